"""Every write that a person or a program asks of serving: files and batches."""

from penstock.serving.services.batches import cancel_batch, create_batch
from penstock.serving.services.files import create_file, delete_file

__all__ = ["cancel_batch", "create_batch", "create_file", "delete_file"]
