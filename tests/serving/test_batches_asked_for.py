"""Asking for a batch and for its end: who may, what is checked at once, and that asking twice is asking once."""

from collections.abc import Callable
from typing import Any

import pytest
from django.core.exceptions import PermissionDenied

from governance.ledger.models import OutboxEntry
from penstock.serving.models import Batch
from penstock.serving.rejection import Rejected
from penstock.serving.selectors import batches_visible_to
from penstock.serving.services import cancel_batch, create_batch

Submit = Callable[..., Any]


def ask(people: Any, file: Any, **fields: Any) -> Any:
    return create_batch(
        user=people.operator, team=people.team, input_file=file, **{"endpoint": "/v1/chat/completions", **fields}
    )


def test_a_batch_waits_for_intake_with_a_day_to_run(submit: Submit, line: Any) -> None:
    batch = submit([line("a")])

    assert batch.status == Batch.Status.VALIDATING
    assert (batch.expires_at - batch.created_at).total_seconds() == 86400
    assert OutboxEntry.objects.filter(kind="batch.created", subject=batch.pk).count() == 1


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"endpoint": "/v1/images"}, "endpoint"),
        ({"completion_window": "1h"}, "completion_window"),
        ({"metadata": {str(n): "v" for n in range(17)}}, "metadata"),
        ({"metadata": {"k" * 65: "v"}}, "metadata." + "k" * 65),
        ({"metadata": {"k": "v" * 513}}, "metadata.k"),
        ({"metadata": {"k": 5}}, "metadata.k"),
        ({"metadata": {"task": "no-such-task"}}, "model"),
        ({"idempotency_key": "k" * 256}, "Idempotency-Key"),
    ],
)
def test_a_bad_parameter_is_named(
    people: Any, task: Any, upload: Any, line: Any, fields: dict[str, Any], param: str
) -> None:
    with pytest.raises(Rejected) as caught:
        ask(people, upload([line("a")]), **fields)

    assert caught.value.param == param
    assert not Batch.objects.exists()


def test_metadata_at_its_limits_is_taken(people: Any, task: Any, upload: Any, line: Any) -> None:
    metadata = {f"{n:064d}": "v" * 512 for n in range(16)}

    assert ask(people, upload([line("a")]), metadata=metadata).metadata == metadata


def test_the_same_idempotency_key_gives_the_same_batch(people: Any, task: Any, upload: Any, line: Any) -> None:
    file = upload([line("a")])

    first = ask(people, file, idempotency_key="k1")

    assert ask(people, file, idempotency_key="k1") == first
    with pytest.raises(Rejected) as caught:
        ask(people, upload([line("b")]), idempotency_key="k1")
    assert (caught.value.http_status, caught.value.code) == (409, "idempotency_conflict")
    assert Batch.objects.count() == 1


def test_a_file_of_another_team_is_no_input(people: Any, task: Any, home: Any, line: Any) -> None:
    from penstock.accounts.models import Team
    from penstock.serving.services import create_file

    elsewhere = Team.objects.get(slug="elsewhere")
    file = create_file(user=people.outsider, team=elsewhere, filename="a.jsonl", purpose="batch", chunks=[b"{}\n"])

    with pytest.raises(Rejected) as caught:
        ask(people, file)

    assert caught.value.param == "input_file_id"


def test_who_may_run_cancel_and_see(people: Any, submit: Submit, upload: Any, line: Any) -> None:
    batch = submit([line("a")])

    for person in (people.auditor, people.approver, people.outsider):
        with pytest.raises(PermissionDenied):
            create_batch(user=person, team=people.team, input_file=batch.input_file, endpoint="/v1/chat/completions")
        with pytest.raises(PermissionDenied):
            cancel_batch(user=person, batch=batch)
    assert batch in batches_visible_to(people.auditor)
    assert batch not in batches_visible_to(people.outsider)


def test_cancelling_twice_is_cancelling_once(people: Any, taken_in: Submit, line: Any) -> None:
    batch = taken_in([line("a")])

    first = cancel_batch(user=people.operator, batch=batch)
    second = cancel_batch(user=people.operator, batch=batch)

    assert first.status == second.status == Batch.Status.CANCELLING
    assert first.cancelling_at == second.cancelling_at


def test_a_batch_that_is_over_cannot_be_cancelled(people: Any, submit: Submit, line: Any) -> None:
    from django.utils import timezone

    batch = submit([line("a")])
    Batch.objects.filter(pk=batch.pk).update(status="completed", completed_at=timezone.now())

    with pytest.raises(Rejected) as caught:
        cancel_batch(user=people.operator, batch=batch)

    assert caught.value.http_status == 409
