"""Evaluating a release: the figures are kept, the state moves, and only those who may can do it."""

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import click
import pytest
from django.core.exceptions import PermissionDenied, ValidationError

from governance.ledger.models import OutboxEntry
from inference.task_score import TaskFileError
from inference.weights import StoreManifest, import_model
from penstock.registry.models import ModelRelease
from penstock.registry.selectors import evaluations_of
from penstock.registry.services import approve_release, evaluate_release, withdraw_release
from penstock.registry.transitions import TransitionError

pytestmark = pytest.mark.django_db

TEXT = (
    "The gate at the top of the pipe decides how much water reaches the wheel. When it opens too far the wheel races; "
    "when it closes too fast the pipe shakes. A careful keeper moves it a hand's width at a time and listens.\n"
)


@pytest.fixture(scope="session")
def tiny_source(starter_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder of one layer of random weights, with the starter model's tokenizer."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("tiny") / "source"
    with_tokenizer = tmp_path_factory.mktemp("starter") / "store"
    import_model(starter_gguf, with_tokenizer)
    torch.manual_seed(20261130)
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        eos_token_id=2,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    shutil.copy(with_tokenizer / "tokenizer.json", folder)
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}), "utf-8")
    return folder


@pytest.fixture
def imported(tiny_source: Path, make_release: Any, home: Path, tmp_path: Path) -> ModelRelease:
    """A release whose weights are 4-bit ones of `tiny_source`."""
    store = tmp_path / "store"
    manifest = import_model(tiny_source, store, quantize="int4")
    release: ModelRelease = make_release("tiny-int4", status="imported")
    release.digest, release.store_path = manifest.digest, str(store)
    release.source_digest, release.source_path = manifest.source_digest, str(tiny_source)
    release.save()
    return release


@pytest.fixture
def text(tmp_path: Path) -> Path:
    file = tmp_path / "heldout.txt"
    file.write_text(TEXT, "utf-8")
    return file


def test_the_figures_are_kept_with_the_texts_digest_and_the_release_is_evaluated(
    people: Any, imported: ModelRelease, text: Path, home: Path, tmp_path: Path
) -> None:
    task = tmp_path / "task.jsonl"
    task.write_text('{"context": "The keeper", "choices": [" listens", " sings"], "answer": 0}\n', "utf-8")
    seen: list[tuple[int, int]] = []
    evaluation = evaluate_release(
        user=people.operator,
        release=imported,
        text=text,
        task=task,
        progress=lambda done, total: seen.append((done, total)),
    )
    imported.refresh_from_db()
    assert imported.status == "evaluated"
    assert seen[-1][0] == seen[-1][1]
    assert list(evaluations_of(imported)) == [evaluation]
    assert evaluation.text_sha256 == hashlib.sha256(TEXT.encode()).hexdigest()
    assert (evaluation.text_name, evaluation.evaluated_by) == ("heldout.txt", "operator")
    figures = evaluation.figures
    assert figures["model"]["digest"] == imported.digest
    # The reference is the source before quantization, in float32.
    assert evaluation.reference_digest != imported.digest
    assert (figures["reference"]["source"], figures["reference"]["compute"]) == ("source", "fp32")
    assert figures["kl_mean_nats"]["value"] > 0
    assert figures["task"]["items"] == 1
    event = OutboxEntry.objects.get(kind="release.evaluated")
    assert event.subject == "tiny-int4"
    assert event.payload["before"] == "imported" and event.payload["after"] == "evaluated"
    assert event.payload["text_sha256"] == evaluation.text_sha256
    assert event.payload["perplexity"] == figures["perplexity"]["value"]
    assert event.payload["task_sha256"] == hashlib.sha256(task.read_bytes()).hexdigest()


def test_without_its_source_a_release_is_compared_with_itself_in_float32(
    people: Any, imported: ModelRelease, text: Path
) -> None:
    for path in ("/nowhere/model.gguf", ""):
        imported.source_path = path
        imported.save()
        evaluation = evaluate_release(user=people.operator, release=imported, text=text, max_tokens=20)
        assert evaluation.reference_digest == imported.digest
        assert evaluation.figures["scored_tokens"] == 19


def test_a_source_that_has_changed_is_no_reference(people: Any, imported: ModelRelease, text: Path) -> None:
    imported.source_digest = "0" * 64
    imported.save()
    evaluation = evaluate_release(user=people.operator, release=imported, text=text, max_tokens=20)
    assert evaluation.reference_digest == imported.digest


def test_an_approved_release_stays_approved_and_a_withdrawn_one_is_not_evaluated(
    people: Any, imported: ModelRelease, text: Path
) -> None:
    approve_release(user=people.approver, release=imported)
    evaluate_release(user=people.approver, release=imported, text=text, max_tokens=20)
    imported.refresh_from_db()
    assert imported.status == "approved"
    withdraw_release(user=people.approver, release=imported)
    imported.refresh_from_db()
    with pytest.raises(TransitionError):
        evaluate_release(user=people.approver, release=imported, text=text)


def test_only_an_operator_or_approver_evaluates(people: Any, imported: ModelRelease, text: Path) -> None:
    for person in (people.task_owner, people.auditor, people.pilot_manager):
        with pytest.raises(PermissionDenied):
            evaluate_release(user=person, release=imported, text=text)
    assert not evaluations_of(imported).exists()


def test_what_is_wrong_is_named_and_nothing_is_recorded(
    people: Any, imported: ModelRelease, text: Path, tmp_path: Path
) -> None:
    binary = tmp_path / "binary.txt"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValidationError) as caught:
        evaluate_release(user=people.operator, release=imported, text=binary)
    assert "text" in caught.value.message_dict
    bad = tmp_path / "bad.jsonl"
    bad.write_text("{}", "utf-8")
    with pytest.raises(TaskFileError, match="line 1"):
        evaluate_release(user=people.operator, release=imported, text=text, task=bad)
    imported.digest = "0" * 64
    imported.save()
    with pytest.raises(ValidationError, match=StoreManifest.load(imported.store_path).digest):
        evaluate_release(user=people.operator, release=imported, text=text)
    imported.refresh_from_db()
    assert imported.status == "imported"
    assert not OutboxEntry.objects.filter(kind="release.evaluated").exists()


def test_the_command_prints_the_figures_and_names_a_release_that_is_not_there(
    people: Any, imported: ModelRelease, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from penstock.commands.models import model_evaluate

    assert model_evaluate.callback is not None
    # Without the connection to an installation that surrounds it.
    command: Any = model_evaluate.callback.__wrapped__  # type: ignore[attr-defined]
    options = {"text": text, "task": None, "reference": None, "tokens": 20, "username": "operator"}
    command(name="tiny-int4", as_json=True, **options)
    figures = json.loads(capsys.readouterr().out)
    assert figures == evaluations_of(imported).get().figures
    command(name="tiny-int4", as_json=False, **options)
    assert "Perplexity of the reference" in capsys.readouterr().out
    with pytest.raises(click.ClickException, match="absent"):
        command(name="absent", as_json=False, **options)
