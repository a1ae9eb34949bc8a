"""Tells in which language an output is written, and whether that is the expected one.

Two steps. The script comes from counting letters: an output of which no script makes up most is in several
languages ("mul"). Within a script the language is told by what tells it: kana for Japanese, Traditional or
Simplified characters (CC-CEDICT, through hanzidentifier) for Chinese, byte n-grams (py3langid, its bundled
model) for the rest.

Whoever is unsure says so: "und" where the letters do not suffice. `contradicts` then gives the benefit of
the doubt.
"""

import re
from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from threading import Lock
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from py3langid.langid import LanguageIdentifier

Script = Literal["Hani", "Jpan", "Hang", "Latn", "other"]

_DOMINANT_SHARE = 0.7  # of the letters' weight; below it the output is in several languages
_STRAY_WORDS = 2.0  # less than this much of a second script is a name or a unit, not a language
_STRAY_CHARACTERS = 0.1  # share of the other Chinese variant that is a slip, not a mixture
_CERTAIN = 0.5  # probability from which a language counts as told
_POSSIBLE = 0.2  # probability from which the expected language is believed
_HALF_WINDOW = 4000  # code points looked at, from the start and from the end of a long output
_IDENTIFIED = 1500  # code points given to py3langid; it is sure long before

# Letters that make about one word, so that scripts can be weighed against each other.
_LETTERS_A_WORD: dict[Script, float] = {"Hani": 1.5, "Jpan": 2.0, "Hang": 2.0, "Latn": 5.0, "other": 5.0}

_HAN = r"\u3005\u3007\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003134f"
_KANA = r"\u3041-\u3096\u309d\u309e\u30a1-\u30fa\u30fd\u30fe\uff66-\uff9d"  # no middle dot: Chinese has it too
_HANGUL = r"\u1100-\u11ff\u3131-\u318e\uac00-\ud7a3"
_LATIN_LETTERS = r"A-Za-z\u00aa\u00ba\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u024f\u1e00-\u1eff\uff21-\uff3a\uff41-\uff5a"
_BOPOMOFO_AND_MARKS = r"\u3100-\u312f\u31a0-\u31bf\u30fc\u309b\u309c\uff70\uff9e\uff9f"
_RUNS: dict[Script, re.Pattern[str]] = {
    "Hani": re.compile(f"[{_HAN}]+"),
    "Jpan": re.compile(f"[{_KANA}]+"),
    "Hang": re.compile(f"[{_HANGUL}]+"),
    "Latn": re.compile(f"[{_LATIN_LETTERS}]+"),
    "other": re.compile(rf"[^\W\d_{_HAN}{_KANA}{_HANGUL}{_LATIN_LETTERS}{_BOPOMOFO_AND_MARKS}]+"),
}

# What is in no language: fenced code, addresses, markup. Bounded, so that no input makes them slow.
_FENCE = re.compile(r"```.*?(?:```|\Z)", re.DOTALL)
_MARKUP = re.compile(r"https?://\S+|[\w.+-]{1,64}@[\w-]{1,64}\.[\w.-]{1,64}|</?[A-Za-z][^<>]*>")

# Languages that an output may plausibly be in. py3langid knows 140, and takes a short English line for one
# of the small ones too easily.
_LATIN = "af ca cs da de en es et eu fi fr gl hr hu id is it lt lv ms nl no pl pt ro sk sl sq sv sw tl tr vi"
_OTHER = "am ar be bg bn el fa gu he hi hy ka kk km kn ky lo mk ml mn mr my ne pa ps ru si sr ta te th uk ur"
_LATIN_LANGUAGES = frozenset(_LATIN.split())
_OTHER_LANGUAGES = frozenset(_OTHER.split())
_SAME_LANGUAGE = {
    "nb": "no",
    "nn": "no",
    "iw": "he",
    "in": "id",
    "fil": "tl",
    "cmn": "zh",
    "yue": "zh",
    "wuu": "zh",
}
_TRADITIONAL_REGIONS = frozenset({"TW", "HK", "MO"})
_SIMPLIFIED_REGIONS = frozenset({"CN", "SG"})

_TAG = re.compile(
    r"(?P<language>[a-z]{2,3})(?:-[a-z]{3})?(?:-(?P<script>[a-z]{4}))?(?:-(?P<region>[a-z]{2}|\d{3}))?"
    r"(?:-(?:[a-z0-9]{5,8}|\d[a-z0-9]{3}))*(?:-[a-z0-9](?:-[a-z0-9]{2,8})+)*",
    re.IGNORECASE | re.ASCII,
)


@dataclass(frozen=True, slots=True)
class Detection:
    """`tag` is BCP 47: "en", "zh-Hant", "zh-Hans", "zh" (could be either, or both at once), "mul"
    (several), "und"."""

    tag: str
    script: Script | None  # None: no letters at all
    mixed_script: bool = False  # Traditional and Simplified characters together


@dataclass(frozen=True, slots=True)
class _Expected:
    language: str
    variant: Literal["Hant", "Hans"] | None
    script: Script


def is_language_tag(tag: str) -> bool:
    """Whether an output can be checked against this tag: well-formed BCP 47, in a language that can be
    told."""
    return _parse(tag) is not None


def detect(text: str, expected_language: str | None = None) -> Detection:
    """The language of a text. The expected one breaks ties between languages that are easily taken for each
    other."""
    prose = _without_code(text)
    letters = {script: "".join(run.findall(prose)) for script, run in _RUNS.items()}
    weights = {script: len(found) / _LETTERS_A_WORD[script] for script, found in letters.items() if found}
    if not weights:
        return Detection("und", None)
    if len(letters["Jpan"]) * 10 >= len(letters["Hani"]) and "Jpan" in weights:
        weights["Jpan"] += weights.pop("Hani", 0.0)  # Japanese is written in both
    script = max(weights, key=lambda candidate: weights[candidate])
    strays = sum(weights.values()) - weights[script]
    if weights[script] < _DOMINANT_SHARE * (weights[script] + strays) and strays >= _STRAY_WORDS:
        return Detection("mul", script)
    if script == "Hani":
        return _chinese(letters["Hani"])
    if script == "Jpan":
        return Detection("ja", script)
    if script == "Hang":
        return Detection("ko", script)
    return Detection(_identify(prose, script, expected_language), script)


def contradicts(detection: Detection, expected_language: str) -> bool | None:
    """Whether the output is told to be in another language than this one; None if the tag cannot be checked.

    An output without any letters contradicts every language. One whose language stays open ("und")
    contradicts the expected one only by its script; Chinese that could be either variant contradicts
    neither.
    """
    expected = _parse(expected_language)
    if expected is None:
        return None
    if detection.script != expected.script:
        return True
    if detection.tag == "und" or detection.mixed_script:
        return False
    language, _, variant = detection.tag.partition("-")
    if language != expected.language:
        return True
    return bool(variant and expected.variant and variant != expected.variant)


def expects_variant(expected_language: str) -> bool:
    """Whether the tag asks for Traditional or Simplified characters."""
    expected = _parse(expected_language)
    return expected is not None and expected.variant is not None


def warm_up() -> None:
    """Loads the models (about a second), which otherwise the first output waits for."""
    _identifier()
    _variant_of("臺")


@lru_cache(maxsize=256)
def _parse(tag: str) -> _Expected | None:
    match = _TAG.fullmatch(tag.strip().replace("_", "-")) if len(tag) <= 100 else None
    if match is None:
        return None
    language = match["language"].lower()
    language = _SAME_LANGUAGE.get(language, language)
    if language == "zh":
        script, region = (match["script"] or "").title(), (match["region"] or "").upper()
        if script == "Hant" or (not script and region in _TRADITIONAL_REGIONS):
            return _Expected(language, "Hant", "Hani")
        if script == "Hans" or (not script and region in _SIMPLIFIED_REGIONS):
            return _Expected(language, "Hans", "Hani")
        return _Expected(language, None, "Hani")
    if language == "ja":
        return _Expected(language, None, "Jpan")
    if language == "ko":
        return _Expected(language, None, "Hang")
    if language in _OTHER_LANGUAGES and (match["script"] or "").title() != "Latn":
        return _Expected(language, None, "other")
    if language in _LATIN_LANGUAGES:
        return _Expected(language, None, "Latn")
    return None


def _without_code(text: str) -> str:
    if len(text) > 2 * _HALF_WINDOW:
        text = text[:_HALF_WINDOW] + "\n" + text[-_HALF_WINDOW:]
    prose = _MARKUP.sub(" ", _FENCE.sub(" ", text))
    # An output that is nothing but code is judged by the code.
    return prose if any(run.search(prose) for run in _RUNS.values()) else text


def _chinese(characters: str) -> Detection:
    variants = Counter[str]()
    for character, count in Counter(characters).items():
        variants[_variant_of(character)] += count
    traditional, simplified = variants["Hant"], variants["Hans"]
    if min(traditional, simplified) > _STRAY_CHARACTERS * (traditional + simplified):
        return Detection("zh", "Hani", mixed_script=True)
    if traditional == simplified:  # neither: all characters are common to both
        return Detection("zh", "Hani")
    return Detection("zh-Hant" if traditional > simplified else "zh-Hans", "Hani")


@lru_cache(maxsize=32_768)
def _variant_of(character: str) -> Literal["Hant", "Hans", ""]:
    import hanzidentifier  # slow to import, and only Chinese needs it

    kind = hanzidentifier.identify(character)
    if kind == hanzidentifier.TRADITIONAL:
        return "Hant"
    return "Hans" if kind == hanzidentifier.SIMPLIFIED else ""


def _identify(text: str, script: Script, expected_language: str | None) -> str:
    plausible = _LATIN_LANGUAGES if script == "Latn" else _OTHER_LANGUAGES
    ranked = _identifier().rank(text[:_IDENTIFIED])
    chances = {language: chance for language, chance in ranked if language in plausible}
    total = sum(chances.values())
    if total <= 0:
        return "und"
    expected = _parse(expected_language) if expected_language else None
    if expected is not None and chances.get(expected.language, 0.0) >= _POSSIBLE * total:
        return expected.language
    best = max(chances, key=lambda candidate: chances[candidate])
    return best if chances[best] >= _CERTAIN * total else "und"


_loading = Lock()
_loaded: "LanguageIdentifier | None" = None


def _identifier() -> "LanguageIdentifier":
    # Read-only once built (its `set_languages` is never called), so all threads share one.
    global _loaded
    if _loaded is None:
        with _loading:
            if _loaded is None:
                from py3langid.langid import MODEL_FILE, LanguageIdentifier

                _loaded = LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)
    return _loaded
