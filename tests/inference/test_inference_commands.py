"""The command line and the baseline."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from inference.__main__ import main
from inference.baseline import NaiveBaseline
from inference.bench.__main__ import main as bench


def test_generate_writes_the_text_as_it_comes(smollm2_store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompt = ["--chat", "--prompt", "What is the capital of France?"]
    assert main(["generate", "--model", str(smollm2_store), *prompt, "--stop", " Paris", "--threads", "1"]) == 0
    out, err = capsys.readouterr()
    assert out == "The capital of France is\n"
    assert "[stop: 37 tokens in, 6 out" in err


def test_generate_prints_one_json_object_a_prompt(
    smollm2_store: Path,
    save_chat_model: Callable[[Path, Path], Any],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    save_chat_model(tmp_path / "chat", smollm2_store)
    main(["import", str(tmp_path / "chat"), str(tmp_path / "store"), "--quantize", "int8"])
    capsys.readouterr()
    model = ["--model", str(tmp_path / "store"), "--compute", "fp32", "--threads", "1"]
    drawn = ["--temperature", "0.9", "--seed", "3", "--max-tokens", "5"]
    assert main(["generate", *model, "--prompt", "one", "--prompt", "one", *drawn, "--json"]) == 0
    first, second = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert first["token_ids"] == second["token_ids"]
    assert first["output_tokens"] == len(first["token_ids"]) <= 5


def test_import_and_verify_tell_the_digest(
    tiny_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = tmp_path / "store"
    assert main(["import", str(tiny_folder), str(store), "--quantize", "int4"]) == 0
    digest = json.loads((store / "manifest.json").read_text("utf-8"))["digest"]
    assert digest in capsys.readouterr().out
    assert main(["verify", str(store)]) == 0
    assert digest in capsys.readouterr().out
    (store / "layer_000.bin").write_bytes(b"short")
    assert main(["verify", str(store)]) == 1
    assert "layer_000.bin" in capsys.readouterr().err


def test_a_model_that_is_not_there_is_an_error_and_no_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "--model", "/nowhere/model.gguf", "--prompt", "x"]) == 1
    assert "/nowhere/model.gguf: does not exist" in capsys.readouterr().err


def test_the_baseline_answers_as_transformers_does_and_says_in_what_it_computed(
    smollm2_store: Path, save_chat_model: Callable[[Path, Path], Any], tmp_path: Path
) -> None:
    model = save_chat_model(tmp_path / "chat", smollm2_store)
    baseline = NaiveBaseline.load(tmp_path / "chat", threads=1)
    assert baseline.dtype in ("float32", "bfloat16")
    messages = [{"role": "user", "content": "你好 🎉"}]
    done = baseline.generate(messages, 6)
    ids = torch.tensor([baseline.tokenizer.encode_chat(messages)])
    with torch.inference_mode():
        model = model.to(getattr(torch, baseline.dtype))
        expected = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, do_sample=False, eos_token_id=2, pad_token_id=2
        )
    made = expected[0, ids.shape[1] :].tolist()
    assert done.text == baseline.tokenizer.decode(made)
    assert (done.prompt_tokens, done.output_tokens) == (ids.shape[1], len(made))
    assert done.finish_reason == ("stop" if made[-1] == 2 else "length")
    assert done.ttft_seconds is not None and 0 < done.ttft_seconds <= done.duration_seconds


def test_ctrl_c_ends_the_command_and_not_just_the_prompt(smollm2_store: Path) -> None:
    prompts = ["--prompt", "Count to a thousand.", "--prompt", "And again."]
    command = [sys.executable, "-m", "inference", "generate", "--model", str(smollm2_store), "--chat", *prompts]
    running = subprocess.Popen(
        [*command, "--max-tokens", "4000", "--ignore-eos", "--threads", "1"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # Whoever runs the tests in the background may have it ignored, which a child inherits.
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
    )
    assert running.stdout is not None
    assert running.stdout.read(1)  # the first prompt's answer has begun
    running.send_signal(signal.SIGINT)
    _, err = running.communicate(timeout=120)
    assert running.returncode == 130
    assert err.count("tokens in") == 1 and "[cancelled" in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    "arguments",
    [
        ["generate", "--model", "M", "--prompt", "a", "--threads", "0"],
        ["generate", "--model", "M", "--prompt", "a", "--memory", "2XB"],
        ["evaluate", "M", "--text", "T", "--threads", "-1"],
        ["evaluate", "M", "--text", "T", "--tokens", "0"],
        ["hardware", "--threads", "0"],
        ["plan", "M", "--memory", "9" * 400 + "GB"],
        ["plan", "M", "--memory", "0GB"],
        ["plan", "M", "--disk", "lots"],
        ["plan", "M", "--rows", "-1"],
        ["plan", "M", "--prompt", "0"],
        ["plan", "M", "--threads", "-3"],
        ["plan", "M", "--batch", "1.5"],
        ["bench", "resident", "--model", "M", "--new", "0"],
        ["bench", "shared-prefix", "--model", "M", "--system", "-1"],
    ],
)
def test_a_number_that_makes_no_sense_is_refused_with_the_usage(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    command = partial(bench, arguments[1:]) if arguments[0] == "bench" else partial(main, arguments)
    with pytest.raises(SystemExit) as ended:
        command()
    assert ended.value.code == 2
    assert f"argument {arguments[-2]}" in capsys.readouterr().err


@pytest.mark.parametrize("place", ["file/store", "missing-in-proc"])
def test_a_place_that_cannot_be_written_is_named_without_a_traceback(
    place: str, tiny_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("in the way", "utf-8")
    store = tmp_path / place if place.startswith("file") else Path("/proc") / place
    assert main(["import", str(tiny_folder), str(store)]) == 1
    assert capsys.readouterr().err.startswith(f"error: {store}: cannot be made: ")


def test_a_reader_that_has_seen_enough_ends_a_command_quietly() -> None:
    command = [sys.executable, "-m", "inference", "--help"]
    ran = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert ran.stdout is not None and ran.stderr is not None
    ran.stdout.close()
    assert "Traceback" not in ran.stderr.read()
    ran.wait()


def test_memory_for_an_engine_is_given_as_people_write_it(
    smollm2_store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PENSTOCK_IMAGES", str(tmp_path))
    model = ["generate", "--model", str(smollm2_store), "--prompt", "a", "--max-tokens", "1", "--threads", "1"]
    assert main([*model, "--memory", "1MB"]) == 1
    assert "1000000 bytes do not hold" in capsys.readouterr().err
