"""/v1/batches"""

from typing import Any

from django.db.models import QuerySet
from django.http import HttpResponseBase, JsonResponse
from django.utils.translation import gettext as _

from penstock.openai_api.door import Call, listing
from penstock.openai_api.errors import ApiError, not_found
from penstock.openai_api.files import page_after, unix
from penstock.serving.models import Batch, File
from penstock.serving.selectors import batch_usage, batches_visible_to, files_visible_to, progress
from penstock.serving.services import cancel_batch, create_batch

MAX_PAGE = 100
DEFAULT_PAGE = 20
PARAMETERS = frozenset({"input_file_id", "endpoint", "completion_window", "metadata", "output_expires_after"})


def batch_object(batch: Batch) -> dict[str, Any]:
    """Requests that expired or were cancelled count neither as completed nor as failed, as at OpenAI."""
    counted, usage = progress(batch), batch_usage(batch)
    return {
        "id": batch.pk,
        "object": "batch",
        "endpoint": batch.endpoint,
        "model": batch.model_release.name,
        "errors": batch.errors,
        "input_file_id": batch.input_file_id,
        "completion_window": batch.completion_window,
        "status": batch.status,
        "output_file_id": batch.output_file_id,
        "error_file_id": batch.error_file_id,
        "created_at": unix(batch.created_at),
        "in_progress_at": unix(batch.in_progress_at),
        "expires_at": unix(batch.expires_at),
        "finalizing_at": unix(batch.finalizing_at),
        "completed_at": unix(batch.completed_at),
        "failed_at": unix(batch.failed_at),
        "expired_at": unix(batch.expired_at),
        "cancelling_at": unix(batch.cancelling_at),
        "cancelled_at": unix(batch.cancelled_at),
        "request_counts": {"total": batch.total, "completed": counted.succeeded, "failed": counted.failed},
        "usage": {
            "input_tokens": usage.input_tokens,
            "input_tokens_details": {"cached_tokens": usage.cached_tokens},
            "output_tokens": usage.output_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage.total_tokens,
        },
        "metadata": batch.metadata or None,
    }


def create(call: Call) -> HttpResponseBase:
    body = call.body()
    for name, value in body.items():
        if name not in PARAMETERS:
            message = _("There is no parameter of this name: %(name)s.") % {"name": name}
            raise ApiError(400, "unknown_parameter", message, param=name)
        if name == "output_expires_after" and value is not None:
            message = _("This parameter is not supported yet: %(name)s. Leave it out.") % {"name": name}
            raise ApiError(400, "unsupported_parameter", message, param=name)
    batch = create_batch(
        user=call.user,
        team=call.team,
        input_file=_input_file(call, _text(body, "input_file_id")),
        endpoint=_text(body, "endpoint"),
        completion_window=_text(body, "completion_window"),
        metadata=body.get("metadata"),
        api_key=call.key,
        idempotency_key=call.request.headers.get("idempotency-key"),
    )
    return JsonResponse(batch_object(batch))


def index(call: Call) -> HttpResponseBase:
    limit = call.query_integer("limit", default=DEFAULT_PAGE, least=1, most=MAX_PAGE)
    found = list(page_after(call, _batches(call), _batches(call))[: limit + 1])
    return listing([batch_object(batch) for batch in found[:limit]], has_more=len(found) > limit)


def retrieve(call: Call, batch_id: str) -> HttpResponseBase:
    return JsonResponse(batch_object(_batch(call, batch_id)))


def cancel(call: Call, batch_id: str) -> HttpResponseBase:
    cancel_batch(user=call.user, batch=_batch(call, batch_id))
    return JsonResponse(batch_object(_batch(call, batch_id)))


def _batches(call: Call) -> QuerySet[Batch]:
    return batches_visible_to(call.user).filter(team=call.team)


def _batch(call: Call, batch_id: str) -> Batch:
    batch = _batches(call).filter(pk=batch_id).first() if "\x00" not in batch_id else None
    if batch is None:
        raise not_found(_("batch"), batch_id)
    return batch


def _text(body: dict[str, Any], name: str) -> str:
    value = body.get(name)
    if value is None:
        message = _("%(param)s is missing; it is required.") % {"param": name}
        raise ApiError(400, "missing_required_parameter", message, param=name)
    if not isinstance(value, str) or not value:
        message = _("%(param)s must be text.") % {"param": name}
        raise ApiError(400, "invalid_value", message, param=name)
    return value


def _input_file(call: Call, file_id: str) -> File:
    file = files_visible_to(call.user).filter(team=call.team, pk=file_id).first()
    if file is None:
        message = _("There is no file '%(id)s' in this team.") % {"id": file_id}
        raise ApiError(400, "invalid_input_file", message, param="input_file_id")
    return file
