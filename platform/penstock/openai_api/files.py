"""/v1/files"""

from collections.abc import AsyncIterator
from datetime import datetime
from typing import Any, BinaryIO

from asgiref.sync import sync_to_async
from django.db.models import Q, QuerySet
from django.http import HttpResponseBase, JsonResponse, StreamingHttpResponse
from django.utils.http import content_disposition_header
from django.utils.translation import gettext as _

from penstock.openai_api.door import Call, listing
from penstock.openai_api.errors import ApiError, not_found
from penstock.serving.blobs import open_blob
from penstock.serving.models import File
from penstock.serving.selectors import files_visible_to
from penstock.serving.services import create_file, delete_file

CHUNK_BYTES = 256 * 1024
MAX_PAGE = 10_000


def file_object(file: File) -> dict[str, Any]:
    return {
        "id": file.pk,
        "object": "file",
        "bytes": file.size_bytes,
        "created_at": unix(file.created_at),
        "expires_at": unix(file.expires_at),
        "filename": file.filename,
        "purpose": file.purpose,
        "status": "processed",
        "status_details": None,
    }


def unix(moment: datetime | None) -> int | None:
    return None if moment is None else int(moment.timestamp())


def create(call: Call) -> HttpResponseBase:
    uploaded = call.request.FILES.get("file")
    purpose = call.request.POST.get("purpose")
    if uploaded is None or not purpose:
        param = "file" if uploaded is None else "purpose"
        message = _("%(param)s is missing; it is required.") % {"param": param}
        raise ApiError(400, "missing_required_parameter", message, param=param)
    file = create_file(
        user=call.user,
        team=call.team,
        filename=uploaded.name or "",
        purpose=purpose,
        chunks=uploaded.chunks(CHUNK_BYTES),
        expires_after_seconds=_expires_after_seconds(call),
    )
    return JsonResponse(file_object(file))


def index(call: Call) -> HttpResponseBase:
    limit = call.query_integer("limit", default=MAX_PAGE, least=1, most=MAX_PAGE)
    order = call.query("order", "desc")
    if order not in ("asc", "desc"):
        message = _("order is 'asc' or 'desc', not '%(given)s'.") % {"given": order}
        raise ApiError(400, "invalid_value", message, param="order")
    rows = _files(call)
    purpose = call.query("purpose")
    if purpose:
        rows = rows.filter(purpose=purpose)
    rows = page_after(call, rows, _files(call), ascending=order == "asc")
    found = list(rows[: limit + 1])
    return listing([file_object(file) for file in found[:limit]], has_more=len(found) > limit)


def retrieve(call: Call, file_id: str) -> HttpResponseBase:
    return JsonResponse(file_object(_file(call, file_id)))


def delete(call: Call, file_id: str) -> HttpResponseBase:
    delete_file(user=call.user, file=_file(call, file_id))
    return JsonResponse({"id": file_id, "object": "file", "deleted": True})


def content(call: Call, file_id: str) -> HttpResponseBase:
    """The bytes, whatever the client says that it accepts (OpenAI's asks for `application/binary`)."""
    file = _file(call, file_id)
    # An asynchronous iterator: Django would read a synchronous one to its end, 200 MB and all, before sending it.
    response = StreamingHttpResponse(_chunks(open_blob(file.sha256)), content_type="application/octet-stream")
    response["Content-Length"] = str(file.size_bytes)
    response["Content-Disposition"] = content_disposition_header(True, file.filename) or "attachment"
    response["ETag"] = f'"{file.sha256}"'
    return response


def page_after(call: Call, rows: QuerySet[Any], all_rows: QuerySet[Any], *, ascending: bool = False) -> QuerySet[Any]:
    """The rows behind `after`, by time and then identifier, newest first unless `ascending`."""
    after = call.query("after")
    if after:
        last = all_rows.filter(pk=after).first()
        if last is None:
            message = _("There is nothing with the identifier '%(id)s' to go on from.") % {"id": after}
            raise ApiError(400, "invalid_value", message, param="after")
        way = "gt" if ascending else "lt"
        same_moment = Q(created_at=last.created_at, **{f"pk__{way}": last.pk})
        rows = rows.filter(Q(**{f"created_at__{way}": last.created_at}) | same_moment)
    return rows.order_by("created_at", "pk") if ascending else rows.order_by("-created_at", "-pk")


def _files(call: Call) -> QuerySet[File]:
    return files_visible_to(call.user).filter(team=call.team)


def _file(call: Call, file_id: str) -> File:
    file = _files(call).filter(pk=file_id).first() if "\x00" not in file_id else None
    if file is None:
        raise not_found(_("file"), file_id)
    return file


def _expires_after_seconds(call: Call) -> int | None:
    anchor = call.request.POST.get("expires_after[anchor]")
    seconds = call.request.POST.get("expires_after[seconds]")
    if anchor is None and seconds is None:
        return None
    if anchor != "created_at":
        message = _("The anchor of expires_after is 'created_at'.")
        raise ApiError(400, "invalid_value", message, param="expires_after.anchor")
    try:
        return int(seconds or "")
    except ValueError as error:
        message = _("The seconds of expires_after are a whole number.")
        raise ApiError(400, "invalid_value", message, param="expires_after.seconds") from error


async def _chunks(stream: BinaryIO) -> AsyncIterator[bytes]:
    try:
        while chunk := await sync_to_async(stream.read, thread_sensitive=False)(CHUNK_BYTES):
            yield chunk
    finally:
        stream.close()
