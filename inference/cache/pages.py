"""Pages of the key-value cache: who holds which, and which hold the beginning of a prompt that may come again.

A page holds PAGE_TOKENS tokens of every layer. What it holds depends on its own tokens and on all tokens before them,
so a full page is known by the page before it and its tokens: a chain, looked up link by link. Sequences that begin
alike hold the same pages; a page that nobody holds any more is kept for the next one until its room is needed. Where a
sequence goes its own way within a page, it takes a copy of the page that begins like its own.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

PAGE_TOKENS = 32

# Pages that nobody holds are kept up to this many, or to this share of all where that is more.
KEPT_PAGES = 1024
KEPT_SHARE = 4

# Of the pages that follow one and the same, so many are compared for the longest common beginning.
NEIGHBOURS = 16

BEGINNING = -1  # stands for the page before a prompt's first; so do lower numbers, for beginnings apart from this one


def pages_for(tokens: int) -> int:
    """Pages that hold that many tokens."""
    return -(-tokens // PAGE_TOKENS)


def _leave(*_: object) -> None:
    """For a pool without memory behind it."""


class PagePool:
    """A fixed number of pages, each free, held by one or more sequences, or idle: shared, and held by nobody.

    total: pages. clear: zeroes pages, for those that may hold NaN. copy: the content of the first page to the second.
    keep: idle pages at most.
    Freed pages are reused first, so that memory once touched stays warm.
    """

    def __init__(
        self,
        total: int,
        clear: Callable[[list[int]], None] = _leave,
        copy: Callable[[int, int], None] = _leave,
        keep: int | None = None,
    ) -> None:
        self.total = total
        self.most_held = 0
        self._clear = clear
        self._copy = copy
        self._keep = max(KEPT_PAGES, total // KEPT_SHARE) if keep is None else keep
        self._free = list(range(total - 1, -1, -1))
        self._holders = [0] * total
        self._idle: dict[int, None] = {}  # the least recently used first
        # A shared page's identity is a number that no other page ever gets, so that a chain whose link was given up
        # is broken for good, and equal keys mean equal tokens from the very first.
        self._identities = itertools.count()
        self._identity: dict[int, int] = {}
        self._key: dict[int, tuple[int, tuple[int, ...]]] = {}
        self._shared: dict[tuple[int, tuple[int, ...]], int] = {}
        self._following: dict[int, dict[int, None]] = {}  # by a page's identity or a beginning: the shared next ones
        self._spoiled: set[int] = set()

    @property
    def used(self) -> int:
        """Pages that sequences hold."""
        return self.total - self.available

    @property
    def idle(self) -> int:
        """Pages kept for prompts to come."""
        return len(self._idle)

    @property
    def available(self) -> int:
        """Pages that can be taken: free or idle."""
        return len(self._free) + len(self._idle)

    def holders(self, page: int) -> int:
        return self._holders[page]

    def take(self) -> int:
        """A page of one's own; gives up the least recently used idle one where none is free. Needs `available`."""
        if not self._free:
            self._give_up(next(iter(self._idle)))
        page = self._free.pop()
        self._holders[page] = 1
        self.most_held = max(self.most_held, self.used)
        return page

    def find(self, before: int, tokens: tuple[int, ...]) -> int | None:
        """The shared page with these tokens after the page `before`, or at a BEGINNING; not yet held."""
        identity = before if before <= BEGINNING else self._identity.get(before)
        return None if identity is None else self._shared.get((identity, tokens))

    def nearest(self, before: int, tokens: tuple[int, ...]) -> tuple[int, int]:
        """(how many of the tokens a shared page after `before` begins with, that page): the best of the latest few."""
        identity = before if before <= BEGINNING else self._identity.get(before)
        if identity is None or identity not in self._following:
            return 0, 0
        latest = itertools.islice(reversed(self._following[identity]), NEIGHBOURS)
        return max((_common(self._key[page][1], tokens), page) for page in latest)

    def take_copy(self, page: int) -> int:
        """A page of one's own with the content of another. Needs `available`."""
        self.hold(page)  # or else it might be the one to be given up
        own = self.take()
        self._copy(page, own)
        self.release([page])
        return own

    def is_idle(self, page: int) -> bool:
        return page in self._idle

    def hold(self, page: int) -> None:
        """Hold a page that `find` found."""
        self._idle.pop(page, None)
        self._holders[page] += 1
        self.most_held = max(self.most_held, self.used)

    def share(self, page: int, before: int, tokens: tuple[int, ...]) -> int:
        """Let others find a full page. Returns the page to hold from now on: another one if it has the same content.

        Where the page before is not shared (any more), this one is not either.
        """
        identity = before if before <= BEGINNING else self._identity.get(before)
        if identity is None or page in self._identity or page in self._spoiled:
            return page
        key = (identity, tokens)
        same = self._shared.get(key)
        if same is not None:
            self.hold(same)
            self.release([page])
            return same
        self._shared[key] = page
        self._key[page] = key
        self._identity[page] = next(self._identities)
        self._following.setdefault(identity, {})[page] = None
        return page

    def spoil(self, pages: list[int]) -> None:
        """These may hold NaN: nobody finds them any more, and they are zeroed when their last holder leaves.

        NaN would otherwise pass even through masked attention to a page's next holder.
        """
        for page in pages:
            self._forget(page)
        self._spoiled.update(pages)

    def release(self, pages: list[int]) -> None:
        """Let go of pages, in the order of a sequence. Empties the list.

        The last come to be idle first, so that a chain is given up from its end.
        """
        for page in reversed(pages):
            self._holders[page] -= 1
            if self._holders[page]:
                continue
            if page in self._spoiled:
                self._spoiled.discard(page)
                self._clear([page])
            if page in self._identity:
                self._idle[page] = None
            else:
                self._free.append(page)
        pages.clear()
        while len(self._idle) > self._keep:
            self._give_up(next(iter(self._idle)))

    def forget_idle(self) -> None:
        """Free every page that nobody holds."""
        while self._idle:
            self._give_up(next(iter(self._idle)))

    def _give_up(self, page: int) -> None:
        del self._idle[page]
        self._forget(page)
        self._free.append(page)

    def _forget(self, page: int) -> None:
        key = self._key.pop(page, None)
        if key is not None:
            del self._shared[key]
            del self._identity[page]
            following = self._following[key[0]]
            del following[page]
            if not following:
                del self._following[key[0]]


def _common(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    """The number of tokens that both begin with."""
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
