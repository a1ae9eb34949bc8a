"""Reads the sample and turns it into the lines of an OpenAI batch file.

The 64 records are 32 products, each once in English and once in Traditional Chinese with the same facts
(`LS-101-EN`, `LS-101-ZH`). So a difference between the two language groups is one of language, not of
product.
"""

from collections.abc import Iterator
from decimal import Decimal
from functools import cache
from importlib import resources
from string import Template
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError

from inference.json_lines import json_line

Language = Literal["en", "zh-Hant"]


class SampleError(Exception):
    """A file of the sample is broken: names the file, the line where there is one, and what is wrong."""

    def __init__(self, file: str, problem: str, line: int | None = None) -> None:
        self.file, self.line, self.problem = file, line, problem
        place = file if line is None else f"{file}, line {line}"
        super().__init__(f"{place}: {problem}")


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Product(_Record):
    """One product record. `category` is a code, the same in both languages; the rest is in `language`."""

    sku: str = Field(pattern=r"^LS-\d{3}-(EN|ZH)$")
    name: str = Field(min_length=1)
    language: Language
    category: str = Field(pattern=r"^[a-z]+(-[a-z]+)*$")
    features: tuple[str, ...] = Field(min_length=1)
    material: str = Field(min_length=1)
    price_twd: int = Field(gt=0)  # whole New Taiwan dollars, tax included


class PromptVariant(_Record):
    """The prompt in one language. `template` is a `string.Template` over the fields of `Product`."""

    system: str
    template: str
    list_separator: str


class PromptByLanguage(_Record):
    by: Literal["language"]
    variants: dict[Language, PromptVariant]


class SuggestedObjective(_Record):
    """A target to begin with, in the form of `penstock.registry.contracts.Objective`."""

    metric: str
    target: Decimal


class SampleTask(_Record):
    """The definition in `task.yaml`. `title` and `purpose` are keyed by language.

    `output_contract` has the fields of `penstock.serving.outcome.OutputContract`.
    """

    name: str
    title: dict[Language, str]
    purpose: dict[Language, str]
    latency_class: Literal["realtime", "interactive", "nearline", "batch"]
    risk_tier: str
    group_attribute: str
    max_tokens: int = Field(gt=0)
    temperature: float = Field(ge=0)
    prompt: PromptByLanguage
    output_contract: dict[str, JsonValue]
    objectives: tuple[SuggestedObjective, ...]


def _read(file: str) -> str:
    return resources.files(__package__).joinpath(file).read_text(encoding="utf-8")


@cache
def load_products() -> tuple[Product, ...]:
    """All 64 records, the two languages by turns. Raises `SampleError` naming the line that is broken."""
    products = []
    for number, line in enumerate(_read("products.jsonl").rstrip("\n").split("\n"), start=1):
        try:
            products.append(Product.model_validate_json(line))
        except ValidationError as error:
            raise SampleError("products.jsonl", str(error), number) from error
    return tuple(products)


@cache
def load_task() -> SampleTask:
    """The sample task. Raises `SampleError` if `task.yaml` does not hold one."""
    try:
        return SampleTask.model_validate(yaml.safe_load(_read("task.yaml")))
    except (ValidationError, yaml.YAMLError) as error:
        raise SampleError("task.yaml", str(error)) from error


def render_messages(product: Product) -> list[dict[str, str]]:
    """The chat messages that ask for a description of this product, in its own language."""
    variant = load_task().prompt.variants[product.language]
    fields = product.model_dump() | {"features": variant.list_separator.join(product.features)}
    return [
        {"role": "system", "content": variant.system},
        {"role": "user", "content": Template(variant.template).substitute(fields)},
    ]


def batch_lines(model: str) -> Iterator[dict[str, Any]]:
    """The 64 lines of an OpenAI batch input file (one JSON object each) for the model of this name."""
    task = load_task()
    for product in load_products():
        yield {
            "custom_id": product.sku,
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {
                "model": model,
                "messages": render_messages(product),
                "max_tokens": task.max_tokens,
                "temperature": task.temperature,
                "metadata": {"language": product.language, "category": product.category},
            },
        }


def batch_file(model: str) -> bytes:
    """The same lines as the bytes of a JSONL file: UTF-8, a newline after each line, always the same
    bytes."""
    return b"".join(map(json_line, batch_lines(model)))
