"""What stands in a pilot's report: plain values in the language in force, for the template to lay out."""

import datetime as dt
from collections.abc import Callable, Mapping
from decimal import Decimal
from typing import Any

from django.conf import settings
from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from governance.ledger.selectors import entries, latest_checkpoint
from penstock.pilots import charts, wording
from penstock.pilots.models import BaselineRun, Pilot
from penstock.pilots.returns import Returns, Way, returns
from penstock.pilots.selectors import measured_run, trial_is_measured
from penstock.pilots.wording import money, percent, significant

Row = list[str]


def content(pilot: Pilot, *, printed_at: dt.datetime) -> dict[str, Any]:
    """JSON-safe data for `templates/reports/pilot.typ`."""
    figures, run = returns(pilot), measured_run(pilot)
    return {
        "title": pilot.title,
        "kind": _("Pilot report"),
        "subtitle": _("Task: %(task)s · Team: %(team)s") % {"task": pilot.task.title, "team": pilot.task.team.name},
        "status": _status(pilot),
        "printed": _("Printed %(when)s") % {"when": _moment(printed_at)},
        "page_of": [_("Page"), _("of")],
        "tiles": _tiles(figures),
        "remarks": {"heading": _("Before you use these figures"), "items": list(figures.remarks)},
        "scope": {"heading": _("What was compared"), "rows": _scope(pilot, run)},
        "comparison": _comparison(figures),
        "charts": _charts(figures),
        "return": {"heading": _("What it returns"), "rows": _return(figures)},
        "assumptions": {"heading": _("Assumptions"), "rows": _assumptions(pilot)},
        "sensitivity": _sensitivity(figures),
        "method": _method(pilot, run, figures),
        "evidence": _evidence(pilot, run),
        "questions": {"heading": _("What an auditor would ask next"), "items": wording.auditor_questions()},
        "decision": _decision(pilot),
    }


def _tiles(figures: Returns) -> list[dict[str, str]]:
    interval = _interval(figures.throughput_multiple_low, figures.throughput_multiple_high, lambda value: _times(value))
    saved = None
    if figures.baseline and figures.trial and figures.baseline.cost_per_item and figures.trial.cost_per_item:
        saved = 1 - figures.trial.cost_per_item / figures.baseline.cost_per_item
    quality = figures.quality
    return [
        {
            "label": _("Throughput multiple"),
            "value": _times(figures.throughput_multiple),
            "note": _("95 %% interval %(interval)s") % {"interval": interval} if interval else _("no interval"),
        },
        {
            "label": _("Cost per item"),
            "value": money(figures.trial.cost_per_item if figures.trial else None, figures.currency),
            "note": _("%(share)s less than the baseline") % {"share": percent(saved)}
            if saved is not None and saved >= 0
            else _("%(share)s more than the baseline") % {"share": percent(-saved)}
            if saved is not None
            else "",
        },
        {
            "label": _("Payback"),
            "value": _months(figures.payback_months),
            "note": figures.payback_remark
            or _("saving %(amount)s a month") % {"amount": money(figures.saving_per_month, figures.currency)},
        },
        {
            "label": _("Valid outputs"),
            "value": percent(figures.trial.valid_rate if figures.trial else None),
            "note": _("baseline %(rate)s") % {"rate": percent(figures.baseline.valid_rate)}
            if figures.baseline and quality
            else "",
        },
    ]


def _scope(pilot: Pilot, run: BaselineRun | None) -> list[Row]:
    method: Mapping[str, Any] = run.method if run else {}
    host: Mapping[str, Any] = method.get("host", {})
    release = pilot.task.model_release
    until = pilot.starts_on + dt.timedelta(days=pilot.trial_days)
    rows = [
        [_("Purpose of the task"), pilot.task.purpose],
        [
            _("Latency class, risk tier"),
            f"{pilot.task.get_latency_class_display()} · {pilot.task.get_risk_tier_display()}",
        ],
        [
            _("Items"),
            ngettext("the first %(n)d of %(file)s", "the first %(n)d of %(file)s", pilot.sample_items)
            % {"n": pilot.sample_items, "file": pilot.items_file.filename},
        ],
        [
            _("Baseline"),
            _("transformers generate, one item at a time, unquantized (%(dtype)s), %(threads)s threads")
            % {"dtype": method.get("dtype", "–"), "threads": method.get("threads", "–")},
        ],
        [
            _("Trial"),
            _("a Penstock batch on the release %(release)s (%(quantization)s)")
            % {"release": release.name, "quantization": release.quantization},
        ],
        [
            _("Period"),
            _("%(start)s to %(end)s (%(days)d days)")
            % {"start": pilot.starts_on.isoformat(), "end": until.isoformat(), "days": pilot.trial_days},
        ],
    ]
    if host:
        rows.append(
            [
                _("Host of the baseline"),
                _("%(processor)s, %(cores)d cores, %(memory)s GB of memory, %(system)s")
                % {
                    "processor": host.get("processor", "–"),
                    "cores": host.get("cores", 0),
                    "memory": f"{host.get('memory_bytes', 0) / 1e9:.0f}",
                    "system": host.get("system", "–"),
                },
            ]
        )
    return rows


def _comparison(figures: Returns) -> dict[str, Any]:
    currency = figures.currency

    def row(label: str, show: Callable[[Way], str], ratio: str = "") -> Row:
        return [label, *(show(way) if way else "–" for way in (figures.baseline, figures.trial)), ratio]

    def ratio(name: str) -> str:
        before, after = figures.baseline, figures.trial
        if before is None or after is None or not getattr(before, name) or getattr(after, name) is None:
            return "–"
        return _times(float(getattr(after, name)) / float(getattr(before, name)))

    rows = [
        row(_("Items with an output"), lambda way: f"{way.delivered:,} / {way.items:,}"),
        row(_("Output tokens"), lambda way: f"{way.output_tokens:,}", ratio("output_tokens")),
        row(_("Seconds"), lambda way: significant(way.seconds), ratio("seconds")),
        row(_("Items per second"), lambda way: significant(way.items_per_second), ratio("items_per_second")),
        row(
            _("Output tokens per second"),
            lambda way: significant(way.output_tokens_per_second),
            ratio("output_tokens_per_second"),
        ),
        row(_("Cost per item"), lambda way: money(way.cost_per_item, currency), ratio("cost_per_item")),
        row(
            _("Cost per valid item"), lambda way: money(way.cost_per_valid_item, currency), ratio("cost_per_valid_item")
        ),
        row(
            _("Cost per 1,000 output tokens"),
            lambda way: money(way.cost_per_1k_output_tokens, currency),
            ratio("cost_per_1k_output_tokens"),
        ),
        row(_("Valid outputs"), _valid),
        row(
            _("Machine hours for a month's items"),
            lambda way: significant(way.machine_hours_per_month),
            ratio("machine_hours_per_month"),
        ),
        row(
            _("Hosts needed, running day and night"),
            lambda way: "–" if way.hosts_needed is None else f"{way.hosts_needed:,}",
        ),
        row(
            _("Energy per 1,000 items, kWh (estimated)"),
            lambda way: significant(way.energy_kwh_per_1k_items),
            ratio("energy_kwh_per_1k_items"),
        ),
        row(
            _("Carbon per 1,000 items, kg (estimated)"),
            lambda way: significant(way.carbon_kg_per_1k_items),
            ratio("carbon_kg_per_1k_items"),
        ),
    ]
    notes = []
    by_tokens = _interval(
        figures.token_throughput_multiple_low, figures.token_throughput_multiple_high, lambda value: _times(value)
    )
    if by_tokens:
        notes.append(
            _("By output tokens the multiple is %(multiple)s (95 %% interval %(interval)s).")
            % {"multiple": _times(figures.token_throughput_multiple), "interval": by_tokens}
        )
    if figures.identical_outputs is not None:
        notes.append(
            ngettext(
                "%(same)d of %(n)d output is the same both ways, character for character.",
                "%(same)d of %(n)d outputs are the same both ways, character for character.",
                figures.paired_items,
            )
            % {"same": figures.identical_outputs, "n": figures.paired_items}
        )
    if figures.quality is not None:
        notes.append(figures.quality.remark + _difference(figures))
    return {
        "heading": _("Both ways, side by side"),
        "head": ["", _("Baseline"), _("Trial"), _("Trial by baseline")],
        "rows": rows,
        "notes": notes,
    }


def _charts(figures: Returns) -> list[dict[str, str]]:
    before, after = figures.baseline, figures.trial
    if before is None or after is None:
        return []
    drawn = [
        {
            "svg": charts.time_chart(figures),
            "title": _("The same items take %(trial)s s instead of %(baseline)s s")
            % {"trial": significant(after.seconds), "baseline": significant(before.seconds)},
        }
    ]
    if before.valid_rate is not None and after.valid_rate is not None:
        drawn.append(
            {
                "svg": charts.quality_chart(figures),
                "title": _("Is the quality kept? Valid: %(baseline)s before, %(trial)s in the trial")
                % {"trial": percent(after.valid_rate), "baseline": percent(before.valid_rate)},
            }
        )
    return drawn


def _return(figures: Returns) -> list[Row]:
    currency = figures.currency
    return [
        [_("Saving per item"), money(figures.saving_per_item, currency)],
        [
            _("Saving a month, at %(n)s items") % {"n": f"{figures.items_per_month:,}"},
            money(figures.saving_per_month, currency),
        ],
        [_("… of which power: money not spent"), money(figures.power_saving_per_month, currency)],
        [_("… of which use of hardware: if the hours are used"), money(figures.hardware_saving_per_month, currency)],
        [_("Cost of introduction, once"), money(figures.introduction_cost, currency)],
        [_("Payback"), _months(figures.payback_months)],
        [_("Net present value, 12 months"), money(figures.npv_12_months, currency)],
        [_("Net present value, 36 months"), money(figures.npv_36_months, currency)],
    ]


def _assumptions(pilot: Pilot) -> list[Row]:
    card = pilot.rate_card
    return [
        [_("Rate card"), _("%(name)s, by %(who)s, %(when)s")
            % {"name": card.name, "who": card.created_by, "when": card.created_at.date().isoformat()}],
        [_("Hardware price"), money(card.hardware_price, card.currency)],
        [_("Years of use"), significant(card.lifetime_years)],
        [_("Share of hours in use"), percent(card.utilization)],
        [_("Power under load"), f"{card.power_watts:,.0f} W"],
        [_("Electricity price a kWh"), money(card.electricity_price_per_kwh, card.currency)],
        [_("Carbon, kg a kWh"), significant(card.carbon_kg_per_kwh)],
        [_("Discount rate a year"), percent(pilot.discount_rate)],
    ]  # fmt: skip


def _sensitivity(figures: Returns) -> dict[str, Any] | None:
    if not figures.sensitivity or figures.npv_12_months is None:
        return None
    rows, currency = figures.sensitivity, figures.currency
    return {
        "heading": _("What the return hangs on"),
        "lead": _(
            "At the values entered, the net present value over 12 months is %(npv)s. The widest bar matters most."
        )
        % {"npv": money(figures.npv_12_months, currency)},
        "svg": charts.tornado_chart(rows, figures.npv_12_months, currency),
        "alt": _("Bars of the net present value at the low and high value of each assumption; the table has the same."),
        "legend": [_("at the low value"), _("at the high value")],
        "head": [_("Assumption"), _("Low"), _("High"), _("Value at low"), _("Value at high")],
        "rows": [
            [
                row.label,
                _with_unit(row.low, row.unit),
                _with_unit(row.high, row.unit),
                money(row.npv_at_low, currency),
                money(row.npv_at_high, currency),
            ]
            for row in rows
        ],
    }


def _method(pilot: Pilot, run: BaselineRun | None, figures: Returns) -> dict[str, Any]:
    how = figures.how
    labels = {
        "items": _("Items"),
        "baseline.seconds": _("Seconds of the baseline"),
        "trial.seconds": _("Seconds of the trial"),
        "items_per_second": _("Items per second"),
        "output_tokens": _("Output tokens"),
        "throughput_multiple": _("Throughput multiple"),
        "throughput_multiple_interval": _("Interval of the multiple"),
        "token_throughput_multiple": _("Multiple by output tokens"),
        "cost_per_item": _("Cost per item"),
        "cost_per_valid_item": _("Cost per valid item"),
        "saving_per_month": _("Saving a month"),
        "machine_hours_per_month": _("Machine hours"),
        "payback_months": _("Payback"),
        "npv": _("Net present value"),
        "energy_kwh_per_1k_items": _("Energy and carbon"),
        "valid_rate": _("Valid outputs"),
        "quality": _("Comparison of quality"),
        "sensitivity": _("What the return hangs on"),
    }
    return {"heading": _("How each figure was measured"), "rows": [[label, how[key]] for key, label in labels.items()]}


def _evidence(pilot: Pilot, run: BaselineRun | None) -> dict[str, Any]:
    head = latest_checkpoint()
    release = pilot.task.model_release
    method: Mapping[str, Any] = run.method if run else {}
    rows = [
        [_("Items file"), pilot.items_file_id, pilot.items_file.sha256],
        [_("Baseline run"), str(run.pk) if run else "–", method.get("items_digest", "–")],
        [_("Prompts, as token ids"), "", method.get("prompts_digest", "–")],
        [_("Trial batch"), pilot.trial_batch_id or "–", _input_digest(pilot)],
        [_("Model release"), release.name, release.digest],
        [_("Weights it was made from"), release.source or "–", release.source_digest or "–"],
        [
            _("Signed head of the ledger"),
            _("%(origin)s, %(size)d entries") % {"origin": settings.LEDGER_ORIGIN, "size": head.size} if head else "–",
            bytes(head.root).hex() if head else "–",
        ],
    ]
    own = list(entries(subject=pilot.name).filter(kind__startswith="pilot."))
    listed = [[f"{leaf.index:,}", leaf.kind, _moment(leaf.occurred_at), bytes(leaf.leaf_hash).hex()] for leaf in own]
    recorded = (
        entries(batch=pilot.trial_batch_id, kind="request.finished").count() if pilot.trial_batch_id is not None else 0
    )
    return {
        "heading": _("Evidence"),
        "lead": _(
            "The digests are SHA-256. The ledger is append-only; its signed head covers every entry before it. %(n)d "
            "finished requests of the trial have their entry. The command penstock evidence export writes them with "
            "a verifier that needs no network."
        )
        % {"n": recorded},
        "head": [_("What"), _("Which"), _("Digest")],
        "rows": rows,
        "entries_heading": _("Entries of this pilot in the ledger"),
        "entries_head": [_("Entry"), _("Kind"), _("When"), _("Hash of the leaf")],
        "entries": listed,
        "entries_none": _("None has been put in order yet: print the report again in a few seconds."),
    }


def _decision(pilot: Pilot) -> dict[str, Any]:
    rows = []
    if pilot.status == Pilot.Status.DECIDED and pilot.decided_at is not None:
        rows = [
            [_("Decision"), str(pilot.get_decision_display())],
            [_("Reason"), pilot.decision_reason],
            [_("Decided by"), _("%(who)s, %(when)s") % {"who": pilot.decided_by, "when": _moment(pilot.decided_at)}],
        ]
    return {
        "heading": _("Decision"),
        "rows": rows,
        "open": _("Not decided yet: scale up, redesign, or stop."),
        "lines": [_("Pilot manager"), _("Task owner"), _("Approver (risk)")],
        "signature": _("Name, signature"),
        "date": _("Date"),
    }


def _status(pilot: Pilot) -> str:
    if pilot.status == Pilot.Status.DECIDED:
        return str(pilot.get_decision_display())
    return _("Measured, not decided") if trial_is_measured(pilot) else str(pilot.get_status_display())


def _input_digest(pilot: Pilot) -> str:
    return pilot.trial_batch.input_file.sha256 if pilot.trial_batch is not None else "–"


def _valid(way: Way) -> str:
    if way.valid_rate is None:
        return _("not judged")
    interval = _interval(way.valid_rate_low, way.valid_rate_high, percent)
    return f"{way.valid} / {way.assessed} = {percent(way.valid_rate)}\n({interval})"


def _difference(figures: Returns) -> str:
    quality = figures.quality
    if quality is None or quality.difference is None or quality.low is None or quality.high is None:
        return ""
    return " " + _("Difference %(points)s percentage points (95 %% interval %(low)s to %(high)s).") % {
        "points": _points(quality.difference),
        "low": _points(quality.low),
        "high": _points(quality.high),
    }


def _points(share: float) -> str:
    return f"{share * 100:+.1f}"


def _interval(low: float | None, high: float | None, show: Callable[[float], str]) -> str:
    if low is None or high is None:
        return ""
    return _("%(low)s to %(high)s") % {"low": show(low), "high": show(high)}


def _times(value: float | None) -> str:
    return "–" if value is None else f"{significant(value)}×"


def _months(value: Decimal | None) -> str:
    if value is None:
        return "–"
    return _("%(n)s months") % {"n": significant(value)}


def _with_unit(value: Decimal, unit: str) -> str:
    return significant(value) if not unit else f"{significant(value)} {unit}"


def _moment(moment: dt.datetime) -> str:
    return f"{moment.astimezone(dt.UTC):%Y-%m-%d %H:%M} UTC"
