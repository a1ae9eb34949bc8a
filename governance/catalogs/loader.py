"""Loads the control catalogs that ship with Penstock.

A catalog is a YAML file in `data/`, read once and checked strictly: unknown or missing fields are errors,
identifiers are unique, every control names a group that exists. It carries the SHA-256 of its file, so that a
report can say which text it was made against.
"""

import datetime as dt
import hashlib
from collections import Counter
from collections.abc import Mapping
from functools import lru_cache
from importlib import resources
from types import MappingProxyType
from typing import Literal, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, HttpUrl, ValidationError, model_validator

DATA = resources.files("governance.catalogs") / "data"

NonEmpty = Field(min_length=1)


class CatalogError(Exception):
    """A catalog file cannot be used: says which file, which field and what would be right."""

    def __init__(self, file: str, problem: str) -> None:
        super().__init__(f"{file}: {problem}")
        self.file = file
        self.problem = problem


class UnknownCatalogError(CatalogError, LookupError):
    """No catalog has this identifier."""


class UnknownControlError(CatalogError, LookupError):
    """The catalog has no control with this identifier."""


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", str_strip_whitespace=True)


class Text(_Strict):
    """A text in both languages of the interface."""

    en: str = NonEmpty
    zh_hant: str = NonEmpty

    def in_language(self, language: str | None) -> str:
        """The text for a language code: any `zh` gives Traditional Chinese, everything else English."""
        return self.zh_hant if (language or "").lower().startswith("zh") else self.en


class Group(_Strict):
    """A heading of a catalog: an Annex A clause, an AI RMF function or category."""

    id: str = NonEmpty
    parent: str | None = None
    title: Text


class Control(_Strict):
    """One row of a catalog; its catalog's `text_kind` says whether `text` is verbatim."""

    id: str = NonEmpty
    group: str = NonEmpty
    title: Text
    text: Text


class Catalog(_Strict):
    """One framework in one version, with the source of its text and the SHA-256 of its file."""

    id: str = NonEmpty
    title: Text
    publisher: str = NonEmpty
    version: str = NonEmpty
    source: str = NonEmpty
    source_url: HttpUrl
    retrieved: dt.date
    text_kind: Literal["verbatim", "paraphrase"]
    text_source: Text
    groups: tuple[Group, ...] = Field(min_length=1)
    controls: tuple[Control, ...] = Field(min_length=1)
    digest: str = Field(pattern=r"^[0-9a-f]{64}$")

    @model_validator(mode="after")
    def _references_hold(self) -> Self:
        for what, ids in (
            ("group", [group.id for group in self.groups]),
            ("control", [control.id for control in self.controls]),
        ):
            twice = [identifier for identifier, count in Counter(ids).items() if count > 1]
            if twice:
                raise ValueError(f"{what} identifiers must be unique; repeated: {', '.join(twice)}")
        known: set[str] = set()
        for group in self.groups:
            # A parent stands before its children, so the groups cannot form a ring.
            if group.parent is not None and group.parent not in known:
                raise ValueError(f"group {group.id} names a parent {group.parent} not listed before it")
            known.add(group.id)
        for control in self.controls:
            if control.group not in known:
                raise ValueError(f"control {control.id} names an unknown group {control.group}")
        return self

    def control(self, control_id: str) -> Control:
        """The control of this identifier; `UnknownControlError` if there is none."""
        for control in self.controls:
            if control.id == control_id:
                return control
        raise UnknownControlError(self.id, f"no control {control_id!r}; this catalog has {len(self.controls)}")

    def group(self, group_id: str) -> Group:
        """The group of this identifier; every `Control.group` resolves."""
        for group in self.groups:
            if group.id == group_id:
                return group
        raise UnknownControlError(self.id, f"no group {group_id!r}")

    def group_path(self, control: Control) -> tuple[Group, ...]:
        """The groups above a control, outermost first: a function and a category, or one clause."""
        path: list[Group] = []
        group_id: str | None = control.group
        while group_id is not None:
            group = self.group(group_id)
            path.insert(0, group)
            group_id = group.parent
        return tuple(path)


def parse_catalog(raw: bytes, *, file: str) -> Catalog:
    """Read one catalog from the bytes of a YAML file; `CatalogError` names file and field."""
    try:
        content = yaml.safe_load(raw)
    except yaml.YAMLError as error:
        raise CatalogError(file, f"is not YAML: {error}") from error
    if not isinstance(content, dict):
        raise CatalogError(file, "must be a mapping with id, title, groups and controls")
    content["digest"] = hashlib.sha256(raw).hexdigest()
    try:
        return Catalog.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "catalog"
        raise CatalogError(file, f"{where}: {first['msg']}") from error


@lru_cache(maxsize=1)
def load_catalogs() -> Mapping[str, Catalog]:
    """All catalogs by identifier, in the order of their file names; read once a process."""
    catalogs: dict[str, Catalog] = {}
    for path in sorted(DATA.iterdir(), key=lambda entry: entry.name):
        if not path.name.endswith(".yaml"):
            continue
        catalog = parse_catalog(path.read_bytes(), file=path.name)
        if catalog.id in catalogs:
            raise CatalogError(path.name, f"the identifier {catalog.id} is used by another file too")
        catalogs[catalog.id] = catalog
    return MappingProxyType(catalogs)


def get_catalog(catalog_id: str) -> Catalog:
    """The catalog of this identifier; `UnknownCatalogError` names those that exist."""
    catalogs = load_catalogs()
    try:
        return catalogs[catalog_id]
    except KeyError:
        raise UnknownCatalogError(catalog_id, f"no such catalog; there are {', '.join(catalogs)}") from None
