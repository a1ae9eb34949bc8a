"""Files, batches, shards, requests and the hosts that run them. PostgreSQL remembers; Celery only carries."""

from typing import Any

from django.db import models
from django.db.models import Q
from django.utils.translation import gettext_lazy as _

from penstock.accounts.models import ApiKey, Team
from penstock.registry.models import LatencyClass, ModelRelease, Task


class File(models.Model):
    """A stored file; its content lies in the blob store under its SHA-256."""

    class Purpose(models.TextChoices):
        BATCH = "batch", _("Batch input")
        BATCH_OUTPUT = "batch_output", _("Batch output")
        USER_DATA = "user_data", _("User data")

    id = models.CharField(primary_key=True, max_length=40)
    team = models.ForeignKey(Team, on_delete=models.PROTECT, related_name="files")
    filename = models.CharField(max_length=255)
    purpose = models.CharField(max_length=20, choices=Purpose)
    size_bytes = models.BigIntegerField()
    sha256 = models.CharField(max_length=64)
    created_at = models.DateTimeField()
    created_by = models.CharField(max_length=150)
    expires_at = models.DateTimeField(null=True, blank=True)
    deleted_at = models.DateTimeField(null=True, blank=True)

    class Meta:
        ordering = ("-created_at", "-id")
        indexes = [
            # GET /v1/files lists a team's newest first.
            models.Index(fields=["team", "-created_at"], name="file_team_newest"),
        ]


class Batch(models.Model):
    """Many requests with one deadline, submitted as JSONL. States as in OpenAI's Batch API."""

    class Status(models.TextChoices):
        VALIDATING = "validating", _("Validating")
        FAILED = "failed", _("Failed")
        IN_PROGRESS = "in_progress", _("In progress")
        FINALIZING = "finalizing", _("Finalizing")
        COMPLETED = "completed", _("Completed")
        EXPIRED = "expired", _("Expired")
        CANCELLING = "cancelling", _("Cancelling")
        CANCELLED = "cancelled", _("Cancelled")

    TERMINAL = (Status.FAILED, Status.COMPLETED, Status.EXPIRED, Status.CANCELLED)

    id = models.CharField(primary_key=True, max_length=40)
    team = models.ForeignKey(Team, on_delete=models.PROTECT, related_name="batches")
    task = models.ForeignKey(Task, on_delete=models.PROTECT, related_name="batches")
    task_version = models.PositiveIntegerField()
    model_release = models.ForeignKey(ModelRelease, on_delete=models.PROTECT, related_name="batches")
    latency_class = models.CharField(max_length=12, choices=LatencyClass)
    api_key = models.ForeignKey(ApiKey, on_delete=models.SET_NULL, null=True, blank=True, related_name="batches")
    created_by = models.CharField(max_length=150)
    input_file = models.ForeignKey(File, on_delete=models.PROTECT, related_name="batches")
    output_file = models.ForeignKey(File, on_delete=models.PROTECT, null=True, blank=True, related_name="+")
    error_file = models.ForeignKey(File, on_delete=models.PROTECT, null=True, blank=True, related_name="+")
    endpoint = models.CharField(max_length=60)
    completion_window = models.CharField(max_length=8, default="24h")
    metadata = models.JSONField(default=dict, blank=True)
    idempotency_key = models.CharField(max_length=255, null=True, blank=True)
    status = models.CharField(max_length=12, choices=Status, default=Status.VALIDATING)
    errors = models.JSONField(null=True, blank=True)
    total = models.PositiveIntegerField(default=0)
    created_at = models.DateTimeField()
    in_progress_at = models.DateTimeField(null=True, blank=True)
    expires_at = models.DateTimeField()
    finalizing_at = models.DateTimeField(null=True, blank=True)
    completed_at = models.DateTimeField(null=True, blank=True)
    failed_at = models.DateTimeField(null=True, blank=True)
    expired_at = models.DateTimeField(null=True, blank=True)
    cancelling_at = models.DateTimeField(null=True, blank=True)
    cancelled_at = models.DateTimeField(null=True, blank=True)
    cancelled_by = models.CharField(max_length=150, blank=True)
    # Writing the files can fail (a full disk): how often it has, why, and when it is tried again.
    finalize_attempts = models.PositiveIntegerField(default=0)
    finalize_after = models.DateTimeField(null=True, blank=True)
    finalize_error = models.TextField(blank=True)

    class Meta:
        ordering = ("-created_at", "-id")
        verbose_name_plural = "batches"
        indexes = [
            # GET /v1/batches lists a team's newest first.
            models.Index(fields=["team", "-created_at"], name="batch_team_newest"),
            # The sweep looks at what is not over yet.
            models.Index(
                fields=["status"],
                condition=Q(status__in=["validating", "in_progress", "finalizing", "cancelling"]),
                name="batch_unfinished",
            ),
        ]
        constraints = [
            # A retried POST with the same Idempotency-Key gives the same batch.
            models.UniqueConstraint(fields=["team", "idempotency_key"], name="batch_idempotency_once"),
        ]


class EngineRun(models.Model):
    """A model release loaded on an engine host: what was planned for it, and what it did until it was given up.

    plan: `inference.planner.plan.Plan` as data, with its prediction; None where everything was simply kept in memory.
    measured: what the engine has done since it was loaded, as `serving.hosting.runs` tells it.
    """

    host = models.CharField(max_length=120)
    model_release = models.ForeignKey(ModelRelease, on_delete=models.PROTECT, related_name="engine_runs")
    loaded_at = models.DateTimeField()
    load_seconds = models.FloatField()
    ended_at = models.DateTimeField(null=True, blank=True)
    memory_bytes = models.BigIntegerField()
    plan = models.JSONField(null=True, blank=True)
    measured = models.JSONField(default=dict)
    measured_at = models.DateTimeField(null=True, blank=True)

    class Meta:
        ordering = ("-loaded_at", "-pk")
        indexes = [models.Index(fields=["host", "-loaded_at"], name="serving_engine_run_host")]


class Shard(models.Model):
    """The slice of a batch that one worker leases at a time. Every write of its results carries `fence`."""

    class Status(models.TextChoices):
        QUEUED = "queued", _("Queued")
        LEASED = "leased", _("Leased")
        DONE = "done", _("Done")

    batch = models.ForeignKey(Batch, on_delete=models.CASCADE, related_name="shards")
    number = models.PositiveIntegerField()
    status = models.CharField(max_length=8, choices=Status, default=Status.QUEUED)
    fence = models.PositiveIntegerField(default=0)
    lease_owner = models.CharField(max_length=120, blank=True)
    lease_expires_at = models.DateTimeField(null=True, blank=True)
    attempts = models.PositiveIntegerField(default=0)
    dispatched_at = models.DateTimeField(null=True, blank=True)
    # The engine that computed it last.
    engine_run = models.ForeignKey(EngineRun, on_delete=models.SET_NULL, null=True, blank=True, related_name="shards")

    class Meta:
        ordering = ("batch", "number")
        constraints = [models.UniqueConstraint(fields=["batch", "number"], name="shard_once")]
        indexes = [
            # The sweep re-sends what waits too long or whose lease ran out.
            models.Index(fields=["status", "lease_expires_at"], condition=~Q(status="done"), name="shard_open"),
        ]


class BatchRun(models.Model):
    """A spell in which an engine held rows of a batch, and what it did meanwhile: for these and whatever ran beside.

    first_step: the engine's number of it. measured: as `EngineRun.measured`, of the steps of this spell alone.
    """

    batch = models.ForeignKey(Batch, on_delete=models.CASCADE, related_name="runs")
    engine_run = models.ForeignKey(EngineRun, on_delete=models.CASCADE, related_name="batch_runs")
    first_step = models.PositiveBigIntegerField()
    began_at = models.DateTimeField()
    ended_at = models.DateTimeField(null=True, blank=True)
    measured = models.JSONField(default=dict)
    measured_at = models.DateTimeField(null=True, blank=True)

    class Meta:
        ordering = ("-began_at", "-pk")


class Request(models.Model):
    """One prompt and its outcome, in a batch or on its own; the unit of usage, cost, evidence and replay."""

    class Status(models.TextChoices):
        QUEUED = "queued", _("Queued")
        LEASED = "leased", _("Running")
        SUCCEEDED = "succeeded", _("Succeeded")
        FAILED = "failed", _("Failed")
        EXPIRED = "expired", _("Expired")
        CANCELLED = "cancelled", _("Cancelled")

    FINISHED = (Status.SUCCEEDED, Status.FAILED, Status.EXPIRED, Status.CANCELLED)

    id = models.CharField(primary_key=True, max_length=48)
    batch = models.ForeignKey(Batch, on_delete=models.CASCADE, null=True, blank=True, related_name="requests")
    shard = models.ForeignKey(Shard, on_delete=models.CASCADE, null=True, blank=True, related_name="requests")
    line = models.PositiveIntegerField(null=True, blank=True)
    custom_id = models.CharField(max_length=255, blank=True)
    team = models.ForeignKey(Team, on_delete=models.PROTECT, related_name="requests")
    task = models.ForeignKey(Task, on_delete=models.PROTECT, related_name="requests")
    task_version = models.PositiveIntegerField()
    model_release = models.ForeignKey(ModelRelease, on_delete=models.PROTECT, related_name="requests")
    latency_class = models.CharField(max_length=12, choices=LatencyClass)
    api_key = models.ForeignKey(ApiKey, on_delete=models.SET_NULL, null=True, blank=True, related_name="requests")
    created_by = models.CharField(max_length=150)
    endpoint = models.CharField(max_length=60)
    body = models.JSONField()
    groups = models.JSONField(default=dict, blank=True)
    # Digests in the ledger are SHA-256 over salt and text, so that a short prompt cannot be guessed from its leaf;
    # erasing the row erases the salt.
    salt = models.CharField(max_length=32)
    prompt_digest = models.CharField(max_length=64)

    status = models.CharField(max_length=10, choices=Status, default=Status.QUEUED)
    created_at = models.DateTimeField()
    started_at = models.DateTimeField(null=True, blank=True)
    finished_at = models.DateTimeField(null=True, blank=True)

    output_text = models.TextField(blank=True)
    output_digest = models.CharField(max_length=64, blank=True)
    # Where several outputs or log-probabilities were asked for: an object an output, in their order, with
    # `finish_reason`, `logprobs` (OpenAI's of a chat, or null) and, but for the first, whose text is `output_text`,
    # `text`.
    choices = models.JSONField(null=True, blank=True)
    finish_reason = models.CharField(max_length=20, blank=True)
    http_status = models.PositiveSmallIntegerField(null=True, blank=True)
    error_code = models.CharField(max_length=60, blank=True)
    error_message = models.TextField(blank=True)
    prompt_tokens = models.PositiveIntegerField(null=True, blank=True)
    output_tokens = models.PositiveIntegerField(null=True, blank=True)
    # Of the prompt's tokens, those that the engine found in its cache.
    cached_prompt_tokens = models.PositiveIntegerField(null=True, blank=True)
    queued_seconds = models.FloatField(null=True, blank=True)
    ttft_seconds = models.FloatField(null=True, blank=True)
    duration_seconds = models.FloatField(null=True, blank=True)
    compute_seconds = models.FloatField(null=True, blank=True)

    valid = models.BooleanField(null=True, blank=True)
    refused = models.BooleanField(null=True, blank=True)
    truncated = models.BooleanField(default=False)
    detected_language = models.CharField(max_length=20, blank=True)
    violations = models.JSONField(default=list, blank=True)

    class Meta:
        ordering = ("-created_at", "-id")
        constraints = [
            models.UniqueConstraint(
                fields=["batch", "custom_id"], condition=Q(batch__isnull=False), name="request_custom_id_once"
            ),
            models.UniqueConstraint(fields=["batch", "line"], name="request_line_once"),
            models.CheckConstraint(
                condition=Q(status__in=["queued", "leased"], finished_at__isnull=True)
                | Q(status__in=["succeeded", "failed", "expired", "cancelled"], finished_at__isnull=False),
                name="request_finished_is_dated",
            ),
        ]
        indexes = [
            # A batch's progress, and its rows by state.
            models.Index(fields=["batch", "status"], name="request_batch_status"),
            # A worker reads its shard's rows in order.
            models.Index(fields=["shard", "line"], name="request_shard_line"),
            # A task's measurements over a window.
            models.Index(fields=["task", "finished_at"], name="request_task_finished"),
        ]

    @property
    def output_texts(self) -> list[str]:
        """Every output's text, the first one's first."""
        return [self.output_text, *(choice["text"] for choice in self.further_choices)]

    @property
    def further_choices(self) -> list[dict[str, Any]]:
        """Of more than one output, all but the first: `text` and `finish_reason` among what each has."""
        return (self.choices or [])[1:]


class Embedding(models.Model):
    """The vectors that a request for embeddings got, one a text, in the order of its input.

    data: `count` vectors of `dimensions` numbers, one after the other, float32, little-endian.
    """

    request = models.OneToOneField(Request, on_delete=models.CASCADE, primary_key=True, related_name="embedding")
    count = models.PositiveIntegerField()
    dimensions = models.PositiveIntegerField()
    data = models.BinaryField()


class EngineHost(models.Model):
    """A machine running a worker, as it last reported itself."""

    name = models.CharField(max_length=120, unique=True)
    url = models.CharField(max_length=200)
    facts = models.JSONField(default=dict)
    state = models.JSONField(default=dict)
    started_at = models.DateTimeField()
    heartbeat_at = models.DateTimeField()

    class Meta:
        ordering = ("name",)
