"""Identifiers that programs see: a prefix that tells the kind, and 128 random bits."""

import secrets

BITS_IN_BYTES = 16


def new_file_id() -> str:
    return f"file-{secrets.token_hex(BITS_IN_BYTES)}"


def new_batch_id() -> str:
    return f"batch_{secrets.token_hex(BITS_IN_BYTES)}"


def new_batch_request_id() -> str:
    return f"batch_req_{secrets.token_hex(BITS_IN_BYTES)}"


def new_chat_completion_id() -> str:
    return f"chatcmpl-{secrets.token_hex(BITS_IN_BYTES)}"


def new_embedding_id() -> str:
    return f"embd-{secrets.token_hex(BITS_IN_BYTES)}"


def new_salt() -> str:
    """32 hexadecimal digits that go in front of a text before it is hashed."""
    return secrets.token_hex(BITS_IN_BYTES)


def new_completion_id() -> str:
    return f"cmpl-{secrets.token_hex(BITS_IN_BYTES)}"
