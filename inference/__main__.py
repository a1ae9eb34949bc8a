"""`python -m inference`: generate, import, evaluate, verify, hardware, plan."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from inference.command_line import told
from inference.evaluate_command import add_evaluate_command, run_evaluate
from inference.generate_command import add_generate, run_generate
from inference.hardware_command import add_hardware, run_hardware
from inference.plan_command import add_plan, run_plan

_EPILOG = """\
examples:
  A quick answer from a GGUF file (imported once into a cache, found again the next time):
    python -m inference generate --model SmolLM2-135M-Instruct.Q4_1.gguf --chat --prompt "What is a penstock?"

  A model to keep, at 4 bits, then checked byte by byte:
    python -m inference import ./SmolLM2-135M-Instruct ./stores/smollm2 --quantize int4
    python -m inference verify ./stores/smollm2

  What the 4 bits cost, on a text that the model was not tuned on:
    python -m inference evaluate ./stores/smollm2 --reference ./SmolLM2-135M-Instruct --text heldout.txt

  An answer that validates against a JSON schema, or is one of a few texts:
    python -m inference generate --model ./stores/smollm2 --chat --prompt "A person" --json-schema person.json
    python -m inference generate --model ./stores/smollm2 --chat --prompt "Is ice cold?" --choice yes --choice no

  How a model that is larger than the memory would do a thousand rows, and what else was looked at:
    python -m inference plan ./stores/llama-7b --memory 4GB --rows 1000 --prompt 128 --new 64

  Repeatable sampling, as JSON for a script:
    python -m inference generate --model ./stores/smollm2 --prompt "Once" --temperature 0.8 --seed 7 --json
"""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m inference",
        description="Penstock's engine on its own: run a prompt, import a model, check a store.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    generate = commands.add_parser("generate", help="complete prompts, writing the text as it comes")
    add_generate(generate)

    importing = commands.add_parser("import", help="turn a model into a weight store")
    importing.add_argument("source", type=Path, help="a GGUF file, Hugging Face folder, or store")
    importing.add_argument("store", type=Path, help="the folder to make; it must not exist")
    importing.add_argument(
        "--quantize",
        choices=["keep", "int4", "int8", "bf16"],
        default="keep",
        help="keep the source's precision (default), or make it this one",
    )
    importing.add_argument(
        "--group-size", type=int, choices=[32, 64, 128], default=32, help="weights that share a scale"
    )
    importing.add_argument(
        "--calibrate", type=Path, help="text by which int4 or int8 rounding is chosen to change outputs least"
    )
    importing.add_argument("--json", action="store_true", help="print the manifest as JSON")

    add_evaluate_command(commands)

    add_hardware(commands.add_parser("hardware", help="what this host has and gives, measured"))

    add_plan(commands.add_parser("plan", help="how a model would run in so much memory, and how fast"))

    verify = commands.add_parser(
        "verify", help="read a store, or a layer image, whole and compare every file with its digest"
    )
    verify.add_argument("folder", type=Path)
    return parser


def _import(options: argparse.Namespace) -> int:
    from inference.weights.importer import import_model

    def progress(done: int, total: int) -> None:
        print(f"\r{100 * done // total:3d} % of {total / 1e6:.1f} M weights", end="", file=sys.stderr, flush=True)

    watched = progress if sys.stderr.isatty() else None
    manifest = import_model(
        options.source,
        options.store,
        quantize=options.quantize,
        group_size=options.group_size,
        calibrate=options.calibrate,
        progress=watched,
    )
    if watched is not None:
        print(file=sys.stderr)
    if options.json:
        print(manifest.to_json(), end="")
        return 0
    print(f"store    {options.store}")
    print(f"digest   {manifest.digest}")
    print(f"weights  {manifest.parameters / 1e6:.1f} M, {manifest.quantization['scheme']}", end="")
    print(f", {manifest.quantization['bits_per_weight']} bits each, {manifest.total_bytes / 1e6:.1f} MB")
    print(f"licence  {manifest.licence or 'not stated by the source'}")
    return 0


def _verify(options: argparse.Namespace) -> int:
    from inference.memory.image import INDEX_NAME, verify_image
    from inference.weights.store import verify_store

    if (options.folder / INDEX_NAME).exists():
        image = verify_image(options.folder)
        print(f"all {len(image.units)} files of the layer image match")
        return 0
    manifest = verify_store(options.folder)
    print(f"all {len(manifest.files)} files match; digest {manifest.digest}")
    return 0


def main(arguments: list[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    actions = {
        "generate": run_generate,
        "import": _import,
        "evaluate": run_evaluate,
        "hardware": run_hardware,
        "plan": run_plan,
        "verify": _verify,
    }
    return told(lambda: actions[options.command](options))


if __name__ == "__main__":
    sys.exit(main())
