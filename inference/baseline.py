"""The naive way: transformers' `generate`, unquantized, one prompt at a time. What a pilot is compared with."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from inference.errors import ModelFormatError
from inference.tokenizer import Tokenizer
from inference.weights.sources import open_source
from inference.weights.tokenizer_files import SETTINGS_NAME, TOKENIZER_NAME

_TRIAL_TOKENS = 8


@dataclass(frozen=True, slots=True)
class BaselineCompletion:
    """The outcome of one prompt. `output_tokens` includes the end token where the model made one."""

    text: str
    prompt_tokens: int
    output_tokens: int
    duration_seconds: float
    ttft_seconds: float | None
    finish_reason: Literal["stop", "length"]


class _FirstToken:
    """A streamer of transformers that only notes when the first token came."""

    def __init__(self) -> None:
        self.at: float | None = None
        self._prompt_seen = False

    def put(self, _: Any) -> None:
        # generate() hands over the prompt before the first token.
        if self._prompt_seen and self.at is None:
            self.at = time.perf_counter()
        self._prompt_seen = True

    def end(self) -> None:
        pass


class NaiveBaseline:
    """A model in transformers, dequantized, in whichever of float32 and bfloat16 this processor runs faster.

    dtype: "float32" or "bfloat16", as chosen. versions: of the libraries that do the work, for the record.
    """

    def __init__(self, model: Any, tokenizer: Tokenizer, dtype: str) -> None:
        self._model = model
        self.tokenizer = tokenizer
        self.dtype = dtype
        import transformers

        self.versions = {"transformers": str(transformers.__version__), "torch": str(torch.__version__)}

    @classmethod
    def load(cls, source: Path | str, *, threads: int | None = None) -> NaiveBaseline:
        """From a GGUF file or a Hugging Face folder. Both types are tried on a short prompt; the faster one stays.

        Raises ModelFormatError where the source cannot be read or has no tokenizer.
        """
        if threads is not None:
            torch.set_num_threads(threads)
        path = Path(source)
        tokenizer = _tokenizer(path)
        model: Any = None
        seconds: dict[torch.dtype, float] = {}
        for dtype in (torch.float32, torch.bfloat16):
            model = None  # let go of the first before the second is read: memory holds one at a time
            model = _load(path, dtype)
            seconds[dtype] = _trial_seconds(model)
        fastest = min(seconds, key=lambda dtype: seconds[dtype])
        if fastest is not torch.bfloat16:
            model = None
            model = _load(path, fastest)
        return cls(model, tokenizer, str(fastest).removeprefix("torch."))

    def generate(self, messages: Sequence[Mapping[str, Any]], max_tokens: int) -> BaselineCompletion:
        """Complete one conversation greedily. `max_tokens` at most."""
        ids = torch.tensor([self.tokenizer.encode_chat(messages)])
        first = _FirstToken()
        ends = sorted(self.tokenizer.eos_token_ids)
        started = time.perf_counter()
        with torch.inference_mode():
            output = self._model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=max_tokens,
                eos_token_id=ends or None,
                pad_token_id=ends[0] if ends else None,
                streamer=first,
            )
        duration = time.perf_counter() - started
        made = output[0, ids.shape[1] :].tolist()
        return BaselineCompletion(
            text=self.tokenizer.decode(made),
            prompt_tokens=ids.shape[1],
            output_tokens=len(made),
            duration_seconds=duration,
            ttft_seconds=None if first.at is None else first.at - started,
            finish_reason="stop" if made and made[-1] in self.tokenizer.eos_token_ids else "length",
        )


def _load(path: Path, dtype: torch.dtype) -> Any:
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    quiet: Any = logging
    quiet.disable_progress_bar()
    if path.is_dir():
        model: Any = AutoModelForCausalLM.from_pretrained(str(path), dtype=dtype, local_files_only=True)
        return model.eval()
    from transformers import GgufConfig

    model = AutoModelForCausalLM.from_pretrained(
        str(path.parent),
        gguf_file=path.name,
        dtype=dtype,
        quantization_config=GgufConfig(dequantize=True),
        local_files_only=True,
    )
    return model.eval()


def _tokenizer(path: Path) -> Tokenizer:
    """The engine's own tokenizer for the source, so that both sides are asked exactly the same."""
    import json

    from tokenizers import Tokenizer as FastTokenizer

    files = open_source(path).tokenizer_files()
    if TOKENIZER_NAME not in files:
        raise ModelFormatError(path, TOKENIZER_NAME, "is missing; the baseline needs a tokenizer")
    return Tokenizer(FastTokenizer.from_str(files[TOKENIZER_NAME]), json.loads(files[SETTINGS_NAME]))


def _trial_seconds(model: Any) -> float:
    ids = torch.arange(1, 33)[None, :] % int(model.config.vocab_size)
    options = {"attention_mask": torch.ones_like(ids), "do_sample": False, "pad_token_id": 0}
    with torch.inference_mode():
        model.generate(ids, max_new_tokens=2, **options)
        started = time.perf_counter()
        model.generate(ids, max_new_tokens=_TRIAL_TOKENS, min_new_tokens=_TRIAL_TOKENS, **options)
        return time.perf_counter() - started
