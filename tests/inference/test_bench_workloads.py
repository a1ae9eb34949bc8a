"""The benchmarks on small models: counts and keys, never times."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from inference.bench.__main__ import main as bench
from inference.bench.json_outputs import json_counts
from inference.bench.prompts import SCHEMA
from inference.bench.under_load import percentiles
from inference.request import Completion, FinishReason

PEER_KEYS = {"engine", "batch", "prompt", "new", "seconds", "output_tokens_per_s"}
VALID = {"topic": "other", "urgency": 1, "needs_action": False, "summary": "s", "keywords": ["k"]}


@pytest.fixture(autouse=True)
def _peaks_in_a_cache_of_ones_own(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    from inference.planner import measured, peaks

    folder = tmp_path_factory.mktemp("peaks")
    monkeypatch.setattr(measured, "measured_folder", lambda: folder)
    monkeypatch.setattr(peaks, "SECONDS_A_RATE", 0.0)
    monkeypatch.setattr(peaks, "WORKING_SETS", (2**20, 2**21))
    monkeypatch.setattr(peaks, "LARGE", 256)
    monkeypatch.setattr(peaks, "LIBRARY_ROWS", 8)


@pytest.fixture
def lines(capsys: pytest.CaptureFixture[str]) -> Callable[..., list[dict[str, Any]]]:
    def run(workload: str, model: Path, *options: str) -> list[dict[str, Any]]:
        assert bench([workload, "--model", str(model), "--threads", "1", "--json", *options]) == 0
        return [json.loads(line) for line in capsys.readouterr().out.splitlines()]

    return run


def test_resident_gives_exactly_the_tokens_asked_for(
    tiny_store: Path, lines: Callable[..., list[dict[str, Any]]]
) -> None:
    found = lines("resident", tiny_store, "--batch", "2", "5", "--prompt", "8", "--new", "4", "--repeat", "3")
    assert [line["batch"] for line in found] == [2, 5]
    for line in found:
        assert line.keys() >= PEER_KEYS
        assert (line["engine"], line["workload"], line["prompt"], line["new"]) == ("penstock", "resident", 8, 4)
        assert line["output_tokens"] == 4 * line["batch"]
        assert line["prompt_tokens"] == 8 * line["batch"]
        assert line["errors"] == 0
        assert line["repeats"] == 3 and len(line["seconds_range"]) == 2
        # The last token of an output is never computed: its logits are not wanted.
        assert line["limits"]["decode_tokens"] == 3 * line["batch"]


def test_repeats_and_larger_batches_find_nothing_computed_before(
    tiny_store: Path, lines: Callable[..., list[dict[str, Any]]]
) -> None:
    # The smaller batch's prompts are the first of the larger one's, and repeats are alike.
    found = lines("resident", tiny_store, "--batch", "2", "4", "--prompt", "70", "--new", "2", "--repeat", "2")
    assert [line["limits"]["prefill_tokens"] for line in found] == [140, 280]


def test_uniform_lengths_add_up(tiny_store: Path, lines: Callable[..., list[dict[str, Any]]]) -> None:
    from inference.bench.prompts import uniform_rows

    (line,) = lines("resident", tiny_store, "--batch", "4", "--uniform", "3-9")
    rows = uniform_rows(4, 3, 9, vocab_size=512)
    assert line["uniform"] == "3-9"
    assert line["prompt_tokens"] == sum(len(row.token_ids) for row in rows)
    assert line["output_tokens"] == sum(row.sampling.max_tokens for row in rows)


@pytest.mark.parametrize("span", ["9-3", "0-5", "5", "a-b"])
def test_a_span_that_is_none_is_refused(span: str, tiny_store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench(["resident", "--model", str(tiny_store), "--uniform", span])
    assert "100-1024" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--batch", "--prompt", "--repeat", "--threads"])
def test_a_count_below_one_is_refused(option: str, tiny_store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench(["resident", "--model", str(tiny_store), option, "0"])
    assert "at least 1" in capsys.readouterr().err


@pytest.fixture(scope="module")
def chat_model(
    smollm2_store: Path, save_chat_model: Callable[[Path, Path], Any], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    from inference.weights import import_model

    folder = tmp_path_factory.mktemp("bench")
    save_chat_model(folder / "source", smollm2_store)
    import_model(folder / "source", folder / "store")
    return folder / "store"


def test_shared_prefix_counts_whole_prompts(
    chat_model: Path, lines: Callable[..., list[dict[str, Any]]], tmp_path: Path
) -> None:
    (line,) = lines("shared-prefix", chat_model, "--batch", "3", "--new", "2")
    dumped = tmp_path / "prompts.jsonl"
    assert bench(["shared-prefix", "--model", str(chat_model), "--batch", "3", "--dump-prompts", str(dumped)]) == 0
    prompts = [json.loads(row)["prompt_token_ids"] for row in dumped.read_text("utf-8").splitlines()]

    def common(one: list[int], other: list[int]) -> int:
        return next((at for at, (a, b) in enumerate(zip(one, other, strict=True)) if a != b), len(one))

    # What a prompt has in common with an earlier one is found again, to the token where they part.
    found = [max(common(prompt, earlier) for earlier in prompts[:at]) for at, prompt in enumerate(prompts) if at]
    assert min(found) >= 400
    assert line["prefix_hit_tokens"] == sum(found)
    assert (line["prompt_tokens"], line["output_tokens"], line["prompt"], line["new"]) == (3 * 460, 6, 460, 2)


def test_the_stream_runs_over_the_batch_and_is_told_apart(
    tiny_store: Path, lines: Callable[..., list[dict[str, Any]]]
) -> None:
    sizes = ["--batch", "4", "--prompt", "8", "--new", "64", "--interactive-prompt", "8", "--interactive-new", "2"]
    (line,) = lines("interactive-under-load", tiny_store, *sizes, "--rate", "200", "--idle-requests", "2")
    assert line.keys() >= PEER_KEYS
    assert line["output_tokens"] == 4 * 64  # the batch's only
    assert line["errors"] == line["interactive_errors"] == 0
    assert line["interactive_requests"] >= 1
    assert set(line["ttft_seconds_idle"]) == set(line["ttft_seconds_under_load"]) == {"p50", "p95", "p99"}
    assert 0 < line["interactive_work_share"] < 1


def test_without_json_a_person_reads_sentences(tiny_store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--batch", "2", "--prompt", "4", "--new", "2", "--threads", "1"]
    assert bench(["resident", "--model", str(tiny_store), *sizes]) == 0
    said = capsys.readouterr().out
    assert "batch 2:" in said and "of the limit, bound by" in said


def test_percentiles_are_the_nearest_ranks() -> None:
    # NIST/SEMATECH e-Handbook's nearest-rank rule: the ceil(share * n)-th smallest value.
    assert percentiles([float(n) for n in range(1, 101)]) == {"p50": 50.0, "p95": 95.0, "p99": 99.0}
    assert percentiles([3.0, 1.0, None, 2.0]) == {"p50": 2.0, "p95": 3.0, "p99": 3.0}
    assert percentiles([None]) is None


@pytest.mark.parametrize(
    ("texts", "ended", "valid"),
    [
        ([json.dumps(VALID)], 1, 1.0),
        ([json.dumps(VALID), json.dumps(VALID | {"urgency": 6})], 2, 0.5),
        ([json.dumps(VALID | {"extra": 1}), "{", "", json.dumps(VALID)], 4, 0.25),
        ([], 0, None),
    ],
)
def test_the_valid_share_is_of_outputs_that_ended_by_themselves(
    texts: list[str], ended: int, valid: float | None
) -> None:
    assert set(VALID) == set(SCHEMA["required"])
    # What was cut may be half an object; it is counted as cut, and not as invalid.
    completions = [_completion(text, "stop") for text in texts] + [_completion("{", "length")]
    counts = json_counts(completions)
    assert counts == {"ended": ended, "valid_share": valid, "cut_share": round(1 / len(completions), 4)}


def _completion(text: str, reason: FinishReason) -> Completion:
    return Completion("r", (), text, reason, None, 1, 1, 0.0, 0.0, 0.0, 0.0)
