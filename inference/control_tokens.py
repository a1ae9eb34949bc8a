"""Keeps what a message says apart from the control tokens that its chat template makes. Free of torch."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tokenizers import Tokenizer as FastTokenizer


class ControlTokens:
    """The tokens of a vocabulary that steer a conversation, by the text that stands for them.

    A conversation in which a message holds such a text is rendered with a mark in its place, which the template's own
    tokens are then told apart from: the rendered text is cut at those, and what lies between, with the messages' text
    put back, is encoded by a tokenizer that knows no control tokens. Templates may trim, split and join contents as
    they like, since a mark is ordinary text to them; one that looks for a control token within a message does not find
    it. A tokenizer that puts a space before its first word puts one after each control token here.
    """

    def __init__(self, fast: FastTokenizer, controls: Mapping[str, int]) -> None:
        self._fast = fast
        self._ids = dict(controls)
        # Of several that begin alike, the longest is meant.
        texts = sorted(controls, key=len, reverse=True)
        self._pattern = re.compile("|".join(re.escape(text) for text in texts))
        self._strips = {
            entry.content: (entry.lstrip, entry.rstrip)
            for entry in fast.get_added_tokens_decoder().values()
            if entry.content in self._ids
        }
        self._without: FastTokenizer | None = None

    def found_in(self, value: Any) -> bool:
        """Whether any string of a message, however deep, holds the text of a control token."""
        if isinstance(value, str):
            return self._pattern.search(value) is not None
        if isinstance(value, Mapping):
            return any(self.found_in(part) for part in value.values())
        return isinstance(value, Sequence) and any(self.found_in(part) for part in value)

    def encode(
        self, messages: Sequence[Mapping[str, Any]], render: Callable[[Sequence[Mapping[str, Any]]], str]
    ) -> list[int]:
        """Token ids of the rendered conversation, control tokens from the template alone."""
        nonce = secrets.randbelow(10**18)  # digits, which templates that change case leave alone
        hidden: list[str] = []

        def hide(match: re.Match[str]) -> str:
            hidden.append(match.group())
            return f"\ue000{nonce}:{len(hidden) - 1}\ue001"

        def marked(value: Any) -> Any:
            if isinstance(value, str):
                return self._pattern.sub(hide, value)
            if isinstance(value, Mapping):
                return {key: marked(part) for key, part in value.items()}
            return [marked(part) for part in value] if isinstance(value, (list, tuple)) else value

        text = render([marked(message) for message in messages])
        mark = re.compile(f"\ue000{nonce}:([0-9]+)\ue001")
        ids: list[int] = []
        start = 0
        strip_left = False
        for match in [*self._pattern.finditer(text), None]:
            part = text[start : match.start() if match else None]
            left, right = self._strips[match.group()] if match else (False, False)
            part = part.lstrip() if strip_left else part
            part = part.rstrip() if left else part
            ids += self._plain(mark.sub(lambda found: hidden[int(found.group(1))], part))
            if match:
                ids.append(self._ids[match.group()])
                start, strip_left = match.end(), right
        return ids

    def _plain(self, text: str) -> list[int]:
        """Token ids of a text, none of them a control token."""
        if not text:
            return []
        if self._without is None:
            self._without = self._make_without()
        ids: list[int] = self._without.encode(text, add_special_tokens=False).ids
        if len(text) > 1 and not set(self._ids.values()).isdisjoint(ids):
            # A vocabulary that holds control tokens among its words: cut within each, so that no word is one.
            at = self._pattern.search(text)
            cut = at.start() + 1 if at else len(text) // 2
            return self._plain(text[:cut]) + self._plain(text[cut:])
        return ids

    def _make_without(self) -> FastTokenizer:
        """The same tokenizer without these tokens."""
        description = json.loads(self._fast.to_str())
        description["added_tokens"] = [
            entry for entry in description["added_tokens"] if entry["content"] not in self._ids
        ]
        description["post_processor"] = None
        return FastTokenizer.from_str(json.dumps(description))
