"""What came out of a request, judged against the output contract of its task.

`assess` looks at one output at a time and needs nothing but its text: no database, no network. Its verdicts
are what the fairness of service is counted from, so each is a plain rule that a person can follow, stated
beside the code.
"""

from penstock.registry.output_contract import OutputContract

from .assess import Outcome, assess, prompt_text
from .language import is_language_tag, warm_up
from .violations import VIOLATION_LABELS, Violation

__all__ = [
    "VIOLATION_LABELS",
    "Outcome",
    "OutputContract",
    "Violation",
    "assess",
    "is_language_tag",
    "prompt_text",
    "warm_up",
]
