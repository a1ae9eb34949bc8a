"""Model files in, weight store out. Nothing here needs torch, and nothing here unpickles."""

from inference.weights.importer import import_model
from inference.weights.manifest import StoreManifest
from inference.weights.store import verify_store

__all__ = ["StoreManifest", "import_model", "verify_store"]
