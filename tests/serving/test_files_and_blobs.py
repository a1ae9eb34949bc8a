"""Files: what is kept, who may keep it, and what a failure leaves behind."""

import hashlib
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from django.core.exceptions import PermissionDenied
from django.utils import timezone

from penstock.config import config
from penstock.serving import blobs
from penstock.serving.models import File
from penstock.serving.rejection import Rejected
from penstock.serving.selectors import files_visible_to
from penstock.serving.services import create_file, delete_file


def test_a_blob_lies_under_its_digest_and_reads_back(home: Path) -> None:
    blob = blobs.store([b"one ", b"two"])

    assert blob == blobs.Blob(hashlib.sha256(b"one two").hexdigest(), 7)
    with blobs.open_blob(blob.sha256) as stream:
        assert stream.read() == b"one two"


def test_the_same_content_is_kept_once(home: Path) -> None:
    assert blobs.store([b"same"]) == blobs.store([b"sa", b"me"])

    assert len([path for path in (home / "blobs").rglob("*") if path.is_file()]) == 1


def test_a_blob_past_its_limit_leaves_nothing(home: Path) -> None:
    with pytest.raises(blobs.BlobTooLarge):
        blobs.store([b"x" * 10, b"y"], limit_bytes=10)

    assert [path for path in (home / "blobs").rglob("*") if path.is_file()] == []


def test_an_upload_that_breaks_off_leaves_nothing(home: Path) -> None:
    def broken() -> Iterator[bytes]:
        yield b"begun"
        raise ConnectionResetError

    with pytest.raises(ConnectionResetError):
        blobs.store(broken())

    assert [path for path in (home / "blobs").rglob("*") if path.is_file()] == []


def test_a_name_that_is_no_digest_reads_nothing(home: Path) -> None:
    with pytest.raises(ValueError, match="SHA-256"):
        blobs.open_blob("../../etc/passwd")


def test_content_that_is_gone_is_named(home: Path) -> None:
    with pytest.raises(blobs.BlobMissing, match="0000"):
        blobs.open_blob("0" * 64)


def test_a_batch_input_expires_after_thirty_days(people: Any, home: Path) -> None:
    file = create_file(user=people.operator, team=people.team, filename="a.jsonl", purpose="batch", chunks=[b"{}\n"])

    assert file.expires_at is not None
    assert file.expires_at - file.created_at == timedelta(days=30)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"purpose": "batch_output"}, "purpose"),
        ({"purpose": "anything"}, "purpose"),
        ({"expires_after_seconds": 60}, "expires_after.seconds"),
    ],
)
def test_a_bad_upload_names_the_parameter(people: Any, home: Path, fields: dict[str, Any], param: str) -> None:
    values: dict[str, Any] = {"filename": "a.jsonl", "purpose": "batch", "chunks": [b"{}"], **fields}

    with pytest.raises(Rejected) as caught:
        create_file(user=people.operator, team=people.team, **values)

    assert (caught.value.http_status, caught.value.param) == (400, param)


def test_a_file_past_the_limit_is_refused_with_413(people: Any, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config(), "max_file_bytes", 4)

    with pytest.raises(Rejected) as caught:
        create_file(user=people.operator, team=people.team, filename="a", purpose="batch", chunks=[b"12345"])

    assert caught.value.http_status == 413
    assert not File.objects.exists()


def test_folders_in_a_file_name_are_dropped(people: Any, home: Path) -> None:
    file = create_file(
        user=people.operator, team=people.team, filename="..\\..\\x/../input.jsonl", purpose="batch", chunks=[b"{}"]
    )

    assert file.filename == "input.jsonl"


def test_who_may_upload_and_who_may_see(people: Any, upload: Callable[..., Any]) -> None:
    file = upload([b"{}"])

    assert file in files_visible_to(people.auditor)
    assert file not in files_visible_to(people.outsider)
    for person in (people.auditor, people.approver, people.outsider):
        with pytest.raises(PermissionDenied):
            create_file(user=person, team=people.team, filename="a", purpose="batch", chunks=[b"{}"])


def test_a_deleted_file_cannot_be_read_any_more(people: Any, upload: Callable[..., Any]) -> None:
    from governance.ledger.models import OutboxEntry

    file = upload([b"{}"])

    delete_file(user=people.operator, file=file)
    delete_file(user=people.operator, file=file)

    assert file not in files_visible_to(people.operator)
    assert OutboxEntry.objects.filter(kind="file.deleted", subject=file.pk).count() == 1


def test_an_expired_file_cannot_be_read_any_more(people: Any, upload: Callable[..., Any]) -> None:
    file = upload([b"{}"])
    File.objects.filter(pk=file.pk).update(expires_at=timezone.now() - timedelta(seconds=1))

    assert file not in files_visible_to(people.operator)


def test_a_file_that_a_batch_reads_is_not_deleted(people: Any, submit: Callable[..., Any], line: Any) -> None:
    batch = submit([line("a")])

    with pytest.raises(Rejected) as caught:
        delete_file(user=people.operator, file=batch.input_file)

    assert caught.value.http_status == 409


@pytest.mark.parametrize(
    ("given", "kept"),
    (
        ("../../etc/passwd", "passwd"),
        ("C:\\work\\items.jsonl", "items.jsonl"),
        ("two\nlines\r.jsonl", "two\ufffdlines\ufffd.jsonl"),
        ("not-\udcff-utf8.jsonl", "not-\ufffd-utf8.jsonl"),
        ("a\x00b", "a\ufffdb"),
        ("商品 資料.jsonl", "商品 資料.jsonl"),
        ("", "upload.jsonl"),
        ("x" * 300, "x" * 255),
    ),
)
def test_a_file_name_is_kept_as_far_as_a_header_and_the_database_can_carry_it(given: str, kept: str) -> None:
    from penstock.serving.services.files import plain_filename

    assert plain_filename(given) == kept
