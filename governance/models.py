"""The tables of the governance app, each defined in its room."""

from governance.controls.models import Applicability
from governance.ledger.models import Checkpoint, Leaf, Node, OutboxEntry

__all__ = ["Applicability", "Checkpoint", "Leaf", "Node", "OutboxEntry"]
