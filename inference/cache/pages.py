"""Pages of the key-value cache: who holds which, and the promise that nobody runs out midway.

A page holds PAGE_TOKENS tokens of every layer. A sequence is admitted only when the pages that it may need at worst
(prompt and max_tokens) can be set aside, so a running sequence always finds its next page: no deadlock, no
out-of-memory, no preemption needed.
"""

from __future__ import annotations

PAGE_TOKENS = 32


def pages_for(tokens: int) -> int:
    """Pages that hold that many tokens."""
    return -(-tokens // PAGE_TOKENS)


class PagePool:
    """A fixed number of pages. Freed pages are reused first, so that memory once touched stays warm."""

    def __init__(self, total: int) -> None:
        self.total = total
        self._free = list(range(total - 1, -1, -1))
        self._reserved = 0

    @property
    def used(self) -> int:
        return self.total - len(self._free)

    @property
    def unreserved(self) -> int:
        """Pages that no sequence holds or may come to ask for."""
        return self.total - self._reserved

    def reserve(self, pages: int) -> bool:
        """Set pages aside for a sequence; False where they are not to be had now."""
        if pages > self.unreserved:
            return False
        self._reserved += pages
        return True

    def take(self) -> int:
        """One of the pages set aside."""
        return self._free.pop()

    def release(self, held: list[int], reserved: int) -> None:
        """Give back the pages held, and what was set aside for their holder."""
        self._free.extend(reversed(held))
        held.clear()
        self._reserved -= reserved
