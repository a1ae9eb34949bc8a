import hashlib
from pathlib import Path
from typing import Any

import pytest
from django.core.exceptions import PermissionDenied, ValidationError

from governance.ledger.models import OutboxEntry
from inference.errors import ModelFormatError
from penstock.registry.models import ModelRelease
from penstock.registry.selectors import releases_visible_to
from penstock.registry.services import approve_release, create_task, import_release, withdraw_release
from penstock.registry.transitions import TransitionError

pytestmark = pytest.mark.django_db


def left_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name != ".import.lock")


def test_real_weights_become_a_release_with_their_papers(people: Any, home: Path, starter_gguf: Path) -> None:
    seen: list[tuple[int, int]] = []
    release = import_release(
        user=people.operator,
        source=starter_gguf,
        name="smollm2",
        supplier="Hugging Face",
        progress=lambda done, total: seen.append((done, total)),
    )
    assert release.status == "imported"
    assert release.source_digest == hashlib.sha256(starter_gguf.read_bytes()).hexdigest()
    assert release.architecture == "llama"
    assert release.parameters == 134_515_008  # as its published card says
    assert release.context_tokens == 8192
    assert Path(release.store_path) == home / "models" / "smollm2"
    assert seen[-1][0] == seen[-1][1]
    event = OutboxEntry.objects.get(kind="release.imported")
    assert event.subject == "smollm2"
    assert event.payload["digest"] == release.digest

    with pytest.raises(ValidationError, match="smollm2") as caught:
        import_release(user=people.operator, source=starter_gguf, name="again")
    assert "source" in caught.value.message_dict
    with pytest.raises(ValidationError) as caught:
        import_release(user=people.operator, source=starter_gguf, name="smollm2")
    assert "name" in caught.value.message_dict
    assert left_in(home / "models") == ["smollm2"]
    assert ModelRelease.objects.count() == 1


def test_a_truncated_file_is_refused_and_nothing_stays(
    people: Any, home: Path, tmp_path: Path, starter_gguf: Path
) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(starter_gguf.read_bytes()[:5_000_000])
    with pytest.raises(ModelFormatError, match=r"broken\.gguf"):
        import_release(user=people.operator, source=broken, name="broken")
    assert left_in(home / "models") == []
    assert not ModelRelease.objects.exists()
    assert not OutboxEntry.objects.exists()


def test_what_a_killed_import_left_is_cleared(people: Any, home: Path, tmp_path: Path) -> None:
    for leftover in (".old.12345678.partial", "next"):
        (home / "models" / leftover).mkdir(parents=True)
    bad = tmp_path / "bad.gguf"
    bad.write_bytes(b"GGUF")
    with pytest.raises(ModelFormatError):
        import_release(user=people.operator, source=bad, name="next")
    assert left_in(home / "models") == []


def test_names_and_paths_that_cannot_be_are_named(people: Any, home: Path, release: Any, tmp_path: Path) -> None:
    create_task(
        user=people.operator,
        team=people.team,
        name="descriptions",
        title="x",
        purpose="x",
        latency_class="batch",
        model_release=release,
    )
    for name in ("../up", "Big", "", "small-model", "descriptions", "x" * 81):
        with pytest.raises(ValidationError) as caught:
            import_release(user=people.operator, source=tmp_path, name=name)
        assert "name" in caught.value.message_dict
    with pytest.raises(ValidationError) as caught:
        import_release(user=people.operator, source=tmp_path / "absent.gguf", name="fine")
    assert "source" in caught.value.message_dict


def test_an_approver_releases_and_withdraws(people: Any, make_release: Any) -> None:
    release = make_release("fresh", status="imported")
    release = approve_release(user=people.approver, release=release)
    assert (release.status, release.approved_by) == ("approved", "approver")
    assert release.approved_at is not None
    with pytest.raises(TransitionError):
        approve_release(user=people.approver, release=release)
    release = withdraw_release(user=people.approver, release=release)
    assert release.status == "withdrawn"
    with pytest.raises(TransitionError):
        approve_release(user=people.approver, release=release)
    kinds = OutboxEntry.objects.filter(subject="fresh").order_by("id").values_list("kind", flat=True)
    assert list(kinds) == ["release.approved", "release.withdrawn"]


def test_nobody_but_an_approver_does(people: Any, make_release: Any) -> None:
    release = make_release("fresh", status="imported")
    for person in (people.operator, people.task_owner, people.auditor, people.outsider):
        with pytest.raises(PermissionDenied):
            approve_release(user=person, release=release)
        with pytest.raises(PermissionDenied):
            withdraw_release(user=person, release=release)
    with pytest.raises(PermissionDenied):
        import_release(user=people.auditor, source=Path("x"), name="x")


def test_releases_are_seen_by_whoever_is_signed_in(people: Any, release: Any) -> None:
    from django.contrib.auth.models import AnonymousUser

    assert list(releases_visible_to(people.outsider)) == [release]
    assert list(releases_visible_to(AnonymousUser())) == []
