"""Errors as OpenAI's clients expect them: one envelope, whatever went wrong."""

import errno
import logging
from typing import Any

from django.core.exceptions import (
    BadRequest,
    PermissionDenied,
    RequestDataTooBig,
    SuspiciousOperation,
)
from django.http import Http404, HttpRequest, JsonResponse
from django.http.multipartparser import MultiPartParserError
from django.http.request import UnreadablePostError
from django.utils.translation import gettext as _

from penstock.serving.blobs import BlobMissing
from penstock.serving.rejection import Rejected

logger = logging.getLogger(__name__)

REALM = 'Bearer realm="penstock"'


class ApiError(Exception):
    """An answer other than success. `retry=False` tells the client that trying again cannot help."""

    def __init__(
        self,
        http_status: int,
        code: str | None,
        message: str,
        *,
        param: str | None = None,
        retry: bool | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.http_status = http_status
        self.code = code
        self.message = message
        self.param = param
        self.retry = retry
        self.headers = headers or {}


def not_found(what: str, identifier: str, *, param: str = "id") -> ApiError:
    """For a thing that is not there, or that the caller may not see: the two look alike."""
    message = _("There is no %(what)s '%(id)s'.") % {"what": what, "id": identifier}
    return ApiError(404, "not_found", message, param=param)


def error_type(http_status: int) -> str:
    """OpenAI's name for the family of an error."""
    match http_status:
        case 401:
            return "authentication_error"
        case 403:
            return "permission_error"
        case 429:
            return "rate_limit_error"
        case _:
            return "invalid_request_error" if http_status < 500 else "server_error"


def envelope(http_status: int, code: str | None, message: str, param: str | None = None) -> dict[str, Any]:
    """All four fields, always."""
    return {"error": {"message": message, "type": error_type(http_status), "param": param, "code": code}}


def response_to(error: Exception, request: HttpRequest) -> JsonResponse:
    """The answer to an error of any kind; one that nobody foresaw is logged and told as a 500 without its insides."""
    known = _known(error)
    if known is None:
        logger.error("%s %s failed", request.method, request.path, exc_info=error)
        known = ApiError(500, "internal_error", _("Something went wrong inside Penstock; its log tells what."))
    response = JsonResponse(envelope(known.http_status, known.code, known.message, known.param))
    response.status_code = known.http_status
    for name, value in known.headers.items():
        response[name] = value
    if known.retry is not None:
        response["x-should-retry"] = "true" if known.retry else "false"
    return response


def _known(error: Exception) -> ApiError | None:
    match error:
        case ApiError():
            return error
        case Rejected():
            # The client repeats 409, 429 and 5xx of itself. Ours of the first two stay as they are until something
            # changes; of the last, a missing host may come back.
            permanent = error.http_status in (409, 429)
            return ApiError(
                error.http_status, error.code, error.message, param=error.param, retry=False if permanent else None
            )
        case PermissionDenied():
            return ApiError(403, "permission_denied", str(error) or _("This key may not do that."))
        case Http404():
            return ApiError(404, "not_found", _("There is nothing at this address."))
        case RequestDataTooBig():
            return ApiError(413, "request_too_large", _("The request is too large."))
        case MultiPartParserError() | BadRequest() | SuspiciousOperation() | UnreadablePostError():
            return ApiError(400, "invalid_request", _("The request cannot be read: %(why)s") % {"why": error})
        case BlobMissing():
            return ApiError(500, "content_missing", str(error), retry=False)
        case OSError() if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return ApiError(507, "disk_full", _("The disk is full; nothing was kept."), retry=False)
        case _:
            return None
