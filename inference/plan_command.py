"""`python -m inference plan`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from inference.command_line import byte_count, positive
from inference.errors import InvalidRequest
from inference.hardware_command import size

if TYPE_CHECKING:
    import torch

    from inference.planner.plan import Plan
    from inference.planner.workload import Workload
    from inference.weights.store import StoreReader


def add_plan(command: argparse.ArgumentParser) -> None:
    """The command's options."""
    add = command.add_argument
    add("model", type=Path, help="a weight store, GGUF file or Hugging Face folder")
    add(
        "--memory",
        type=byte_count,
        help="what the whole process may take, as 3GB or 2.5GiB (default: a share of what is available)",
    )
    add(
        "--disk",
        type=byte_count,
        help="what layers and spilled keys and values may take of the disk (default: what is free)",
    )
    add("--rows", type=positive, default=1000, help="requests (default 1000)")
    add("--prompt", type=positive, default=256, help="tokens of a mean prompt (default 256)")
    add("--new", type=positive, default=128, help="tokens of a mean answer (default 128)")
    add("--context", type=positive, help="tokens of the longest row, prompt and answer (default: of the mean one)")
    add("--step-seconds", type=float, help="what a step may take at most, where someone waits for each token")
    add("--batch", type=positive, help="sequences at a time (default: what is best)")
    add("--token-budget", type=positive, help="rows a step (default: what is best)")
    add("--compute", choices=["auto", "fp32", "bf16", "int8"], default="auto")
    add("--cache", choices=["auto", "fp32", "bf16", "int8", "int4"], default="auto")
    add("--threads", type=positive, help="processor threads (default: all)")
    add("--device", default="auto", help="auto (CUDA where there is one), cpu, cuda or cuda:N (default: auto)")
    add(
        "--device-memory",
        type=byte_count,
        help="what may be taken of a device's memory (default: most of what is free)",
    )
    add("--images", type=Path, help="where layer images lie (default: as PENSTOCK_IMAGES says, or in the user's cache)")
    add("--measure-again", action="store_true", help="measure what is known from before, too")
    add("--json", action="store_true", help="print the plan as JSON, as the engine takes it")


def run_plan(options: argparse.Namespace) -> int:
    import torch

    from inference.device.memory import chosen_device
    from inference.fitting import cache_kind
    from inference.loading import choose_kernels, store_at
    from inference.memory.budget import default_budget_bytes, process_bytes
    from inference.model.layers import LayerReader
    from inference.model.linear import fastest_compute
    from inference.planner.planning import make_plan
    from inference.weights.store import StoreReader

    workload = _workload(options)
    memory = options.memory or default_budget_bytes()
    compute = fastest_compute() if options.compute == "auto" else options.compute
    reader = StoreReader(store_at(options.model))
    config = reader.manifest.config
    if config.is_foreign:
        raise InvalidRequest("model", f"{config.architecture} runs by code of its own, whose parts are not planned")
    if workload.context > config.max_context:
        raise InvalidRequest("context", f"{workload.context} tokens; this model takes {config.max_context} at most")
    device = chosen_device(options.device)
    if device is not None:
        print_plan(options, device_plan(options, device, reader, workload, memory), config.layers)
        return 0
    kernels = choose_kernels(config, compute)
    kind = cache_kind(options.cache, kernels)
    print("planning; what is not known of this host from before is measured in some ten seconds", file=sys.stderr)
    plan = make_plan(
        LayerReader(reader, kernels),
        compute=compute,
        cache=kind,
        workload=workload,
        memory_bytes=memory,
        process_bytes=process_bytes(),
        disk_bytes=options.disk,
        threads=options.threads or torch.get_num_threads(),
        max_batch=options.batch,
        token_budget=options.token_budget,
        images=options.images,
        other_caches=tuple(other for other in kernels.cache_kinds[:2] if other != kind),
        again=options.measure_again,
    )
    print_plan(options, plan, config.layers)
    return 0


def device_plan(
    options: argparse.Namespace, device: torch.device, reader: StoreReader, workload: Workload, memory: int
) -> Plan:
    from inference.device.loading import device_compute
    from inference.device.memory import free_bytes
    from inference.engine import DEFAULT_MAX_BATCH, DEFAULT_TOKEN_BUDGET
    from inference.fitting import cache_kind
    from inference.kernels.reference import ReferenceKernels
    from inference.model.layers import LayerReader
    from inference.planner.device_planning import make_device_plan

    kernels = ReferenceKernels(reader.manifest.config, device_compute(options.compute, device), device)
    return make_device_plan(
        LayerReader(reader, kernels),
        cache=cache_kind(options.cache, kernels),
        device_bytes=options.device_memory or free_bytes(device),
        memory_bytes=memory,
        max_batch=options.batch or DEFAULT_MAX_BATCH,
        token_budget=options.token_budget or DEFAULT_TOKEN_BUDGET,
        workload=workload,
        images=options.images,
        again=options.measure_again,
    )


def print_plan(options: argparse.Namespace, plan: Plan, layers: int) -> None:
    if options.json:
        print(plan.to_json(), end="")
        return
    for line in _lines(plan, layers):
        print(line)


def _workload(options: argparse.Namespace) -> Workload:
    from inference.planner.workload import Lengths, Workload

    context = options.prompt + options.new if options.context is None else options.context
    if context < options.prompt + options.new:
        raise InvalidRequest("context", f"{context} tokens are less than a mean prompt and answer together")
    try:
        prompt = Lengths(options.prompt, context - options.new)
        return Workload(options.rows, prompt, Lengths.all(options.new), options.step_seconds)
    except ValueError as error:
        raise InvalidRequest("workload", str(error)) from None


def _lines(plan: Plan, layers: int) -> Iterator[str]:
    placement, predicted, workload = plan.placement, plan.predicted, plan.workload
    assert predicted is not None and workload is not None
    host = predicted.peak_memory_bytes["host"]
    yield f"batch       {plan.max_batch} sequences at a time, {plan.token_budget} rows a step"
    if placement.device is not None:
        yield from _device_lines(plan, layers)
    elif placement.streams(layers):
        yield f"weights     {len(placement.pinned)} of {layers} layers in memory, the others read in each step"
        yield f"            {size(predicted.streamed_bytes_per_step)} a step, {placement.ring} buffers"
        yield f"            head {_where(placement.head_pinned)}, embedding {_where(placement.embedding_pinned)}"
    else:
        yield f"weights     all in memory, in {plan.compute}"
    away = f"{len(placement.spilled)} of {layers} layers on disk"
    if placement.device is not None:
        away = f"{len(placement.hosted_cache)} of {layers} layers in the host's memory"
    yield f"cache       {plan.cache_pages} pages in {plan.cache}, {away}"
    yield f"memory      {size(host)} of {size(plan.memory_bytes)} at most"
    yield f"disk        {size(predicted.peak_memory_bytes['disk'])}"
    yield f"prefill     {predicted.prefill_tokens_per_s:.1f} tokens/s"
    yield f"decode      {predicted.decode_tokens_per_s:.1f} tokens/s, {predicted.step_seconds:.3g} s a step"
    yield f"output      {predicted.output_tokens_per_s:.1f} tokens/s over all, bound by {predicted.bound_by}"
    yield f"in all      {predicted.seconds:.0f} s for {workload.rows} rows, {predicted.steps} steps"
    limit = workload.step_seconds
    if limit is not None and predicted.longest_step_seconds > limit:
        longest = predicted.longest_step_seconds
        yield f"            no plan keeps steps below {limit:g} s; the longest takes {longest:.3g} s"
    if plan.neighbours:
        yield "looked at and left:"
    for other in plan.neighbours:
        rate = "" if other.output_tokens_per_s is None else f"{other.output_tokens_per_s:.1f} tokens/s, "
        yield f"  {other.difference}: {rate}{other.why}"


def _device_lines(plan: Plan, layers: int) -> Iterator[str]:
    placement, predicted = plan.placement, plan.predicted
    assert predicted is not None and plan.device_bytes is not None
    hosted, pinned = len(placement.hosted), len(placement.pinned)
    yield f"device      {placement.device}: {size(predicted.peak_memory_bytes['device'])} of {size(plan.device_bytes)}"
    read = layers - pinned - hosted
    yield f"weights     {pinned} of {layers} layers there, {hosted} in the host's memory, {read} on disk"
    yield f"            {size(predicted.streamed_bytes_per_step)} a step are copied, {placement.device_ring} buffers"
    head, table = ("there" if here else "elsewhere" for here in (placement.head_pinned, placement.embedding_pinned))
    yield f"            head {head}, embedding {table}, in {plan.compute}"


def _where(pinned: bool) -> str:
    return "in memory" if pinned else "on disk"
