"""May this request run, as what, and how: asked of every line of a batch and of every single request alike."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from django.utils.translation import gettext as _

from inference.errors import InferenceError, InvalidRequest, TemplateError
from inference.model.config import FOREIGN
from penstock.accounts.models import ApiKey, Team
from penstock.registry.models import ModelRelease, Task
from penstock.registry.output_contract import OutputContract
from penstock.registry.policy import PolicyError, resolve
from penstock.serving.bodies import (
    EMBEDDINGS,
    ENDPOINTS,
    ChatBody,
    CompletionBody,
    EmbeddingBody,
    InvalidBody,
    parse_body,
    unstorable_text,
)
from penstock.serving.forms import FORM_PARAMETERS, STRUCTURED_OUTPUTS, form_as_kept, form_asked_for, form_rejected
from penstock.serving.prompts import (
    PromptTokenizer,
    bound_sampling_of,
    compiler_of,
    embedding_inputs,
    prompt_token_ids,
    tokenizer_of,
)
from penstock.serving.rejection import Rejected

__all__ = ["Admitted", "Rejected", "admit"]

TASK_KEY = "task"
MAX_EMBEDDED_TOKENS = 300_000  # in one request, as with OpenAI
MISSING_MODEL_CODES = frozenset({"model_not_found", "task_not_found"})

Resolver = Callable[..., tuple[Task, ModelRelease]]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Admitted:
    """A request that may run. `body` is completed: the task's system prompt in front, and `max_tokens` decided.

    prompt_token_ids: of several texts to embed, one after the other.
    """

    task: Task
    release: ModelRelease
    endpoint: str
    body: dict[str, Any]
    groups: dict[str, str]
    prompt_token_ids: tuple[int, ...]
    stream: bool
    include_usage: bool


def admit(
    *,
    team: Team,
    api_key: ApiKey | None,
    body: object,
    endpoint: str,
    tokenizer: Callable[[ModelRelease], PromptTokenizer] = tokenizer_of,
    task_name: str = "",
    resolver: Resolver = resolve,
) -> Admitted:
    """Checks a body against schema, policy and the model's context.

    The task is the one that `metadata.task` names, else `task_name`, else the key's, else what policy says of a
    request that names none. Raises Rejected for the first problem; others of the same body are in its `further`.
    """
    if endpoint not in ENDPOINTS:
        raise unknown_endpoint(endpoint)
    try:
        parsed = parse_body(body, endpoint)
    except InvalidBody as error:
        first, *others = error.problems
        first.further = tuple(others)
        raise first from error
    assert isinstance(body, dict)
    if unstorable_text(body):
        raise Rejected(
            http_status=400,
            code="invalid_value",
            message=_("The text holds U+0000 or half of a surrogate pair; neither is a character."),
        )
    groups = dict(parsed.metadata or {})
    named = groups.pop(TASK_KEY, "") or task_name
    task, release = resolve_task(team=team, api_key=api_key, model=parsed.model, task_name=named, resolver=resolver)
    if isinstance(parsed, EmbeddingBody):
        return _admit_embedding(parsed, body, groups, task=task, release=release, tokenizer=tokenizer)
    completed = _with_system_prompt(body, task)
    token_ids = _tokenize(tokenizer, release, completed)
    completed["max_tokens"] = _max_tokens(parsed, task, release, len(token_ids))
    completed.pop("max_completion_tokens", None)
    _check_sampling(completed, task, release)
    options = body.get("stream_options") or {}
    return Admitted(
        task=task,
        release=release,
        endpoint=endpoint,
        body=completed,
        groups=groups,
        prompt_token_ids=token_ids,
        stream=bool(parsed.stream),
        include_usage=bool(options.get("include_usage")),
    )


def _admit_embedding(
    parsed: EmbeddingBody,
    body: Mapping[str, Any],
    groups: dict[str, str],
    *,
    task: Task,
    release: ModelRelease,
    tokenizer: Callable[[ModelRelease], PromptTokenizer],
) -> Admitted:
    """Texts to embed. A task's system prompt and output contract are about generated text and do not apply."""
    config = release.manifest.get("config") or {}
    if str(config.get("architecture", "")).startswith(FOREIGN):
        raise Rejected(
            http_status=400,
            code="model_does_not_embed",
            param="model",
            message=_("The model release '%(name)s' runs in transformers' own code, which gives no embeddings here.")
            % {"name": release.name},
        )
    hidden_size = config.get("hidden_size")
    if parsed.dimensions is not None and parsed.dimensions != hidden_size:
        raise Rejected(
            http_status=400,
            code="unsupported_dimensions",
            param="dimensions",
            message=_(
                "The vectors of the model release '%(name)s' have %(size)s dimensions, and it was not made for shorter"
                " ones. Leave dimensions out."
            )
            % {"name": release.name, "size": hidden_size or "?"},
        )
    inputs = _readable(release, lambda: embedding_inputs(tokenizer(release), body))
    for index, tokens in enumerate(inputs):
        param = "input" if len(inputs) == 1 else f"input.{index}"
        if not tokens:
            raise _bad_parameter(param, _("the text holds no token of the model's"))
        if len(tokens) > release.context_tokens:
            raise Rejected(
                http_status=400,
                code="context_length_exceeded",
                param=param,
                message=_("The model's context holds %(context)d tokens; this text has %(count)d. Shorten it.")
                % {"context": release.context_tokens, "count": len(tokens)},
            )
        vocabulary = config.get("vocab_size", max(tokens) + 1)
        if max(tokens) >= vocabulary:
            message = _("the token %(token)d is not in the model's vocabulary of %(size)d")
            raise _bad_parameter(param, message % {"token": max(tokens), "size": vocabulary})
    total = sum(map(len, inputs))
    if total > MAX_EMBEDDED_TOKENS:
        message = _("a request may have %(most)d tokens over all its texts, and these have %(count)d")
        raise _bad_parameter("input", message % {"most": MAX_EMBEDDED_TOKENS, "count": total})
    return Admitted(
        task=task,
        release=release,
        endpoint=EMBEDDINGS,
        body=dict(body),
        groups=groups,
        prompt_token_ids=tuple(token for tokens in inputs for token in tokens),
        stream=False,
        include_usage=False,
    )


def resolve_task(
    *, team: Team, api_key: ApiKey | None, model: str, task_name: str, resolver: Resolver = resolve
) -> tuple[Task, ModelRelease]:
    """Policy's answer. A key's own task stands in only where neither `task_name` nor `model` names one.

    Raises Rejected.
    """
    fallback = api_key.task_name if api_key and not task_name else ""
    try:
        return resolver(team=team, model=model, task_name=task_name or fallback)
    except PolicyError as error:
        if not fallback or error.code != "task_mismatch":
            raise policy_rejection(error) from error
    try:
        return resolver(team=team, model=model, task_name="")
    except PolicyError as error:
        raise policy_rejection(error) from error


def unknown_endpoint(endpoint: str) -> Rejected:
    return Rejected(
        http_status=400,
        code="invalid_endpoint",
        param="endpoint",
        message=_("'%(endpoint)s' is not served; use one of: %(known)s.")
        % {"endpoint": endpoint, "known": ", ".join(ENDPOINTS)},
    )


def policy_rejection(error: PolicyError) -> Rejected:
    return Rejected(
        http_status=404 if error.code in MISSING_MODEL_CODES else 400,
        code=error.code,
        param=error.param,
        message=error.message,
    )


def _with_system_prompt(body: Mapping[str, Any], task: Task) -> dict[str, Any]:
    """A copy of the body; the task's system prompt stands in front of messages that bring none."""
    completed = dict(body)
    messages = body.get("messages", ())
    if messages and task.system_prompt and not any(one["role"] in {"system", "developer"} for one in messages):
        completed["messages"] = [{"role": "system", "content": task.system_prompt}, *messages]
    return completed


def _tokenize(
    tokenizer: Callable[[ModelRelease], PromptTokenizer], release: ModelRelease, body: Mapping[str, Any]
) -> tuple[int, ...]:
    try:
        return _readable(release, lambda: prompt_token_ids(tokenizer(release), body))
    except TemplateError as error:
        raise Rejected(
            http_status=400,
            code="invalid_messages",
            param="messages",
            message=_("The model's chat template refuses these messages: %(why)s") % {"why": error},
        ) from error


def _readable(release: ModelRelease, read: Callable[[], T]) -> T:
    """What `read` gives of the release. Raises Rejected where its files cannot be read, TemplateError."""
    try:
        return read()
    except TemplateError:
        raise
    except InferenceError as error:
        raise Rejected(
            http_status=503,
            code="model_unavailable",
            param="model",
            message=_("The model release '%(name)s' cannot be read: %(why)s") % {"name": release.name, "why": error},
        ) from error


def _max_tokens(parsed: ChatBody | CompletionBody, task: Task, release: ModelRelease, prompt_tokens: int) -> int:
    """What was asked for, else the task's own, as far as the context leaves room."""
    asked, samples = parsed.asked_max_tokens, parsed.samples
    room = release.context_tokens - prompt_tokens
    prompt_param = "messages" if isinstance(parsed, ChatBody) else "prompt"
    if room < 1 or (asked is not None and asked > room):
        raise Rejected(
            http_status=400,
            code="context_length_exceeded",
            param=prompt_param,
            message=_(
                "The model's context holds %(context)d tokens; the prompt has %(prompt)d and %(output)d were asked for"
                " as output. Shorten the prompt or ask for less."
            )
            % {
                "context": release.context_tokens,
                "prompt": prompt_tokens,
                "output": asked if asked is not None else 1,
            },
        )
    if not task.unassigned and samples > task.max_output_tokens:
        raise Rejected(
            http_status=400,
            code="max_tokens_above_task_limit",
            param="n",
            message=_("The task '%(task)s' allows %(limit)d output tokens a request; that is not one for each output.")
            % {"task": task.name, "limit": task.max_output_tokens},
        )
    if asked is not None and not task.unassigned and asked * samples > task.max_output_tokens:
        newer = isinstance(parsed, ChatBody) and parsed.max_completion_tokens is not None
        raise Rejected(
            http_status=400,
            code="max_tokens_above_task_limit",
            param="max_completion_tokens" if newer else "max_tokens",
            message=_("The task '%(task)s' allows %(limit)d output tokens a request; %(asked)d were asked for.")
            % {"task": task.name, "limit": task.max_output_tokens, "asked": asked * samples},
        )
    if asked is not None:
        return asked
    return min(task.max_output_tokens if task.unassigned else task.max_output_tokens // samples, room)


def _check_sampling(completed: dict[str, Any], task: Task, release: ModelRelease) -> None:
    """Tries what the engine will be asked for, and leaves one spelling of the output's form in the body.

    Raises Rejected naming the parameter.
    """
    config = release.manifest.get("config") or {}
    if not config.get("has_head", True):
        raise Rejected(
            http_status=400,
            code="model_does_not_generate",
            param="model",
            message=_("The model release '%(name)s' generates no text; it only gives embeddings.")
            % {"name": release.name},
        )
    asked = form_asked_for(completed)
    try:
        sampling = bound_sampling_of(completed, "", OutputContract.model_validate(task.output_contract or {}))
    except InvalidRequest as error:
        raise _bad_parameter(error.field, error.message) from error
    if sampling.constraint is not None:
        param = asked[0] if asked is not None else "model"
        try:
            compiler_of(release).compile(sampling.constraint)
        except InvalidRequest as error:
            raise form_rejected(param, error) from error
    unknown = next(
        (
            (name, token)
            for name, tokens in (
                ("logit_bias", [token for token, _bias in sampling.logit_bias]),
                ("stop_token_ids", sampling.stop_token_ids),
            )
            for token in tokens
            if token >= config.get("vocab_size", token + 1)
        ),
        None,
    )
    if unknown is not None:
        name, token = unknown
        message = _("the token %(token)d is not in the model's vocabulary of %(size)d")
        raise _bad_parameter(name, message % {"token": token, "size": config["vocab_size"]})
    for name in FORM_PARAMETERS:
        completed.pop(name, None)
    if asked is not None:
        completed[STRUCTURED_OUTPUTS] = form_as_kept(asked[1])


def _bad_parameter(param: str, problem: str) -> Rejected:
    return Rejected(
        http_status=400,
        code="invalid_value",
        param=param,
        message=_("%(param)s: %(problem)s.") % {"param": param, "problem": problem},
    )
