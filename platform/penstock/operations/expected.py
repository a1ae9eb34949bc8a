"""The errors that a person can act on: a command prints them in one line instead of a traceback."""

from django.core.exceptions import PermissionDenied, ValidationError

from inference.errors import InferenceError
from penstock.operations.acting import NobodyToActAs
from penstock.operations.batch_run import BatchRunError
from penstock.operations.connection import DatabaseUnreachable
from penstock.operations.pilot_run import PilotRunError

EXPECTED_ERRORS = (
    BatchRunError,
    DatabaseUnreachable,
    InferenceError,
    NobodyToActAs,
    OSError,
    PermissionDenied,
    PilotRunError,
    ValidationError,
)
