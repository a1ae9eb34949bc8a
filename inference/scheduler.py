"""Who computes what in the next step: every running sequence one token, and a few prompts a piece of their prefill."""

from __future__ import annotations

import heapq
import time
from dataclasses import dataclass

from inference.cache.pages import PagePool, pages_for
from inference.sequence import Sequence

# Prompts are cut at multiples of this many tokens from their own start, wherever the batch stands, so that a prompt's
# pieces never depend on its neighbours.
CHUNK_TOKENS = 256


@dataclass(frozen=True, slots=True)
class Slice:
    """`count` tokens of a sequence, from `start`, to be computed in one step."""

    sequence: Sequence
    start: int
    count: int

    @property
    def yields_token(self) -> bool:
        """Whether the step reaches the sequence's last token, whose logits choose the next."""
        return self.start + self.count == len(self.sequence.tokens)


class Scheduler:
    """Continuous batching: sequences join and leave at any step, the most urgent first.

    max_batch: sequences at a time. token_budget: rows a step, which bounds activations and the time between a
    decoding sequence's tokens.
    """

    def __init__(self, pages: PagePool, max_batch: int, token_budget: int) -> None:
        self.pages = pages
        self.max_batch = max_batch
        self.token_budget = token_budget
        self.running: list[Sequence] = []
        self._waiting: list[tuple[tuple[int, int], Sequence]] = []

    @property
    def waiting(self) -> list[Sequence]:
        return [sequence for _, sequence in self._waiting]

    @property
    def has_work(self) -> bool:
        return bool(self.running or self._waiting)

    def add(self, sequence: Sequence) -> None:
        heapq.heappush(self._waiting, (sequence.order, sequence))

    def schedule(self) -> list[Slice]:
        """The slices of the next step: decoding rows first, then prefill within what is left of the budget."""
        self._admit()
        decoding = [Slice(s, s.computed, 1) for s in self.running if _decodes(s)]
        budget = max(self.token_budget - len(decoding), CHUNK_TOKENS)
        prefilling = sorted((s for s in self.running if not _decodes(s)), key=lambda s: s.order)
        chosen = decoding
        for sequence in prefilling:
            left = len(sequence.tokens) - sequence.computed
            count = min(left, CHUNK_TOKENS - sequence.computed % CHUNK_TOKENS)
            if count > budget:
                break
            budget -= count
            chosen.append(Slice(sequence, sequence.computed, count))
        for piece in chosen:
            while len(piece.sequence.pages) < pages_for(piece.start + piece.count):
                piece.sequence.pages.append(self.pages.take())
        return chosen

    def _admit(self) -> None:
        now = time.perf_counter()
        while self._waiting and len(self.running) < self.max_batch:
            sequence = self._waiting[0][1]
            need = pages_for(sequence.prompt_tokens + sequence.max_tokens)
            if not self.pages.reserve(need):
                # Later arrivals wait too: letting small ones pass would starve this one.
                break
            heapq.heappop(self._waiting)
            sequence.reserved_pages = need
            sequence.started_at = now
            self.running.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out, running or waiting, and free what it held."""
        if sequence in self.running:
            self.running.remove(sequence)
        else:
            self._waiting = [entry for entry in self._waiting if entry[1] is not sequence]
            heapq.heapify(self._waiting)
        self.pages.release(sequence.pages, sequence.reserved_pages)
        sequence.reserved_pages = 0


def _decodes(sequence: Sequence) -> bool:
    return sequence.computed > 0 and sequence.computed == len(sequence.tokens) - 1
