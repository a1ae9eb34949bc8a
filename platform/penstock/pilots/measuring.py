"""Measures a baseline, in the process of an engine host: the items one at a time through transformers, unquantized.

1. Claim the run: one conditional UPDATE, which takes a waiting run, or a running one whose heartbeat stopped. It counts
   `attempts`, the fence: whatever an earlier claimant still brings is dropped.
2. Load the weights that the release was made from, and check that they are those (SHA-256).
3. Run each item that has no result yet; write it before the next one begins. A killed worker repeats one item at most;
   one that is asked to stop ends its item and hands the run back.
4. When all items are there, count what else the installation ran meanwhile, close the run and record it in the ledger.

Torch is imported by the generator alone, when a run has been claimed.
"""

import contextlib
import datetime as dt
import hashlib
import logging
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from django.db import connection, transaction
from django.db.models import F, Q
from django.db.models.functions import Coalesce
from django.utils import timezone
from django.utils.translation import gettext as _

from governance.ledger.services import record
from penstock.pilots.items import admit_items, prompt_of, read_items
from penstock.pilots.models import BaselineItem, BaselineRun
from penstock.pilots.naive import Generated, Generator, Loader, TransformersGenerator
from penstock.registry.models import ModelRelease
from penstock.serving.admission import Admitted
from penstock.serving.completion import contract_of
from penstock.serving.hosting.facts import host_facts
from penstock.serving.models import Request
from penstock.serving.outcome import assess

logger = logging.getLogger(__name__)

HEARTBEAT_SECONDS = 5.0
# A heartbeat comes from a thread of its own, so it does not wait for a long item; a minute without one means death.
DEAD_AFTER = dt.timedelta(seconds=60)
MAX_ATTEMPTS = 10
WARM_UP_TOKENS = 4


class Superseded(Exception):
    """Another worker has claimed the run, or it is over."""


class HandedBack(Exception):
    """The worker stops; another one goes on with the run."""


class BaselineError(Exception):
    """A baseline that cannot be measured; says why, for a person."""


def measure(run_id: int, *, load: Loader | None = None, stopping: threading.Event | None = None) -> bool:
    """Measures what is left of a run, or what can be until `stopping` is set. Returns whether this call completed it; a
    run that another worker holds, or that is over, is left alone. A fault fails the run with its message."""
    fence = _claim(run_id)
    if fence is None:
        return False
    try:
        with _heartbeat(run_id, fence):
            _measure(run_id, fence, load or TransformersGenerator.load, stopping or threading.Event())
        return True
    except HandedBack:
        held = BaselineRun.objects.filter(pk=run_id, attempts=fence, status=BaselineRun.Status.RUNNING)
        held.update(status=BaselineRun.Status.QUEUED, heartbeat_at=None)
        return False
    except Superseded:
        logger.info("baseline run %s was taken over; what this worker still had is dropped", run_id)
        return False
    except Exception as error:
        logger.exception("baseline run %s failed", run_id)
        _fail(run_id, fence, str(error) or type(error).__name__)
        return False


def sweep(wake: Callable[[int], bool]) -> list[int]:
    """Wakes workers for runs that wait or whose worker died; gives up one that has killed `MAX_ATTEMPTS` workers."""
    now = timezone.now()
    for run in _dead(now).filter(attempts__gte=MAX_ATTEMPTS):
        _fail(run.pk, run.attempts, _("The worker died %(n)d times while measuring.") % {"n": run.attempts})
    waiting = Q(status=BaselineRun.Status.QUEUED, created_at__lt=now - dt.timedelta(seconds=HEARTBEAT_SECONDS))
    dead = Q(pk__in=_dead(now).values("pk"))
    runs = list(BaselineRun.objects.filter(waiting | dead).order_by("pk").values_list("pk", flat=True))
    return [run for run in runs if wake(run)]


def _dead(now: dt.datetime) -> Any:
    return BaselineRun.objects.filter(status=BaselineRun.Status.RUNNING, heartbeat_at__lt=now - DEAD_AFTER)


def _claim(run_id: int) -> int | None:
    """The fence of the claim, or None where there is nothing to claim."""
    now = timezone.now()
    free = Q(status=BaselineRun.Status.QUEUED) | Q(pk__in=_dead(now).values("pk"))
    with transaction.atomic():
        claimed = BaselineRun.objects.filter(free, pk=run_id).update(
            status=BaselineRun.Status.RUNNING,
            attempts=F("attempts") + 1,
            started_at=Coalesce("started_at", now),
            heartbeat_at=now,
        )
        return BaselineRun.objects.values_list("attempts", flat=True).get(pk=run_id) if claimed == 1 else None


def _measure(run_id: int, fence: int, load: Loader, stopping: threading.Event) -> None:
    run = BaselineRun.objects.select_related("pilot__task__model_release", "pilot__items_file").get(pk=run_id)
    pilot, release = run.pilot, run.pilot.task.model_release
    items = read_items(pilot.items_file, pilot.sample_items)
    admitted = admit_items(pilot, items)
    _check_prompts(run, admitted)
    done = set(run.items.values_list("custom_id", flat=True))
    waiting = [(item, one) for item, one in zip(items, admitted, strict=True) if item.custom_id not in done]
    if waiting:
        source_digest = _check_source(release)
        running_before = _running_requests()
        generator = load(release)
        _describe(run_id, fence, generator, admitted, source_digest=source_digest, busy=running_before)
        # The first call pays for what libraries set up once; no item should.
        if not stopping.is_set():
            generator.generate(waiting[0][1], max_tokens=WARM_UP_TOKENS)
        for item, one in waiting:
            if stopping.is_set():
                raise HandedBack
            started_at = timezone.now()
            generated = generator.generate(one, max_tokens=int(one.body["max_tokens"]))
            if generated.prompt_tokens != len(one.prompt_token_ids):
                raise BaselineError(_("The two ways read different prompts for %(id)s.") % {"id": item.custom_id})
            _write(run_id, fence, item.custom_id, one, generated, started_at)
    _complete(run_id, fence)


def _write(
    run_id: int, fence: int, custom_id: str, admitted: Admitted, generated: Generated, started_at: dt.datetime
) -> None:
    text = generated.text.replace("\x00", "\ufffd")  # PostgreSQL's text takes no U+0000; the trial's is replaced too
    contract = contract_of(admitted.task.pk, admitted.task.version)
    outcome = assess(
        text=text,
        finish_reason=generated.finish_reason,
        error=False,
        contract=contract,
        expected_language=contract.expected_language(admitted.groups),
        prompt=prompt_of(admitted),
    )
    with transaction.atomic():
        _hold(run_id, fence)
        BaselineItem.objects.create(
            run_id=run_id,
            custom_id=custom_id,
            started_at=started_at,
            finished_at=timezone.now(),
            finish_reason=generated.finish_reason,
            prompt_tokens=generated.prompt_tokens,
            output_tokens=generated.output_tokens,
            ttft_seconds=generated.ttft_seconds,
            duration_seconds=generated.duration_seconds,
            output_text=text,
            output_digest=hashlib.sha256(text.encode()).hexdigest(),
            valid=outcome.valid,
            violations=list(outcome.violations),
        )


@transaction.atomic
def _complete(run_id: int, fence: int) -> None:
    run = _hold(run_id, fence)
    items = list(run.items.order_by("pk"))
    running_after = _running_requests()
    run.method["engine_requests_running_after"] = running_after
    spans = [(item.started_at, item.finished_at) for item in items]
    run.method["work_meanwhile"] = work_meanwhile(spans, besides_run=run.pk) + running_after
    run.method["items_digest"] = items_digest(items)
    run.method["interruptions"] = fence - 1
    run.status = BaselineRun.Status.COMPLETED
    run.finished_at = timezone.now()
    run.error_message = ""
    run.save(update_fields=["method", "status", "finished_at", "error_message"])
    record(
        kind="pilot.baseline_measured",
        subject=run.pilot.name,
        payload={
            "task": run.pilot.task.name,
            "release": run.pilot.task.model_release.name,
            "run": run.pk,
            "items": len(items),
            "prompt_tokens": sum(item.prompt_tokens for item in items),
            "output_tokens": sum(item.output_tokens for item in items),
            "duration_seconds": round(sum(item.duration_seconds for item in items), 6),
            "valid": sum(item.valid is True for item in items),
            "assessed": sum(item.valid is not None for item in items),
            "method": run.method,
        },
        actor="system",
    )


@transaction.atomic
def _fail(run_id: int, fence: int, message: str) -> None:
    with contextlib.suppress(Superseded):
        run = _hold(run_id, fence)
        run.status = BaselineRun.Status.FAILED
        run.finished_at = timezone.now()
        run.error_message = message
        run.save(update_fields=["status", "finished_at", "error_message"])
        record(
            kind="pilot.baseline_failed",
            subject=run.pilot.name,
            payload={"task": run.pilot.task.name, "run": run.pk, "items": run.items.count()},
            actor="system",
        )


def items_digest(items: list[BaselineItem]) -> str:
    """SHA-256 over one line an item, in order of custom_id: what the ledger's entry about the run vouches for."""
    lines = sorted(
        f"{item.custom_id}\t{item.output_digest}\t{item.output_tokens}\t{item.duration_seconds!r}\n" for item in items
    )
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def work_meanwhile(
    spans: list[tuple[dt.datetime, dt.datetime]], *, besides_batch: str | None = None, besides_run: int | None = None
) -> int:
    """How many requests and baseline items, on whatever host of the installation, ran in part within one of the spans.

    A request tells when it ran once it has finished, so what still runs is not among them. What belongs to the batch
    or the baseline run that is being looked at is left out.
    """
    requests_overlap = items_overlap = Q(pk__in=[])
    for start, end in spans:
        requests_overlap |= Q(started_at__lt=end, finished_at__gt=start)
        items_overlap |= Q(started_at__lt=end, finished_at__gt=start)
    requests = Request.objects.filter(requests_overlap)
    if besides_batch is not None:
        requests = requests.exclude(batch=besides_batch)
    items = BaselineItem.objects.filter(items_overlap)
    if besides_run is not None:
        items = items.exclude(run=besides_run)
    return requests.count() + items.count()


def _running_requests() -> int:
    return Request.objects.filter(status=Request.Status.LEASED).count()


def _hold(run_id: int, fence: int) -> BaselineRun:
    """Locks the run for this transaction, if the claim still holds. Raises Superseded."""
    run = (
        BaselineRun.objects.select_for_update(of=("self",))
        .select_related("pilot__task__model_release")
        .filter(pk=run_id, attempts=fence, status=BaselineRun.Status.RUNNING)
        .first()
    )
    if run is None:
        raise Superseded
    return run


@contextlib.contextmanager
def _heartbeat(run_id: int, fence: int) -> Iterator[None]:
    over = threading.Event()

    def beat() -> None:
        try:
            while not over.wait(HEARTBEAT_SECONDS):
                held = BaselineRun.objects.filter(pk=run_id, attempts=fence, status=BaselineRun.Status.RUNNING)
                try:
                    held.update(heartbeat_at=timezone.now())
                except Exception:
                    logger.warning("no heartbeat for baseline run %s", run_id, exc_info=True)
                    connection.close()
        finally:
            connection.close()  # each thread has its own

    thread = threading.Thread(target=beat, name=f"baseline-{run_id}-heartbeat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _check_prompts(run: BaselineRun, admitted: list[Admitted]) -> None:
    """A run that goes on must go on with the same prompts: the task may have changed in between."""
    known = run.method.get("prompts_digest")
    if known and known != prompts_digest(admitted):
        raise BaselineError(_("The task's prompts changed while the baseline was being measured: start it again."))


def prompts_digest(admitted: list[Admitted]) -> str:
    """SHA-256 over the token ids and limits of all prompts, in order."""
    lines = (f"{','.join(map(str, one.prompt_token_ids))};{one.body['max_tokens']}\n" for one in admitted)
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def _check_source(release: ModelRelease) -> str:
    """The digest of the weights at `release.source_path`, which must be those that the release was made from."""
    from inference.weights.sources import open_source

    path = Path(release.source_path)
    if not path.exists():
        raise BaselineError(
            _("The weights that %(name)s was made from are no longer at %(path)s: put them back.")
            % {"name": release.name, "path": path}
        )
    found = open_source(path).digest()
    if release.source_digest and found != release.source_digest:
        raise BaselineError(
            _("The weights at %(path)s are not those that %(name)s was made from (SHA-256 %(found)s).")
            % {"path": path, "name": release.name, "found": found}
        )
    return found


@transaction.atomic
def _describe(
    run_id: int,
    fence: int,
    generator: Generator,
    admitted: list[Admitted],
    *,
    source_digest: str,
    busy: int,
) -> None:
    """Keeps how it is measured before the first item is."""
    run = _hold(run_id, fence)
    run.method = {
        "way": "transformers generate, one item at a time",
        "decoding": "greedy",
        "source": run.pilot.task.model_release.source,
        "source_digest": source_digest,
        "dtype": generator.dtype,
        "threads": generator.threads,
        "warm_up_tokens": WARM_UP_TOKENS,
        "libraries": generator.libraries,
        "host": host_facts(),
        "prompts_digest": prompts_digest(admitted),
        "engine_requests_running_before": busy + run.method.get("engine_requests_running_before", 0),
    }
    run.save(update_fields=["method"])
