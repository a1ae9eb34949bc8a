"""Decoder models: their configuration, and the forward pass over a running batch."""
