"""A release's page: what was measured on it, or plainly that nothing was."""

from typing import Any

import pytest
from django.urls import reverse

pytestmark = pytest.mark.django_db

FIGURES = {
    "model": {"digest": "aa" * 32, "source": "m", "quantization": "int4 group 64", "compute": "int8", "kernels": "n"},
    "reference": {
        "digest": "dd" * 32,
        "source": "model-16bit",
        "quantization": "bfloat16",
        "compute": "fp32",
        "kernels": "n",
    },
    "text_sha256": "ee" * 32,
    "scored_tokens": 12345,
    "perplexity": {"value": 20.5, "low": 19.0, "high": 22.0},
    "reference_perplexity": {"value": 20.0, "low": None, "high": None},
    "perplexity_change": {"value": 0.025, "low": -0.0012, "high": 0.03},
    "top1_agreement": {"value": 0.951, "low": 0.94, "high": 0.96},
    "kl_mean_nats": {"value": 0.0056, "low": 0.0053, "high": 0.0058},
    "kl_p99_nats": 0.0256,
    "task": {
        "items": 40,
        "accuracy": 0.8,
        "accuracy_low": 0.652,
        "accuracy_high": 0.895,
        "reference_accuracy": 0.825,
        "reference_accuracy_low": 0.68,
        "reference_accuracy_high": 0.913,
        "agreement": 0.95,
    },
}


def test_a_release_without_evaluation_says_so(make_release: Any, people: Any, as_person: Any) -> None:
    release = make_release("fresh", status="imported", approved_at=None)
    page = as_person(people.auditor).get(reverse("dashboard:release", args=[release.name])).content.decode()
    assert "Not evaluated." in page
    assert "penstock model evaluate fresh" in page
    asked = as_person(people.approver).get(reverse("dashboard:release-act", args=[release.name, "approve"]))
    assert "It has not been evaluated" in asked.content.decode()


def test_the_page_shows_the_figures_their_intervals_and_what_was_compared(
    make_release: Any, people: Any, as_person: Any
) -> None:
    release = make_release(
        "measured",
        manifest={
            "quantization": {
                "bits_per_weight": 5.21,
                "weights_by_encoding": {"int4 group 64": 106_168_320, "int8 group 64": 28_311_552},
                "calibration": {"method": "gptq", "tokens": 8192, "text_sha256": "ab" * 32},
            }
        },
    )
    release.evaluations.create(
        figures=FIGURES,
        text_name="heldout.txt",
        text_sha256="ee" * 32,
        reference_digest="dd" * 32,
        evaluated_by="operator",
    )
    page = as_person(people.auditor).get(reverse("dashboard:release", args=[release.name])).content.decode()
    assert "Not evaluated." not in page
    for shown in ("20.5", "19.0 to 22.0", "2.50%", "−0.120% to 3.00%", "95.1%", "0.00560", "0.0256", "80.0%"):
        assert shown in page, shown
    for shown in ("model-16bit (bfloat16), computed in fp32", "12,345", "heldout.txt", "items: 40"):
        assert shown in page, shown
    for shown in ("int4 group 64", "106,168,320", "5.21", "gptq", "8,192"):
        assert shown in page, shown
    approver = as_person(people.approver)
    assert (
        "Evaluate"
        not in approver.get(reverse("dashboard:release-act", args=[release.name, "approve"])).content.decode()
    )
    assert approver.get(reverse("dashboard:release-act", args=[release.name, "evaluate"])).status_code == 404
