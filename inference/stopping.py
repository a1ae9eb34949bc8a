"""Stop strings, found across the borders of tokens."""

from __future__ import annotations


class StopMatcher:
    """Passes text through until one of the stop strings begins; holds back what could be the beginning of one."""

    def __init__(self, stop: tuple[str, ...]) -> None:
        self._stop = stop
        self._held = ""

    def feed(self, text: str) -> tuple[str, bool]:
        """(text that is certain not to be part of a stop string, whether a stop string was found).

        Of several in the text, the one that begins first counts. What follows it is dropped.
        """
        if not self._stop:
            return text, False
        text = self._held + text
        found = [at for at in (text.find(stop) for stop in self._stop) if at >= 0]
        if found:
            self._held = ""
            return text[: min(found)], True
        keep = max((_overlap(text, stop) for stop in self._stop), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], False

    def finish(self) -> str:
        """The text still held back when no more comes."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """The length of the longest end of `text` that is a proper beginning of `stop`."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
