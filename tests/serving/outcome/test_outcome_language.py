"""Languages are told as a reader would tell them. Expected values: the texts were written in that language."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.sample.records import load_products
from penstock.serving.outcome import is_language_tag
from penstock.serving.outcome.language import contradicts, detect, expects_variant

ENGLISH = (
    "This stoneware teapot is thrown by hand on the wheel. A round strainer inside keeps the leaves back, "
    "and the spout pours without dripping."
)
TRADITIONAL = "這只小茶壺以陶土手拉坯成形，壺內附有球形濾孔，倒茶時斷水俐落，不會沿著壺嘴滴漏。"
SIMPLIFIED = "这只小茶壶以陶土手拉坯成形，壶内附有球形滤孔，倒茶时断水利落，不会沿着壶嘴滴漏。"


@pytest.mark.parametrize(
    ("text", "tag"),
    [
        (ENGLISH, "en"),
        (ENGLISH.upper(), "en"),
        (TRADITIONAL, "zh-Hant"),
        (SIMPLIFIED, "zh-Hans"),
        ("臺北的冬天常下雨，這把自動折傘收起來只有二十七公分，放進背包剛好。", "zh-Hant"),
        ("支援 65 W USB-C 快充，可同時為筆電與手機充電，插頭可收折。", "zh-Hant"),
        ("這款 LED 檯燈☀️有五段亮度，閱讀、寫字都合適👍👍", "zh-Hant"),
        ("A dimmable LED desk lamp ☀️ with five brightness steps that remembers its last setting 👍", "en"),
        ("The tea is known as 高山烏龍 and grows above 1,300 metres, where mornings are cool and misty.", "en"),
        ("この急須は職人がろくろで一つずつ作りました。注ぎ口から水が垂れません。", "ja"),
        ("이 찻주전자는 물레로 하나하나 손으로 빚었습니다.", "ko"),
        ("Cette théière en grès est tournée à la main et verse sans goutter.", "fr"),
        ("Diese Teekanne aus Steinzeug wird von Hand gedreht und gießt, ohne zu tropfen.", "de"),
        ("Ấm trà bằng gốm này được làm thủ công và rót không bị nhỏ giọt.", "vi"),
        ("Этот чайник сделан вручную на гончарном круге.", "ru"),
        ("กาน้ำชาดินเผานี้ปั้นด้วยมือทีละใบ", "th"),
        ("你好", "zh"),  # both characters are common to Traditional and Simplified
        ("", "und"),
        ("   \n\t", "und"),
        ("👍🎉✨", "und"),
        ("1,280 / 3.5 % --- 42", "und"),
        ("def f(x):\n    return x + 1", "und"),
        ("```python\nfor name in names:\n    print(name)\n```\n這段程式會依序印出每個名稱。", "zh-Hant"),
        ("請看 https://example.com/a/very/long/address/that/has/many/english/words/in/it 的說明。", "zh-Hant"),
        ("<div class='description'><strong>輕巧耐用</strong>，適合登山健行。</div>", "zh-Hant"),
    ],
)
def test_the_language_of_a_text_is_told(text: str, tag: str) -> None:
    assert detect(text).tag == tag


@pytest.mark.parametrize("product", load_products(), ids=lambda product: product.sku)
def test_the_language_of_every_sample_record_is_told(product) -> None:  # type: ignore[no-untyped-def]
    joint, stop = (", ", ". ") if product.language == "en" else ("、", "。")
    text = stop.join([product.name, product.material, joint.join(product.features)])
    assert detect(text).tag == product.language
    other = {"en": "zh-Hant", "zh-Hant": "en"}[product.language]
    assert contradicts(detect(text, other), other)
    assert not contradicts(detect(product.name, product.language), product.language)


def test_half_english_half_chinese_is_in_several_languages() -> None:
    assert detect(TRADITIONAL + "\n" + ENGLISH).tag == "mul"


def test_an_english_answer_behind_a_chinese_opening_is_english() -> None:
    assert detect("好的，以下是商品說明：\n" + ENGLISH * 2).tag == "en"


def test_traditional_and_simplified_together_are_noticed() -> None:
    detection = detect(TRADITIONAL + SIMPLIFIED)
    assert (detection.tag, detection.mixed_script) == ("zh", True)


def test_one_stray_simplified_character_is_a_slip() -> None:
    detection = detect(TRADITIONAL.replace("滴漏", "滴漏时") + TRADITIONAL)
    assert (detection.tag, detection.mixed_script) == ("zh-Hant", False)


@pytest.mark.parametrize(
    ("text", "expected", "contradicted"),
    [
        (ENGLISH, "en", False),
        (ENGLISH, "en-GB", False),
        (ENGLISH, "zh-Hant", True),
        (ENGLISH, "fr", True),
        (TRADITIONAL, "zh-Hant", False),
        (TRADITIONAL, "zh-TW", False),
        (TRADITIONAL, "zh-Hant-TW", False),
        (TRADITIONAL, "zh_TW", False),
        (TRADITIONAL, "zh", False),
        (TRADITIONAL, "zh-CN", True),
        (TRADITIONAL, "ja", True),
        (SIMPLIFIED, "zh-Hant", True),
        (SIMPLIFIED, "zh-Hans", False),
        ("你好", "zh-Hant", False),
        ("你好", "zh-Hans", False),
        ("def f(x):\n    return x + 1", "zh-Hant", True),
        ("Tea.", "en", False),  # too short to tell, and nothing speaks against it
        ("👍", "en", True),
        ("Koppen er laget for hånd og tåler oppvaskmaskin.", "nb", False),
    ],
)
def test_an_output_contradicts_the_expected_language_or_not(text: str, expected: str, contradicted: bool) -> None:
    assert contradicts(detect(text, expected), expected) is contradicted


@pytest.mark.parametrize("tag", ["", "Traditional Chinese", "e", "12", "en--GB", "tlh", "x" * 500])
def test_a_tag_that_cannot_be_checked_is_said_to_be_so(tag: str) -> None:
    assert not is_language_tag(tag)
    assert contradicts(detect(ENGLISH, tag), tag) is None


@pytest.mark.parametrize(("tag", "variant"), [("zh-Hant", True), ("zh-SG", True), ("zh", False), ("en", False)])
def test_only_some_tags_ask_for_a_chinese_variant(tag: str, variant: bool) -> None:
    assert is_language_tag(tag)
    assert expects_variant(tag) is variant


def test_a_very_long_output_is_told_by_its_start_and_end() -> None:
    assert detect(ENGLISH * 2000).tag == "en"
    assert detect(TRADITIONAL * 5000).tag == "zh-Hant"


def test_many_threads_get_the_answers_that_one_gets() -> None:
    texts = [ENGLISH, TRADITIONAL, SIMPLIFIED, "Diese Kanne wird von Hand gemacht."] * 50
    alone = [detect(text) for text in texts]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(detect, texts)) == alone


@given(st.text(alphabet=st.characters(), max_size=400), st.text(max_size=20) | st.sampled_from(["en", "zh-Hant"]))
def test_no_text_and_no_tag_make_it_raise(text: str, tag: str) -> None:
    detection = detect(text, tag)
    assert detection.tag
    assert contradicts(detection, tag) in {True, False, None}


@given(st.text(max_size=200))
def test_white_space_around_a_text_changes_nothing(text: str) -> None:
    stripped = text.strip()
    assert detect(stripped).script == detect(f"\n  {stripped} \n").script
