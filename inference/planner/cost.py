"""What a workload takes on a plan: each step by measured rates, the steps as the scheduler would form them.

A step computes its layers one after the other while readers fetch what the next ones need, across layers and steps, so

    step = max(layers' arithmetic + head, (streamed weights + spilled keys and values) / disk rate) + making it ready

where arithmetic beside reads is slower by a measured factor. Within a step rows of prompts go beside decoding ones, as
far as the token budget goes; a row's context grows as it decodes.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

from inference.planner.layer_rates import LayerRates
from inference.planner.workload import Workload
from inference.scheduler import CHUNK_TOKENS


@dataclass(frozen=True, slots=True)
class StepLoad:
    """What a step computes. decode_tokens: context of all decoding rows; prompt_pairs: of all prompts' rows; yielding:
    rows whose logits are wanted.
    """

    decode_rows: int
    decode_tokens: float
    prompt_rows: int
    prompt_pairs: float
    yielding: int

    @property
    def rows(self) -> int:
        return self.decode_rows + self.prompt_rows


@dataclass(frozen=True, slots=True)
class StepCost:
    """How long a step takes where `layers` layers compute and streamed_bytes are read in each, and, of the spilled
    layers' cache, spilled_token_bytes for each token that the step looks back to.
    """

    rates: LayerRates
    layers: int
    streamed_bytes: int
    spilled_token_bytes: float
    disk_bytes_per_s: float

    def arithmetic_seconds(self, load: StepLoad) -> float:
        layer = self.rates.layer_seconds(
            load.rows, load.decode_tokens, load.prompt_pairs, reading=self.streamed_bytes > 0
        )
        return self.layers * layer + self.rates.head_seconds(load.yielding)

    def disk_seconds(self, load: StepLoad) -> float:
        spilled = self.spilled_token_bytes * (load.decode_tokens + load.prompt_rows)
        return (self.streamed_bytes + spilled) / self.disk_bytes_per_s

    def seconds(self, load: StepLoad) -> float:
        return max(self.arithmetic_seconds(load), self.disk_seconds(load)) + self.rates.batch_seconds(load.rows)


@dataclass(slots=True)
class Estimate:
    """A workload's whole run. disk_bound_seconds: of steps that wait for the disk."""

    seconds: float = 0.0
    prefill_seconds: float = 0.0
    disk_bound_seconds: float = 0.0
    steps: int = 0
    longest_step: float = 0.0

    @property
    def decode_seconds(self) -> float:
        return self.seconds - self.prefill_seconds


@dataclass(slots=True)
class _Group:
    """Sequences that began to decode in the same step."""

    count: int
    generated: int


def estimate(workload: Workload, max_batch: int, token_budget: int, cost: StepCost) -> Estimate:
    """Run the workload's mean row through the scheduler's rules, step by step."""
    prompt, new = max(1, round(workload.prompt.mean)), max(1, round(workload.new.mean))
    piece = min(prompt, CHUNK_TOKENS)
    pairs_a_token = (prompt + 1) / 2
    waiting, begun = workload.rows, 0  # begun: prompt tokens computed of the sequences that do not decode yet
    prefilling = 0
    groups: deque[_Group] = deque()
    run = Estimate()
    while waiting or prefilling or groups:
        decoding = sum(group.count for group in groups)
        joining = min(waiting, max_batch - decoding - prefilling)
        waiting, prefilling = waiting - joining, prefilling + joining
        budget = max(token_budget - decoding, CHUNK_TOKENS)
        tokens = min(budget // piece * piece, prefilling * prompt - begun)
        done = (begun + tokens) // prompt
        begun = begun + tokens - done * prompt
        prefilling -= done
        context = sum(group.count * (prompt + group.generated) for group in groups)
        load = StepLoad(decoding, context, tokens, tokens * pairs_a_token, decoding + done)
        seconds = cost.seconds(load)
        run.seconds += seconds
        run.prefill_seconds += seconds * tokens / load.rows
        if cost.disk_seconds(load) > cost.arithmetic_seconds(load):
            run.disk_bound_seconds += seconds
        run.longest_step = max(run.longest_step, seconds)
        run.steps += 1
        for group in groups:
            group.generated += 1
        while groups and groups[0].generated >= new:
            groups.popleft()
        if done and new > 1:
            groups.append(_Group(done, 1))
    return run


def decode_load(workload: Workload, rows: int) -> StepLoad:
    """A step in which so many rows decode, half way through their answers."""
    context = workload.prompt.mean + math.ceil(workload.new.mean / 2)
    return StepLoad(rows, rows * context, 0, 0.0, rows)
