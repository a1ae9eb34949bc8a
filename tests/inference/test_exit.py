"""A process that ends while threads of the engine are at work ends as any other."""

import os
import subprocess
import sys
from pathlib import Path

PROGRAM = """
import sys, threading
from inference import Engine, SamplingParams
from inference.memory.placement import Placement
from inference.request import GenerationRequest
from tests.inference.test_streaming import plan_of

engine = Engine.load(sys.argv[1], threads=1, plan=plan_of(Placement(frozenset(), ring=2, readers=2)))
began = threading.Event()
engine.start()
engine.submit(
    GenerationRequest("a", (100, 200, 300), SamplingParams(max_tokens=1000, ignore_eos=True)),
    on_token=lambda event: began.set(),
    on_finish=lambda completion: print(completion.finish_reason),
)
assert began.wait(20)
print("ends")
"""


def test_a_process_ends_in_order_in_the_middle_of_a_step(smollm2_store: Path, tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(smollm2_store)],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"PENSTOCK_IMAGES": str(tmp_path / "images")},
        cwd=Path(__file__).parents[2],
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert "terminate" not in ended.stderr and "Traceback" not in ended.stderr
    assert ended.stdout.split() == ["ends", "cancelled"]
