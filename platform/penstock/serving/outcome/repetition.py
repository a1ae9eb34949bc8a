"""Measures how much an output repeats itself, or its prompt.

Small models at temperature 0 fall into endless loops, and in a language that they hardly know they recite the prompt
instead of answering. Both are text in the right language; neither is an answer.
"""

import re

_N = 4
_ENOUGH = 12  # 4-grams; below this a share says nothing
_LONGEST = 50_000  # code points looked at; more would cost time and tell nothing new

# Han, kana and symbols (emoji) stand for themselves; of other scripts a word is one unit. A "word" without
# end is cut, so that a loop without spaces counts too. ASCII punctuation is left out: rulers and tables are
# no loops.
_UNIT = re.compile(
    r"[\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\u2600-\u27bf\U0001f300-\U0001faff\U00020000-\U0003134f]"
    r"|[^\W\d_\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003134f]{1,24}"
    r"|\d{1,24}"
)


def repeated_share(text: str) -> float | None:
    """Share of the text's 4-grams that occurred before in it, 0 to 1; None if there are too few to tell.

    1 - |distinct n-grams| / |n-grams|, "seq-rep-n" in Welleck et al., Neural Text Generation with Unlikelihood
    Training (2020), with n = 4.
    """
    grams = _grams(text)
    if len(grams) < _ENOUGH:
        return None
    return 1 - len(set(grams)) / len(grams)


def copied_share(text: str, prompt: str) -> float | None:
    """Share of the text's 4-grams that stand in the prompt too, 0 to 1; None if there are too few to tell."""
    grams = _grams(text)
    if len(grams) < _ENOUGH:
        return None
    of_prompt = set(_grams(prompt))
    return sum(gram in of_prompt for gram in grams) / len(grams)


def _grams(text: str) -> list[tuple[str, ...]]:
    units = _UNIT.findall(text[:_LONGEST].lower())
    return list(zip(*(units[offset:] for offset in range(_N)), strict=False))
