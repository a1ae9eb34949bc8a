"""What a workload takes on a plan: each step by measured rates, the steps as the scheduler would form them.

A step computes its layers one after the other while readers fetch what the next ones need, across layers and steps; so
it takes what is slower, and reads cost the arithmetic beside them some processor and memory, by measured rates:

    step = max(bytes / stream rate, arithmetic + bytes * read cost)

Within a step rows of prompts go beside decoding ones, as far as the token budget goes; a row's context grows as it
decodes.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, replace

from inference.cache.pages import PAGE_TOKENS
from inference.kernels.base import CacheKind
from inference.planner.layer_rates import LayerRates
from inference.planner.workload import Workload
from inference.scheduler import CHUNK_TOKENS

# Of a long run, so many batches are run through the scheduler's rules; the rest is more of the same.
BATCHES_RUN = 6


@dataclass(frozen=True, slots=True)
class StepLoad:
    """What a step computes. decode_tokens: context of all decoding rows; prompt_pairs: of all prompts' rows; yielding:
    rows whose logits are wanted; prompts: of which a piece is computed.
    """

    decode_rows: int
    decode_tokens: float
    prompt_rows: int
    prompt_pairs: float
    yielding: int
    prompts: int = 0

    @property
    def rows(self) -> int:
        return self.decode_rows + self.prompt_rows

    @property
    def pages_read(self) -> float:
        """Of each layer of the cache: whole ones, half of the last one of each row being empty on average."""
        return self.decode_tokens / PAGE_TOKENS + self.decode_rows / 2 + self.prompt_rows / PAGE_TOKENS

    @property
    def pages_written(self) -> float:
        """Of each layer of the cache."""
        return self.decode_rows + self.prompt_rows / PAGE_TOKENS


@dataclass(frozen=True, slots=True)
class StepCost:
    """How long a step takes where `layers` layers compute.

    streamed_bytes: of weights read in each step. spilled_page_bytes: of one page in all spilled layers together; these
    are read and written as far as a step uses them. Rates in bytes a second, beside arithmetic. By default no disk is
    used.
    """

    rates: LayerRates
    cache: CacheKind
    layers: int
    streamed_bytes: int = 0
    spilled_page_bytes: int = 0
    read_bytes_per_s: float = math.inf
    write_bytes_per_s: float = math.inf

    def arithmetic_seconds(self, load: StepLoad) -> float:
        """With nothing beside it, making the step ready included."""
        layer = self.rates.layer_seconds(self.cache, load.rows, load.decode_rows, load.decode_tokens, load.prompt_pairs)
        ready = self.rates.batch_seconds(load.decode_rows + load.prompts)
        apart = self.rates.apart if self.streamed_bytes or self.spilled_page_bytes else 1.0
        return self.layers * layer * apart + self.rates.head_seconds(load.yielding) + ready

    def _read_bytes(self, load: StepLoad) -> float:
        return self.streamed_bytes + self.spilled_page_bytes * load.pages_read

    def disk_seconds(self, load: StepLoad) -> float:
        written = self.spilled_page_bytes * load.pages_written
        return self._read_bytes(load) / self.read_bytes_per_s + written / self.write_bytes_per_s

    def _beside_reads(self, load: StepLoad) -> float:
        return self.arithmetic_seconds(load) + self._read_bytes(load) * self.rates.read_cost

    def waits(self, load: StepLoad) -> bool:
        """Whether arithmetic ends first."""
        return self._beside_reads(load) <= self.disk_seconds(load)

    def seconds(self, load: StepLoad) -> float:
        return max(self.disk_seconds(load), self._beside_reads(load))


@dataclass(slots=True)
class Estimate:
    """A workload's whole run. disk_bound_seconds: of steps that wait for the disk; longest_step: in seconds."""

    seconds: float = 0.0
    prefill_seconds: float = 0.0
    disk_bound_seconds: float = 0.0
    steps: int = 0
    longest_step: float = 0.0

    @property
    def decode_seconds(self) -> float:
        return self.seconds - self.prefill_seconds

    def carried_on(self, shorter: Estimate, times: float) -> Estimate:
        """As many times more as this one is longer than a shorter one of the same kind."""

        def more(long: float, short: float) -> float:
            return long + (long - short) * times

        return Estimate(
            more(self.seconds, shorter.seconds),
            more(self.prefill_seconds, shorter.prefill_seconds),
            more(self.disk_bound_seconds, shorter.disk_bound_seconds),
            round(more(self.steps, shorter.steps)),
            self.longest_step,
        )


@dataclass(slots=True)
class _Group:
    """Sequences that began to decode in the same step."""

    count: int
    generated: int


def estimate(workload: Workload, max_batch: int, token_budget: int, cost: StepCost) -> Estimate:
    """The workload's whole run, each row being its mean one."""
    most = BATCHES_RUN * max_batch
    if workload.rows <= most:
        return _run(workload, max_batch, token_budget, cost)
    half = _run(replace(workload, rows=most // 2), max_batch, token_budget, cost)
    whole = _run(replace(workload, rows=most), max_batch, token_budget, cost)
    return whole.carried_on(half, (workload.rows - most) / (most - most // 2))


def _run(workload: Workload, max_batch: int, token_budget: int, cost: StepCost) -> Estimate:
    """The workload through the scheduler's rules, step by step."""
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
        load = StepLoad(decoding, context, tokens, tokens * pairs_a_token, decoding + done, -(-tokens // piece))
        seconds = cost.seconds(load)
        run.seconds += seconds
        run.prefill_seconds += seconds * tokens / load.rows
        if cost.waits(load):
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
