"""What a batch's lines may ask of sampling and of the output's form: from the file that goes in to the one that comes
out, on the real engine. Right answers follow from the greedy output, from schemas, or from what parameters exclude."""

import json
import math
from collections.abc import Callable
from typing import Any

import pytest
from jsonschema import validate

from governance.ledger.models import OutboxEntry
from penstock.serving import blobs
from penstock.serving.finalizing import finalize
from penstock.serving.hosting.shards import run_shard
from penstock.serving.models import Request

pytestmark = pytest.mark.django_db

TEA: dict[str, Any] = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 10}, "grade": {"enum": ["A", "B"]}},
    "required": ["name", "grade"],
    "additionalProperties": False,
}
FORM = {"type": "json_schema", "json_schema": {"name": "tea", "strict": True, "schema": TEA}}
SAMPLED = {"temperature": 1.0, "seed": 5, "max_tokens": 8}


@pytest.fixture
def run(taken_in: Callable[..., Any], line: Callable[..., Any], host: Any) -> Callable[..., dict[str, Any]]:
    """A batch with a line for each keyword, of these parameters; the bodies of its output file by `custom_id`."""

    def make(**lines: dict[str, Any]) -> dict[str, Any]:
        batch = taken_in([line(name, "Write a line about tea.", **fields) for name, fields in lines.items()])
        for shard in batch.shards.all():
            run_shard(shard.pk, host=host)
        assert finalize(batch.pk)
        batch.refresh_from_db()
        assert batch.status == "completed" and batch.error_file is None
        with blobs.open_blob(batch.output_file.sha256) as stream:
            return {one["custom_id"]: one["response"]["body"] for one in map(json.loads, stream)}

    return make


def texts(body: dict[str, Any]) -> list[str]:
    return [choice["message"]["content"] for choice in body["choices"]]


def test_sampling_parameters_reach_the_engine_and_their_outputs_the_file(run: Callable[..., dict[str, Any]]) -> None:
    plain = run(
        greedy={"max_tokens": 12, "logprobs": True, "top_logprobs": 2},
        several={**SAMPLED, "n": 3},
        several_again={**SAMPLED, "n": 3},
        one={**SAMPLED},
        likeliest={**SAMPLED, "max_tokens": 12, "min_p": 1.0},
        top_1={**SAMPLED, "max_tokens": 12, "top_k": 1},
        form={"temperature": 1.0, "seed": 3, "max_tokens": 60, "response_format": FORM},
        choice={"structured_outputs": {"choice": ["oolong", "puer"]}, "max_tokens": 10},
    )
    (greedy,) = texts(plain["greedy"])
    items = plain["greedy"]["choices"][0]["logprobs"]["content"]
    assert "".join(item["token"] for item in items).startswith(greedy)
    for item in items:
        assert item["top_logprobs"][0]["token"] == item["token"] and len(item["top_logprobs"]) == 2
        assert 0 < math.exp(item["logprob"]) <= 1.0001
    assert len(set(texts(plain["several"]))) > 1
    assert [choice["index"] for choice in plain["several"]["choices"]] == [0, 1, 2]
    assert texts(plain["several_again"]) == texts(plain["several"])  # whatever ran beside them
    assert texts(plain["one"]) == texts(plain["several"])[:1]
    assert texts(plain["likeliest"]) == texts(plain["top_1"]) == [greedy]
    validate(json.loads(texts(plain["form"])[0]), TEA)
    assert plain["form"]["choices"][0]["finish_reason"] == "stop"
    assert texts(plain["choice"])[0] in {"oolong", "puer"}

    # A stop text that begins in one token and ends in the next.
    tokens = [item["token"] for item in items]
    at = next(k for k in range(2, len(tokens) - 1) if tokens[k].strip() and tokens[k + 1].strip())
    stop = tokens[at][-1] + tokens[at + 1][0]
    from inference.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(Request.objects.latest("created_at").model_release.store_path)
    (first,) = {tokenizer.encode(items[0]["token"])[0]}
    (comma,) = tokenizer.encode(",")
    more = run(
        stopped={"max_tokens": 12, "stop": [stop]},
        banned={"max_tokens": 1, "logit_bias": {str(first): -100}},
        forced={"max_tokens": 4, "logit_bias": {str(comma): 100}},
        long={"max_tokens": 30, "ignore_eos": True, "min_tokens": 30},
        repeated={"max_tokens": 12, "logit_bias": {str(comma): 100}, "repetition_penalty": 100.0},
    )
    assert texts(more["stopped"]) == [greedy[: greedy.index(stop)]]
    assert more["stopped"]["choices"][0]["finish_reason"] == "stop"
    assert texts(more["banned"]) != [items[0]["token"]]
    assert texts(more["forced"]) == [",,,,"]
    assert more["long"]["usage"]["completion_tokens"] == 30
    assert texts(more["repeated"])[0].count(",") < 12


def test_the_ledger_tells_what_sampling_was_asked_for(run: Callable[..., dict[str, Any]]) -> None:
    run(asked={**SAMPLED, "n": 2, "min_p": 0.25, "top_k": 40, "response_format": FORM, "logit_bias": {"5": 1.0}})
    row = Request.objects.get(custom_id="asked")
    told = OutboxEntry.objects.get(kind="request.finished", subject=row.pk).payload["sampling"]
    assert (told["n"], told["min_p"], told["top_k"], told["seed"]) == (2, 0.25, 40, "5")
    assert len(told["constraint_digest"]) == len(told["logit_bias_digest"]) == 64
    assert row.violations == [] and len(row.output_texts) == 2


def test_what_makes_no_sense_in_a_line_fails_the_batch_before_anything_runs(
    submit: Callable[..., Any], line: Callable[..., Any]
) -> None:
    from penstock.serving.intake import intake

    batch = submit(
        [
            line("bias", logit_bias={"99999999": 1.0}),
            line("form", response_format={"type": "json_schema"}),
            line("top", top_logprobs=2),
            line("min_p", min_p=1.5),
            line("n", n=65),
        ]
    )
    intake(batch.pk)
    batch.refresh_from_db()
    assert batch.status == "failed" and not batch.requests.exists()
    found = {(error["line"], error["param"]) for error in batch.errors["data"]}
    assert {number for number, _param in found} >= {2, 3, 4}
    assert (4, "body.min_p") in found and (3, "body.top_logprobs") in found
