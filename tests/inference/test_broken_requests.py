"""Requests that make the model produce NaN: each ends with an error, and nobody else's output changes by a bit.

The engine is real, and so is the damage: a row of the embedding holds NaN, for good or for a while.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.numpy import load_file, save_file

from inference import Completion, Engine, SamplingParams
from inference.bench.tiny import write_tiny_model
from inference.loading import load_model
from inference.request import GenerationRequest
from inference.weights import import_model

BAD = 499  # the token whose row is damaged
SAMPLING = SamplingParams(max_tokens=6, ignore_eos=True, logprobs=2)
KINDS = ["native int8", "native int4", "native bf16", "native fp32", "torch bf16", "torch fp32"]

Make = Callable[..., "Patient"]


class Patient:
    """An engine on a model with a damaged token. ill: whether the damage is there."""

    def __init__(self, store: Path, kernels: str, cache: Any, settings: dict[str, Any]) -> None:
        compute = "int8" if kernels == "native" else "fp32"
        model = load_model(
            store, compute=compute, cache=cache, max_batch=8, token_budget=512, memory_bytes=settings.pop("memory")
        )
        if model.decoder.kernels.name != kernels:
            pytest.skip("there is no compiler")
        self.ill = True
        self.engine = Engine(model, threads=1, max_batch=8, token_budget=512, **settings)
        self.done: dict[str, Completion] = {}
        embedding: Any = model.decoder._embedding
        whole = type(embedding).__call__

        class Damaged(type(embedding)):  # type: ignore[misc]
            def __call__(damaged, token_ids: torch.Tensor) -> torch.Tensor:
                rows: torch.Tensor = whole(damaged, token_ids)
                if self.ill:
                    rows[token_ids == BAD] = torch.nan
                return rows

        embedding.__class__ = Damaged

    def submit(self, name: str, prompt: list[int], priority: int = 0, sampling: SamplingParams = SAMPLING) -> None:
        request = GenerationRequest(name, tuple(prompt), sampling, priority)
        self.engine.submit(request, on_finish=lambda completion: self.done.setdefault(name, completion))

    def run(self) -> None:
        while self.engine.step():
            pass

    def outcome(self, name: str) -> tuple[object, ...]:
        """Tokens and log-probabilities; the former alone where the kernels do not promise more."""
        completion = self.done.pop(name)
        assert completion.error is None
        return completion.token_ids, completion.logprobs if self.engine.stats().kernels == "native" else None

    def alone(self, prompt: list[int]) -> tuple[object, ...]:
        """What the request gives in an engine that nobody else has used since."""
        self.engine.forget_prefixes()
        self.submit("alone", prompt)
        self.run()
        self.engine.forget_prefixes()
        return self.outcome("alone")

    def failed(self, name: str) -> bool:
        completion = self.done.pop(name)
        return completion.finish_reason == "error" and "NaN or infinity" in str(completion.error)


@pytest.fixture(params=KINDS)
def make(request: pytest.FixtureRequest, tiny_store: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    kernels, cache = request.param.split()
    monkeypatch.setenv("PENSTOCK_KERNELS", "torch" if kernels == "torch" else "auto")

    def patient(**settings: Any) -> Patient:
        return Patient(tiny_store, kernels, cache, {"memory": 1024**3} | settings)

    return patient


def tokens_of(length: int, salt: int) -> list[int]:
    return [(7 * i * i + 11 * i * salt + salt) % 490 + 5 for i in range(length)]


def with_bad(prompt: list[int], place: int) -> list[int]:
    return [*prompt[:place], BAD, *prompt[place + 1 :]]


COMMON = tokens_of(330, 1)


def test_others_keep_their_bits_beside_prompts_of_nan_and_after_them(make: Make) -> None:
    patient = make()
    sane = [COMMON + tokens_of(20, 2), COMMON[:200] + tokens_of(5, 3), tokens_of(40, 4)]
    expected = [patient.alone(prompt) for prompt in sane]
    places = [0, 31, 150, 255, 256, 300, len(COMMON) - 1]
    for _ in range(2):
        for index, place in enumerate(places):
            patient.submit(f"bad {place}", with_bad(COMMON, place))
            patient.submit(f"sane {index % 3} {place}", sane[index % 3])
        patient.run()
        for index, place in enumerate(places):
            assert patient.failed(f"bad {place}"), place
            assert patient.outcome(f"sane {index % 3} {place}") == expected[index % 3], place
    assert patient.engine.stats().cache_pages_used == 0
    assert [patient.alone(prompt) for prompt in sane] == expected


def test_a_prompt_of_nan_ends_with_the_piece_in_which_it_shows(make: Make) -> None:
    patient = make()
    patient.submit("bad", with_bad(COMMON, 100))
    patient.submit("sane", tokens_of(40, 4))
    patient.engine.step()
    assert patient.failed("bad")
    patient.run()
    assert patient.outcome("sane") == patient.alone(tokens_of(40, 4))


def test_a_fault_that_passes_leaves_nothing_that_others_find(make: Make) -> None:
    patient = make()
    prompt = with_bad(COMMON, 100)
    patient.ill = False
    expected = patient.alone(prompt)
    for cancelled in (False, True):
        patient.ill = True
        patient.submit("first", prompt)
        patient.engine.step()
        patient.ill = False
        if cancelled:
            patient.engine.cancel("first")
        patient.submit("second", prompt)
        patient.run()
        assert patient.failed("first")
        assert patient.outcome("second") == expected
        patient.engine.forget_prefixes()


def test_two_of_the_same_prompt_do_not_share_what_is_broken(make: Make) -> None:
    patient = make()
    prompt = with_bad(COMMON, 100)
    patient.ill = False
    expected = patient.alone(prompt)
    patient.ill = True
    for name in ("first", "second"):
        patient.submit(name, prompt)
    patient.engine.step()  # the second waits for the first one's pages
    patient.ill = False
    patient.run()
    assert patient.failed("first")
    assert patient.outcome("second") == expected


def test_pages_of_broken_prompts_are_used_again_without_harm(make: Make) -> None:
    """However they end: cancelled between two pieces, preempted, or with their error; in little memory."""
    patient = make(chunk_tokens=64)
    sane = [tokens_of(90, 5), tokens_of(33, 6), COMMON]
    expected = [patient.alone(prompt) for prompt in sane]
    page = patient.engine.cache_page_bytes
    spare = (patient.engine.stats().cache_pages_total - 24) * page
    tight = make(chunk_tokens=64, memory=patient.engine.memory_bytes_at_most - spare)
    assert tight.engine.stats().cache_pages_total == 24
    for round_ in range(4):
        tight.engine.forget_prefixes()
        tight.submit("bad", with_bad(COMMON, 290), priority=5)
        tight.submit("worse", with_bad(COMMON[::-1], 200), priority=5)
        for _ in range(round_ + 1):
            tight.engine.step()
        if round_ % 2:
            tight.engine.cancel("bad")
        for index, prompt in enumerate(sane):
            tight.submit(f"sane {index}", prompt)
        tight.run()
        assert tight.done["bad"].finish_reason == ("cancelled" if round_ % 2 else "error")
        assert tight.done.pop("bad") and tight.failed("worse")
        assert [tight.outcome(f"sane {index}") for index in range(3)] == expected
        assert tight.engine.stats().cache_pages_used == 0
    assert tight.engine.stats().preemptions


def test_a_sequence_that_comes_to_nan_while_it_decodes_ends_alone(make: Make) -> None:
    patient = make()
    sane = [COMMON, tokens_of(40, 4)]
    expected = [patient.alone(prompt) for prompt in sane]
    bias = SamplingParams(max_tokens=6, ignore_eos=True, logit_bias=((BAD, 100.0),))
    patient.submit("bad", COMMON, sampling=bias)  # its first token is the damaged one
    for index, prompt in enumerate(sane):
        patient.submit(f"sane {index}", prompt)
    patient.run()
    completion = patient.done["bad"]
    assert completion.token_ids == (BAD,) and patient.failed("bad")
    assert [patient.outcome(f"sane {index}") for index in range(2)] == expected


@pytest.mark.parametrize("compute", ["int8", "fp32"])
@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
@pytest.mark.parametrize(
    ("name", "all_of_them"),
    [("model.embed_tokens", False), ("model.norm", True), ("model.layers.1.input_layernorm", True)],
)
def test_damage_in_a_models_file_is_told_to_the_requests_that_meet_it(
    name: str, all_of_them: bool, wrong: float, compute: Any, tmp_path: Path
) -> None:
    write_tiny_model(tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    tensors = load_file(file)
    tensors[f"{name}.weight"][7] = wrong  # of the embedding, a token's row
    save_file(tensors, file)
    import_model(tmp_path / "model", tmp_path / "store")
    engine = Engine.load(tmp_path / "store", threads=1, compute=compute, max_batch=4, memory_bytes=256 * 1024**2)
    met, spared = engine.generate([[5, 7, 8], [5, 6, 8]], SAMPLING)
    assert met.finish_reason == "error" and "NaN or infinity" in str(met.error)
    assert (spared.finish_reason == "error") == all_of_them
    assert engine.stats().cache_pages_used == 0
