"""`python -m inference generate`."""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from inference.command_line import INTERRUPTED, byte_count, positive
from inference.errors import InvalidRequest
from inference.json_lines import json_text
from inference.request import Completion, Constraint, GenerationRequest, SamplingParams, TokenEvent

if TYPE_CHECKING:
    from inference.engine import Engine


def add_generate(generate: argparse.ArgumentParser) -> None:
    """The command's options."""
    add = generate.add_argument
    add("--model", required=True, type=Path, help="a weight store, GGUF file or Hugging Face folder")
    add("--prompt", action="append", help="the prompt; may be given several times; without it, standard input is read")
    add("--chat", action="store_true", help="put the prompt into the model's chat template first")
    add("--system", help="with --chat: the system message")
    add("--max-tokens", type=int, default=256, help="tokens to generate at most (default 256)")
    add("--temperature", type=float, default=0.0, help="0 is greedy (default)")
    add("--top-p", type=float, default=1.0, help="draw among the likeliest tokens of this mass")
    add("--top-k", type=int, default=0, help="draw among that many likeliest tokens (default 0: all)")
    add("--min-p", type=float, default=0.0, help="drop tokens less likely than this share of the likeliest")
    add("--repetition-penalty", type=float, default=1.0, help="above 1: make tokens seen before less likely")
    add("--frequency-penalty", type=float, default=0.0, help="-2 to 2, for each time a token was generated")
    add("--presence-penalty", type=float, default=0.0, help="-2 to 2, once for a token that was generated")
    add("--seed", type=int, help="makes drawing repeatable")
    add("--stop", action="append", default=[], help="end at this text; may be given several times")
    add("--min-tokens", type=int, default=0, help="do not end before that many tokens")
    add("--ignore-eos", action="store_true", help="go on past the end token")
    add("-n", type=int, default=1, help="completions of each prompt (default 1)")
    add("--best-of", type=int, help="make that many and keep the n that the model finds likeliest")
    add("--logprobs", type=int, help="tell each token's log-probability, and those of that many likeliest (0 to 20)")
    form = generate.add_mutually_exclusive_group()
    form.add_argument("--json-schema", type=Path, metavar="FILE", help="output JSON that validates against this schema")
    form.add_argument("--json-object", action="store_true", help="output any JSON object")
    form.add_argument("--regex", help="output what matches this regular expression")
    form.add_argument("--choice", action="append", help="output one of these texts; give it once for each")
    form.add_argument("--grammar", type=Path, metavar="FILE", help="output a sentence of this Lark grammar")
    add("--compute", choices=["auto", "fp32", "bf16", "int8"], default="auto")
    add("--memory", type=byte_count, help="for weights and cache, as 3GB or 2.5GiB (default: 60 %% of what is free)")
    add("--threads", type=positive, help="processor threads (default: all)")
    add("--json", action="store_true", help="print one JSON object a prompt instead of text")


def run_generate(options: argparse.Namespace) -> int:
    from inference.engine import Engine

    sampling = SamplingParams(
        max_tokens=options.max_tokens,
        temperature=options.temperature,
        top_p=options.top_p,
        top_k=options.top_k,
        min_p=options.min_p,
        repetition_penalty=options.repetition_penalty,
        frequency_penalty=options.frequency_penalty,
        presence_penalty=options.presence_penalty,
        seed=options.seed,
        stop=tuple(options.stop),
        min_tokens=options.min_tokens,
        ignore_eos=options.ignore_eos,
        n=options.n,
        best_of=options.best_of,
        logprobs=options.logprobs,
        constraint=_constraint(options),
    )
    prompts: list[str] = options.prompt or [sys.stdin.read()]
    engine = Engine.load(options.model, threads=options.threads, compute=options.compute, memory_bytes=options.memory)
    streams = sampling.samples == 1 and not options.json
    failed = False
    for index, prompt in enumerate(prompts):
        if options.chat:
            system = [{"role": "system", "content": options.system}] if options.system else []
            ids = engine.tokenizer.encode_chat([*system, {"role": "user", "content": prompt}])
        else:
            ids = engine.tokenizer.encode(prompt)
        done: list[Completion] = []

        def show(event: TokenEvent) -> None:
            print(event.text, end="", flush=True)

        engine.submit(
            GenerationRequest(str(index), tuple(ids), sampling),
            on_token=show if streams else None,
            on_finish=done.append,
        )
        try:
            while not done:
                engine.step()
        except KeyboardInterrupt:
            engine.stop()
            _report(done[0], as_json=options.json, streamed=streams)
            return INTERRUPTED
        failed |= _report(done[0], as_json=options.json, streamed=streams)
    if not options.json:
        _show_limits(engine)
    return 1 if failed else 0


def _show_limits(engine: Engine) -> None:
    """What the run achieved against this host, on the standard error stream."""
    if not engine.stats().steps:
        return
    if engine.peaks(measure=False) is None:
        print("[measuring what this host can do at most: once, some seconds]", file=sys.stderr)
        engine.peaks()
    print(f"[{engine.report().line()}]", file=sys.stderr)


def _constraint(options: argparse.Namespace) -> Constraint | None:
    """Raises InvalidRequest naming `constraint`."""
    if options.json_object:
        return Constraint.json_object()
    if options.regex is not None:
        return Constraint.regex(options.regex)
    if options.choice:
        return Constraint.choice(options.choice)
    if options.json_schema is not None:
        return Constraint.json_schema(_text_of(options.json_schema))
    return Constraint.grammar(_text_of(options.grammar)) if options.grammar is not None else None


def _text_of(file: Path) -> str:
    try:
        return file.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest("constraint", f"{file}: cannot be read: {error}") from None


def _report(completion: Completion, *, as_json: bool, streamed: bool) -> bool:
    """Print the outcome; True where it is a failure."""
    if as_json:
        print(json_text(asdict(completion)))
        return completion.finish_reason == "error"
    for choice in completion.choices if not streamed else ():
        if len(completion.choices) > 1:
            print(f"--- {choice.index + 1} of {len(completion.choices)}, {choice.finish_reason}")
        print(choice.text)
    if streamed:
        print()
    if completion.error is not None:
        print(f"error: {completion.error}", file=sys.stderr)
        return True
    for entry in completion.logprobs or ():
        others = "  ".join(f"{top.text!r} {top.logprob:.3f}" for top in entry.top)
        print(f"{entry.logprob:9.3f} {entry.text!r}  {others}".rstrip(), file=sys.stderr)
    rate = completion.output_tokens / completion.duration_seconds if completion.duration_seconds else 0.0
    first = f", first after {completion.ttft_seconds:.2f} s" if completion.ttft_seconds is not None else ""
    print(
        f"[{completion.finish_reason}: {completion.prompt_tokens} tokens in, {completion.output_tokens} out, "
        f"{rate:.1f} a second{first}]",
        file=sys.stderr,
    )
    return False
