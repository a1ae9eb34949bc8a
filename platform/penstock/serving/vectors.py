"""The vectors of a request for embeddings: as they are kept, and as OpenAI's API tells them. Without NumPy."""

import base64
import sys
from array import array
from dataclasses import dataclass
from typing import Any

from pydantic import ConfigDict

from penstock.serving.models import Request

BYTES = 4  # of a float32
DIGITS = 9  # significant ones, as many as tell any two numbers of float32 apart


@dataclass(frozen=True, slots=True)
class Vectors:
    """`data` holds `count` vectors of `dimensions` numbers, one after the other, float32, little-endian."""

    __pydantic_config__ = ConfigDict(ser_json_bytes="base64", val_json_bytes="base64")

    count: int
    dimensions: int
    data: bytes

    def __post_init__(self) -> None:
        if len(self.data) != BYTES * self.count * self.dimensions:
            raise ValueError(f"{self.count} vectors of {self.dimensions} numbers are not {len(self.data)} bytes")

    def part(self, index: int) -> bytes:
        size = BYTES * self.dimensions
        return self.data[index * size : (index + 1) * size]


def embedding_body(request: Request) -> dict[str, Any]:
    """OpenAI's list of embeddings of a request that succeeded; its `embedding` loaded."""
    kept = request.embedding
    vectors = Vectors(kept.count, kept.dimensions, bytes(kept.data))
    as_base64 = request.body.get("encoding_format") == "base64"
    tokens = request.prompt_tokens or 0
    return {
        "object": "list",
        "data": [
            {"object": "embedding", "index": index, "embedding": _told(vectors.part(index), as_base64)}
            for index in range(vectors.count)
        ],
        "model": request.body["model"],
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
    }


def _told(data: bytes, as_base64: bool) -> str | list[float]:
    if as_base64:
        return base64.b64encode(data).decode()
    numbers = array("f", data)
    if sys.byteorder == "big":
        numbers.byteswap()
    return [float(f"{number:.{DIGITS}g}") for number in numbers]
