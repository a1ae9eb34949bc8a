"""How a request is told that its batch's window closed (OpenAI's words and code)."""

from django.utils.translation import gettext as _

EXPIRED_CODE = "batch_expired"


def expired_message() -> str:
    return _("This request could not be executed before the completion window expired.")
