"""Evaluation against transformers and scipy: the figures, their intervals, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.special import rel_entr
from scipy.stats import binomtest

from inference.__main__ import main
from inference.errors import InvalidRequest
from inference.evaluate import EvaluationError, evaluate
from inference.scoring import Scorer
from inference.task_score import TaskFileError, read_task
from inference.weights import import_model
from inference.weights.store import StoreReader

TEXT = (
    "The gate at the top of the pipe decides how much water reaches the wheel. When it opens too far the wheel races; "
    "when it closes too fast the pipe shakes. A careful keeper moves it a hand's width at a time and listens.\n"
    "水門開得慢,水輪轉得穩。\nAt night the keeper writes down each opening, so that whoever comes later can see why. "
)
WINDOW = 48


@dataclass(frozen=True)
class Pair:
    """A tiny model as transformers holds it, its store, and an int4 store of it with the same in transformers."""

    model: Any
    store: Path
    quantized_model: Any
    quantized_store: Path


@pytest.fixture(scope="module")
def pair(
    smollm2_store: Path, save_chat_model: Callable[[Path, Path], Any], tmp_path_factory: pytest.TempPathFactory
) -> Pair:
    folder = tmp_path_factory.mktemp("evaluation")
    model = save_chat_model(folder / "model", smollm2_store)
    quantized = save_chat_model(folder / "again", smollm2_store)
    import_model(folder / "model", folder / "store")
    import_model(folder / "model", folder / "int4", quantize="int4")
    reader = StoreReader(folder / "int4")
    names = {"q": "self_attn.q_proj", "k": "self_attn.k_proj", "v": "self_attn.v_proj", "o": "self_attn.o_proj",
             "gate": "mlp.gate_proj", "up": "mlp.up_proj", "down": "mlp.down_proj"}  # fmt: skip
    state = quantized.state_dict()
    for ours, theirs in names.items():
        state[f"model.layers.0.{theirs}.weight"].copy_(torch.from_numpy(reader.float32(f"layers.0.{ours}")))
    state["model.embed_tokens.weight"].copy_(torch.from_numpy(reader.float32("embedding")))
    return Pair(model, folder / "store", quantized, folder / "int4")


def probabilities_of(model: Any, tokens: list[int]) -> np.ndarray:
    """float64 [T, vocab]: transformers' next-token distributions."""
    with torch.inference_mode():
        logits = model(torch.tensor([tokens])).logits[0]
    return torch.softmax(logits.double(), dim=1).numpy()


def test_the_figures_equal_those_of_transformers_and_scipy(pair: Pair) -> None:
    result = evaluate(pair.quantized_store, TEXT, reference=pair.store, compute="fp32", window_tokens=WINDOW)
    tokenizer = Scorer.load(pair.store, compute="fp32").tokenizer
    assert tokenizer is not None
    tokens = tokenizer.encode(TEXT)
    losses, references, agreed, divergence = [], [], [], []
    for at in range(0, len(tokens), WINDOW):
        window = tokens[at : at + WINDOW]
        q = probabilities_of(pair.quantized_model, window)[:-1]
        p = probabilities_of(pair.model, window)[:-1]
        losses += list(-np.log(q[np.arange(len(q)), window[1:]]))
        references += list(-np.log(p[np.arange(len(p)), window[1:]]))
        agreed += list(q.argmax(axis=1) == p.argmax(axis=1))
        divergence += list(rel_entr(p, q).sum(axis=1))
    assert result.scored_tokens == len(losses)
    assert result.windows == -(-len(tokens) // WINDOW)
    assert result.perplexity.value == pytest.approx(np.exp(np.mean(losses)), rel=1e-4)
    assert result.reference_perplexity.value == pytest.approx(np.exp(np.mean(references)), rel=1e-4)
    change = np.exp(np.mean(losses)) / np.exp(np.mean(references)) - 1
    assert result.perplexity_change.value == pytest.approx(change, abs=1e-4)
    assert result.top1_agreement.value == pytest.approx(np.mean(agreed), abs=1.5 / len(agreed))
    assert result.kl_mean_nats.value == pytest.approx(np.mean(divergence), rel=1e-3)
    assert result.kl_p99_nats == pytest.approx(np.percentile(divergence, 99), rel=1e-3)
    for figure in (result.perplexity, result.perplexity_change, result.top1_agreement, result.kl_mean_nats):
        assert figure.low is not None and figure.high is not None
        assert figure.low <= figure.value <= figure.high


def test_the_same_evaluation_gives_the_same_json_and_none_of_it_is_nan(pair: Pair) -> None:
    once, again = (
        evaluate(pair.quantized_store, TEXT, reference=pair.store, window_tokens=WINDOW).to_dict() for _ in range(2)
    )
    assert once == again
    json.dumps(once, allow_nan=False)


def test_a_model_against_itself_differs_in_nothing(pair: Pair) -> None:
    result = evaluate(pair.store, TEXT, compute="fp32", window_tokens=WINDOW)
    assert result.perplexity_change.value == 0.0
    assert result.top1_agreement.value == 1.0
    assert result.kl_mean_nats.value == pytest.approx(0.0, abs=1e-12)


def test_one_window_has_figures_and_no_interval(pair: Pair) -> None:
    result = evaluate(pair.store, TEXT, window_tokens=512, max_tokens=20)
    assert (result.windows, result.scored_tokens) == (1, 19)
    assert result.perplexity.low is None and result.perplexity.high is None


def test_pieces_of_a_text_have_the_logits_of_the_whole(pair: Pair) -> None:
    tokens = [(17 * place) % 49152 for place in range(300)]
    scorer = Scorer.load(pair.store, compute="fp32")
    pieces = list(scorer.logits(tokens))
    assert [start for start, _ in pieces] == [0, 256]
    ours = torch.softmax(torch.cat([logits for _, logits in pieces]).double(), dim=1).numpy()
    assert np.abs(ours - probabilities_of(pair.model, tokens)).max() < 1e-5
    assert not torch.is_inference_mode_enabled()


def test_a_task_is_scored_by_log_likelihood_a_byte(pair: Pair, tmp_path: Path) -> None:
    tokenizer = Scorer.load(pair.store, compute="fp32").tokenizer
    assert tokenizer is not None
    contexts = ["The gate is", "Water reaches the", "At night the keeper", "A careful"]
    choices = [" open", " wheel and the pipe", " writes"]
    expected = []
    for context in contexts:
        prompt = tokenizer.encode(context)
        likelihood = []
        for choice in choices:
            rest = tokenizer.encode(choice)
            p = probabilities_of(pair.model, prompt + rest)
            steps = [np.log(p[len(prompt) + at - 1, token]) for at, token in enumerate(rest)]
            likelihood.append(sum(steps) / len(choice.encode()))
        expected.append(int(np.argmax(likelihood)))
    # The first two are answered rightly, the last two wrongly, by construction.
    answers = [expected[0], expected[1], (expected[2] + 1) % 3, (expected[3] + 1) % 3]
    file = tmp_path / "task.jsonl"
    rows = [{"context": c, "choices": choices, "answer": a} for c, a in zip(contexts, answers, strict=True)]
    file.write_text("\n".join(map(json.dumps, rows)) + "\n\n", "utf-8")
    task = evaluate(pair.store, TEXT, compute="fp32", window_tokens=WINDOW, task=file).task
    assert task is not None
    assert (task.items, task.accuracy, task.reference_accuracy, task.agreement) == (4, 0.5, 0.5, 1.0)
    wilson = binomtest(2, 4).proportion_ci(0.95, method="wilson")
    assert (task.accuracy_low, task.accuracy_high) == (wilson.low, wilson.high)


def test_an_exact_match_is_what_greedy_decoding_writes(pair: Pair, tmp_path: Path) -> None:
    tokenizer = Scorer.load(pair.store, compute="fp32").tokenizer
    assert tokenizer is not None
    prompt = tokenizer.encode("The wheel")
    best = int(probabilities_of(pair.model, prompt)[-1].argmax())
    target = tokenizer.decode([best])
    assert tokenizer.encode("The wheel" + target) == [*prompt, best]
    file = tmp_path / "task.jsonl"
    rows = [{"context": "The wheel", "target": target}, {"context": "The wheel", "target": target + " never this"}]
    file.write_text("\n".join(map(json.dumps, rows)), "utf-8")
    task = evaluate(pair.store, TEXT, compute="fp32", window_tokens=WINDOW, task=file).task
    assert task is not None and task.accuracy == 0.5


def test_a_text_of_a_task_may_hold_unicodes_other_line_ends(tmp_path: Path) -> None:
    file = tmp_path / "task.jsonl"
    file.write_bytes('{"context": "a\u2028b", "target": "c\x85d"}\r\n{"context": "e",\r "target": "f"}\n'.encode())
    assert [(item.context, item.choices) for item in read_task(file)] == [("a\u2028b", ("c\x85d",)), ("e", ("f",))]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "not JSON"),
        ("[]", "'context'"),
        ('{"context": "a", "choices": ["b"], "answer": 0}', "at least two"),
        ('{"context": "a", "choices": ["b", ""], "answer": 0}', "not empty"),
        ('{"context": "a", "choices": ["b", "c"], "answer": 2}', "'answer' is 2"),
        ('{"context": "a", "choices": ["b", "c"], "answer": true}', "'answer' is True"),
    ],
)
def test_a_bad_line_of_a_task_is_named(tmp_path: Path, line: str, message: str) -> None:
    file = tmp_path / "task.jsonl"
    file.write_text('{"context": "a", "target": "b"}\n' + line, "utf-8")
    with pytest.raises(TaskFileError, match=f"line 2: .*{message}"):
        read_task(file)


def test_what_cannot_be_compared_is_refused(pair: Pair, tiny_store: Path) -> None:
    with pytest.raises(EvaluationError, match="vocabulary of 512"):
        evaluate(pair.store, TEXT, reference=tiny_store)
    with pytest.raises(EvaluationError, match="no tokenizer"):
        evaluate(tiny_store, TEXT)
    with pytest.raises(EvaluationError, match="at least 2"):
        evaluate(pair.store, "")
    with pytest.raises(EvaluationError, match="windows of 1"):
        evaluate(pair.store, TEXT, window_tokens=1)
    with pytest.raises(InvalidRequest, match="not in the vocabulary"):
        list(Scorer.load(tiny_store).logits([1, 512]))


def test_the_command_prints_figures_and_json(pair: Pair, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "heldout.txt"
    text.write_text(TEXT, "utf-8")
    options = ["--reference", str(pair.store), "--text", str(text), "--window", str(WINDOW), "--compute", "fp32"]
    assert main(["evaluate", str(pair.quantized_store), *options, "--json"]) == 0
    out, err = capsys.readouterr()
    figures = json.loads(out)
    assert figures["model"]["digest"] == StoreReader(pair.quantized_store).manifest.digest
    assert "tokens" in err
    assert main(["evaluate", str(pair.quantized_store), *options]) == 0
    assert f"{figures['perplexity']['value']:.4f}" in capsys.readouterr().out
    assert main(["evaluate", str(pair.store), "--text", str(tmp_path / "absent.txt")]) == 1
    assert "absent.txt" in capsys.readouterr().err
