"""No output depends on what runs beside it; and many requests leave nothing behind."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from inference.bench.__main__ import main
from inference.bench.invariance import InvarianceCheck, NotInvariant, tiny_model
from inference.bench.mixes import random_mix
from inference.bench.soak import SoakResult, small_engine, soak
from inference.bench.tiny import HeadShape

VOCABULARY = 320


@pytest.fixture(scope="module")
def check() -> Iterator[InvarianceCheck]:
    with tiny_model("int8") as model:
        yield InvarianceCheck(model)


@pytest.fixture(scope="module")
def ungrouped_check() -> Iterator[InvarianceCheck]:
    """4-bit weights, and a key-value head for every query head."""
    with tiny_model("int8", quantize="int4", shape=HeadShape(4, 4)) as model:
        assert model.manifest.config.group == 1
        assert model.manifest.tensor("layers.0.gate").encoding == "int4-rotated"
        yield InvarianceCheck(model)


@settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(st.randoms(use_true_random=False))
def test_outputs_are_the_same_bits_in_any_mix(check: InvarianceCheck, rng: random.Random) -> None:
    check.run(random_mix(rng, VOCABULARY))


@settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(st.randoms(use_true_random=False))
def test_four_bit_weights_and_heads_of_their_own_keep_their_bits_in_any_mix(
    ungrouped_check: InvarianceCheck, rng: random.Random
) -> None:
    ungrouped_check.run(random_mix(rng, VOCABULARY))


def test_the_mixes_bring_about_what_could_change_an_output(check: InvarianceCheck) -> None:
    for number in range(20):
        check.run(random_mix(random.Random(f"0 {number}"), VOCABULARY))
    tally = check.tally
    assert tally.prefix_hit_tokens and tally.preemptions and tally.recomputed_tokens
    assert tally.pauses and tally.steps_within_steps and tally.cancelled and tally.constrained


def test_a_changed_output_is_found(check: InvarianceCheck) -> None:
    mix = random_mix(random.Random(1), VOCABULARY)
    check.run(mix)
    request = next(arrival.request for arrival in mix.arrivals if arrival.cancel_step is None)
    key = request.prompt_token_ids, request.sampling
    alone = check._alone[key]
    check._alone[key] = type(alone)(
        **{name: getattr(alone, name) for name in type(alone).__slots__} | {"token_ids": (1,), "choices": ()}
    )
    with pytest.raises(NotInvariant, match=request.request_id):
        check.run(mix)
    check._alone[key] = alone


def test_mixes_run_from_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["invariance", "--mixes", "2", "--json"]) == 0
    line = json.loads(capsys.readouterr().out)
    assert line["mixes"] == 2 and line["changed"] == 0 and len(line["models"]) == 2


def test_many_mixed_requests_leave_no_page_behind(tmp_path: Path) -> None:
    result = soak(small_engine(tmp_path), 300)
    assert result.pages_leaked == result.requests_left == 0
    assert sum(result.reasons.values()) == 300
    assert set(result.reasons) >= {"length", "cancelled", "error"}
    assert result.preemptions and result.pauses and result.prefix_hit_tokens


def test_growth_is_told_from_a_cache_that_fills_up() -> None:
    def result(rss: list[int]) -> SoakResult:
        return SoakResult(1, 1.0, {}, 0, 0, 0, 0, 0, tuple(rss))

    assert result([1, 5, 9, 10, 10, 10, 10, 10]).growth_bytes == 0
    assert result([10, 11, 12, 13, 14, 15, 16, 17]).growth_bytes == 2
