"""Plans: figures worked by hand, the linear program against trying everything, and what is said where none can work."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path

import pytest

from inference.__main__ import main
from inference.cache.pages import pages_for
from inference.cache.spilled.sizes import spilled_disk_bytes, spilled_memory_bytes
from inference.errors import MemoryBudgetError
from inference.memory.direct import aligned
from inference.memory.placement import LEAST_RING, Placement
from inference.model.config import DecoderConfig
from inference.planner import disk as disk_module
from inference.planner import layer_trial as trial_module
from inference.planner import measured as measured_module
from inference.planner import placing as placing_module
from inference.planner.cost import StepCost, StepLoad, decode_load, estimate
from inference.planner.disk import RING, DiskRate
from inference.planner.layer_rates import AttentionSeconds, LayerRates
from inference.planner.placing import Need, Room, place, spread
from inference.planner.search import Ask, Ground, batch_sizes, check, search, token_budgets
from inference.planner.sizes import ModelSizes
from inference.planner.workload import Lengths, Workload

MB = 10**6
MIB = 2**20
CONFIG = DecoderConfig(
    architecture="llama",
    vocab_size=1000,
    hidden_size=64,
    intermediate_size=128,
    layers=4,
    heads=2,
    kv_heads=1,
    head_dim=32,
    max_context=4096,
    rope_theta=10_000.0,
    rms_norm_eps=1e-5,
    tied_embeddings=False,
)
SIZES = ModelSizes(CONFIG, layers=(10 * MB,) * 4, head=5 * MB, embedding=4 * MB, small=MB)
# A layer takes 1 ms and 10 us a row; the head 2 ms; reads cost arithmetic nothing.
RATES = LayerRates(
    rows=(1, 100),
    layer=(0.00101, 0.002),
    apart=1.0,
    head=(0.002, 0.002),
    batch=(0.0, 0.0),
    stream_bytes_per_s=1e9,
    read_cost=0.0,
    attention={"int8": AttentionSeconds(0.0, 1e-6, 2e-6), "int4": AttentionSeconds(0.0, 2e-6, 2e-6)},
)
DISK = DiskRate(1e9, 5e8, 2, 4 * 2**20, True, "2026-12-01T00:00:00+00:00")


def cost(streamed: int = 0, rates: LayerRates = RATES, spilled: int = 0) -> StepCost:
    return StepCost(rates, "int8", 4, streamed, spilled, 1e9, 5e8)


def ask(memory: int, workload: Workload | None = None, disk: int = 10**12) -> Ask:
    return Ask(
        sizes=SIZES,
        compute="int8",
        cache="int8",
        rows_at_once=None,
        memory_bytes=memory,
        process_bytes=2 * MB,
        disk_bytes=disk,
        workload=workload or Workload.uniform(8, 32, 32),
        could_shrink=True,
    )


def test_a_step_in_memory_takes_its_layers_and_its_head() -> None:
    # 4 layers of 1 ms + 11 rows of 10 us + 1000 tokens of 1 us, and 2 ms of head.
    load = StepLoad(11, 1000.0, 0, 0.0, 11)
    assert cost().seconds(load) == pytest.approx(4 * (0.001 + 0.00011 + 0.001) + 0.002)
    assert not cost().waits(load)


def test_a_decoding_row_takes_more_than_a_prompts() -> None:
    rates = replace(RATES, attention={"int8": AttentionSeconds(5e-6, 1e-6, 2e-6)})
    more = cost(rates=rates).seconds(StepLoad(8, 100.0, 3, 6.0, 8)) - cost().seconds(StepLoad(8, 100.0, 3, 6.0, 8))
    assert more == pytest.approx(4 * 8 * 5e-6)


def test_layers_take_longer_one_by_one_where_anything_is_streamed() -> None:
    load, rates = StepLoad(1, 0.0, 0, 0.0, 1), replace(RATES, apart=1.25)
    assert cost(rates=rates).seconds(load) == pytest.approx(4 * 0.00101 + 0.002)
    assert cost(1, rates).seconds(load) == pytest.approx(1.25 * 4 * 0.00101 + 0.002)


def test_a_streamed_step_takes_what_is_slower() -> None:
    load = StepLoad(1, 0.0, 0, 0.0, 1)
    arithmetic = 4 * 0.00101 + 0.002
    assert cost(streamed=2 * MB).seconds(load) == pytest.approx(arithmetic)  # 2 ms of reads
    assert cost(streamed=20 * MB).seconds(load) == pytest.approx(0.020)
    assert cost(streamed=20 * MB).waits(load)


def test_reads_cost_the_arithmetic_beside_them_some_time() -> None:
    load = StepLoad(1, 0.0, 0, 0.0, 1)
    costly = replace(RATES, read_cost=0.5e-9)
    arithmetic = 4 * 0.00101 + 0.002
    # 4 MB cost 2 ms; 20 MB cost 10 ms, and 20 ms of the disk.
    assert cost(4 * MB, costly).seconds(load) == pytest.approx(arithmetic + 0.002)
    assert cost(20 * MB, costly).seconds(load) == pytest.approx(0.020)


def test_rates_of_streaming_are_told_from_steps_that_wait_and_steps_that_do_not() -> None:
    # 10 MB a layer: 10 ms where steps wait, 1 GB/s; of 100 rows 14 ms instead of 11 and 13 instead of 12: 2 ms longer.
    alone = {8: [0.001, 0.001], 100: [0.011, 0.012]}
    streamed = {8: [0.010, 0.010], 100: [0.014, 0.013]}
    waited = {8: [0.8, 0.9], 100: [0.0, 0.05]}
    rate, read_cost = trial_module.stream_rates(10 * MB, alone, streamed, waited)
    assert rate == pytest.approx(1e9)
    assert read_cost == pytest.approx(0.002 / (10 * MB))
    quick = {rows: [0.0, 0.0] for rows in waited}
    assert trial_module.stream_rates(10 * MB, alone, streamed, quick)[0] is None


def test_a_batch_is_made_ready_by_pieces_of_sequences() -> None:
    rates = replace(RATES, rows=(1, 11, 100), layer=(0.001,) * 3, head=(0.0,) * 3, batch=(0.001, 0.011, 0.1))
    # 9 rows that decode, and 64 of 2 prompts.
    assert cost(rates=rates).seconds(StepLoad(9, 0.0, 64, 0.0, 9, 2)) == pytest.approx(4 * 0.001 + 0.011)


def test_spilled_pages_are_read_as_far_as_they_are_used_and_written_where_rows_are_new() -> None:
    # 2 rows of 64 tokens: 2 pages each and half of another; each row writes one.
    load = StepLoad(2, 128.0, 0, 0.0, 2)
    assert cost(spilled=MB).disk_seconds(load) == pytest.approx(0.001 * (4 + 1) + 0.002 * 2)


def test_a_workload_is_run_as_the_scheduler_would() -> None:
    # 2 sequences at a time of 4 rows, 32 tokens in and 3 out: a step for both prompts, two for the rest, and again.
    run = estimate(Workload.uniform(4, 32, 3), 2, 256, cost())
    assert run.steps == 6
    pairs = 64 * 33 / 2
    prompts = 4 * (0.001 + 0.00064 + pairs * 2e-6) + 0.002
    first = 4 * (0.001 + 0.00002 + 2 * 33 * 1e-6) + 0.002
    second = 4 * (0.001 + 0.00002 + 2 * 34 * 1e-6) + 0.002
    assert run.prefill_seconds == pytest.approx(2 * prompts)
    assert run.seconds == pytest.approx(2 * (prompts + first + second))
    assert run.longest_step == pytest.approx(prompts)


def test_a_long_run_is_more_of_the_same() -> None:
    short, long = (estimate(Workload.uniform(rows, 32, 8), 2, 256, cost()) for rows in (24, 240))
    assert long.seconds == pytest.approx(10 * short.seconds, rel=0.02)
    assert long.steps == pytest.approx(10 * short.steps, rel=0.02)


def brute_force(need: Need, room: Room, ring: int) -> float | None:
    """The least seconds of the disk over every placement of equal layers, by the sizes' own words."""
    sizes, count = need.sizes, len(need.sizes.layers)
    layer, page = sizes.layers[0], sizes.page_of_layer(need.cache)
    best: float | None = None
    for pinned, head, embedding, spilled in itertools.product(range(count + 1), (0, 1), (0, 1), range(count + 1)):
        streamed = [layer] * (count - pinned) + [sizes.head] * (1 - head)
        memory = need.fixed_bytes + pinned * layer + head * sizes.head + embedding * sizes.embedding
        memory += (count - spilled) * need.pages * page + (ring * max(streamed) if streamed else 0)
        memory += spilled_memory_bytes(CONFIG, need.cache, spilled, need.pages)
        disk = (sizes.weights if streamed else 0) + spilled_disk_bytes(CONFIG, need.cache, spilled, need.pages)
        if memory > room.memory_bytes or disk > room.disk_bytes:
            continue
        read = float(sum(streamed)) + (0 if embedding else need.step_rows * sizes.embedding / CONFIG.vocab_size)
        read += spilled * need.step.pages_read * aligned(page)
        written = spilled * need.step.pages_written * aligned(page)
        seconds = read / room.read_bytes_per_s + written / room.write_bytes_per_s
        best = seconds if best is None else min(best, seconds)
    return best


@pytest.mark.parametrize("memory", [25, 35, 40, 50, 60, 80, 120, 400])
@pytest.mark.parametrize("batch", [1, 64, 2000])
def test_the_program_finds_what_trying_everything_finds(
    memory: int, batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(placing_module, "WORTH_SPILLING", 1.0)
    workload = Workload.uniform(batch, 512, 64)
    need = Need(SIZES, "int8", batch * pages_for(576), pages_for(576), decode_load(workload, batch), 500, 3 * MB)
    room = Room(memory * MB, 10**12, 1e9, 5e8)
    found, expected = place(need, room), brute_force(need, room, RING)
    if expected is None:  # two buffers only where there is no room for three
        expected = brute_force(need, room, LEAST_RING)
    if expected is None:
        assert found is None
        return
    assert found is not None and found.host_bytes <= room.memory_bytes
    spilled, page = len(found.placement.spilled), aligned(SIZES.page_of_layer("int8"))
    read = float(found.streamed_bytes) + (0 if found.placement.embedding_pinned else 500 * 4000)
    read += spilled * need.step.pages_read * page
    seconds = read / 1e9 + spilled * need.step.pages_written * page / 5e8
    assert seconds == pytest.approx(expected)


def test_what_fits_is_never_streamed() -> None:
    plan = search(Ground(ask(200 * MB), RATES, DISK))
    assert not plan.placement.streams(4) and not plan.placement.spilled
    assert plan.max_batch == 8 and plan.predicted is not None and plan.predicted.streamed_bytes_per_step == 0


@pytest.mark.parametrize("memory", [60, 62, 70, 80])
def test_what_fits_with_a_smaller_batch_is_not_streamed_for_a_larger_ones_sake_alone(memory: int) -> None:
    # A row takes as long in company as alone, so that a larger batch, for which layers would have to go, gains nothing.
    rates = replace(RATES, layer=(0.00101, 0.1))
    plan = search(Ground(ask(memory * MB, Workload.uniform(64, 2048, 32)), rates, DISK))
    assert not plan.placement.streams(4) and not plan.placement.spilled and plan.placement.embedding_pinned
    larger = [one for one in plan.neighbours if one.difference == f"{2 * plan.max_batch} sequences at a time"]
    assert larger and ("disk" in larger[0].why or "more of weights" in larger[0].why)


def test_where_streaming_pays_the_plan_tells_what_keeping_all_in_memory_would_give() -> None:
    # Steps take nearly as long for one row as for many, and a fast disk gives all layers in less.
    light = {kind: AttentionSeconds(0.0, 1e-9, 1e-9) for kind in ("int8", "int4")}
    rates = replace(RATES, attention=light, stream_bytes_per_s=1e10)
    plan = search(Ground(ask(60 * MB, Workload.uniform(64, 32, 2048)), rates, replace(DISK, bytes_per_s=1e10)))
    assert plan.placement.streams(4) and plan.predicted is not None
    whole = plan.neighbours[0]
    assert whole.difference.startswith("all in memory") and whole.output_tokens_per_s is not None
    assert whole.output_tokens_per_s * 1.25 < plan.predicted.output_tokens_per_s


def test_streamed_layers_lie_apart() -> None:
    assert spread(8, 6) == frozenset(range(8)) - {2, 6}
    assert spread(4, 0) == frozenset() and spread(4, 4) == frozenset(range(4))


def test_a_plan_keeps_to_its_memory_and_says_why_its_neighbours_are_worse() -> None:
    plan = search(Ground(ask(45 * MB), RATES, DISK))
    predicted = plan.predicted
    assert predicted is not None and predicted.peak_memory_bytes["host"] <= 45 * MB
    assert plan.placement.streams(4) and predicted.streamed_bytes_per_step > 0
    told = {neighbour.difference: neighbour for neighbour in plan.neighbours}
    assert {"4 sequences at a time", "384 rows a step", "a cache in int4"} <= set(told)
    assert predicted.output_tokens_per_s == pytest.approx(8 * 32 / predicted.seconds)
    assert plan.hardware["process_bytes"] == 2 * MB


def test_someone_who_waits_for_each_token_gets_shorter_steps() -> None:
    ground = Ground(ask(200 * MB, Workload.uniform(64, 512, 16)), RATES, DISK)
    quick = search(replace(ground, ask=replace(ground.ask, workload=replace(ground.ask.workload, step_seconds=0.6))))
    free = search(ground)
    assert quick.predicted is not None and free.predicted is not None
    assert quick.predicted.longest_step_seconds <= 0.6 < free.predicted.longest_step_seconds
    assert quick.predicted.seconds > free.predicted.seconds


def test_a_plan_that_cannot_work_says_what_would() -> None:
    with pytest.raises(MemoryBudgetError, match="what would do: allow") as caught:
        check(ask(20 * MB))
    assert "--quantize int4" in str(caught.value)
    least = int(str(caught.value).split("allow ")[1].split(" bytes")[0])
    check(ask(least))
    with pytest.raises(MemoryBudgetError):
        check(ask(round(least * 0.99)))


def test_too_little_disk_is_told_apart_from_too_little_memory() -> None:
    with pytest.raises(MemoryBudgetError, match="the disk has 1000 bytes for that") as caught:
        check(ask(45 * MB, disk=1000))
    # Four layers and a head are 45 MB, and are read whole.
    least = int(str(caught.value).split("that; ")[1].split(" bytes")[0])
    assert 45 * MB <= least <= 45.1 * MB


def test_budgets_that_spread_prompts_over_the_steps_are_tried() -> None:
    # 128 sequences of 16 steps each: 8 begin and end in every step, 512 tokens of prompts beside 120 rows that decode.
    assert 632 in token_budgets(Workload.uniform(512, 64, 16), 128)
    # Of 600 tokens a prompt takes 3 steps, and a row 12: 16 sequences are computed 4 pieces of 256 a step.
    assert 16 - 4 + 4 * 256 in token_budgets(Workload.uniform(512, 600, 10), 16)


def test_spread_prompts_are_computed_while_the_disk_is_read() -> None:
    # A row takes 0.4 ms in 4 layers, and the disk 120 ms a step. Of 64 sequences 4 begin and end in each step: 256 rows
    # of prompts and 60 that decode take 126.4 ms, 160 times, and the last ones 15 steps more.
    rates = replace(RATES, layer=(0.0001, 0.01), head=(0.0, 0.0), attention={"int8": AttentionSeconds(0.0, 0.0, 0.0)})
    workload = Workload.uniform(640, 64, 16)
    assert 316 in token_budgets(workload, 64)
    spread, at_once = (estimate(workload, 64, budget, cost(120 * MB, rates)) for budget in (316, 2048))
    assert spread.steps == 160 + 15
    assert spread.seconds == pytest.approx(144 * 0.1264 + 31 * 0.120, rel=0.02)
    # At once: 4096 rows of prompts take 1.6 s of each 64 sequences, and 15 more steps 120 ms each.
    assert at_once.seconds == pytest.approx(10 * (1.6384 + 15 * 0.120), rel=0.1)


def test_batches_that_part_the_rows_evenly_are_tried() -> None:
    assert {1000, 250, 500}.isdisjoint(batch_sizes(200))
    assert {100, 67, 50, 25} <= set(batch_sizes(200))


@pytest.fixture
def quick(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Measures little, and keeps it here."""
    monkeypatch.setattr(measured_module, "measured_folder", lambda: tmp_path / "kept")
    monkeypatch.setattr(disk_module, "FILE_BYTES", 8 * 2**20)
    monkeypatch.setattr(disk_module, "LEAST_SECONDS", 0.05)
    for name, value in {
        "ROWS": (1, 8, 128),
        "STREAMED_ROWS": (1, 8),
        "WORKING_BYTES": 1,
        "STREAMED_BYTES": 2**20,
        "CONTEXT": 64,
        "CONTEXT_ROWS": 8,
        "PROMPT": 128,
        "PIECE": 32,
        "LEAST_ROUNDS": 1,
        "SECONDS": 0.0,
    }.items():
        monkeypatch.setattr(trial_module, name, value)
    return tmp_path


def test_the_plan_of_a_store_is_printed_and_as_json_is_what_the_engine_takes(
    quick: Path, tiny_store: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from inference.engine import Engine
    from inference.memory import budget
    from inference.planner.plan import Plan
    from inference.request import SamplingParams

    # This process may hold whatever the tests before have left in it.
    monkeypatch.setattr(budget, "process_bytes", lambda: 200_000_000)
    command = ["plan", str(tiny_store), "--memory", "2GB", "--rows", "6", "--prompt", "20", "--new", "4"]
    command += ["--images", str(quick / "images"), "--threads", "1"]
    assert main(command) == 0
    out = capsys.readouterr().out
    assert "weights     all in memory" in out and "looked at and left" in out and "tokens/s" in out
    assert main([*command, "--json"]) == 0
    plan = Plan.from_dict(json.loads(capsys.readouterr().out))
    assert plan.workload == Workload.uniform(6, 20, 4) and plan.max_batch == 6
    engine = Engine.load(tiny_store, threads=1, plan=plan)
    done = engine.generate([[5, 6, 7]] * 6, SamplingParams(max_tokens=4, ignore_eos=True))
    assert all(len(one.token_ids) == 4 for one in done)


def test_a_trial_of_a_layer_keeps_to_the_memory_that_it_is_given() -> None:
    # Layers of 32 MiB with 8 MiB of cache each, 3 more that stream, a head of 96 MiB, and 48 MiB of activations.
    ring = trial_module.RING * 32 * MIB

    def copies(room_bytes: int | None) -> int:
        return trial_module.copies_within(room_bytes, 32 * MIB, 8 * MIB, 96 * MIB)

    assert copies(None) == copies(10**10) == 4  # 128 MiB of weights are in no cache
    assert copies(ring + (96 + 48 + 2 * 40) * MIB) == 2
    assert copies(ring + (96 + 48 + 2 * 40) * MIB - 1) == copies(1) == 1


def test_an_engine_tells_what_its_steps_should_have_taken_once_it_has_learnt_the_rates(
    quick: Path, tiny_store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from inference.engine import Engine
    from inference.loading import choose_kernels
    from inference.model.layers import LayerReader
    from inference.planner.planning import make_plan
    from inference.request import SamplingParams
    from inference.weights.store import StoreReader

    monkeypatch.setenv("PENSTOCK_IMAGES", str(quick / "images"))
    whole = Engine.load(tiny_store, threads=1, max_batch=4)
    sampling = SamplingParams(max_tokens=4, ignore_eos=True)
    whole.generate([[5, 6, 7]], sampling)
    assert whole.report().predicted_seconds is None
    assert whole.learn_rates()
    report = whole.report()
    assert report.predicted_seconds is not None and report.predicted_prefill_seconds is not None
    assert 0 < report.predicted_prefill_seconds < report.predicted_seconds
    assert not (quick / "images").exists()  # nothing streams, so no disk was tried

    # The same model streamed through a disk of 1 KB a second: each step takes as long as its bytes do.
    parts = LayerReader(StoreReader(tiny_store), choose_kernels(whole.manifest.config, "int8"))
    plan = make_plan(
        parts,
        compute="int8",
        cache="int8",
        workload=Workload.uniform(4, 3, 4),
        memory_bytes=10**9,
        threads=1,
        images=quick / "images",
    )
    assert plan.predicted is not None
    slow = replace(
        plan,
        placement=Placement(frozenset(), ring=3, readers=2),
        predicted=replace(plan.predicted, streamed_bytes_per_step=5000),
        hardware=plan.hardware | {"stream_bytes_per_s": 1000.0},
    )
    streams = Engine.load(tiny_store, threads=1, plan=slow)
    assert streams.learn_rates()
    streams.generate([[5, 6, 7]], sampling)
    assert streams.report().predicted_seconds == pytest.approx(4 * 5.0)
    assert not Engine.load(tiny_store, threads=1, plan=replace(slow, predicted=None)).learn_rates()


def test_a_planned_engine_runs_as_many_sequences_at_once_as_were_planned(quick: Path, tiny_store: Path) -> None:
    from inference.engine import Engine
    from inference.loading import choose_kernels
    from inference.model.layers import LayerReader
    from inference.planner.planning import make_plan
    from inference.request import SamplingParams
    from inference.weights.store import StoreReader

    reader = StoreReader(tiny_store)
    for prompt, new in ((20, 4), (31, 2), (32, 2), (60, 40)):  # within a page, up to its end, over it
        plan = make_plan(
            LayerReader(reader, choose_kernels(reader.manifest.config, "int8")),
            compute="int8",
            cache="int8",
            workload=Workload.uniform(6, prompt, new),
            memory_bytes=10**9,
            threads=1,
            max_batch=6,
            token_budget=1024,
            images=quick / "images",
        )
        assert plan.cache_pages == 6 * pages_for(prompt + new)
        engine = Engine.load(tiny_store, threads=1, plan=plan)
        prompts = [[(7 * row + 3 * at) % 400 + 5 for at in range(prompt)] for row in range(6)]
        engine.generate(prompts, SamplingParams(max_tokens=new, ignore_eos=True))
        # All prompts fit into one step, and each step after it makes a token of every row.
        stats = engine.stats()
        assert (stats.steps, stats.mean_batch_size, stats.preemptions) == (-(-6 * prompt // 1024) + new - 1, 6, 0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--memory", "3 apples"], "no size"),
        (["--memory", "2GB", "--context", "9000"], "takes 512 at most"),
        (["--memory", "2GB", "--context", "10"], "less than a mean prompt"),
        (["--memory", "2GB", "--rows", "0"], "at least 1"),
        (["--memory", "1MB"], "what would do: allow"),
    ],
)
def test_a_plan_that_makes_no_sense_is_refused_before_anything_is_measured(
    options: list[str], message: str, quick: Path, tiny_store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status: object
    try:
        status = main(["plan", str(tiny_store), *options, "--images", str(quick / "images"), "--threads", "1"])
    except SystemExit as stopped:  # what cannot be read at all
        status = stopped.code
    assert status in (1, 2)
    assert message in capsys.readouterr().err
    assert not (quick / "kept").exists()


def test_lengths_of_a_workload_fill_the_longest_row() -> None:
    assert Workload(3, Lengths(20, 100), Lengths.all(10)).context == 110
