"""The ledger itself: its signed head, the key that verifies it, and a check of the whole."""

from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.utils import timezone
from django.views.decorators.http import require_POST, require_safe

from governance.ledger import selectors
from governance.ledger.services import ledger_key
from governance.ledger.verification import verify_database
from penstock.accounts.access import is_administrator
from penstock.accounts.models import User
from penstock.dashboard.access import viewer
from penstock.dashboard.history import row_of

LISTED_EVENTS = 50


@require_safe
def index(request: HttpRequest) -> HttpResponse:
    return render(request, "dashboard/ledger/index.html", context_of(viewer(request)))


def context_of(user: User) -> dict[str, object]:
    """The head is everybody's; the list of events names things of all teams and is the administrator's."""
    events = selectors.entries().order_by("-index")[:LISTED_EVENTS] if is_administrator(user) else []
    return {
        "size": selectors.tree_size(),
        "pending": selectors.pending_count(),
        "checkpoint": selectors.latest_checkpoint(),
        "key": ledger_key().verifier,
        "events": [row_of(leaf) for leaf in events],
        "sees_events": is_administrator(user),
    }


@require_POST
def verify(request: HttpRequest) -> HttpResponse:
    """Reads the whole ledger and holds it against itself and its signed heads."""
    user = viewer(request)
    context = {"found": verify_database(key=ledger_key().verifier), "now": timezone.now()}
    if getattr(request, "htmx", False):
        return render(request, "dashboard/ledger/found.html", context)
    return render(request, "dashboard/ledger/index.html", {**context_of(user), **context})
