"""An output is judged by its contract, and by nothing else."""

import json
from typing import Any

import pytest
from django.utils import translation
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from penstock.sample.records import load_products, load_task, render_messages
from penstock.serving.outcome import VIOLATION_LABELS, Outcome, OutputContract, Violation, assess, prompt_text
from penstock.serving.outcome.refusal import is_refusal
from penstock.serving.outcome.repetition import copied_share, repeated_share

SAMPLE_CONTRACT = OutputContract(language_from="language", min_characters=20)
ENGLISH = "A stoneware teapot, thrown by hand, with a strainer inside. It pours without dripping."
TRADITIONAL = "手拉坯製作的陶壺，壺內附濾孔，斷水俐落不滴漏，每件略有不同，適合日常泡茶。"
SIMPLIFIED = "手拉坯制作的陶壶，壶内附滤孔，断水利落不滴漏，每件略有不同，适合日常泡茶。"


def judge(text: str, contract: OutputContract = SAMPLE_CONTRACT, expected: str | None = None, **more: Any) -> Outcome:
    given_values: dict[str, Any] = {"finish_reason": "stop", "error": False} | more
    return assess(text=text, contract=contract, expected_language=expected, **given_values)


@pytest.mark.parametrize(("text", "language"), [(ENGLISH, "en"), (TRADITIONAL, "zh-Hant")])
def test_an_output_that_keeps_its_contract_is_valid(text: str, language: str) -> None:
    assert judge(text, expected=language) == Outcome(
        valid=True, refused=False, truncated=False, detected_language=language, violations=()
    )


@pytest.mark.parametrize(
    ("text", "detected", "violations"),
    [
        (ENGLISH, "en", ("language",)),
        (SIMPLIFIED, "zh-Hans", ("language",)),
        (TRADITIONAL + ENGLISH, "mul", ("mixed_language",)),
        (TRADITIONAL + SIMPLIFIED, "zh", ("mixed_script",)),
        ("陶壺一只。", "zh-Hant", ("too_short",)),
        ("👍", "und", ("too_short", "language")),
        ("", "und", ("empty",)),
        (" \n ", "und", ("empty",)),
        ("def describe(product):\n    return product.name", "und", ("language",)),
    ],
)
def test_what_a_traditional_chinese_item_can_get_wrong(text: str, detected: str, violations: tuple[str, ...]) -> None:
    outcome = judge(text, expected="zh-Hant")
    assert (outcome.valid, outcome.detected_language, outcome.violations) == (False, detected, violations)


def test_a_truncated_output_can_be_valid() -> None:
    outcome = judge(ENGLISH[:60], expected="en", finish_reason="length")
    assert (outcome.valid, outcome.truncated) == (True, True)


def test_a_failed_request_has_no_outcome() -> None:
    assert judge("", expected="en", error=True) == Outcome(None, None, False, None, ())


def test_without_a_contract_nothing_is_valid_or_invalid() -> None:
    outcome = judge("I'm sorry, but I can't help with that.", OutputContract())
    assert (outcome.valid, outcome.refused, outcome.violations) == (None, True, ())


@pytest.mark.parametrize("expected", [None, "not a language", "tlh"])
def test_an_output_whose_language_cannot_be_checked_is_not_called_valid(expected: str | None) -> None:
    assert judge(ENGLISH, expected=expected).valid is None
    assert judge("Tea", expected=expected).violations == ("too_short",)


def test_a_refusal_breaks_a_contract_unless_it_may_be_the_right_answer() -> None:
    refusal = "I'm sorry, but I can't help with that."
    assert judge(refusal, expected="en").violations == ("refused",)
    allowed = OutputContract(language_from="language", allow_refusal=True)
    outcome = judge(refusal, allowed, expected="en")
    assert (outcome.valid, outcome.refused) == (True, True)


def test_a_filtered_output_counts_as_refused() -> None:
    assert judge("", expected="en", finish_reason="content_filter").refused is True


def test_lengths_count_characters_not_bytes_and_no_outer_space() -> None:
    contract = OutputContract(min_characters=5, max_characters=5)
    assert judge("\n五個中文字 ", contract).valid is True
    assert judge("cafe\u0301s", contract).valid is True  # a letter and its combining accent are one
    assert judge("四個中文", contract).violations == ("too_short",)
    assert judge("六個中文字了", contract).violations == ("too_long",)


@pytest.mark.parametrize("text", ['{"a": [1, "x"]}', " 3 ", '"text"'])
def test_json_is_accepted(text: str) -> None:
    assert judge(text, OutputContract(must_be_json=True)).valid is True


@pytest.mark.parametrize(
    "text",
    ['```json\n{"a": 1}\n```', "{'a': 1}", '{"a": 1', '{"a": NaN}', "Here: {}", "[" * 200_000, "9" * 10_000],
)
def test_what_is_not_json_is_found(text: str) -> None:
    assert judge(text, OutputContract(must_be_json=True)).violations == ("not_json",)


def test_the_language_of_json_is_that_of_its_values() -> None:
    contract = OutputContract(must_be_json=True, language_from="language")
    text = json.dumps({"description": TRADITIONAL, "highlights": ["斷水俐落"]})  # escaped: no Han in the bytes
    assert judge(text, contract, expected="zh-Hant").valid is True
    assert judge(text, contract, expected="en").violations == ("language",)


@pytest.mark.parametrize("text", ["Truly THE BEST pot.", "Truly ｔｈｅ ｂｅｓｔ pot."])
def test_forbidden_phrases_are_found_whatever_case_and_width(text: str) -> None:
    contract = OutputContract(forbidden_phrases=("the best",))
    assert judge(text, contract).violations == ("forbidden_phrase",)
    assert judge("The finest pot.", contract).valid is True


def test_the_repeated_share_is_that_worked_out_by_hand() -> None:
    # 16 words make 13 four-word windows; "a b c d" comes round every 4 words, so 4 of them differ.
    assert repeated_share("a b c d " * 4) == pytest.approx(1 - 4 / 13)
    # The same in Chinese, where each character is a unit.
    assert repeated_share("春夏秋冬" * 4) == pytest.approx(1 - 4 / 13)
    assert repeated_share("one two three four") is None
    assert repeated_share(ENGLISH + " " + TRADITIONAL) == 0


@pytest.mark.parametrize("text", ["The tea is very good. " * 10, "這茶很好喝。" * 12, "👍" * 60, "a" * 800, "哈" * 60])
def test_a_loop_is_found(text: str) -> None:
    assert judge(text, OutputContract(repetition_limit=0.5)).violations == ("repetition",)
    assert judge(text, OutputContract(min_characters=1)).valid is True  # off unless asked for


def test_the_copied_share_is_that_worked_out_by_hand() -> None:
    prompt = "Describe: a b c d e f g h i j k l m n o p"
    # 12 of 15 windows lie within the prompt's letters; the three that reach "x y z" do not.
    assert copied_share("a b c d e f g h i j k l m n o x y z", prompt) == pytest.approx(12 / 15)
    assert copied_share("a b c d", prompt) is None
    assert copied_share("z y x w v u t s r q p o n m l k", prompt) == 0


# What SmolLM2-135M-Instruct answers to items of the sample, at temperature 0.
RECITED = (
    "請用兩到三句話撰寫這項商品的說明。\n\n商品：高山烏龍茶 150 公克\n材質：春季採收的整葉烏龍\n"
    "特色：海拔一千三百公尺以上茶園、輕烘焙、帶花香、夾"
)
LOOPED = "Dried Irwin mango strips, a little cane sugar, a little bit of extra virgin coconut, " + (
    "a little bit of coconut oil, a little bit of coconut cream, " * 5
)
DESCRIBED = (
    "This product is a great example of a modern kitchen appliance that offers a unique and versatile cooking tool. "
    "It is designed to be used in a variety of settings, from a home kitchen to a professional kitchen, and is "
    "available in a variety of sizes and shapes."
)


@pytest.mark.parametrize(
    ("sku", "output", "violations"),
    [
        ("LS-101-ZH", RECITED, ("copies_prompt",)),
        ("LS-104-EN", LOOPED, ("repetition",)),
        ("LS-203-EN", DESCRIBED, ()),
    ],
)
def test_the_sample_contract_tells_answers_from_recitations_and_loops(
    sku: str, output: str, violations: tuple[str, ...]
) -> None:
    product = next(product for product in load_products() if product.sku == sku)
    contract = OutputContract.model_validate(load_task().output_contract)
    prompt = prompt_text(render_messages(product))
    outcome = judge(output, contract, product.language, prompt=prompt)
    assert (outcome.detected_language, outcome.violations) == (product.language, violations)
    assert outcome.valid is not bool(violations)


def test_copying_that_cannot_be_checked_leaves_the_verdict_open() -> None:
    contract = OutputContract(copy_limit=0.5)
    assert judge(ENGLISH, contract).valid is None
    assert judge(ENGLISH, contract, prompt="Describe a teapot.").valid is True


def test_the_text_of_a_prompt_is_that_of_its_messages_without_images() -> None:
    messages: list[dict[str, object]] = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Describe"}, {"type": "image_url", "image_url": {}}]},
        {"role": "assistant", "content": None},
    ]
    assert prompt_text(messages) == "Be brief.\nDescribe"


@pytest.mark.parametrize(
    "text",
    [
        "I'm sorry, but I can't assist with that.",
        "I’m so sorry, I cannot help with this request.",
        "As an AI language model, I cannot write this.",
        "Unfortunately, I am unable to provide that.",
        "I apologize, but I'm not able to create that content.",
        "**I cannot comply with this request.**",
        "很抱歉，我無法提供這項資訊。",
        "對不起，我不能協助您完成這個要求。",
        "作為一個人工智慧語言模型，我無法撰寫這段說明。",
        "抱歉，无法回答您的问题。",
        "我無法協助這項請求。",
    ],
)
def test_the_usual_refusals_are_recognised(text: str) -> None:
    assert is_refusal(text)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "I can't wait to brew in this pot.",
        "I cannot imagine a better mug for the morning.",
        "I won't give up my evening tea.",
        "Sorry for the wait: this kettle is back in stock.",
        "As an AI company's gift, this mug delights.",
        "This bottle cannot leak. I'm sorry, I can't help myself!",
        "無法提供比這更好的口感，是本店的遺憾。",
        "抱歉讓您久等，這款茶壺回來了。",
        "我們的茶壺不會滴漏。",
        "不能機洗，請手洗後陰乾。",
    ],
)
def test_answers_are_not_taken_for_refusals(text: str) -> None:
    assert not is_refusal(text)


def test_the_expected_language_comes_from_the_metadata_of_the_request() -> None:
    assert SAMPLE_CONTRACT.expected_language({"language": "zh-Hant", "category": "kitchen"}) == "zh-Hant"
    for metadata in (None, {}, {"language": ""}, {"language": 3}):
        assert SAMPLE_CONTRACT.expected_language(metadata) is None
    assert OutputContract().expected_language({"language": "en"}) is None


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("min_characters", -1),
        ("max_characters", 0),
        ("repetition_limit", 1.0),
        ("forbidden_phrases", [""]),
        ("language_from", ""),
        ("langauge_from", "language"),
    ],
)
def test_a_contract_that_cannot_be_is_refused_with_the_field_named(field: str, value: object) -> None:
    with pytest.raises(ValidationError) as refusal:
        OutputContract.model_validate({field: value})
    assert refusal.value.errors()[0]["loc"][0] == field


def test_a_contract_whose_bounds_leave_no_room_is_refused() -> None:
    with pytest.raises(ValidationError, match="most characters must not be fewer"):
        OutputContract(min_characters=20, max_characters=10)


def test_a_contract_survives_json_and_cannot_be_changed() -> None:
    contract = OutputContract(language_from="language", forbidden_phrases=("a", "b"), repetition_limit=0.5)
    assert OutputContract.model_validate_json(contract.model_dump_json()) == contract
    with pytest.raises(ValidationError, match="frozen"):
        contract.min_characters = 3  # type: ignore[misc]


def test_every_violation_has_a_label() -> None:
    assert set(VIOLATION_LABELS) == {violation.value for violation in Violation}
    with translation.override("en"):
        assert str(VIOLATION_LABELS["language"]) == "Not in the expected language"


CONTRACTS = st.builds(
    OutputContract,
    language_from=st.sampled_from([None, "language"]),
    min_characters=st.integers(0, 30),
    max_characters=st.none() | st.integers(30, 60),
    must_be_json=st.booleans(),
    forbidden_phrases=st.lists(st.text("abc壺", min_size=1, max_size=3), max_size=2).map(tuple),
    repetition_limit=st.none() | st.floats(0.1, 0.9),
    copy_limit=st.none() | st.floats(0.1, 0.9),
    allow_refusal=st.booleans(),
)
TEXTS = st.one_of(
    st.text(alphabet=st.characters(), max_size=200),
    st.text("`<a@.:/h壺カ가я3 ", max_size=200),
    st.recursive(st.none() | st.text(max_size=9), lambda x: st.lists(x) | st.dictionaries(st.text(), x)).map(
        json.dumps
    ),
)


@given(
    text=TEXTS,
    contract=CONTRACTS,
    expected=st.none() | st.sampled_from(["en", "zh-Hant", "zh", "ja", ""]) | st.text(max_size=12),
    finish_reason=st.sampled_from(["stop", "length", "content_filter", ""]),
    error=st.booleans(),
    prompt=st.none() | TEXTS,
)
def test_no_output_makes_it_raise_and_no_verdict_contradicts_itself(
    text: str, contract: OutputContract, expected: str | None, finish_reason: str, error: bool, prompt: str | None
) -> None:
    outcome = judge(text, contract, expected, finish_reason=finish_reason, error=error, prompt=prompt)
    assert (outcome.valid is False) == bool(outcome.violations)
    assert set(outcome.violations) <= set(VIOLATION_LABELS)
    assert len(set(outcome.violations)) == len(outcome.violations)
    assert outcome.truncated == (finish_reason == "length" and not error)
    assert (outcome.detected_language is None) == error
