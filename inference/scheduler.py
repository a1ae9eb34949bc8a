"""Who computes what in the next step: every running sequence one token, and a few prompts a piece of their prefill.

Sequences wait, run, or are paused: a paused one keeps its pages and goes on when there is room. Pages are taken as they
are needed. When they run out, the least urgent, latest sequence gives up its own and waits to be computed again, so
the most urgent, oldest one always goes on, and everyone ends. No result depends on any of this.
"""

from __future__ import annotations

import heapq
import time
from dataclasses import dataclass

from inference.cache.pages import BEGINNING, PAGE_TOKENS, PagePool, pages_for
from inference.sequence import Sequence

# Prompts are cut at multiples of this many tokens from their own start, wherever the batch stands, so that a prompt's
# pieces never depend on its neighbours.
CHUNK_TOKENS = 256

# Copying a page costs about as much as computing a token or two.
LEAST_COPIED = 4


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
    decoding sequence's tokens. chunk_tokens: of a prompt in one step, a multiple of PAGE_TOKENS.
    """

    def __init__(
        self,
        pages: PagePool,
        max_batch: int,
        token_budget: int,
        *,
        chunk_tokens: int = CHUNK_TOKENS,
        share_prefixes: bool = True,
    ) -> None:
        if chunk_tokens < PAGE_TOKENS or chunk_tokens % PAGE_TOKENS:
            raise ValueError(f"chunk_tokens: must be a multiple of {PAGE_TOKENS}, not {chunk_tokens}")
        self.pages = pages
        self.max_batch = max_batch
        self.token_budget = token_budget
        self.chunk_tokens = chunk_tokens
        self.share_prefixes = share_prefixes
        self.running: dict[Sequence, None] = {}  # a set in order of admission
        self.paused: dict[Sequence, None] = {}
        self.preemptions = self.pauses = self.prefix_hit_tokens = self.recomputed_tokens = 0
        self._waiting: dict[Sequence, None] = {}
        # What has left _waiting stays in here until it comes up, or until such entries are the most.
        self._queue: list[tuple[tuple[int, int], Sequence]] = []

    @property
    def waiting(self) -> list[Sequence]:
        return list(self._waiting)

    @property
    def waiting_count(self) -> int:
        return len(self._waiting)

    @property
    def has_work(self) -> bool:
        return bool(self.running or self.paused or self._waiting)

    def add(self, sequence: Sequence) -> None:
        self._waiting[sequence] = None
        heapq.heappush(self._queue, (sequence.order, sequence))

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out, running, paused or waiting, and free what it held."""
        if sequence in self._waiting:
            del self._waiting[sequence]
            if len(self._queue) > 2 * len(self._waiting) + 64:
                self._queue = [entry for entry in self._queue if entry[1] in self._waiting]
                heapq.heapify(self._queue)
        self.running.pop(sequence, None)
        self.paused.pop(sequence, None)
        self.pages.release(sequence.pages)

    def schedule(self) -> list[Slice]:
        """The slices of the next step, decoding rows first, then prefill within what is left of the budget.

        Where a prompt is waiting that is more urgent than some of the running, the step is its own and theirs who are
        as urgent.
        """
        self._admit(None)
        decoding: list[Slice] = []
        prefilling: list[Sequence] = []
        for sequence in self.running:
            length = len(sequence.tokens)
            if sequence.computed + 1 == length and length > sequence.prompt_tokens:
                decoding.append(Slice(sequence, length - 1, 1))
            else:
                prefilling.append(sequence)
        if prefilling:
            most_urgent = min(sequence.request.priority for sequence in prefilling)
            decoding = [piece for piece in decoding if piece.sequence.request.priority <= most_urgent]
            prefilling = [sequence for sequence in prefilling if sequence.request.priority <= most_urgent]
            decoding += self._prefill(prefilling, self.token_budget - len(decoding))
        return self._with_pages(decoding, preempting=True)

    def schedule_ahead(self, priority: int) -> list[Slice]:
        """Slices of prompts more urgent than that, for a step that is put into the middle of another.

        The other step's sequences lose no page by it, though one may be paused.
        """
        self._admit(priority)
        prefilling = [
            sequence
            for sequence in self.running
            if sequence.request.priority < priority and sequence.output_tokens == 0
        ]
        return self._with_pages(self._prefill(prefilling, 0), preempting=False)

    def complete(self, piece: Slice) -> None:
        """A slice's keys and values are in the cache; others may use the pages that have become full."""
        sequence, end = piece.sequence, piece.start + piece.count
        sequence.computed = end
        if piece.start < sequence.most_computed:
            self.recomputed_tokens += min(end, sequence.most_computed) - piece.start
        if end > sequence.most_computed:
            sequence.most_computed = end
        if self.share_prefixes:
            pages = sequence.pages
            for index in range(piece.start // PAGE_TOKENS, end // PAGE_TOKENS):
                pages[index] = self.pages.share(pages[index], *_link(sequence, index))

    def _prefill(self, sequences: list[Sequence], budget: int) -> list[Slice]:
        """A piece of each prompt, by urgency, as far as the budget goes; at least one piece."""
        budget = max(budget, self.chunk_tokens)
        chosen: list[Slice] = []
        being_made: set[tuple[int, tuple[int, ...]]] = set()
        for sequence in sorted(sequences, key=_order):
            if self.share_prefixes and sequence.computed % PAGE_TOKENS == 0:
                self._find_prefix(sequence)
                if len(sequence.tokens) - sequence.computed >= PAGE_TOKENS:
                    link = _link(sequence, sequence.computed // PAGE_TOKENS)
                    if link in being_made:
                        continue  # it finds the page in the next step
                    being_made.add(link)
                self._copy_prefix(sequence)
            left = len(sequence.tokens) - sequence.computed
            count = min(left, self.chunk_tokens - sequence.computed % self.chunk_tokens)
            if count > budget:
                break
            budget -= count
            chosen.append(Slice(sequence, sequence.computed, count))
        return chosen

    def _find_prefix(self, sequence: Sequence) -> None:
        """Hold the pages that others have made of a sequence's next tokens. The last token is always computed."""
        found = self._findable(sequence)
        for page in found:
            self.pages.hold(page)
        sequence.pages += found
        self._skip(sequence, len(found) * PAGE_TOKENS)

    def _copy_prefix(self, sequence: Sequence) -> None:
        """Where a page that others have made differs from the next one only further on, begin with a copy of it."""
        if self.pages.available <= len(self.running):
            return
        at = sequence.computed
        wanted = tuple(sequence.tokens[at : min(at + PAGE_TOKENS, len(sequence.tokens) - 1)])
        common, page = self.pages.nearest(_before(sequence, len(sequence.pages)), wanted)
        if common >= LEAST_COPIED:
            sequence.pages.append(self.pages.take_copy(page))
            self._skip(sequence, common)

    def _skip(self, sequence: Sequence, count: int) -> None:
        """So many more of its tokens are in the cache without having been computed for it."""
        start, end = sequence.computed, sequence.computed + count
        sequence.computed = end
        self.prefix_hit_tokens += max(0, min(end, sequence.prompt_tokens) - start)
        if end > sequence.most_computed:
            first = max(start, sequence.most_computed)
            sequence.cached_prompt_tokens += max(0, min(end, sequence.prompt_tokens) - first)
            sequence.most_computed = end

    def _findable(self, sequence: Sequence) -> list[int]:
        found: list[int] = []
        tokens, at = sequence.tokens, sequence.computed
        before = _before(sequence, len(sequence.pages))
        while at + PAGE_TOKENS < len(tokens):
            page = self.pages.find(before, tuple(tokens[at : at + PAGE_TOKENS]))
            if page is None:
                break
            found.append(page)
            before, at = page, at + PAGE_TOKENS
        return found

    def _admit(self, above: int | None) -> None:
        """Fill the batch from the paused and the waiting, the most urgent first; pause who has to stand back for them.

        above: only those more urgent than that, and nobody's pages are taken away.
        """
        blocked = False  # the first of those who wait does not find its pages; later ones wait behind it
        # Pages that the running need for the tokens they have, and one more to grow by. Ahead of others' step, nobody
        # need grow before the next.
        growing = above is None
        promised = sum(_promised(sequence, growing) for sequence in self.running) if self._waiting else 0
        while True:
            waiting = None if blocked else self._first_waiting()
            paused = min(self.paused, key=_order, default=None)
            candidate = min(filter(None, (waiting, paused)), key=_order, default=None)
            if candidate is None or (above is not None and candidate.request.priority >= above):
                return
            displaced = None
            if len(self.running) >= self.max_batch:
                displaced = max(self.running, key=_order)
                if candidate.request.priority >= displaced.request.priority:
                    return
            if candidate is waiting:
                if not self._has_room(candidate, promised, preempting=growing):
                    blocked = True
                    continue
                heapq.heappop(self._queue)
                del self._waiting[candidate]
                if self.share_prefixes:
                    self._find_prefix(candidate)
                promised += _promised(candidate, growing)
                if candidate.started_at is None:
                    candidate.started_at = time.perf_counter()
            else:
                del self.paused[candidate]
            self.running[candidate] = None
            if displaced in self.running and displaced is not None:
                del self.running[displaced]
                self.paused[displaced] = None
                self.pauses += 1

    def _first_waiting(self) -> Sequence | None:
        while self._queue:
            sequence = self._queue[0][1]
            if sequence in self._waiting:
                return sequence
            heapq.heappop(self._queue)
        return None

    def _has_room(self, sequence: Sequence, promised: int, *, preempting: bool) -> bool:
        """Whether there are pages for its tokens beside those promised to the running.

        preempting: take them from less urgent sequences where need be.
        """
        while True:
            found = self._findable(sequence) if self.share_prefixes else []
            need = pages_for(len(sequence.tokens)) - len(found)
            left = self.pages.available - sum(map(self.pages.is_idle, found))
            if need + promised <= left or not (self.running or self.paused):
                return True
            victim = self._last() if preempting else None
            if victim is None or victim.request.priority <= sequence.request.priority:
                return False
            if victim in self.running:
                promised -= _promised(victim, preempting)
            self._preempt(victim)

    def _with_pages(self, chosen: list[Slice], *, preempting: bool) -> list[Slice]:
        """The slices for which pages could be had, which their sequences now hold."""
        growing = [(piece, missing) for piece in chosen if (missing := _missing(piece))]
        if sum(missing for _, missing in growing) <= self.pages.available:
            for piece, missing in growing:
                piece.sequence.pages += [self.pages.take() for _ in range(missing)]
            return chosen
        without: set[Sequence] = set()
        for piece, missing in sorted(growing, key=lambda grown: grown[0].sequence.order):
            if self._make_available(missing, piece.sequence, preempting=preempting):
                piece.sequence.pages += [self.pages.take() for _ in range(missing)]
            else:
                without.add(piece.sequence)
        return [piece for piece in chosen if piece.sequence in self.running and piece.sequence not in without]

    def _make_available(self, pages: int, sequence: Sequence, *, preempting: bool) -> bool:
        """Preempt from the last on until there are that many pages; the sequence itself, if it is the last."""
        while self.pages.available < pages and sequence in self.running:
            victim = self._last() if preempting else None
            if victim is None:
                return False
            self._preempt(victim)
        return sequence in self.running

    def _last(self) -> Sequence | None:
        return max((*self.running, *self.paused), key=_order, default=None)

    def _preempt(self, sequence: Sequence) -> None:
        """Free its pages and let it wait; what is then still found of them need not be computed again."""
        self.remove(sequence)
        sequence.computed = 0
        self.preemptions += 1
        self.add(sequence)


def _order(sequence: Sequence) -> tuple[int, int]:
    return sequence.order


def _link(sequence: Sequence, index: int) -> tuple[int, tuple[int, ...]]:
    """What a sequence's full page is known by: the page before it, and its tokens."""
    return _before(sequence, index), tuple(sequence.tokens[index * PAGE_TOKENS : (index + 1) * PAGE_TOKENS])


def _before(sequence: Sequence, index: int) -> int:
    """The page before that one; keys rotated otherwise are another beginning."""
    return sequence.pages[index - 1] if index else BEGINNING - sequence.rotation_offset


def _missing(piece: Slice) -> int:
    return pages_for(piece.start + piece.count) - len(piece.sequence.pages)


def _lacking(sequence: Sequence) -> int:
    """Pages that it needs for the tokens it has, and does not hold yet."""
    return max(0, pages_for(len(sequence.tokens)) - len(sequence.pages))


def _promised(sequence: Sequence, growing: bool) -> int:
    """What it lacks, and a page to grow by where its answer may yet need one: its last token is never stored."""
    most = sequence.prompt_tokens + sequence.max_tokens - 1
    return _lacking(sequence) + int(growing and pages_for(most) > pages_for(len(sequence.tokens)))
