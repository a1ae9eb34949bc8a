"""What services raise, as HTTP. One handler for every view of /api."""

from typing import Any

from django.core.exceptions import NON_FIELD_ERRORS
from django.core.exceptions import ValidationError as DjangoValidationError
from django.utils.translation import gettext as _
from rest_framework.exceptions import APIException, ParseError, ValidationError
from rest_framework.response import Response
from rest_framework.settings import api_settings
from rest_framework.views import exception_handler

from penstock.registry.transitions import TransitionError


class Conflict(APIException):
    """The thing is not in a state that allows it."""

    status_code = 409
    default_code = "conflict"


def handle(error: Exception, context: dict[str, Any]) -> Response | None:
    """A ValidationError names its fields (400), a refused change of state is a 409; the rest is DRF's own."""
    match error:
        case DjangoValidationError():
            error = ValidationError(_by_field(error))
        case TransitionError():
            error = Conflict(str(error))
        case RecursionError():
            # JSON of thousands of brackets, which Python's parser gives up on.
            error = ParseError(_("The body is nested too deep."))
    return exception_handler(error, context)


def _by_field(error: DjangoValidationError) -> dict[str, list[str]]:
    if not hasattr(error, "error_dict"):
        return {api_settings.NON_FIELD_ERRORS_KEY: error.messages}
    messages = error.message_dict
    return {
        (api_settings.NON_FIELD_ERRORS_KEY if field == NON_FIELD_ERRORS else field): texts
        for field, texts in messages.items()
    }
