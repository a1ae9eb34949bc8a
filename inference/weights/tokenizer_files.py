"""The tokenizer's two files in a store: tokenizer.json, and tokenizer_settings.json with what chat needs beside it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from inference.errors import ModelFormatError
from inference.weights.safetensors_folder import SafetensorsFolder, read_json

TOKENIZER_NAME = "tokenizer.json"
SETTINGS_NAME = "tokenizer_settings.json"


def settings_json(
    *, chat_template: str | None, eos_token_ids: list[int], bos_token: str | None, eos_token: str | None
) -> str:
    """tokenizer_settings.json: the chat template (Jinja), the ids that end an output, and two tokens templates use."""
    settings = {
        "chat_template": chat_template,
        "eos_token_ids": eos_token_ids,
        "bos_token": bos_token,
        "eos_token": eos_token,
    }
    return json.dumps(settings, indent=1, ensure_ascii=False) + "\n"


def tokenizer_files_from_folder(folder: Path, eos_token_id: Any) -> dict[str, str]:
    """A Hugging Face folder's tokenizer, file name -> content; {} where the folder has none (a bare model)."""
    source = folder / TOKENIZER_NAME
    if not source.exists():
        return {}
    read_json(source)
    config_path = folder / "tokenizer_config.json"
    config = read_json(config_path) if config_path.exists() else {}
    template = config.get("chat_template")
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
    beside = folder / "chat_template.jinja"
    if template is None and beside.exists():
        template = beside.read_text("utf-8")
    ids = eos_token_id if isinstance(eos_token_id, list) else [eos_token_id]
    if not all(isinstance(token, int) for token in ids):
        if ids != [None]:
            raise ModelFormatError(
                folder / "config.json", "key 'eos_token_id'", f"is {eos_token_id!r}; numbers are needed"
            )
        ids = []
    settings = settings_json(
        chat_template=template,
        eos_token_ids=ids,
        bos_token=_token_text(config.get("bos_token")),
        eos_token=_token_text(config.get("eos_token")),
    )
    return {TOKENIZER_NAME: source.read_text("utf-8"), SETTINGS_NAME: settings}


def tokenizer_files_of_model(model: SafetensorsFolder) -> dict[str, str]:
    """`tokenizer_files_from_folder`, ending at what the model's generation settings, or else its own, say."""
    generation = model.path / "generation_config.json"
    eos = read_json(generation).get("eos_token_id") if generation.exists() else None
    return tokenizer_files_from_folder(model.path, eos if eos is not None else model.config.get("eos_token_id"))


def _token_text(token: Any) -> str | None:
    """A special token as tokenizer_config.json writes it: text, or an object with `content`."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None
