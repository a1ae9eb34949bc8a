"""A GGUF file's vocabulary as a tokenizer of the `tokenizers` library.

Two models occur in the llama architecture: "gpt2", a byte-level BPE whose way of cutting text into words is named by
`tokenizer.ggml.pre`, and "llama", SentencePiece's BPE, which comes as pieces with scores and without merges.
"""

from __future__ import annotations

from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE

from inference.errors import ModelFormatError
from inference.weights.gguf import GGUFFile
from inference.weights.tokenizer_files import SETTINGS_NAME, TOKENIZER_NAME, settings_json

_MOST_CHARACTERS = 4096  # of a token

_CONTROL, _USER_DEFINED = 3, 4

# How the words of Llama 3 and Qwen 2 are cut; they differ in the length of a run of digits.
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _pre_tokenizer(file: GGUFFile, name: str) -> Any:
    def split(pattern: str) -> Any:
        return pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(pattern), "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )

    if name in ("llama-bpe", "llama3", "llama-v3", "smaug-bpe", "dbrx"):
        return split(_WORDS % "{1,3}")
    if name == "qwen2":
        return split(_WORDS % "")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if name in ("smollm", "refact"):
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    if name in ("default", "gpt-2"):
        return byte_level
    known = "smollm, refact, llama-bpe, smaug-bpe, dbrx, qwen2, gpt-2 and default"
    raise ModelFormatError(file.path, "key 'tokenizer.ggml.pre'", f"is {name!r}; {known} are read")


def _byte_level(file: GGUFFile, tokens: list[str]) -> Tokenizer:
    merges: list[tuple[str, str]] = []
    for line in file.require("tokenizer.ggml.merges", list):
        left, _, right = line.partition(" ")
        merges.append((left, right))
    pre = file.metadata.get("tokenizer.ggml.pre", "default")
    vocabulary = {token: index for index, token in enumerate(tokens)}
    try:
        model = BPE(vocab=vocabulary, merges=merges, ignore_merges=pre in ("llama-bpe", "llama3", "llama-v3"))
    except Exception as error:
        raise ModelFormatError(
            file.path, "key 'tokenizer.ggml.merges'", f"do not fit the vocabulary: {error}"
        ) from None
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = _pre_tokenizer(file, pre)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(file: GGUFFile, tokens: list[str]) -> Tokenizer:
    """SentencePiece joins the pair whose joined piece has the highest score: that order is the list of merges."""
    scores = file.require("tokenizer.ggml.scores", list)
    vocabulary = {token: index for index, token in enumerate(tokens)}
    merges: list[tuple[float, int, str, str]] = []
    for piece, index in vocabulary.items():
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in vocabulary and right in vocabulary:
                merges.append((-scores[index], index, left, right))
    merges.sort(key=lambda merge: merge[:2])
    unknown = tokens[int(file.metadata.get("tokenizer.ggml.unknown_token_id", 0))]
    ordered = [(left, right) for _, _, left, right in merges]
    tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=ordered, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    normalizer: list[Any] = [normalizers.Replace(" ", "▁")]
    tail: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if file.metadata.get("tokenizer.ggml.add_space_prefix", True):
        normalizer.insert(0, normalizers.Prepend("▁"))
        tail.append(decoders.Strip(" ", 1, 0))
    tokenizer.normalizer = normalizers.Sequence(normalizer)
    tokenizer.decoder = decoders.Sequence(tail)
    return tokenizer


def tokenizer_files_from_gguf(file: GGUFFile) -> dict[str, str]:
    """File name -> content of the store's tokenizer files. Raises ModelFormatError, naming the key."""
    model = file.require("tokenizer.ggml.model", str)
    tokens = file.require("tokenizer.ggml.tokens", list)
    for index, token in enumerate(tokens):
        if not isinstance(token, str) or len(token) > _MOST_CHARACTERS:
            what = f"{len(token)} characters" if isinstance(token, str) else "no text"
            raise ModelFormatError(
                file.path,
                "key 'tokenizer.ggml.tokens'",
                f"token {index} has {what}; at most {_MOST_CHARACTERS} are read",
            )
    if model == "gpt2":
        tokenizer = _byte_level(file, tokens)
    elif model == "llama":
        tokenizer = _sentencepiece(file, tokens)
    else:
        raise ModelFormatError(file.path, "key 'tokenizer.ggml.model'", f"is {model!r}; gpt2 and llama are read")
    types = file.metadata.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    special = [
        AddedToken(t, special=True, normalized=False)
        for t, kind in zip(tokens, types, strict=False)
        if kind == _CONTROL
    ]
    plain = [
        AddedToken(t, special=False, normalized=False)
        for t, kind in zip(tokens, types, strict=False)
        if kind == _USER_DEFINED
    ]
    tokenizer.add_special_tokens(special)
    tokenizer.add_tokens(plain)

    def token_of(key: str) -> tuple[int | None, str | None]:
        index = file.metadata.get(f"tokenizer.ggml.{key}")
        if not isinstance(index, int) or not 0 <= index < len(tokens):
            return None, None
        return index, tokens[index]

    bos_id, bos = token_of("bos_token_id")
    eos_ids = [index for index in (token_of("eos_token_id")[0], token_of("eot_token_id")[0]) if index is not None]
    if file.metadata.get("tokenizer.ggml.add_bos_token", model == "llama") and bos is not None:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A $B", special_tokens=[(bos, bos_id)]
        )
    template = file.metadata.get("tokenizer.chat_template")
    settings = settings_json(
        chat_template=template if isinstance(template, str) else None,
        eos_token_ids=sorted(set(eos_ids)),
        bos_token=bos,
        eos_token=token_of("eos_token_id")[1],
    )
    return {TOKENIZER_NAME: tokenizer.to_str(), SETTINGS_NAME: settings}
