"""Every read of files, batches and requests."""

from dataclasses import dataclass
from datetime import datetime, timedelta

from django.db.models import Count, Max, Min, Q, QuerySet, Sum
from django.utils import timezone

from penstock.accounts.access import Person, visible_to
from penstock.registry.models import ModelRelease
from penstock.serving.models import Batch, BatchRun, Embedding, EngineHost, EngineRun, File, Request

RATE_WINDOW = timedelta(seconds=30)
HOST_SILENT = timedelta(seconds=20)


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a batch is. The rate is that of the last half minute; None where it cannot be told yet."""

    total: int
    queued: int
    running: int
    succeeded: int
    failed: int
    expired: int
    cancelled: int
    output_tokens: int
    output_tokens_per_second: float | None
    eta_seconds: float | None

    @property
    def finished(self) -> int:
        return self.succeeded + self.failed + self.expired + self.cancelled

    @property
    def share(self) -> float:
        """Finished of total, 0 to 1."""
        return self.finished / self.total if self.total else 0.0


@dataclass(frozen=True, slots=True)
class BatchUsage:
    """OpenAI's usage of a batch, in tokens."""

    input_tokens: int
    output_tokens: int
    cached_tokens: int = 0

    @property
    def total_tokens(self) -> int:
        return self.input_tokens + self.output_tokens


def files_visible_to(user: Person) -> QuerySet[File]:
    """Files that can still be read: neither deleted nor expired."""
    readable = Q(expires_at=None) | Q(expires_at__gt=timezone.now())
    return visible_to(user, File.objects.filter(readable, deleted_at=None).select_related("team"))


def batches_visible_to(user: Person) -> QuerySet[Batch]:
    return visible_to(user, Batch.objects.select_related("team", "task", "model_release"))


def requests_visible_to(user: Person) -> QuerySet[Request]:
    return visible_to(user, Request.objects.select_related("team", "task", "model_release"))


def embedding_of(request: Request) -> Embedding | None:
    """What a request for embeddings got, without the numbers. For those who may see the request."""
    return Embedding.objects.filter(request=request).defer("data").first()


def engine_hosts() -> QuerySet[EngineHost]:
    """The installation's hosts; whoever is signed in may see them."""
    return EngineHost.objects.all()


def hosts_loading(release: ModelRelease) -> list[EngineHost]:
    """The hosts that are loading a release just now. For those who may see what waits for it."""
    return [host for host in EngineHost.objects.filter(state__loading=release.name) if is_alive(host)]


def hosts_that_cannot_load(release: ModelRelease) -> list[tuple[EngineHost, str]]:
    """The hosts that could not load a release when it was last wanted, and why. For those who may see what waits."""
    hosts = EngineHost.objects.filter(state__trouble__has_key=release.name)
    return [(host, host.state["trouble"][release.name]) for host in hosts if is_alive(host)]


def runs_of_host(host: EngineHost) -> QuerySet[EngineRun]:
    """What a host has loaded, the latest first; whoever is signed in may see it, as the host itself."""
    return EngineRun.objects.filter(host=host.name).select_related("model_release")


def runs_of_batch(batch: Batch) -> QuerySet[EngineRun]:
    """The engines that computed a batch's shards, the latest first. For those who may see the batch."""
    return EngineRun.objects.filter(shards__batch=batch).select_related("model_release").distinct()


def spells_of_batch(batch: Batch) -> QuerySet[BatchRun]:
    """What engines did while they held rows of a batch, the latest first. For those who may see the batch."""
    return BatchRun.objects.filter(batch=batch).select_related("engine_run__model_release")


def is_alive(host: EngineHost) -> bool:
    """Whether a host told of itself lately and is not leaving."""
    return host.state.get("status") == "running" and timezone.now() - host.heartbeat_at < HOST_SILENT


def progress(batch: Batch) -> Progress:
    """Counts by state in one query; rate and time remaining from what finished lately."""
    now = timezone.now()
    window_start = max(now - RATE_WINDOW, batch.in_progress_at or now)
    lately = Q(finished_at__gte=window_start, compute_seconds__gt=0)
    figures = Request.objects.filter(batch=batch).aggregate(
        **{status.value: Count("pk", filter=Q(status=status)) for status in Request.Status},
        tokens=Sum("output_tokens"),
        tokens_lately=Sum("output_tokens", filter=lately),
        finished_lately=Count("pk", filter=lately),
        first_started=Min("started_at"),
        last_finished=Max("finished_at", filter=Q(started_at__isnull=False)),
    )
    open_rows = figures["queued"] + figures["leased"]
    seconds = (now - window_start).total_seconds()
    rate = eta = None
    if open_rows and seconds > 0 and figures["finished_lately"]:
        rate = (figures["tokens_lately"] or 0) / seconds
        eta = open_rows * seconds / figures["finished_lately"]
    elif not open_rows:
        rate, eta = _overall_rate(figures["tokens"], figures["first_started"], figures["last_finished"]), 0.0
    return Progress(
        total=batch.total,
        queued=figures["queued"],
        running=figures["leased"],
        succeeded=figures["succeeded"],
        failed=figures["failed"],
        expired=figures["expired"],
        cancelled=figures["cancelled"],
        output_tokens=figures["tokens"] or 0,
        output_tokens_per_second=rate,
        eta_seconds=eta,
    )


def batch_usage(batch: Batch) -> BatchUsage:
    sums = Request.objects.filter(batch=batch).aggregate(
        prompt=Sum("prompt_tokens"), output=Sum("output_tokens"), cached=Sum("cached_prompt_tokens")
    )
    return BatchUsage(sums["prompt"] or 0, sums["output"] or 0, sums["cached"] or 0)


def _overall_rate(tokens: int | None, first_started: datetime | None, last_finished: datetime | None) -> float | None:
    """Of a batch whose requests are over: all its tokens over the time that they ran, as in the batch's summary."""
    if not tokens or first_started is None or last_finished is None:
        return None
    seconds = (last_finished - first_started).total_seconds()
    return tokens / seconds if seconds > 0 else None
