"""The errors that a person can act on: a command prints them in one line instead of a traceback."""

from django.core.exceptions import PermissionDenied, ValidationError

from governance.exports.bundle import BundleError
from governance.exports.services import NothingToExportError, UnknownCheckpointError
from governance.ledger.keys import KeyFileError
from inference.errors import InferenceError
from penstock.operations.acting import NobodyToActAs
from penstock.operations.batch_run import BatchRunError
from penstock.operations.connection import DatabaseUnreachable
from penstock.operations.embedded import ServerStartError
from penstock.operations.pilot_run import PilotRunError
from penstock.pilots.report import ReportError
from penstock.registry.prompts import PromptError
from penstock.registry.transitions import TransitionError
from penstock.serving.blobs import BlobMissing
from penstock.serving.rejection import Rejected

EXPECTED_ERRORS = (
    BatchRunError,
    BlobMissing,
    BundleError,
    DatabaseUnreachable,
    InferenceError,
    KeyFileError,
    NobodyToActAs,
    NothingToExportError,
    OSError,
    PermissionDenied,
    PilotRunError,
    PromptError,
    Rejected,
    ReportError,
    ServerStartError,
    TransitionError,
    UnknownCheckpointError,
    ValidationError,
)
