"""JSON of tasks, releases, batches, requests, rate cards and pilots. Shapes only: services check and write."""

from typing import Any

from django.db.models import QuerySet
from drf_spectacular.utils import extend_schema_field
from rest_framework import serializers

from penstock.accounts.models import Team, User
from penstock.accounts.selectors import people_visible_to, teams_visible_to
from penstock.pilots.models import Pilot
from penstock.registry.models import ModelRelease, ReleaseEvaluation, Task, TaskVersion
from penstock.registry.selectors import releases_visible_to, transitions_open_to
from penstock.registry.services.tasks import CONTENT_FIELDS
from penstock.serving.models import Batch, BatchRun, Embedding, EngineRun, Request
from penstock.serving.selectors import embedding_of, progress, runs_of_batch, spells_of_batch
from penstock.telemetry.models import RateCard


class TeamField(serializers.SlugRelatedField[Team]):
    def get_queryset(self) -> QuerySet[Team]:
        return teams_visible_to(self.context["request"].user)


class OwnerField(serializers.SlugRelatedField[User]):
    def get_queryset(self) -> QuerySet[User]:
        return people_visible_to(self.context["request"].user)


class ReleaseField(serializers.SlugRelatedField[ModelRelease]):
    def get_queryset(self) -> QuerySet[ModelRelease]:
        return releases_visible_to(self.context["request"].user)


class TaskSerializer(serializers.ModelSerializer[Task]):
    team = TeamField(slug_field="slug")
    owner = OwnerField(slug_field="username", required=False)
    model_release = ReleaseField(slug_field="name")
    transitions = serializers.SerializerMethodField(help_text="Changes of state that you could make now.")

    class Meta:
        model = Task
        fields = [
            "name",
            "team",
            *CONTENT_FIELDS,
            "status",
            "version",
            "unassigned",
            "created_at",
            "updated_at",
            "transitions",
        ]
        read_only_fields = ["status", "version", "unassigned"]

    def get_transitions(self, task: Task) -> list[str]:
        return transitions_open_to(self.context["request"].user, task)


class TaskUpdateSerializer(serializers.ModelSerializer[Task]):
    owner = OwnerField(slug_field="username", required=False)
    model_release = ReleaseField(slug_field="name", required=False)

    class Meta:
        model = Task
        fields = CONTENT_FIELDS


class ReasonSerializer(serializers.Serializer[Any]):
    reason = serializers.CharField(required=False, allow_blank=True, max_length=2000, default="")


class TaskVersionSerializer(serializers.ModelSerializer[TaskVersion]):
    class Meta:
        model = TaskVersion
        fields = ["version", "digest", "content", "created_at", "created_by"]


class EvaluationSerializer(serializers.ModelSerializer[ReleaseEvaluation]):
    class Meta:
        model = ReleaseEvaluation
        fields = [
            "figures",
            "text_name",
            "text_sha256",
            "task_sha256",
            "reference_digest",
            "evaluated_at",
            "evaluated_by",
        ]


class ReleaseSerializer(serializers.ModelSerializer[ModelRelease]):
    evaluations = EvaluationSerializer(many=True, read_only=True)

    class Meta:
        model = ModelRelease
        fields = [
            "name",
            "status",
            "digest",
            "architecture",
            "parameters",
            "size_bytes",
            "context_tokens",
            "quantization",
            "tokenizer_digest",
            "licence",
            "supplier",
            "source",
            "source_digest",
            "imported_at",
            "imported_by",
            "approved_at",
            "approved_by",
            "withdrawn_at",
            "evaluations",
        ]


class ProgressSerializer(serializers.Serializer[Any]):
    """How far a batch is; rate and time remaining are null where they cannot be told yet."""

    total = serializers.IntegerField()
    queued = serializers.IntegerField()
    running = serializers.IntegerField()
    succeeded = serializers.IntegerField()
    failed = serializers.IntegerField()
    expired = serializers.IntegerField()
    cancelled = serializers.IntegerField()
    output_tokens = serializers.IntegerField()
    output_tokens_per_second = serializers.FloatField(allow_null=True)
    eta_seconds = serializers.FloatField(allow_null=True)


class BatchSerializer(serializers.ModelSerializer[Batch]):
    team = serializers.SlugRelatedField[Team](slug_field="slug", read_only=True)
    task = serializers.SlugRelatedField[Task](slug_field="name", read_only=True)
    model_release = serializers.SlugRelatedField[ModelRelease](slug_field="name", read_only=True)
    input_file = serializers.CharField(source="input_file_id")
    output_file = serializers.CharField(source="output_file_id", allow_null=True)
    error_file = serializers.CharField(source="error_file_id", allow_null=True)

    class Meta:
        model = Batch
        fields = [
            "id",
            "team",
            "task",
            "task_version",
            "model_release",
            "latency_class",
            "endpoint",
            "status",
            "metadata",
            "errors",
            "total",
            "input_file",
            "output_file",
            "error_file",
            "created_by",
            "created_at",
            "in_progress_at",
            "expires_at",
            "finalizing_at",
            "completed_at",
            "failed_at",
            "expired_at",
            "cancelling_at",
            "cancelled_at",
        ]
        read_only_fields = fields


class EngineRunSerializer(serializers.ModelSerializer[EngineRun]):
    """An engine that computed a batch: its plan with what it predicted, and what the engine has reached."""

    model_release = serializers.SlugRelatedField[ModelRelease](slug_field="name", read_only=True)

    class Meta:
        model = EngineRun
        fields = [
            "id",
            "host",
            "model_release",
            "loaded_at",
            "load_seconds",
            "ended_at",
            "memory_bytes",
            "plan",
            "measured",
            "measured_at",
        ]
        read_only_fields = fields


class BatchRunSerializer(serializers.ModelSerializer[BatchRun]):
    """A spell in which an engine held rows of a batch: what it did meanwhile, for these and whatever ran beside."""

    class Meta:
        model = BatchRun
        fields = ["id", "engine_run", "began_at", "ended_at", "measured", "measured_at"]
        read_only_fields = fields


class BatchDetailSerializer(BatchSerializer):
    progress = serializers.SerializerMethodField()
    engine_runs = serializers.SerializerMethodField()
    runs = serializers.SerializerMethodField()

    class Meta(BatchSerializer.Meta):
        fields = [*BatchSerializer.Meta.fields, "progress", "engine_runs", "runs"]
        read_only_fields = fields

    @extend_schema_field(EngineRunSerializer(many=True))
    def get_engine_runs(self, batch: Batch) -> list[dict[str, Any]]:
        return list(EngineRunSerializer(runs_of_batch(batch), many=True).data)

    @extend_schema_field(BatchRunSerializer(many=True))
    def get_runs(self, batch: Batch) -> list[dict[str, Any]]:
        return list(BatchRunSerializer(spells_of_batch(batch), many=True).data)

    @extend_schema_field(ProgressSerializer)
    def get_progress(self, batch: Batch) -> dict[str, Any]:
        return dict(ProgressSerializer(progress(batch)).data)


class RequestSerializer(serializers.ModelSerializer[Request]):
    """A request without its texts."""

    team = serializers.SlugRelatedField[Team](slug_field="slug", read_only=True)
    task = serializers.SlugRelatedField[Task](slug_field="name", read_only=True)
    model_release = serializers.SlugRelatedField[ModelRelease](slug_field="name", read_only=True)
    batch = serializers.CharField(source="batch_id", allow_null=True)

    class Meta:
        model = Request
        fields = [
            "id",
            "batch",
            "line",
            "custom_id",
            "team",
            "task",
            "task_version",
            "model_release",
            "latency_class",
            "endpoint",
            "groups",
            "status",
            "created_by",
            "created_at",
            "started_at",
            "finished_at",
            "finish_reason",
            "http_status",
            "error_code",
            "error_message",
            "prompt_tokens",
            "output_tokens",
            "queued_seconds",
            "ttft_seconds",
            "duration_seconds",
            "compute_seconds",
            "valid",
            "refused",
            "truncated",
            "detected_language",
            "violations",
            "prompt_digest",
            "output_digest",
        ]
        read_only_fields = fields


class EmbeddingSerializer(serializers.ModelSerializer[Embedding]):
    class Meta:
        model = Embedding
        fields = ["count", "dimensions"]
        read_only_fields = fields


class RequestDetailSerializer(RequestSerializer):
    """A request with its prompt and its outputs, of which `output_text` is the first.

    `embedding`: how many vectors a request for embeddings got, and of how many dimensions; `output_digest` is of their
    numbers, which the answer and the batch's output file hold.
    """

    output_texts = serializers.ListField(child=serializers.CharField(), read_only=True)
    embedding = serializers.SerializerMethodField()

    class Meta(RequestSerializer.Meta):
        fields = [*RequestSerializer.Meta.fields, "body", "output_text", "output_texts", "embedding"]
        read_only_fields = fields

    @extend_schema_field(EmbeddingSerializer(allow_null=True))
    def get_embedding(self, request: Request) -> dict[str, Any] | None:
        found = embedding_of(request)
        return None if found is None else dict(EmbeddingSerializer(found).data)


class RateCardSerializer(serializers.ModelSerializer[RateCard]):
    class Meta:
        model = RateCard
        fields = [
            "id",
            "name",
            "currency",
            "hardware_price",
            "lifetime_years",
            "utilization",
            "power_watts",
            "electricity_price_per_kwh",
            "carbon_kg_per_kwh",
            "created_at",
            "created_by",
        ]
        read_only_fields = ["created_by"]


class PilotSerializer(serializers.ModelSerializer[Pilot]):
    task = serializers.SlugRelatedField[Task](slug_field="name", read_only=True)
    trial_batch = serializers.CharField(source="trial_batch_id", allow_null=True)
    items_file = serializers.CharField(source="items_file_id")

    class Meta:
        model = Pilot
        fields = [
            "name",
            "title",
            "task",
            "status",
            "items_file",
            "sample_items",
            "trial_batch",
            "rate_card",
            "items_per_month",
            "introduction_cost",
            "trial_days",
            "starts_on",
            "decision",
            "decision_reason",
            "decided_at",
            "decided_by",
            "created_at",
            "created_by",
        ]
        read_only_fields = fields
