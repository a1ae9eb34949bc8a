"""Penstock: governed, high-throughput inference with evidence that an outsider can check."""

__version__ = "0.1.0"
