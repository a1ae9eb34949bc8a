"""The rules that ship, and how faulty ones are refused."""

from decimal import Decimal

import hanzidentifier
import pytest

from governance.controls.rules import FILE, RulesError, Threshold, load_rules, parse_rules


def test_every_rule_names_real_controls_and_every_measurement_has_a_rule() -> None:
    rules = load_rules()
    assert {rule.measurement for rule in rules.rules} == set(rules.measurements)
    assert len(rules.rules) == 30


def test_controls_that_no_figure_can_speak_to_stay_unmapped() -> None:
    rules = load_rules()
    for control_id in ("A.2.2", "A.5.2", "A.8.4"):
        assert rules.for_control("iso-iec-42001-2023", control_id) == ()
    for control_id in ("GOVERN 2.2", "GOVERN 3.1", "MAP 1.5"):
        assert rules.for_control("nist-ai-rmf-1.0", control_id) == ()


@pytest.mark.parametrize(
    ("catalog_id", "control_id", "measurement"),
    [
        ("iso-iec-42001-2023", "A.6.2.6", "requests.error_rate"),
        ("nist-ai-rmf-1.0", "MEASURE 2.4", "objectives.met_rate"),
        ("iso-iec-42001-2023", "A.6.2.8", "ledger.leaves"),
        ("iso-iec-42001-2023", "A.4.5", "hosts.inventory"),
        ("nist-ai-rmf-1.0", "MEASURE 2.3", "pilots.throughput_multiple"),
        ("nist-ai-rmf-1.0", "MEASURE 2.11", "fairness.groups_failing"),
        ("nist-ai-rmf-1.0", "MEASURE 2.12", "energy.kwh"),
        ("nist-ai-rmf-1.0", "MAP 3.2", "cost.total"),
        ("nist-ai-rmf-1.0", "MANAGE 1.1", "pilots.decided"),
        ("nist-ai-rmf-1.0", "GOVERN 1.6", "registry.active_tasks"),
        ("nist-ai-rmf-1.0", "GOVERN 6.1", "registry.releases_with_licence_rate"),
        ("iso-iec-42001-2023", "A.3.2", "registry.tasks_with_owner_rate"),
    ],
)
def test_a_control_finds_its_figures(catalog_id: str, control_id: str, measurement: str) -> None:
    assert measurement in {rule.measurement for rule in load_rules().for_control(catalog_id, control_id)}


def test_no_rule_claims_compliance_or_a_score() -> None:
    for rule in load_rules().rules:
        for text in (rule.shows.en, rule.next_question.en):
            assert "complian" not in text.lower() and "score" not in text.lower()
        assert "合規" not in rule.shows.zh_hant


def test_rules_and_titles_are_told_in_both_languages() -> None:
    rules = load_rules()
    texts = [definition.title for definition in rules.measurements.values()]
    texts += [text for rule in rules.rules for text in (rule.shows, rule.next_question)]
    for text in texts:
        assert hanzidentifier.is_traditional(text.zh_hant), text
        assert not hanzidentifier.has_chinese(text.en), text


@pytest.mark.parametrize(
    ("op", "limit", "value", "holds"),
    [
        ("<=", "0.05", 0.05, True),
        ("<=", "0.05", 0.050001, False),
        (">=", "0.95", Decimal("0.95"), True),
        (">=", "0.95", 0.9499, False),
        ("<=", "0", 0, True),
        ("<=", "0", 1, False),
    ],
)
def test_a_threshold_holds_at_its_own_value(op: str, limit: str, value: float, holds: bool) -> None:
    threshold = Threshold.model_validate({"op": op, "value": limit, "unit": "ratio"})
    assert threshold.holds(value) is holds


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("[A.3.2]", "[A.3.99]", r"A\.3\.99"),
        ("iso-iec-42001-2023: [A.3.2]", "iso-27001: [A.3.2]", "no such catalog"),
        ("measurement: energy.kwh", "measurement: energy.joule", "undefined measurement"),
        ('value: "0.05", unit: ratio', 'value: "0.05", unit: seconds', "unit must be ratio"),
        ("id: error-rate", "id: requests-counted", "repeated: requests-counted"),
        ("freshness_hours: 24\n", "freshness_hours: 0\n", "freshness_hours"),
        ("rules:", "rules: [", "not YAML"),
    ],
)
def test_faulty_rules_are_refused_with_the_place(old: str, new: str, message: str) -> None:
    raw = FILE.read_text(encoding="utf-8")
    assert old in raw
    with pytest.raises(RulesError, match=message):
        parse_rules(raw.replace(old, new, 1).encode())
