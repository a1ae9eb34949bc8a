import json
from datetime import timedelta
from typing import Any

import httpx
import openai
import pytest
from django.utils import timezone

pytestmark = pytest.mark.django_db(transaction=True)


def jsonl(*prompts: str, model: str = "smollm2", max_tokens: int = 8) -> bytes:
    lines = [
        {
            "custom_id": f"row-{number}",
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {
                "model": model,
                "messages": [{"role": "user", "content": prompt}],
                "max_tokens": max_tokens,
                "temperature": 0,
            },
        }
        for number, prompt in enumerate(prompts, start=1)
    ]
    return b"".join(json.dumps(line, ensure_ascii=False).encode() + b"\n" for line in lines)


def upload(client: openai.OpenAI, content: bytes, name: str = "items.jsonl") -> Any:
    return client.files.create(file=(name, content), purpose="batch")


def start(client: openai.OpenAI, file_id: str, **fields: Any) -> Any:
    return client.batches.create(
        input_file_id=file_id, endpoint="/v1/chat/completions", completion_window="24h", **fields
    )


def counts(batch: Any) -> tuple[int, int, int]:
    told = batch.request_counts
    return told.total, told.completed, told.failed


def test_a_file_goes_up_is_listed_comes_down_and_goes(client: openai.OpenAI) -> None:
    content = jsonl("你好", "Hello")
    file = upload(client, content, "商品.jsonl")
    assert (file.object, file.bytes, file.filename, file.purpose) == ("file", len(content), "商品.jsonl", "batch")
    assert file.expires_at is not None
    assert file.expires_at - file.created_at == 30 * 86400
    assert client.files.retrieve(file.id) == file
    assert client.files.content(file.id).content == content
    assert [listed.id for listed in client.files.list(purpose="batch")] == [file.id]
    assert list(client.files.list(purpose="user_data")) == []
    gone = client.files.delete(file.id)
    assert (gone.deleted, gone.id, gone.object) == (True, file.id, "file")
    with pytest.raises(openai.NotFoundError):
        client.files.content(file.id)


def test_a_file_larger_than_memory_limits_survives_the_way_there_and_back(client: openai.OpenAI) -> None:
    content = b"x" * (3 * 1024 * 1024 + 17)
    file = client.files.create(file=("big.bin", content), purpose="user_data")
    assert client.files.content(file.id).content == content


def test_a_file_may_expire_sooner(client: openai.OpenAI) -> None:
    file = client.files.create(
        file=("a.jsonl", b"{}\n"), purpose="batch", expires_after={"anchor": "created_at", "seconds": 3600}
    )
    assert file.expires_at is not None
    assert file.expires_at - file.created_at == 3600
    with pytest.raises(openai.BadRequestError) as caught:
        client.files.create(
            file=("a.jsonl", b"{}\n"), purpose="batch", expires_after={"anchor": "created_at", "seconds": 1}
        )
    assert caught.value.param == "expires_after.seconds"


def test_the_client_pages_through_files_and_batches(client: openai.OpenAI, release: Any) -> None:
    files = [upload(client, jsonl("Hi"), f"{number}.jsonl").id for number in range(5)]
    assert [file.id for file in client.files.list(limit=2)] == files[::-1]
    assert [file.id for file in client.files.list(limit=2, order="asc")] == files
    batches = [start(client, file_id).id for file_id in files]
    assert [batch.id for batch in client.batches.list(limit=2)] == batches[::-1]
    page = client.batches.list(limit=5)
    assert page.has_more is False


@pytest.mark.parametrize(
    ("call", "param"),
    [
        (lambda client: client.files.list(limit=0), "limit"),
        (lambda client: client.files.list(limit=10_001), "limit"),
        (lambda client: client.files.list(order="up"), "order"),
        (lambda client: client.files.list(after="file-none"), "after"),
        (lambda client: client.batches.list(limit=101), "limit"),
        (lambda client: client.files.create(file=("a", b"x"), purpose="vision"), "purpose"),
        (lambda client: start(client, "file-none"), "input_file_id"),
        (lambda client: start(client, "file-none\x00"), None),
        (lambda client: start(client, upload(client, b"{}").id, metadata={"a": "\x00"}), None),
        (lambda client: client.batches.create(input_file_id=upload(client, b"{}").id, endpoint="/v1/images",
                                              completion_window="24h"), "endpoint"),
        (lambda client: client.batches.create(input_file_id=upload(client, b"{}").id, completion_window="1h",
                                              endpoint="/v1/chat/completions"), "completion_window"),
        (lambda client: start(client, upload(client, b"{}").id, metadata={"a": "b" * 513}), None),
        (lambda client: start(client, upload(client, b"{}").id, extra_body={"priority": 1}), "priority"),
    ],
)  # fmt: skip
def test_a_bad_parameter_is_a_400_that_names_it(client: openai.OpenAI, release: Any, call: Any, param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        call(client)
    body = caught.value.body
    assert isinstance(body, dict)
    assert set(body) == {"message", "type", "param", "code"}
    assert body["type"] == "invalid_request_error"
    assert body["message"]
    if param:
        assert caught.value.param == param
    assert caught.value.request_id


def test_a_batch_runs_on_the_real_engine_and_its_output_comes_down(
    client: openai.OpenAI, release: Any, engine_host: Any
) -> None:
    from penstock.serving.finalizing import finalize
    from penstock.serving.hosting.shards import run_shard
    from penstock.serving.intake import intake
    from penstock.serving.models import Shard

    batch = start(client, upload(client, jsonl("Say hello.", "用一句話打招呼。")).id, metadata={"run": "first"})
    assert (batch.object, batch.status, batch.metadata) == ("batch", "validating", {"run": "first"})
    assert counts(batch) == (0, 0, 0)
    assert batch.expires_at is not None
    assert batch.expires_at - batch.created_at == 86400
    intake(batch.id)
    running = client.batches.retrieve(batch.id)
    assert (running.status, counts(running)) == ("in_progress", (2, 0, 0))
    for shard in Shard.objects.filter(batch_id=batch.id):
        run_shard(shard.pk, host=engine_host)
    finalize(batch.id)
    done = client.batches.retrieve(batch.id)
    assert (done.status, counts(done)) == ("completed", (2, 2, 0))
    assert done.error_file_id is None
    assert done.output_file_id is not None
    lines = [json.loads(line) for line in client.files.content(done.output_file_id).text.splitlines()]
    assert {line["custom_id"] for line in lines} == {"row-1", "row-2"}
    for line in lines:
        assert line["error"] is None
        assert line["response"]["status_code"] == 200
        assert line["response"]["body"]["choices"][0]["finish_reason"] in {"stop", "length"}
    output_tokens = sum(line["response"]["body"]["usage"]["completion_tokens"] for line in lines)
    assert done.usage is not None
    assert done.usage.output_tokens == output_tokens
    assert client.files.retrieve(done.output_file_id).purpose == "batch_output"
    with pytest.raises(openai.ConflictError) as caught:
        client.batches.cancel(batch.id)
    assert caught.value.response.headers["x-should-retry"] == "false"


def test_a_batch_with_bad_lines_fails_and_lists_them(client: openai.OpenAI, release: Any) -> None:
    from penstock.serving.intake import intake

    content = jsonl("fine", "fine too") + b'{"custom_id": "row-1", "method": \n' + jsonl("again")
    batch = start(client, upload(client, content).id)
    intake(batch.id)
    failed = client.batches.retrieve(batch.id)
    assert failed.status == "failed"
    assert failed.failed_at is not None
    assert failed.errors is not None
    assert failed.errors.data is not None
    assert [error.line for error in failed.errors.data] == [3, 4]


def test_a_batch_is_cancelled_once(client: openai.OpenAI, release: Any) -> None:
    from penstock.serving.closing import close_batch
    from penstock.serving.finalizing import finalize
    from penstock.serving.intake import intake

    batch = start(client, upload(client, jsonl("Say hello.")).id)
    intake(batch.id)
    cancelling = client.batches.cancel(batch.id)
    assert cancelling.status == "cancelling"
    close_batch(batch.id)
    finalize(batch.id)
    cancelled = client.batches.cancel(batch.id)
    assert cancelled.status == "cancelled"
    assert cancelled.cancelled_at is not None
    assert cancelled.output_file_id is None


def test_an_idempotency_key_makes_one_batch(client: openai.OpenAI, release: Any) -> None:
    file = upload(client, jsonl("Hi"))
    headers = {"Idempotency-Key": "order-66"}
    first = start(client, file.id, extra_headers=headers)
    assert start(client, file.id, extra_headers=headers).id == first.id
    with pytest.raises(openai.ConflictError) as caught:
        start(client, file.id, metadata={"other": "yes"}, extra_headers=headers)
    assert caught.value.code == "idempotency_conflict"
    assert caught.value.response.headers["x-should-retry"] == "false"


def test_a_file_that_a_batch_reads_stays(client: openai.OpenAI, release: Any) -> None:
    file = upload(client, jsonl("Hi"))
    start(client, file.id)
    with pytest.raises(openai.ConflictError) as caught:
        client.files.delete(file.id)
    assert caught.value.code == "file_in_use"


def test_an_outsider_finds_nothing_of_another_team(
    client: openai.OpenAI, outsider: openai.OpenAI, release: Any
) -> None:
    file = upload(client, jsonl("Hi"))
    batch = start(client, file.id)
    for call in (
        lambda: outsider.files.retrieve(file.id),
        lambda: outsider.files.content(file.id),
        lambda: outsider.files.delete(file.id),
        lambda: outsider.batches.retrieve(batch.id),
        lambda: outsider.batches.cancel(batch.id),
    ):
        with pytest.raises(openai.NotFoundError):
            call()
    with pytest.raises(openai.BadRequestError):
        start(outsider, file.id)
    with pytest.raises(openai.BadRequestError):
        outsider.files.list(after=file.id)
    assert list(outsider.files.list()) == []
    assert list(outsider.batches.list()) == []
    assert client.batches.retrieve(batch.id).status == "validating"


def test_an_administrators_key_reaches_its_own_team_alone(
    server: Any, client: openai.OpenAI, people: Any, release: Any
) -> None:
    from penstock.accounts.models import Team
    from penstock.accounts.services import create_key

    file = upload(client, jsonl("Hi"))
    elsewhere = Team.objects.get(slug="elsewhere")
    _key, token = create_key(user=people.administrator, team=elsewhere, name="x")
    with pytest.raises(openai.NotFoundError):
        server.client(token).files.retrieve(file.id)


def test_an_expired_file_is_gone(client: openai.OpenAI) -> None:
    from penstock.serving.models import File

    file = upload(client, jsonl("Hi"))
    File.objects.filter(pk=file.id).update(expires_at=timezone.now() - timedelta(seconds=1))
    with pytest.raises(openai.NotFoundError):
        client.files.retrieve(file.id)


def test_without_a_good_key_it_is_401_and_the_envelope(server: Any) -> None:
    with pytest.raises(openai.AuthenticationError) as caught:
        server.client("pk_unknown_key").files.list()
    assert caught.value.code == "invalid_api_key"
    assert caught.value.response.headers["www-authenticate"].startswith("Bearer")
    answer = httpx.get(f"{server.url}/v1/batches")
    assert answer.status_code == 401
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
    assert httpx.post(f"{server.url}/v1/chat/completions", json={}).status_code == 401


def test_a_browsers_session_opens_nothing_under_v1(server: Any, people: Any) -> None:
    from django.conf import settings
    from django.test import Client

    browser = Client()
    browser.force_login(people.administrator)
    cookie = browser.cookies[settings.SESSION_COOKIE_NAME].value
    answer = httpx.get(f"{server.url}/v1/files", cookies={settings.SESSION_COOKIE_NAME: cookie})
    assert answer.status_code == 401


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1/nonsense", 404),
        ("GET", "/v1/", 404),
        ("GET", "/v1/files/", 404),
        ("POST", "/v1/fine_tuning/jobs", 404),
        ("PUT", "/v1/files", 405),
        ("GET", "/v1/chat/completions", 405),
        ("GET", "/v1/files/file-none", 404),
        ("GET", "/v1/files/%00", 404),
        ("GET", "/v1/batches/%00", 404),
        ("GET", "/v1/files?after=%00", 400),
        ("GET", "/v1/files?purpose=%00", 400),
        ("GET", "/v1/models/%00", 404),
    ],
)
def test_every_error_has_the_envelope_and_a_request_id(
    server: Any, client: openai.OpenAI, method: str, path: str, status: int
) -> None:
    headers = {"Authorization": f"Bearer {client.api_key}"}
    answer = httpx.request(method, f"{server.url}{path}", headers=headers)
    assert answer.status_code == status
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
    assert answer.headers["x-request-id"].startswith("req_")


@pytest.mark.parametrize("body", [b"{", b"[]", b'"text"', b"\xff", b'{"a": NaN}', b"[" * 100_000, b""])
def test_a_body_that_is_no_json_object_is_a_400(server: Any, client: openai.OpenAI, body: bytes) -> None:
    headers = {"Authorization": f"Bearer {client.api_key}", "Content-Type": "application/json"}
    for path in ("/v1/batches", "/v1/chat/completions"):
        answer = httpx.post(f"{server.url}{path}", content=body, headers=headers)
        assert answer.status_code == 400
        assert answer.json()["error"]["code"] == "invalid_json"


def test_an_upload_without_file_or_purpose_or_form_is_a_400(server: Any, client: openai.OpenAI) -> None:
    headers = {"Authorization": f"Bearer {client.api_key}"}
    url = f"{server.url}/v1/files"
    no_file = httpx.post(url, headers=headers, data={"purpose": "batch"})
    assert (no_file.status_code, no_file.json()["error"]["param"]) == (400, "file")
    no_purpose = httpx.post(url, headers=headers, files={"file": ("a.jsonl", b"{}")})
    assert (no_purpose.status_code, no_purpose.json()["error"]["param"]) == (400, "purpose")
    broken = httpx.post(url, headers={**headers, "Content-Type": "multipart/form-data"}, content=b"x")
    assert broken.status_code == 400


def test_a_reader_may_list_but_not_write(server: Any, people: Any) -> None:
    from penstock.accounts.models import Membership, Role
    from penstock.accounts.services import create_key

    _key, token = create_key(user=people.operator, team=people.team, name="x")
    Membership.objects.filter(user=people.operator).update(role=Role.AUDITOR)
    reader = server.client(token)
    assert list(reader.files.list()) == []
    with pytest.raises(openai.PermissionDeniedError) as caught:
        upload(reader, b"{}")
    assert caught.value.code == "permission_denied"


def test_models_are_the_approved_releases_and_the_teams_active_tasks(
    client: openai.OpenAI, outsider: openai.OpenAI, people: Any, release: Any
) -> None:
    from penstock.registry.models import ModelRelease
    from penstock.registry.services import activate_task, create_task, submit_task

    task = create_task(
        user=people.operator,
        team=people.team,
        name="descriptions",
        title="Product descriptions",
        purpose="Writes product descriptions.",
        latency_class="batch",
        model_release=release,
    )
    assert [model.id for model in client.models.list()] == ["smollm2"]
    submit_task(user=people.operator, task=task)
    activate_task(user=people.approver, task=task)
    assert [model.id for model in client.models.list()] == ["smollm2", "descriptions"]
    assert client.models.retrieve("smollm2").owned_by == "Hugging Face"
    assert [model.id for model in outsider.models.list()] == ["smollm2"]
    with pytest.raises(openai.NotFoundError):
        outsider.models.retrieve("descriptions")
    ModelRelease.objects.update(status="withdrawn")
    assert list(client.models.list()) == []
