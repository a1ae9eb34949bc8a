"""When recorded events become leaves, and when a head is signed over them."""

from datetime import timedelta

from django.utils import timezone

from governance.ledger import selectors
from governance.ledger.services import ledger_key, sequence, sign_checkpoint
from penstock.config import config

EVENTS_A_TRANSACTION = 2000


def sequence_and_sign() -> bool:
    """Sequences all that is recorded; signs a head if enough leaves or enough time passed; whether it signed."""
    while sequence(limit=EVENTS_A_TRANSACTION) == EVENTS_A_TRANSACTION:
        if _is_due(config().checkpoint_leaves):
            sign_checkpoint(key=ledger_key())
    return _is_due(config().checkpoint_leaves) and sign_checkpoint(key=ledger_key()) is not None


def _is_due(leaves: int) -> bool:
    last = selectors.latest_checkpoint()
    grown = selectors.tree_size() - (last.size if last else 0)
    if grown <= 0:
        return False
    age = timedelta(seconds=config().checkpoint_seconds)
    return grown >= leaves or last is None or timezone.now() - last.created_at >= age
