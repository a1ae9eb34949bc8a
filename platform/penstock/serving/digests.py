"""Digests of texts that the ledger holds in their place.

SHA-256 over the salt's 16 bytes and the text in UTF-8. The salt lies in the request's row alone: a short prompt
cannot be guessed from its leaf, and erasing the row takes the last link to the text away.
"""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import rfc8785


def salted_digest(salt: str, text: bytes | str) -> str:
    """`salt` in hexadecimal; returns 64 hexadecimal digits."""
    data = text.encode() if isinstance(text, str) else text
    return hashlib.sha256(bytes.fromhex(salt) + data).hexdigest()


def prompt_digest(salt: str, body: Mapping[str, Any]) -> str:
    """Of the prompt in a stored body: its messages or its input as RFC 8785 canonical JSON, or its prompt text."""
    for name in ("messages", "input"):
        if name in body:
            return salted_digest(salt, rfc8785.dumps(body[name]))
    return salted_digest(salt, str(body["prompt"]))


def embedding_digest(salt: str, data: bytes) -> str:
    """Of a request's vectors, as `Embedding.data` keeps them."""
    return salted_digest(salt, data)


def output_digest(salt: str, texts: Sequence[str]) -> str:
    """Of a request's outputs: the text of one, or the texts of several as RFC 8785 canonical JSON; empty of none."""
    if len(texts) > 1:
        return salted_digest(salt, rfc8785.dumps(list(texts)))
    return salted_digest(salt, texts[0]) if texts and texts[0] else ""
