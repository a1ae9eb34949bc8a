"""The benchmarks' work: the same for everyone, in exactly the lengths asked for."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from inference.bench.__main__ import main as bench
from inference.bench.prompts import json_rows, random_prompts, shared_prefix_rows, uniform_rows
from inference.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer(smollm2_store: Path) -> Tokenizer:
    return Tokenizer.load(smollm2_store)


def test_random_prompts_are_those_that_the_peers_get() -> None:
    # The peers' script: random.Random(0), rng.randint(100, 40_000), prompt after prompt.
    rng = random.Random(0)
    expected = [[rng.randint(100, 40_000) for _ in range(7)] for _ in range(3)]
    assert random_prompts(3, 7, vocab_size=49_152) == expected


def test_random_prompts_stay_within_a_small_vocabulary() -> None:
    assert all(0 <= token < 150 for ids in random_prompts(8, 50, vocab_size=150) for token in ids)


def test_uniform_lengths_cover_the_span_and_are_the_same_every_time() -> None:
    rows = uniform_rows(200, 10, 40, vocab_size=512)
    assert rows == uniform_rows(200, 10, 40, vocab_size=512)
    prompts = {len(row.token_ids) for row in rows}
    outputs = {row.sampling.max_tokens for row in rows}
    assert min(prompts | outputs) == 10 and max(prompts | outputs) == 40
    assert all(row.sampling.ignore_eos for row in rows)


def test_rows_share_the_system_prompt_and_differ_after_it(tokenizer: Tokenizer) -> None:
    rows = shared_prefix_rows(64, tokenizer)
    assert {len(row.token_ids) for row in rows} == {460}
    assert {row.sampling.max_tokens for row in rows} == {80}
    assert len({row.token_ids[:400] for row in rows}) == 1
    assert len({row.token_ids[400:] for row in rows}) == 64
    assert rows == shared_prefix_rows(64, tokenizer)


def test_the_shared_prefix_is_real_text(tokenizer: Tokenizer) -> None:
    (row,) = shared_prefix_rows(1, tokenizer)
    text = tokenizer.decode(row.token_ids)
    assert text.startswith("You keep the notebook of a team")
    assert "The guard can be removed" in text or "Note 1:" in text


def test_json_rows_ask_for_the_schema(tokenizer: Tokenizer) -> None:
    rows = json_rows(3, tokenizer, new=50)
    assert len({row.token_ids for row in rows}) == 3
    for row in rows:
        assert row.sampling.constraint is not None and row.sampling.constraint.kind == "json_schema"
        assert row.sampling.max_tokens == 50 and not row.sampling.ignore_eos
        assert "Form:" in tokenizer.decode(row.token_ids)


def test_dumped_prompts_are_the_measured_ones(smollm2_store: Path, tokenizer: Tokenizer, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text("of an earlier time\n")
    call = ["shared-prefix", "--model", str(smollm2_store), "--batch", "2", "3", "--new", "5"]
    assert bench([*call, "--dump-prompts", str(file)]) == 0
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [(line["batch"], line["index"]) for line in lines] == [(2, 0), (2, 1), (3, 0), (3, 1), (3, 2)]
    rows = shared_prefix_rows(3, tokenizer, new=5)
    assert [line["prompt_token_ids"] for line in lines[2:]] == [list(row.token_ids) for row in rows]
    assert all(line["new"] == 5 and line["ignore_eos"] for line in lines)


def test_dumped_json_rows_carry_their_schema(smollm2_store: Path, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    assert bench(["json", "--model", str(smollm2_store), "--batch", "1", "--dump-prompts", str(file)]) == 0
    (line,) = [json.loads(line) for line in file.read_text().splitlines()]
    assert line["json_schema"]["required"] == ["topic", "urgency", "needs_action", "summary", "keywords"]


def test_a_workload_of_real_text_needs_a_tokenizer(tiny_store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench(["shared-prefix", "--model", str(tiny_store), "--batch", "1"]) == 1
    assert "tokenizer" in capsys.readouterr().err
