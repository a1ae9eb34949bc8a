"""/v1/embeddings with the real client, server, engine and weights; the right vectors are transformers'."""

import base64
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest

pytestmark = pytest.mark.django_db(transaction=True)

HIDDEN = 128
CONTEXT = 256
TEXTS = ["A kettle that whistles.", "會唱歌的水壺", "Ice is cold. " * 20]


@pytest.fixture(scope="session")
def base_model(starter_store: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """A tiny base model without a head, made for embeddings by the last token's state, and the store of it."""
    import torch
    from transformers import LlamaConfig, LlamaModel

    from inference.weights import import_model

    torch.manual_seed(7)
    folder = tmp_path_factory.mktemp("embedder")
    model = LlamaModel(
        LlamaConfig(
            vocab_size=49152,
            hidden_size=HIDDEN,
            intermediate_size=192,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=CONTEXT,
            tie_word_embeddings=False,
            initializer_range=0.05,
        )
    ).eval()
    model.save_pretrained(folder)
    shutil.copy(starter_store / "tokenizer.json", folder)
    (folder / "tokenizer_config.json").write_text("{}")
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_lasttoken": True}))
    import_model(folder, folder / "store")
    return model, folder / "store"


@pytest.fixture
def embedder(transactional_db: None, base_model: tuple[Any, Path]) -> Any:
    """The approved release of that model, as `penstock model import` registers it."""
    from dataclasses import asdict

    from django.utils import timezone

    from inference.weights import StoreManifest
    from penstock.registry.models import ModelRelease

    store = base_model[1]
    manifest = StoreManifest.load(store)
    papers = asdict(manifest)
    papers.pop("tensors")
    return ModelRelease.objects.create(
        name="embedder",
        status="approved",
        digest=manifest.digest,
        architecture=manifest.config.architecture,
        parameters=manifest.parameters,
        size_bytes=manifest.total_bytes,
        context_tokens=manifest.config.max_context,
        quantization="float32",
        tokenizer_digest="e" * 64,
        store_path=str(store),
        manifest=papers,
        imported_by="admin",
        approved_at=timezone.now(),
    )


@pytest.fixture(scope="session")
def expected(base_model: tuple[Any, Path]) -> Callable[[list[int]], Any]:
    """transformers' last state of these tokens, of length 1."""
    import torch

    def vector(tokens: list[int]) -> Any:
        with torch.inference_mode():
            state = base_model[0](torch.tensor([tokens])).last_hidden_state[0, -1].double().numpy()
        return state / np.linalg.norm(state)

    return vector


@pytest.fixture(scope="session")
def tokens_of(starter_store: Path) -> Callable[[str], list[int]]:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(starter_store / "tokenizer.json"))
    return lambda text: list(tokenizer.encode(text).ids)


def close(got: Any, right: Any) -> bool:
    """Whether two unit vectors are the same but for the engine's arithmetic."""
    return float(np.dot(np.asarray(got, dtype=np.float64), right)) > 0.998


def last_request() -> Any:
    from penstock.serving.models import Request

    return Request.objects.latest("created_at")


def test_every_spelling_of_the_input_gives_transformers_vectors(
    client: openai.OpenAI, embedder: Any, engine_host: Any, expected: Any, tokens_of: Any
) -> None:
    ids = [tokens_of(text) for text in TEXTS]
    right = [expected(one) for one in ids]
    assert not close(right[0], right[1])
    one: Any
    for one, index in ((TEXTS[0], 0), (ids[1], 1)):
        answer = client.embeddings.create(model="embedder", input=one, encoding_format="float")
        (found,) = answer.data
        assert (answer.object, found.object, found.index, len(found.embedding)) == ("list", "embedding", 0, HIDDEN)
        assert close(found.embedding, right[index])
        assert (answer.usage.prompt_tokens, answer.usage.total_tokens) == (len(ids[index]),) * 2
    several: Any
    for several in (TEXTS, ids):
        answer = client.embeddings.create(model="embedder", input=several, encoding_format="float")
        assert [found.index for found in answer.data] == [0, 1, 2]
        assert all(close(found.embedding, one) for found, one in zip(answer.data, right, strict=True))
        assert answer.usage.prompt_tokens == sum(map(len, ids))
        assert answer.model == "embedder"


def test_base64_and_numbers_are_the_same_float32s(client: openai.OpenAI, embedder: Any, engine_host: Any) -> None:
    plain = client.embeddings.create(model="embedder", input=TEXTS, encoding_format="float", dimensions=HIDDEN)
    raw = client.embeddings.with_raw_response.create(model="embedder", input=TEXTS, encoding_format="base64")
    packed = [
        np.frombuffer(base64.b64decode(one["embedding"]), dtype="<f4") for one in raw.http_response.json()["data"]
    ]
    for numbers, vector in zip(plain.data, packed, strict=True):
        assert np.array_equal(np.array(numbers.embedding, dtype=np.float32), vector)
        assert np.linalg.norm(vector) == pytest.approx(1.0, abs=1e-6)
    # The client asks for base64 of itself where nothing is said, and unpacks it.
    assert client.embeddings.create(model="embedder", input=TEXTS).data[0].embedding == pytest.approx(
        packed[0].tolist()
    )


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"input": ""}, "input", "invalid_value"),
        ({"input": []}, "input", "invalid_value"),
        ({"input": ["fine", ""]}, "input.1", "invalid_value"),
        ({"input": [[5], []]}, "input.1", "invalid_value"),
        ({"input": ["fine", 5]}, "input.1", "invalid_value"),
        ({"input": [49152]}, "input", "invalid_value"),
        ({"input": [[5], [5, 49152]]}, "input.1", "invalid_value"),
        ({"input": [-1]}, "input.0", "invalid_value"),
        ({"input": ["x"] * 2049}, "input", "invalid_value"),
        ({"input": [[5] * 257]}, "input", "context_length_exceeded"),
        ({"input": [[5], [5] * 257]}, "input.1", "context_length_exceeded"),
        ({"input": [[5] * 250] * 1201}, "input", "invalid_value"),
        ({"input": "x", "dimensions": 64}, "dimensions", "unsupported_dimensions"),
        ({"input": "x", "encoding_format": "int8"}, "encoding_format", "invalid_value"),
        ({"input": "x", "temperature": 1.0}, "temperature", "unknown_parameter"),
        ({"input": "x", "stream": True}, "stream", "unknown_parameter"),
        ({}, "input", "missing_required_parameter"),
    ],
)
def test_what_cannot_be_embedded_is_told_in_openais_form(
    client: openai.OpenAI, embedder: Any, fields: dict[str, Any], param: str, code: str
) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.post("/embeddings", body={"model": "embedder", **fields}, cast_to=object)
    assert (refused.value.param, refused.value.code, refused.value.type) == (param, code, "invalid_request_error")


def test_a_model_without_a_head_embeds_and_is_refused_for_generation(client: openai.OpenAI, embedder: Any) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(model="embedder", prompt="Once", max_tokens=4)
    assert (refused.value.code, refused.value.param) == ("model_does_not_generate", "model")


def test_only_approved_releases_embed_and_only_for_those_who_may(
    client: openai.OpenAI, people: Any, embedder: Any
) -> None:
    with pytest.raises(openai.NotFoundError) as unknown:
        client.embeddings.create(model="elsewhere", input="x")
    assert unknown.value.code == "model_not_found"
    embedder.status = "withdrawn"
    embedder.save()
    with pytest.raises(openai.BadRequestError) as withdrawn:
        client.embeddings.create(model="embedder", input="x")
    assert withdrawn.value.code == "model_not_approved"
    people.operator.memberships.update(role="auditor")
    with pytest.raises(openai.PermissionDeniedError):
        client.embeddings.create(model="embedder", input="x")


def test_without_an_engine_host_the_client_is_told_to_try_again(client: openai.OpenAI, embedder: Any) -> None:
    with pytest.raises(openai.InternalServerError) as told:
        client.embeddings.create(model="embedder", input="x")
    assert (told.value.status_code, told.value.code) == (503, "no_engine_host")


def test_a_request_for_embeddings_is_billed_and_recorded(
    client: openai.OpenAI, embedder: Any, engine_host: Any, tokens_of: Any
) -> None:
    from governance.ledger.models import OutboxEntry
    from penstock.dashboard.evidence_check import disagreements
    from penstock.serving.completion import leaf_payload
    from penstock.serving.digests import salted_digest
    from penstock.telemetry.models import Usage

    raw = client.embeddings.with_raw_response.create(
        model="embedder", input=TEXTS, encoding_format="base64", extra_body={"metadata": {"language": "en"}}
    )
    data = b"".join(base64.b64decode(one["embedding"]) for one in raw.http_response.json()["data"])
    row = last_request()
    assert (row.status, row.endpoint, row.groups) == ("succeeded", "/v1/embeddings", {"language": "en"})
    assert row.output_digest == salted_digest(row.salt, data)
    assert (row.prompt_tokens, row.output_tokens) == (sum(len(tokens_of(text)) for text in TEXTS), 0)
    assert row.valid is None and row.refused is None
    usage = Usage.objects.get(request=row)
    assert usage.cost > 0 and usage.prompt_tokens == row.prompt_tokens and row.compute_seconds > 0
    entry = OutboxEntry.objects.get(subject=row.pk)
    assert entry.payload["output_digest"] == row.output_digest and entry.payload == leaf_payload(row)
    said = {"occurred_at": entry.occurred_at, "payload": entry.payload}
    found = [one for one in disagreements(row, said) if "digest" in one]
    assert found == []
    row.embedding.data = b"\x00" * len(data)
    row.embedding.save()
    changed = type(row).objects.get(pk=row.pk)
    assert any("stored output does not have the digest" in one for one in disagreements(changed, said))


def line(custom_id: str, given: Any, **body: Any) -> dict[str, Any]:
    return {
        "custom_id": custom_id,
        "method": "POST",
        "url": "/v1/embeddings",
        "body": {"model": "embedder", "input": given, **body},
    }


def start(client: openai.OpenAI, lines: list[dict[str, Any]]) -> Any:
    content = b"".join(json.dumps(one).encode() + b"\n" for one in lines)
    file = client.files.create(file=("texts.jsonl", content), purpose="batch")
    return client.batches.create(input_file_id=file.id, endpoint="/v1/embeddings", completion_window="24h")


def test_a_batch_of_embeddings_gives_what_single_requests_get(
    client: openai.OpenAI, embedder: Any, engine_host: Any, expected: Any, tokens_of: Any
) -> None:
    from penstock.serving.finalizing import finalize
    from penstock.serving.hosting.shards import run_shard
    from penstock.serving.intake import intake
    from penstock.serving.models import Shard

    lines = [
        *(line(f"text-{number}", text) for number, text in enumerate(TEXTS)),
        line("packed", TEXTS, encoding_format="base64"),
        line("tokens", [[5, 6, 7], [8]]),
    ]
    batch = start(client, lines)
    intake(batch.id)
    for shard in Shard.objects.filter(batch_id=batch.id):
        run_shard(shard.pk, host=engine_host)
    finalize(batch.id)
    done = client.batches.retrieve(batch.id)
    assert done.status == "completed" and done.error_file_id is None and done.output_file_id is not None
    assert done.request_counts is not None and done.request_counts.completed == 5
    answers = {
        one["custom_id"]: one["response"]["body"]
        for one in map(json.loads, client.files.content(done.output_file_id).text.splitlines())
    }
    for number, text in enumerate(TEXTS):
        body = answers[f"text-{number}"]
        single = client.embeddings.create(model="embedder", input=text, encoding_format="float")
        assert single.to_dict() == body
        assert close(body["data"][0]["embedding"], expected(tokens_of(text)))
    packed = [np.frombuffer(base64.b64decode(one["embedding"]), "<f4") for one in answers["packed"]["data"]]
    assert [len(one) for one in packed] == [HIDDEN] * 3
    assert packed[0].tolist() == np.float32(answers["text-0"]["data"][0]["embedding"]).tolist()
    assert answers["tokens"]["usage"] == {"prompt_tokens": 4, "total_tokens": 4}
    assert done.usage is not None
    assert done.usage.input_tokens == sum(body["usage"]["prompt_tokens"] for body in answers.values())
    assert done.usage.output_tokens == 0


def test_each_line_of_a_batch_of_embeddings_is_checked_before_any_runs(client: openai.OpenAI, embedder: Any) -> None:
    from penstock.serving.intake import intake

    chat = {**line("chat", "x"), "url": "/v1/chat/completions"}
    batch = start(client, [line("a", "fine"), line("b", ["x", ""]), line("c", "x", dimensions=3), chat])
    intake(batch.id)
    failed = client.batches.retrieve(batch.id)
    assert failed.status == "failed" and failed.errors is not None and failed.errors.data is not None
    assert [(one.line, one.param, one.code) for one in failed.errors.data] == [
        (2, "body.input.1", "invalid_value"),
        (3, "body.dimensions", "unsupported_dimensions"),
        (4, "url", "invalid_url"),
    ]


def test_what_is_being_embedded_ends_when_it_is_cancelled_and_costs_what_it_used(base_model: tuple[Any, Path]) -> None:
    from inference import Engine
    from penstock.serving.hosting.embedding import Texts, embed

    engine = Engine.load(base_model[1], threads=1, max_batch=4, memory_bytes=1024**3)
    requests = [Texts(f"r{number}", [(5,) * 200] * 40) for number in range(3)]  # each fills a group alone
    asked: list[bool] = []

    def stopped() -> bool:
        asked.append(True)
        return len(asked) > 20

    ended = [one for group in embed(engine, requests, stopped=stopped) for one in group]
    assert [(one.request_id, one.cancelled, one.vectors is not None) for one in ended] == [
        ("r0", False, True),
        ("r1", True, False),
    ]
    assert sum(one.compute_seconds for one in ended) == pytest.approx(engine.stats().busy_seconds)


def test_what_fails_for_one_request_fails_for_none_beside_it(base_model: tuple[Any, Path]) -> None:
    from inference import Engine
    from penstock.serving.hosting.embedding import Texts, embed

    engine = Engine.load(base_model[1], threads=1, max_batch=4, memory_bytes=1024**3)
    requests = [Texts("good", [(5, 6)]), Texts("bad", [(5,), (60_000,)]), Texts("too", [(7,)])]
    ended = {one.request_id: one for group in embed(engine, requests, stopped=lambda: False) for one in group}
    assert list(ended) == ["good", "bad", "too"]
    assert "token id 60000 is not in the vocabulary" in ended["bad"].error and ended["bad"].vectors is None
    assert ended["good"].vectors is not None and ended["too"].vectors is not None
