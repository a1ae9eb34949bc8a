"""Text to tokens and back, and chat messages to a prompt. Free of torch."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import Environment
from jinja2 import TemplateError as JinjaTemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer as FastTokenizer

from inference.control_tokens import ControlTokens
from inference.errors import InvalidRequest, StoreError, TemplateError
from inference.weights.tokenizer_files import SETTINGS_NAME, TOKENIZER_NAME


def _byte_of_character() -> dict[str, int]:
    """GPT-2's table of bytes as printable characters, reversed (openai/gpt-2, encoder.py: bytes_to_unicode)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    table = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in printable)
    table.update({chr(256 + index): byte for index, byte in enumerate(others)})
    return table


_BYTES = _byte_of_character()
_BYTE_FALLBACK = re.compile("<0x[0-9A-F]{2}>")


class Tokenizer:
    """The tokenizer of a weight store."""

    def __init__(self, fast: FastTokenizer, settings: Mapping[str, Any]) -> None:
        self._fast = fast
        self._template_text: str | None = settings.get("chat_template")
        self._bos: str = settings.get("bos_token") or ""
        self._eos: str = settings.get("eos_token") or ""
        self.eos_token_ids: frozenset[int] = frozenset(settings.get("eos_token_ids") or ())
        self.vocab_size: int = fast.get_vocab_size(with_added_tokens=True)
        self.is_byte_level: bool = (json.loads(fast.to_str()).get("decoder") or {}).get("type") == "ByteLevel"
        self._pieces: dict[int, bytes] = {}
        added = fast.get_added_tokens_decoder()
        self._special = {token for token, entry in added.items() if entry.special}
        controls = {entry.content: token for token, entry in added.items() if _is_control(entry, self._bos, self._eos)}
        self._controls = ControlTokens(fast, controls) if controls else None
        self._template: Any = None

    @classmethod
    def load(cls, store_path: Path | str) -> Tokenizer:
        """The tokenizer of a store folder; StoreError where it has none."""
        folder = Path(store_path)
        try:
            fast = FastTokenizer.from_str((folder / TOKENIZER_NAME).read_text("utf-8"))
            return cls(fast, json.loads((folder / SETTINGS_NAME).read_text("utf-8")))
        except FileNotFoundError as error:
            raise StoreError(error.filename, "is missing: this store has no tokenizer; use token ids") from None
        except Exception as error:
            raise StoreError(folder / TOKENIZER_NAME, f"or {SETTINGS_NAME} cannot be read: {error}") from None

    def encode(self, text: str) -> list[int]:
        """Token ids, with the start token where the model wants one. InvalidRequest for half of a surrogate pair."""
        ids: list[int] = self._fast.encode(_characters(text)).ids
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text without special tokens; bytes that are no UTF-8 become U+FFFD."""
        text: str = self._fast.decode(list(ids), skip_special_tokens=True)
        return text

    def to_json(self) -> str:
        """The whole tokenizer as tokenizer.json has it."""
        text: str = self._fast.to_str()
        return text

    def is_special(self, token_id: int) -> bool:
        return token_id in self._special

    def piece(self, token_id: int) -> bytes:
        """The bytes that a token of a byte-level tokenizer stands for; nothing for a special one."""
        known = self._pieces.get(token_id)
        if known is None:
            token = None if token_id in self._special else self._fast.id_to_token(token_id)
            if token is None:
                known = b""
            elif all(character in _BYTES for character in token):
                known = bytes(_BYTES[character] for character in token)
            else:
                known = token.encode()
            self._pieces[token_id] = known
        return known

    def shown(self, token_id: int) -> tuple[str, tuple[int, ...]]:
        """A token's own text and bytes, a special one's name. Bytes that are no UTF-8 become U+FFFD in the text."""
        token = self._fast.id_to_token(token_id)
        if token is None:
            return "", ()
        if token_id in self._special:
            raw = token.encode()
        elif self.is_byte_level:
            raw = self.piece(token_id)
        elif _BYTE_FALLBACK.fullmatch(token):
            raw = bytes([int(token[3:5], 16)])
        else:
            raw = token.replace("\u2581", " ").encode()
        return raw.decode("utf-8", errors="replace"), tuple(raw)

    def render_chat(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True) -> str:
        """The prompt text of a conversation, by the model's own template.

        The template runs in a sandbox without access to anything but the messages. TemplateError where the model has
        none, or where it refuses the messages; InvalidRequest where these hold half of a surrogate pair.
        """
        if self._template is None:
            self._template = self._compile()
        try:
            text: str = self._template.render(
                messages=[dict(message) for message in messages],
                add_generation_prompt=add_generation_prompt,
                bos_token=self._bos,
                eos_token=self._eos,
            )
        except JinjaTemplateError as error:
            raise TemplateError(f"the model's chat template refuses these messages: {error}") from None
        except (TypeError, ValueError, AttributeError, KeyError) as error:
            raise TemplateError(f"the model's chat template fails on these messages: {error}") from None
        return _characters(text)

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Token ids of a conversation, ready for the assistant's turn. The template brings its own start token.

        Only the template makes control tokens. Where a message holds the text of one, such as `<|im_end|>`, that text
        is encoded like any other and ends no turn.
        """
        if self._controls is not None and self._controls.found_in(messages):
            return self._controls.encode(messages, self.render_chat)
        ids: list[int] = self._fast.encode(self.render_chat(messages), add_special_tokens=False).ids
        return ids

    def _compile(self) -> Any:
        if not self._template_text:
            raise TemplateError("this model has no chat template; send a plain prompt instead")

        def refuse(message: str) -> NoReturn:
            raise JinjaTemplateError(message)

        def now(layout: str) -> str:
            return datetime.now().astimezone().strftime(layout)

        environment: Environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = refuse
        environment.globals["strftime_now"] = now
        try:
            return environment.from_string(self._template_text)
        except JinjaTemplateError as error:
            raise TemplateError(f"the model's chat template cannot be read: {error}") from None


def _characters(text: str) -> str:
    """The text, if it is one: JSON can spell half of a surrogate pair, which stands for no character."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest("prompt", f"character {error.start} is half of a surrogate pair") from None
    return text


def _is_control(entry: Any, bos: str, eos: str) -> bool:
    """Whether an added token steers a conversation: it is special, or looks it though its model has not said so."""
    text = entry.content
    return bool(entry.special) or text in (bos, eos) or (text.startswith("<|") and text.endswith("|>"))


def _to_json(value: Any, indent: int | None = None) -> str:
    """JSON as chat templates expect it: without Jinja's escaping for HTML."""
    return json.dumps(value, ensure_ascii=False, indent=indent)


class Detokenizer:
    """Text from tokens as they come. Never splits a character; all pieces together are `Tokenizer.decode` of all ids.

    A byte-level tokenizer's tokens are bytes, so an incremental UTF-8 decoder is exact. Any other is decoded whole each
    time, and what may still change (a tail of U+FFFD, or of spaces) is held back.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._emitted = 0
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace") if tokenizer.is_byte_level else None

    def feed(self, token_id: int) -> str:
        """The text that this token makes certain."""
        if self._utf8 is not None:
            return self._utf8.decode(self._tokenizer.piece(token_id))
        self._ids.append(token_id)
        text = self._tokenizer.decode(self._ids)
        certain = len(text.rstrip("\ufffd"))
        fresh = text[self._emitted : certain]
        self._emitted = max(self._emitted, certain)
        return fresh

    def finish(self) -> str:
        """What is left when no more tokens come."""
        if self._utf8 is not None:
            return self._utf8.decode(b"", final=True)
        fresh = self._tokenizer.decode(self._ids)[self._emitted :]
        self._emitted += len(fresh)
        return fresh
