"""JSON one value a line, as whoever reads it line by line expects it."""

import json
from typing import Any

# JSON lets these three stand in a string as they are, but Python's `str.splitlines`, httpx's `iter_lines` and
# JavaScript of old take them for the end of a line.
_LINE_ENDS = str.maketrans({character: f"\\u{ord(character):04x}" for character in "\x85\u2028\u2029"})


def json_text(value: Any) -> str:
    """The value as JSON without any character that some reader takes for the end of a line; other text stays legible.

    Whoever parses it gets the value back. No line end is added.
    """
    return json.dumps(value, ensure_ascii=False).translate(_LINE_ENDS)


def json_line(value: Any) -> bytes:
    """`json_text` in UTF-8, and a line feed. UnicodeEncodeError where a text holds half of a surrogate pair."""
    return json_text(value).encode() + b"\n"
