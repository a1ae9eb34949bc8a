"""Requests for embeddings on the engine: several at a time, beside whatever it generates."""

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from inference.errors import EmbeddingCancelled, InferenceError
from penstock.serving.results import Embedded
from penstock.serving.vectors import Vectors

if TYPE_CHECKING:
    from inference.embedding import Embedding
    from inference.engine import Engine

logger = logging.getLogger(__name__)

# So many tokens of requests are embedded together: enough for full steps, few enough that results come steadily.
TOKENS_TOGETHER = 8192


@dataclass(frozen=True, slots=True)
class Texts:
    """What a request wants embedded, in token ids."""

    request_id: str
    inputs: Sequence[tuple[int, ...]]

    @property
    def tokens(self) -> int:
        return sum(map(len, self.inputs))


def embed(engine: "Engine", requests: Sequence[Texts], *, stopped: Callable[[], bool]) -> Iterator[list[Embedded]]:
    """The requests' vectors, in their order, some requests at a time. Blocks the calling thread.

    stopped: asked between the engine's steps; once it is true, what is being computed ends as cancelled, and the
    requests after it are not begun. What fails for one request of those that are computed together is computed again
    without the others, and told of that one alone.
    """
    submitted = time.monotonic()
    waiting = deque(_groups(requests))
    while waiting:
        together, started = waiting.popleft(), time.monotonic()
        try:
            yield _embed(engine, together, submitted, stopped)
        except EmbeddingCancelled as cancelled:
            yield _cancelled(together, submitted, started, cancelled.compute_seconds)
            return
        except Exception as error:
            # Whatever it was, it belongs to one of these and not to those that come after them.
            if len(together) > 1:
                waiting.extendleft([one] for one in reversed(together))
                continue
            logger.exception("the texts of %s could not be embedded", together[0].request_id)
            yield [_failed(together[0], submitted, started, error)]


def _groups(requests: Sequence[Texts]) -> Iterator[list[Texts]]:
    group: list[Texts] = []
    tokens = 0
    for request in requests:
        if group and tokens + request.tokens > TOKENS_TOGETHER:
            yield group
            group, tokens = [], 0
        group.append(request)
        tokens += request.tokens
    if group:
        yield group


def _embed(
    engine: "Engine", requests: Sequence[Texts], submitted: float, stopped: Callable[[], bool]
) -> list[Embedded]:
    started = time.monotonic()
    found = iter(engine.embeddings([tokens for one in requests for tokens in one.inputs], cancelled=stopped))
    ended = time.monotonic()
    result = []
    for one in requests:
        embeddings = [next(found) for _ in one.inputs]
        result.append(
            Embedded(
                request_id=one.request_id,
                prompt_tokens=one.tokens,
                queued_seconds=started - submitted,
                duration_seconds=ended - submitted,
                compute_seconds=sum(embedding.compute_seconds for embedding in embeddings),
                vectors=_vectors(embeddings),
            )
        )
    return result


def _cancelled(requests: Sequence[Texts], submitted: float, started: float, compute_seconds: float) -> list[Embedded]:
    """Each with its part of the time that they took, by its tokens."""
    tokens = sum(one.tokens for one in requests)
    return [
        Embedded(
            request_id=one.request_id,
            prompt_tokens=one.tokens,
            queued_seconds=started - submitted,
            duration_seconds=time.monotonic() - submitted,
            compute_seconds=compute_seconds * one.tokens / tokens,
            cancelled=True,
        )
        for one in requests
    ]


def _failed(request: Texts, submitted: float, started: float, error: Exception) -> Embedded:
    return Embedded(
        request_id=request.request_id,
        prompt_tokens=0,
        queued_seconds=started - submitted,
        duration_seconds=time.monotonic() - submitted,
        compute_seconds=0.0,
        error=str(error) if isinstance(error, InferenceError) else f"{type(error).__name__}: {error}",
    )


def _vectors(embeddings: "Sequence[Embedding]") -> Vectors:
    values = np.stack([embedding.vector for embedding in embeddings]).astype("<f4")
    return Vectors(len(embeddings), values.shape[1], values.tobytes())
