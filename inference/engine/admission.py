"""Which requests cannot run, and why: told before they cost anything."""

from __future__ import annotations

from inference.cache.pages import pages_for
from inference.group import RequestGroup
from inference.model.config import DecoderConfig


def reason_to_reject(group: RequestGroup, config: DecoderConfig, cache_pages: int) -> str | None:
    """What is wrong with a request, its field first; None where it can run. cache_pages: all that one may have."""
    request, count = group.request, len(group.request.prompt_token_ids)
    if not config.has_head:
        return "model: has no head; it gives embeddings and generates no tokens"
    if count == 0:
        return "prompt: is empty; at least one token is needed"
    if count >= config.max_context:
        return f"prompt: has {count} tokens; this model takes at most {config.max_context - 1} and one to answer with"
    wrong = next((token for token in request.prompt_token_ids if not 0 <= token < config.vocab_size), None)
    if wrong is not None:
        return f"prompt: token id {wrong} is not in the vocabulary of {config.vocab_size}"
    for field, tokens in (
        ("logit_bias", [token for token, _ in request.sampling.logit_bias]),
        ("stop_token_ids", request.sampling.stop_token_ids),
    ):
        wrong = next((token for token in tokens if token >= config.vocab_size), None)
        if wrong is not None:
            return f"{field}: token id {wrong} is not in the vocabulary of {config.vocab_size}"
    most = group.sequences[0].max_tokens
    need = pages_for(count + most)
    if need > cache_pages:
        return (
            f"prompt: {count} tokens and {most} to generate need {need} cache pages; the engine's "
            f"memory holds {cache_pages}; ask for fewer tokens or give the engine more memory"
        )
    return None
