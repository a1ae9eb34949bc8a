"""The sample is complete, even between its two languages, and makes a batch file that the OpenAI client knows."""

import json
from collections import Counter

import pytest
from openai.types.chat import completion_create_params

from penstock.sample import records
from penstock.sample.records import (
    SampleError,
    batch_file,
    batch_lines,
    load_products,
    load_task,
    render_messages,
)
from penstock.serving.outcome import OutputContract
from penstock.serving.outcome.language import detect


def test_half_of_the_64_records_are_in_each_language() -> None:
    products = load_products()
    assert Counter(product.language for product in products) == {"en": 32, "zh-Hant": 32}
    assert len({product.sku for product in products}) == 64
    assert len({product.name for product in products}) == 64


def test_each_product_is_there_in_both_languages_with_the_same_facts() -> None:
    pairs: dict[str, dict[str, records.Product]] = {}
    for product in load_products():
        pairs.setdefault(product.sku[:-3], {})[product.language] = product
    for pair in pairs.values():
        english, chinese = pair["en"], pair["zh-Hant"]
        assert english.category == chinese.category
        assert english.price_twd == chinese.price_twd
        assert len(english.features) == len(chinese.features)


def test_each_category_holds_the_same_number_of_products() -> None:
    assert set(Counter(product.category for product in load_products()).values()) == {8}


def test_the_languages_alternate_so_that_a_part_of_the_batch_is_even() -> None:
    assert [product.language for product in load_products()] == ["en", "zh-Hant"] * 32


@pytest.mark.parametrize("product", load_products(), ids=lambda product: product.sku)
def test_each_prompt_is_in_the_language_of_its_record_with_all_fields_filled_in(product: records.Product) -> None:
    system, user = render_messages(product)
    assert (system["role"], user["role"]) == ("system", "user")
    for message in (system, user):
        assert detect(message["content"]).tag == product.language
    for fact in (product.name, product.material, *product.features, str(product.price_twd)):
        assert fact in user["content"]
    assert "$" not in user["content"].replace("NT$", "")


def test_the_english_prompt_shows_the_price_in_dollars() -> None:
    first = load_products()[0]
    assert render_messages(first)[1]["content"].endswith("Price: NT$680")


def test_batch_lines_are_chat_completion_requests() -> None:
    lines = list(batch_lines("some-model"))
    assert [line["custom_id"] for line in lines] == [product.sku for product in load_products()]
    known = set(completion_create_params.CompletionCreateParamsNonStreaming.__annotations__)
    known |= set(completion_create_params.CompletionCreateParamsBase.__annotations__)
    for line in lines:
        assert line.keys() == {"custom_id", "method", "url", "body"}
        assert (line["method"], line["url"]) == ("POST", "/v1/chat/completions")
        assert line["body"].keys() <= known
        assert line["body"]["model"] == "some-model"
        assert line["body"]["max_tokens"] == 96
        assert line["body"]["temperature"] == 0
        assert line["body"]["metadata"].keys() == {"language", "category"}


def test_the_batch_file_is_jsonl_and_always_the_same_bytes() -> None:
    content = batch_file("some-model")
    assert content == batch_file("some-model")
    assert content.endswith(b"}\n")
    assert [json.loads(line) for line in content.decode().splitlines()] == list(batch_lines("some-model"))


def test_the_contract_of_the_task_expects_the_language_of_the_record() -> None:
    task = load_task()
    contract = OutputContract.model_validate(task.output_contract)
    assert contract.min_characters == 20
    assert task.group_attribute == contract.language_from
    for line in batch_lines("some-model"):
        suffix = {"en": "EN", "zh-Hant": "ZH"}[contract.expected_language(line["body"]["metadata"]) or ""]
        assert line["custom_id"].endswith(suffix)


def test_the_suggested_objectives_are_ones_that_the_registry_takes() -> None:
    from penstock.registry.contracts import parse_objectives

    suggested = [objective.model_dump(mode="json") for objective in load_task().objectives]
    assert [objective.metric for objective in parse_objectives(suggested)] == [
        "deadline_met_rate",
        "error_rate",
        "valid_rate",
    ]


def test_a_broken_record_is_named_with_its_line(monkeypatch: pytest.MonkeyPatch) -> None:
    good = json.dumps(load_products()[0].model_dump())
    monkeypatch.setattr(records, "_read", lambda file: f"{good}\n{good.replace('680', '-1')}\n")
    load_products.cache_clear()
    try:
        with pytest.raises(SampleError, match=r"(?s)products\.jsonl, line 2: .*price_twd"):
            load_products()
    finally:
        load_products.cache_clear()
