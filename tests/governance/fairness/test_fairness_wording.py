"""Each verdict is told in words that claim no more than the data show."""

from dataclasses import replace
from decimal import Decimal

import pytest

from governance.fairness.outcomes import OutcomeRow, Reason, Verdict
from governance.fairness.report import group_report
from governance.fairness.wording import explain, rate_text, verdict_label

ROW = OutcomeRow("", True, False, False, False, 0.5, 40, 60, Decimal("0.002"))


def told(**groups: tuple[int, int]) -> dict[str, str]:
    report = group_report(
        [
            replace(ROW, group=group, valid=index < valid)
            for group, (valid, count) in groups.items()
            for index in range(count)
        ]
    )
    return {result.group: explain(result, report) for result in report.groups}


def test_a_failing_group_is_told_with_both_rates_ratio_and_threshold() -> None:
    assert told(en=(30, 32), zh=(4, 32))["zh"] == (
        "zh is served worse: 12.5 % (5.0 to 28.1 %) of its requests got a valid output, against "
        "93.8 % (79.9 to 98.3 %) for en. The ratio is 0.13, below the screening threshold of 0.80."
    )


def test_a_passing_group_is_never_called_equal() -> None:
    sentence = told(en=(31, 32), zh=(30, 32))["zh"]
    assert "does not show that both are served equally" in sentence


def test_an_open_verdict_is_told_as_open() -> None:
    assert told(en=(31, 32), zh=(26, 32))["zh"].endswith(
        "The data would also allow a ratio below the threshold; more requests would tell."
    )
    assert told(en=(31, 32), zh=(22, 32))["zh"].endswith(
        "The data would also allow a ratio above the threshold; more requests would tell."
    )


@pytest.mark.parametrize(
    ("groups", "reason", "words"),
    [
        ({"en": (30, 32), "ja": (1, 2)}, Reason.FEW_REQUESTS, "2, where at least 30 are needed"),
        ({"en": (6, 100), "ja": (1, 40)}, Reason.FEW_EVENTS, "fewer than 5 of its requests"),
        ({"ja": (30, 32)}, Reason.ONE_GROUP, "no other group large enough"),
        ({"en": (0, 40), "ja": (0, 40)}, Reason.NO_FAVOURABLE, "nothing to compare ja with"),
        ({"en": (30, 40), "ja": (40, 40)}, Reason.REFERENCE, "ja is the best-served group"),
    ],
)
def test_every_reason_has_its_sentence(groups: dict[str, tuple[int, int]], reason: Reason, words: str) -> None:
    assert words in told(**groups)["ja"], reason


def test_a_rate_of_nothing_is_a_dash() -> None:
    assert rate_text(group_report([replace(ROW, group="en", valid=None)]).groups[0].valid) == "–"


def test_every_verdict_has_a_label() -> None:
    assert [verdict_label(verdict) for verdict in Verdict] == ["pass", "fail", "insufficient data"]
