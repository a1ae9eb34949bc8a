"""Models whose layers lie on disk: the same bits as in memory, and no wrong ones whatever becomes of the files."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from inference.__main__ import main
from inference.cache.pages import pages_for
from inference.engine import Engine
from inference.errors import SettingError, StoreError
from inference.loading import choose_kernels, load_model
from inference.memory.image import INDEX_NAME, ImageKey, LayerImage, verify_image
from inference.memory.image_making import image_for
from inference.memory.placement import Placement
from inference.model.layers import LayerReader
from inference.model.residency import layer_image
from inference.planner.plan import Plan
from inference.request import Completion, GenerationRequest, SamplingParams
from inference.weights import import_model
from inference.weights.store import StoreReader

LAYERS = 4
TINY: dict[str, Any] = {
    "vocab_size": 500,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "qwen3, tied": ("Qwen3", {"tie_word_embeddings": True}),
    "qwen2, biases": ("Qwen2", {}),
    "gemma2": ("Gemma2", {"sliding_window": 24, "query_pre_attn_scalar": 48, "attn_logit_softcapping": 5.0}),
    "granite": ("Granite", {"residual_multiplier": 0.7, "logits_scaling": 4.0, "tie_word_embeddings": True}),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3 moe": (
        "Qwen3Moe",
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "mlp_only_layers": [1]},
    ),
}
EVERYTHING = Placement(frozenset(), head_pinned=False, embedding_pinned=False, ring=2, readers=2)
SOME = Placement(frozenset({1}), head_pinned=False, embedding_pinned=True, ring=3, readers=1)
LAYERS_ALONE = Placement(frozenset({0, 3}), head_pinned=True, embedding_pinned=False, ring=2, readers=3)
HEAD_ALONE = Placement(frozenset(range(LAYERS)), head_pinned=False, embedding_pinned=True, ring=2, readers=2)
ASKED = SamplingParams(max_tokens=8, ignore_eos=True, logprobs=3)
PROMPTS = [[(7 * n * n + 13 * n + 5 * m) % 500 for n in range(3 + 9 * m)] for m in range(6)]


@pytest.fixture(autouse=True, scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where the images of these tests are kept."""
    folder = tmp_path_factory.mktemp("images")
    before = os.environ.get("PENSTOCK_IMAGES")
    os.environ["PENSTOCK_IMAGES"] = str(folder)
    yield folder
    if before is None:
        del os.environ["PENSTOCK_IMAGES"]
    else:
        os.environ["PENSTOCK_IMAGES"] = before


@pytest.fixture(scope="module")
def store_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    made: dict[tuple[str, str], Path] = {}

    def store(family: str, quantize: Any = "keep") -> Path:
        import transformers

        if (family, quantize) not in made:
            kind, changes = FAMILIES[family]
            torch.manual_seed(20261201)
            config = getattr(transformers, kind + "Config")(**(TINY | changes))
            folder = tmp_path_factory.mktemp("models")
            model = getattr(transformers, kind + "ForCausalLM")(config)
            for parameter in model.parameters():
                parameter.data.add_(torch.randn_like(parameter) * 0.1)
            model.save_pretrained(folder / "model")
            import_model(folder / "model", folder / "store", quantize=quantize)
            made[family, quantize] = folder / "store"
        return made[family, quantize]

    return store


def plan_of(placement: Placement, compute: Any = "int8", cache: Any = "bf16", **changes: Any) -> Plan:
    settings = {"cache_pages": 64, "max_batch": 8, "token_budget": 256, "memory_bytes": 2**30} | changes
    return Plan(placement, compute, cache, **settings)


def engine_of(store: Path, placement: Placement, **settings: Any) -> Engine:
    return Engine.load(store, threads=1, plan=plan_of(placement, **settings))


def told(completions: list[Completion]) -> list[Any]:
    return [(one.finish_reason, one.error, one.token_ids, one.logprobs) for one in completions]


def alike(store: Path, placement: Placement, **settings: Any) -> Engine:
    """Asserts the same bits as in memory; returns the engine that streamed."""
    resident = engine_of(store, Placement.resident(LAYERS), **settings)
    streamed = engine_of(store, placement, **settings)
    expected = told(resident.generate(PROMPTS, ASKED))
    assert all(reason == "length" for reason, *_ in expected)
    assert told(streamed.generate(PROMPTS, ASKED)) == expected
    assert resident.stats().streamed_bytes == 0
    assert streamed.stats().streamed_bytes > 0
    return streamed


@pytest.mark.parametrize("family", FAMILIES)
def test_streamed_layers_give_the_same_bits(store_of: Callable[..., Path], family: str) -> None:
    alike(store_of(family), EVERYTHING)


@pytest.mark.parametrize("compute", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("quantize", ["keep", "bf16", "int8", "int4"])
def test_every_arithmetic_and_every_store_give_the_same_bits(
    store_of: Callable[..., Path], quantize: str, compute: str
) -> None:
    alike(store_of("llama", quantize), EVERYTHING, compute=compute)


@pytest.mark.parametrize("placement", [SOME, LAYERS_ALONE, HEAD_ALONE], ids=["some", "layers alone", "head alone"])
def test_whatever_is_pinned_the_bits_are_the_same(store_of: Callable[..., Path], placement: Placement) -> None:
    alike(store_of("qwen3, tied", "int4"), placement)


@pytest.mark.parametrize("compute", ["fp32", "int8"])
def test_the_reference_kernels_stream_too(
    store_of: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, compute: str
) -> None:
    monkeypatch.setenv("PENSTOCK_KERNELS", "torch")
    alike(store_of("mixtral", "int8"), EVERYTHING, compute=compute)


def test_prompts_in_pieces_and_a_cache_too_small_for_all_give_the_same_bits(store_of: Callable[..., Path]) -> None:
    """Steps without logits skip the head; sequences give up their pages and are computed again."""
    store = store_of("llama", "int4")
    prompts = [[(3 * n + 11 * m) % 500 for n in range(70)] for m in range(5)]
    asked = SamplingParams(max_tokens=80, ignore_eos=True)
    settings: dict[str, Any] = {"cache_pages": 2 * pages_for(150) + 2, "max_batch": 4, "token_budget": 64}
    done = []
    for placement in (Placement.resident(LAYERS), EVERYTHING, HEAD_ALONE):
        model = load_model(
            store,
            compute="auto",
            max_batch=4,
            token_budget=64,
            memory_bytes=None,
            plan=plan_of(placement, **settings),
        )
        engine = Engine(model, threads=1, max_batch=4, token_budget=64, chunk_tokens=32)
        done.append(told(engine.generate(prompts, asked)))
        assert engine.stats().preemptions > 0
        assert engine.stats().cache_pages_used == 0
    assert done[0] == done[1] == done[2]


def test_a_unit_of_many_chunks_is_read_whole(tmp_path: Path) -> None:
    import transformers

    config = transformers.LlamaConfig(
        **(TINY | {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 3})
    )
    torch.manual_seed(1)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    import_model(tmp_path / "model", tmp_path / "store")
    placement = Placement(frozenset(), head_pinned=True, ring=2, readers=3)
    streamed = engine_of(tmp_path / "store", placement, compute="fp32")
    resident = engine_of(tmp_path / "store", Placement.resident(3), compute="fp32")
    assert told(streamed.generate(PROMPTS, ASKED)) == told(resident.generate(PROMPTS, ASKED))
    assert all(len(unit.checksums) > 2 for unit in the_image(tmp_path / "store", "fp32").units[:3])


def test_embeddings_come_out_the_same(store_of: Callable[..., Path]) -> None:
    store = store_of("llama", "int8")
    resident = engine_of(store, Placement.resident(LAYERS))
    streamed = engine_of(store, EVERYTHING)
    assert streamed.embed(PROMPTS) == resident.embed(PROMPTS)
    assert told(streamed.generate(PROMPTS, ASKED)) == told(resident.generate(PROMPTS, ASKED))


def test_what_was_streamed_is_counted(store_of: Callable[..., Path]) -> None:
    store = store_of("llama")
    engine = engine_of(store, Placement(frozenset(), head_pinned=False, ring=2, readers=2), compute="fp32")
    engine.generate(PROMPTS, ASKED)
    report, stats = engine.report(), engine.stats()
    whole = the_image(store, "fp32").total_bytes
    # Each step reads every unit once; the buffers may hold what the next step will begin with.
    assert whole * stats.steps <= stats.streamed_bytes + whole
    assert stats.streamed_bytes <= whole * (stats.steps + 1)
    assert report.streamed_bytes == stats.streamed_bytes
    assert report.streamed_bytes_per_s > 0
    assert 0 <= report.waited_seconds <= report.busy_seconds
    assert "GB streamed at" in report.line()


def test_memory_is_that_of_the_ring_and_what_is_pinned(store_of: Callable[..., Path]) -> None:
    store = store_of("llama")
    image = the_image(store, "fp32")
    engine = engine_of(store, Placement(frozenset({2}), head_pinned=False, ring=2, readers=1), compute="fp32")
    held = engine._model.decoder._weights.nbytes
    largest = max(unit.bytes for unit in image.units if unit.name != "layers.2")
    assert held == image.unit("layers.2").bytes + 2 * largest


def test_a_model_that_memory_does_not_hold_is_planned_for(tmp_path: Path) -> None:
    import transformers

    tall = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 8}
    torch.manual_seed(3)
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**(TINY | tall))).save_pretrained(tmp_path / "model")
    import_model(tmp_path / "model", tmp_path / "store")
    settings: dict[str, Any] = {"threads": 1, "compute": "fp32", "max_batch": 2}
    roomy = Engine.load(tmp_path / "store", memory_bytes=2**30, **settings)
    assert roomy.plan is None
    tight = roomy.memory_bytes_at_most - roomy._model.cache.nbytes - 16 * 2**20
    engine = Engine.load(tmp_path / "store", memory_bytes=tight, **settings)
    assert engine.plan is not None
    assert engine.plan.placement.streams(8)
    assert engine._model.decoder.nbytes + engine._model.cache.nbytes <= tight
    assert told(engine.generate(PROMPTS, ASKED)) == told(roomy.generate(PROMPTS, ASKED))
    assert engine.stats().streamed_bytes > 0


# Files that are not what they were


def the_image(store: Path, compute: str = "int8") -> LayerImage:
    reader = StoreReader(store)
    return layer_image(LayerReader(reader, choose_kernels(reader.manifest.config, compute)))  # type: ignore[arg-type]


@pytest.fixture
def own(store_of: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A store, and a folder of images for this test alone, to be damaged."""
    monkeypatch.setenv("PENSTOCK_IMAGES", str(tmp_path / "images"))
    shutil.copytree(store_of("llama", "int8"), tmp_path / "store")
    return tmp_path / "store"


def flip(path: Path, at: int) -> None:
    """One bit, in place."""
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 4]))


def unit_path(store: Path, name: str = "layers.2") -> Path:
    image = the_image(store)
    return image.path(image.unit(name))


def failed(engine: Engine, *, naming: Path) -> str:
    """Runs into the trouble and asserts that every request says so; returns what it said."""
    completions = engine.generate(PROMPTS[:2], ASKED)
    for completion in completions:
        assert completion.finish_reason == "error"
        assert completion.error is not None
        assert str(naming) in completion.error
    assert engine.stats().cache_pages_used == 0
    return str(completions[0].error)


def test_a_flipped_bit_ends_the_requests_and_is_found_on_demand(own: Path) -> None:
    resident = told(engine_of(own, Placement.resident(LAYERS)).generate(PROMPTS, ASKED))
    engine = engine_of(own, EVERYTHING)
    path = unit_path(own)
    flip(path, 100)
    # What was read before the bit flipped may still be right; what comes back is right or an error, never wrong.
    for completion, (_, _, tokens, _) in zip(engine.generate(PROMPTS, ASKED), resident, strict=True):
        assert completion.finish_reason == "error"
        assert completion.token_ids == tokens[: len(completion.token_ids)]
    assert "is damaged: bytes 0 to" in failed(engine, naming=path)
    with pytest.raises(StoreError, match="SHA-256"):
        verify_image(path.parent)
    assert main(["verify", str(path.parent)]) == 1
    flip(path, 100)
    assert told(engine.generate(PROMPTS, ASKED)) == resident
    assert main(["verify", str(path.parent)]) == 0


def test_a_flipped_bit_in_a_pinned_layer_is_found_while_loading(own: Path) -> None:
    path = unit_path(own, "layers.1")
    flip(path, 4096)
    with pytest.raises(StoreError, match="is damaged") as found:
        engine_of(own, SOME)
    assert found.value.file == str(path)


def test_a_removed_file_is_named(own: Path) -> None:
    engine = engine_of(own, EVERYTHING)
    engine.generate(PROMPTS[:1], ASKED)
    path = unit_path(own)
    aside = path.with_suffix(".aside")
    path.rename(aside)
    shutil.copy(aside, aside.with_suffix(".copy"))
    aside.unlink()
    said = failed(engine, naming=path)
    assert "has been removed" in said or "No such file" in said
    assert "No such file" in failed(engine, naming=path)
    with pytest.raises(StoreError, match="No such file"):
        engine_of(own, EVERYTHING)
    aside.with_suffix(".copy").rename(path)
    assert engine.generate(PROMPTS[:1], ASKED)[0].finish_reason == "length"


def test_a_file_cut_short_is_named(own: Path) -> None:
    engine = engine_of(own, EVERYTHING)
    path = unit_path(own)
    os.truncate(path, 4096)
    engine.generate(PROMPTS[:1], ASKED)
    assert "ends at byte 4096" in failed(engine, naming=path)
    with pytest.raises(StoreError, match="has 4096 bytes"):
        engine_of(own, EVERYTHING)


def test_a_file_replaced_by_another_layers_is_found(own: Path) -> None:
    engine = engine_of(own, EVERYTHING)
    path = unit_path(own)
    shutil.copy(unit_path(own, "layers.1"), path.with_suffix(".other"))
    path.with_suffix(".other").rename(path)
    engine.generate(PROMPTS[:1], ASKED)
    assert "is damaged" in failed(engine, naming=path)
    assert "is damaged" in failed(engine_of(own, EVERYTHING), naming=path)


def test_a_folder_in_a_files_place_ends_the_requests(own: Path) -> None:
    """What the system says, EISDIR here, is passed on as an input or output error would be."""
    engine = engine_of(own, EVERYTHING)
    path = unit_path(own)
    path.unlink()
    path.mkdir()
    engine.generate(PROMPTS[:1], ASKED)
    assert "Is a directory" in failed(engine, naming=path)


def test_an_index_of_another_store_is_refused(own: Path, store_of: Callable[..., Path]) -> None:
    mine, other = the_image(own), the_image(store_of("qwen2, biases", "int8"))
    shutil.copy(other.folder / INDEX_NAME, mine.folder / INDEX_NAME)
    with pytest.raises(StoreError, match=r"is of store .* not of") as found:
        engine_of(own, EVERYTHING)
    assert found.value.file == str(mine.folder / INDEX_NAME)


def test_a_changed_index_is_refused(own: Path) -> None:
    index = the_image(own).folder / INDEX_NAME
    data = json.loads(index.read_text())
    data["units"][0]["checksums"][0] = "0" * 16
    index.write_text(json.dumps(data))
    with pytest.raises(StoreError, match="not what its digest was made of"):
        engine_of(own, EVERYTHING)


def test_an_image_whose_index_was_removed_is_made_anew(own: Path) -> None:
    expected = told(engine_of(own, EVERYTHING).generate(PROMPTS[:1], ASKED))
    index = the_image(own).folder / INDEX_NAME
    text = index.read_text("utf-8")
    index.unlink()
    (index.parent / "00000.bin").write_bytes(b"something else")
    assert told(engine_of(own, EVERYTHING).generate(PROMPTS[:1], ASKED)) == expected
    assert index.read_text("utf-8") == text


@pytest.mark.parametrize(("field", "value"), [("file", "../outside.bin"), ("offset", -4096)])
def test_an_index_that_lies_under_its_own_digest_is_refused(own: Path, field: str, value: Any) -> None:
    index = the_image(own).folder / INDEX_NAME
    data = json.loads(index.read_text("utf-8"))
    unit = data["units"][0]
    (unit if field == "file" else unit["matrices"][0]["arrays"][0])[field] = value
    body = {key: part for key, part in data.items() if key != "digest"}
    canonical = json.dumps(body, sort_keys=True, separators=(",", ":"))
    index.write_text(json.dumps(body | {"digest": hashlib.sha256(canonical.encode()).hexdigest()}), "utf-8")
    with pytest.raises(StoreError, match=r"index\.json: cannot be read: unit layers\.0"):
        engine_of(own, EVERYTHING)


def test_a_damaged_row_of_the_embedding_is_found(own: Path) -> None:
    engine = engine_of(own, EVERYTHING)
    entry = StoreReader(own).entry("embedding")
    part = entry.parts[0]
    flip(own / entry.file, part.offset + 70 * part.bytes // 500)
    good = engine.generate([[1, 2, 3]], SamplingParams(max_tokens=1))[0]
    bad = engine.generate([[1, 70, 3]], SamplingParams(max_tokens=1))[0]
    assert good.finish_reason == "length"
    assert bad.error is not None
    assert f"{own / entry.file}: is damaged" in bad.error
    with pytest.raises(StoreError, match="SHA-256"):
        engine_of(own, EVERYTHING)


# Making the image


def test_two_engines_use_one_image(own: Path) -> None:
    engines: list[Engine] = []
    threads = [threading.Thread(target=lambda: engines.append(engine_of(own, EVERYTHING))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    one, other = (told(engine.generate(PROMPTS, ASKED)) for engine in engines)
    assert one == other
    folders = [path for path in the_image(own).folder.parent.iterdir() if path.is_dir()]
    assert folders == [the_image(own).folder]


def test_an_image_in_an_earlier_layout_is_removed_once_nobody_uses_it(own: Path) -> None:
    engine = engine_of(own, EVERYTHING)
    earlier = the_image(own)
    key = ImageKey(earlier.key.store, earlier.key.compute, earlier.key.layout + "0")

    def made(key: ImageKey) -> LayerImage:
        return image_for(key, list, total=0, expected_bytes=0)

    first = made(key)
    assert earlier.folder.is_dir()
    expected = told(engine.generate(PROMPTS, ASKED))
    assert all(reason == "length" for reason, *_ in expected)
    engine._model.decoder.close()
    second = made(ImageKey(key.store, key.compute, key.layout + "0"))
    assert not earlier.folder.exists()
    assert not first.folder.exists()
    other_kernels = made(ImageKey(key.store, key.compute, "others " + key.layout))
    assert second.folder.is_dir()
    assert other_kernels.folder.is_dir()


def test_an_image_that_was_cut_off_while_made_is_never_taken_for_whole(own: Path, tmp_path: Path) -> None:
    program = f"""
import os, signal
from pathlib import Path
from inference.memory import image_making
written = image_making._write_unit
def write_and_die(path, unit, staging):
    place = written(path, unit, staging)
    if path.name.startswith("00002"):
        os.kill(os.getpid(), signal.SIGKILL)
    return place
image_making._write_unit = write_and_die
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
import test_streaming
test_streaming.the_image(Path({str(own)!r}))
"""
    done = subprocess.run([sys.executable, "-c", program], env=os.environ, capture_output=True, text=True)
    assert done.returncode == -9, done.stderr
    left = [path for path in (tmp_path / "images").iterdir() if path.is_dir()]
    assert [path.suffix for path in left] == [".partial"]
    image = the_image(own)
    verify_image(image.folder)
    assert [path for path in (tmp_path / "images").iterdir() if path.is_dir()] == [image.folder]


@pytest.mark.parametrize("kilobytes", [64, 600], ids=["told before", "found while writing"])
def test_a_full_disk_tells_what_is_needed_and_leaves_nothing(own: Path, tmp_path: Path, kilobytes: int) -> None:
    images = tmp_path / "images"
    images.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={kilobytes}k", "tmpfs", str(images)], capture_output=True
    )
    if mounted.returncode:
        pytest.skip("a small filesystem can be mounted by root only")
    try:
        with pytest.raises(StoreError, match=r"\d+ bytes are needed, and \d+ are free"):
            engine_of(own, EVERYTHING)
        assert not [path for path in images.iterdir() if path.is_dir()]
    finally:
        subprocess.run(["umount", str(images)], check=True)


def test_a_damaged_store_leaves_no_image(own: Path, tmp_path: Path) -> None:
    path = next(own.glob("*layer*3*"), None) or sorted(own.iterdir())[-2]
    os.truncate(path, 64)
    with pytest.raises(StoreError):
        engine_of(own, EVERYTHING)
    assert not [path for path in (tmp_path / "images").iterdir() if path.is_dir()]


# Coming to an end


def test_cancelled_requests_end_while_others_go_on(store_of: Callable[..., Path]) -> None:
    engine = engine_of(store_of("llama"), EVERYTHING)
    expected = engine_of(store_of("llama"), Placement.resident(LAYERS)).generate(PROMPTS[:1], ASKED)
    ended: dict[str, Completion] = {}
    both = threading.Semaphore(0)

    def finished(completion: Completion) -> None:
        ended[completion.request_id] = completion
        both.release()

    engine.start()
    long = SamplingParams(max_tokens=150, ignore_eos=True)
    engine.submit(
        GenerationRequest("long", tuple(PROMPTS[1]), long),
        on_token=lambda event: engine.cancel("long"),
        on_finish=finished,
    )
    engine.submit(GenerationRequest("short", tuple(PROMPTS[0]), ASKED), on_finish=finished)
    assert both.acquire(timeout=60)
    assert both.acquire(timeout=60)
    engine.stop()
    assert ended["long"].finish_reason == "cancelled"
    assert told([ended["short"]]) == told(expected)


def test_stopping_in_the_middle_of_a_run_ends_everything_and_can_be_taken_up_again(
    store_of: Callable[..., Path],
) -> None:
    engine = engine_of(store_of("llama"), EVERYTHING)
    ended: list[Completion] = []
    begun = threading.Event()
    engine.start()
    engine.submit(
        GenerationRequest("long", tuple(PROMPTS[1]), SamplingParams(max_tokens=200, ignore_eos=True)),
        on_token=lambda event: begun.set(),
        on_finish=ended.append,
    )
    assert begun.wait(60)
    engine.stop()
    assert [completion.finish_reason for completion in ended] == ["cancelled"]
    assert engine.generate(PROMPTS[:1], ASKED)[0].finish_reason == "length"


def test_readers_end_with_the_model(store_of: Callable[..., Path]) -> None:
    def readers() -> set[threading.Thread]:
        return {thread for thread in threading.enumerate() if thread.name.startswith("inference-reader")}

    before = readers()
    engine = engine_of(store_of("llama"), EVERYTHING)
    engine.generate(PROMPTS[:1], ASKED)
    mine = readers() - before
    assert len(mine) == EVERYTHING.readers
    del engine
    for thread in mine:
        thread.join(60)
    assert not mine & readers()


def test_a_closed_model_says_so(store_of: Callable[..., Path]) -> None:
    engine = engine_of(store_of("llama"), EVERYTHING)
    engine._model.decoder.close()
    (completion,) = engine.generate(PROMPTS[:1], ASKED)
    assert completion.error is not None
    assert "the model has been closed" in completion.error


def test_a_placement_that_cannot_work_is_refused(store_of: Callable[..., Path]) -> None:
    with pytest.raises(ValueError, match="at least 2"):
        Placement(frozenset(), ring=1, readers=1)
    with pytest.raises(ValueError, match="readers"):
        Placement(frozenset(), ring=2)
    with pytest.raises(SettingError, match="plan: ring"):
        engine_of(store_of("llama"), Placement(frozenset({0})))
    with pytest.raises(SettingError, match="there is no 99"):
        engine_of(store_of("llama"), Placement(frozenset({0, 99}), ring=2, readers=1))
    assert Placement.from_dict(json.loads(json.dumps(SOME.as_dict()))) == SOME
