"""The catalogs that ship: complete, in both languages, and traceable to a file."""

import datetime as dt
import hashlib
import re
from collections import Counter

import hanzidentifier
import pytest

from governance.catalogs.loader import (
    DATA,
    Catalog,
    CatalogError,
    UnknownCatalogError,
    UnknownControlError,
    get_catalog,
    load_catalogs,
    parse_catalog,
)

# Counted in the published frameworks.
COUNTS = {
    "iso-iec-42001-2023": 38,
    "nist-ai-rmf-1.0": 72,
    "eu-ai-act-2024": 15,
    "taiwan-ai-basic-act-2026": 7,
}


def catalogs() -> list[Catalog]:
    return list(load_catalogs().values())


def test_the_shipped_catalogs_have_the_published_number_of_controls() -> None:
    assert {catalog.id: len(catalog.controls) for catalog in catalogs()} == COUNTS


def test_annex_a_has_its_published_number_of_controls_a_clause() -> None:
    per_group = Counter(control.group for control in get_catalog("iso-iec-42001-2023").controls)
    assert per_group == {
        "A.2": 3,
        "A.3": 2,
        "A.4": 5,
        "A.5": 4,
        "A.6": 9,
        "A.7": 5,
        "A.8": 4,
        "A.9": 3,
        "A.10": 3,
    }


def test_annex_a_has_none_of_the_identifiers_that_do_not_exist() -> None:
    identifiers = {control.id for control in get_catalog("iso-iec-42001-2023").controls}
    assert all(re.fullmatch(r"A\.\d+(\.\d+){1,2}", identifier) for identifier in identifiers)
    assert "A.6.2.9" not in identifiers


def test_the_ai_rmf_has_its_published_number_of_subcategories_a_function() -> None:
    catalog = get_catalog("nist-ai-rmf-1.0")
    per_function = Counter(catalog.group_path(control)[0].id for control in catalog.controls)
    assert per_function == {"GOVERN": 19, "MAP": 18, "MEASURE": 22, "MANAGE": 13}
    categories = [group for group in catalog.groups if group.parent]
    assert len(categories) == 19
    for control in catalog.controls:
        function, category = catalog.group_path(control)
        assert control.id.startswith(f"{category.id}.")
        assert category.id.startswith(f"{function.id} ")


def test_the_ai_rmf_statements_are_the_frameworks_own_words() -> None:
    catalog = get_catalog("nist-ai-rmf-1.0")
    assert catalog.text_kind == "verbatim"
    assert catalog.control("MANAGE 1.1").text.en == (
        "A determination is made as to whether the AI system achieves its intended purposes and stated "
        "objectives and whether its development or deployment should proceed."
    )


def test_iso_text_is_declared_a_paraphrase() -> None:
    assert get_catalog("iso-iec-42001-2023").text_kind == "paraphrase"


@pytest.mark.parametrize("catalog", catalogs(), ids=lambda catalog: catalog.id)
def test_every_chinese_text_is_traditional(catalog: Catalog) -> None:
    texts = [catalog.title, catalog.text_source, *(group.title for group in catalog.groups)]
    texts += [text for control in catalog.controls for text in (control.title, control.text)]
    for text in texts:
        assert hanzidentifier.is_traditional(text.zh_hant), text
        assert hanzidentifier.has_chinese(text.zh_hant), text
        assert not hanzidentifier.has_chinese(text.en), text


@pytest.mark.parametrize("catalog", catalogs(), ids=lambda catalog: catalog.id)
def test_a_catalog_carries_source_date_and_the_digest_of_its_file(catalog: Catalog) -> None:
    digests = {hashlib.sha256(path.read_bytes()).hexdigest() for path in DATA.iterdir()}
    assert catalog.digest in digests
    assert catalog.retrieved == dt.date(2026, 11, 30)
    assert catalog.source and catalog.version and str(catalog.source_url).startswith("https://")


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("en", "AI policy"),
        ("zh-hant", "AI 政策"),
        ("zh_Hant", "AI 政策"),
        ("fr", "AI policy"),
        (None, "AI policy"),
    ],
)
def test_a_text_answers_in_the_readers_language(code: str | None, expected: str) -> None:
    assert get_catalog("iso-iec-42001-2023").control("A.2.2").title.in_language(code) == expected


def test_an_unknown_catalog_is_refused_with_those_that_exist() -> None:
    with pytest.raises(UnknownCatalogError, match=r"nist-ai-rmf-1\.0"):
        get_catalog("iso-27001")


def test_an_unknown_control_is_refused() -> None:
    with pytest.raises(UnknownControlError, match=r"A\.6\.2\.9"):
        get_catalog("iso-iec-42001-2023").control("A.6.2.9")


MINIMAL = """
id: sample
title: {en: Sample, zh_hant: 範例}
publisher: Someone
version: "1"
source: A book
source_url: https://example.org/
retrieved: 2026-11-30
text_kind: paraphrase
text_source: {en: Ours, zh_hant: 自撰}
groups:
  - {id: G, title: {en: Group, zh_hant: 群組}}
controls:
  - {id: C1, group: G, title: {en: One, zh_hant: 一}, text: {en: Text, zh_hant: 文字}}
"""


def test_a_well_formed_file_is_read() -> None:
    assert parse_catalog(MINIMAL.encode(), file="sample.yaml").control("C1").title.en == "One"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("group: G,", "group: H,", "unknown group H"),
        ("zh_hant: 一", "zh_hant: ''", r"controls\.0\.title\.zh_hant"),
        ("publisher: Someone", "", "publisher"),
        ("publisher: Someone", "publisher: Someone\nscore: 97", "score"),
        ("{id: G, title", "{id: G, parent: G, title", "not listed before"),
        ("groups:", "groups: [", "not YAML"),
        (
            "controls:",
            "controls:\n  - {id: C1, group: G, title: {en: A, zh_hant: 一}, text: {en: B, zh_hant: 文}}",
            "repeated: C1",
        ),
    ],
)
def test_a_faulty_file_is_refused_with_file_and_field(old: str, new: str, message: str) -> None:
    with pytest.raises(CatalogError, match=message) as caught:
        parse_catalog(MINIMAL.replace(old, new).encode(), file="sample.yaml")
    assert str(caught.value).startswith("sample.yaml: ")
