"""What the figures of a pilot mean, in words: how each was measured, what limits it, what an auditor would ask."""

from collections.abc import Iterator, Mapping
from decimal import Decimal
from typing import Any

from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from penstock.pilots import arithmetic
from penstock.pilots.models import BaselineRun, Pilot
from penstock.pilots.sensitivity import Case
from penstock.pilots.ways import Way

FEW_ITEMS = 30


def how(pilot: Pilot, run: BaselineRun | None, *, pairs: int) -> dict[str, str]:
    """For each figure of `Returns`, by its name: how it was measured or reckoned."""
    card = pilot.rate_card
    values: dict[str, Any] = {
        "file": pilot.items_file.filename,
        "sha": pilot.items_file.sha256,
        "n": pilot.sample_items,
        "pairs": pairs,
        "batch": pilot.trial_batch_id or "–",
        "card": card.name,
        "watts": f"{card.power_watts:,.0f}",
        "resamples": f"{arithmetic.RESAMPLES:,}",
        "seed": arithmetic.SEED,
        "hours": arithmetic.HOURS_PER_MONTH,
        "rate": f"{pilot.discount_rate * 100:.2f}",
        "margin": round(arithmetic.MARGIN * 100),
        **_method_values(run),
    }
    texts = {
        "items": _(
            "The first %(n)s items of the file %(file)s (SHA-256 %(sha)s). Both ways got the same prompts, token for "
            "token, and the same limit of output tokens, and decoded greedily (temperature 0)."
        ),
        "baseline.seconds": _(
            "Sum of the times of the items, one after the other, each from its prompt's tokens to its last token. "
            "transformers %(transformers)s with torch %(torch)s on the weights that the release was made from, "
            "unquantized (%(dtype)s), on %(threads)s processor threads. Left out: loading the model, and a warm-up "
            "of %(warm_up)s tokens."
        ),
        "trial.seconds": _(
            "Wall time from the start of the first request to the end of the last one in the batch %(batch)s, "
            "whatever the engine did in between. Left out: loading the model, and the time before the first request "
            "started."
        ),
        "items_per_second": _(
            "Items with an output, by the seconds of the way. An item that failed counts only in time."
        ),
        "output_tokens": _("Tokens that the model wrote, by its own tokenizer; tokens of the prompt are not counted."),
        "throughput_multiple": _("Items per second of the trial, by items per second of the baseline."),
        "throughput_multiple_interval": _(
            "95 %% bootstrap interval over the %(pairs)s items, drawn with replacement %(resamples)s times (seed "
            "%(seed)s), each item with its baseline time and its share of the trial's busy time. It tells how far "
            "the multiple hangs on which items were taken. Each way ran once, so it does not tell how far a second "
            "run would differ."
        ),
        "token_throughput_multiple": _(
            "The same with output tokens per second: where one way writes longer outputs, this is the fairer "
            "comparison."
        ),
        "cost_per_item": _(
            "Seconds of the way times the cost of a second of the host, by the items with an output. A second costs "
            "the hardware's price over its years and share of hours in use, plus its power (rate card: %(card)s). "
            "The same for both ways. The page of a batch counts busy seconds alone and can show less."
        ),
        "cost_per_valid_item": _(
            "The same cost, by the items whose output kept the task's output contract: what a usable output costs."
        ),
        "saving_per_month": _(
            "Saving per item times the items a month that were entered. The part of power is money not spent. The "
            "part of hardware is money only where the hours freed are used for something else, or a host is not "
            "bought."
        ),
        "machine_hours_per_month": _(
            "Seconds per item times the items a month. A month has %(hours)s hours; beyond them it takes another host."
        ),
        "payback_months": _(
            "Cost of introduction as it was entered, by the saving per month. It assumes that a month's items are "
            "like those compared."
        ),
        "npv": _(
            "Savings at the end of each month, discounted at %(rate)s %% a year, less the cost of introduction. "
            "Taxes, and prices that change, are left out."
        ),
        "energy_kwh_per_1k_items": _(
            "Estimated, not measured: the rate card's %(watts)s W times the seconds, the same for both ways. Carbon "
            "is that energy times the card's factor."
        ),
        "valid_rate": _(
            "Share of the outputs that kept the task's output contract, of those that could be judged, with Wilson's "
            "95 %% interval. The same checks for both ways. A valid output kept the rules; whether it is good, a "
            "person has to read."
        ),
        "quality": _(
            "Difference of the valid rates with Newcombe's 95 %% interval. Non-inferior means that the whole "
            "interval lies above minus %(margin)s percentage points."
        ),
        "sensitivity": _(
            "Net present value over 12 months with one assumption at half, and at one and a half times, its value, "
            "the others held; and with the throughput multiple at either end of its interval. What makes a second of "
            "the host dearer makes the same time saved worth more."
        ),
    }
    return {figure: text % values for figure, text in texts.items()}


def remarks(
    pilot: Pilot,
    *,
    baseline: Way | None,
    trial: Way | None,
    baseline_disturbed_by: int | None,
    trial_disturbed_by: int | None,
    hosts: int,
    interruptions: int,
) -> Iterator[str]:
    """What limits the figures, the weightiest first."""
    if baseline is None:
        yield _("The baseline has not been measured yet.")
    if trial is None:
        yield _("The trial has not completed yet.")
    if baseline_disturbed_by:
        yield ngettext(
            "The baseline was disturbed: %(n)d other request ran meanwhile, which slows it down and flatters the "
            "trial. Measure it again while nothing else runs.",
            "The baseline was disturbed: %(n)d other requests ran meanwhile, which slows it down and flatters the "
            "trial. Measure it again while nothing else runs.",
            baseline_disturbed_by,
        ) % {"n": baseline_disturbed_by}
    if trial_disturbed_by:
        yield ngettext(
            "The trial was disturbed: %(n)d other request ran meanwhile, which slows it down.",
            "The trial was disturbed: %(n)d other requests ran meanwhile, which slows it down.",
            trial_disturbed_by,
        ) % {"n": trial_disturbed_by}
    if trial is not None and trial.delivered < trial.items:
        failed = trial.items - trial.delivered
        yield ngettext(
            "%(n)d item of the trial gave no output; its time counts, the item does not.",
            "%(n)d items of the trial gave no output; their time counts, the items do not.",
            failed,
        ) % {"n": failed}
    if pilot.sample_items < FEW_ITEMS:
        yield ngettext(
            "%(n)d item was compared: few for a decision about many thousands.",
            "%(n)d items were compared: few for a decision about many thousands.",
            pilot.sample_items,
        ) % {"n": pilot.sample_items}
    if hosts > 1:
        yield _(
            "The installation has %(n)d engine hosts: the trial may have run on another one, or on several, while "
            "the baseline ran on one."
        ) % {"n": hosts}
    if interruptions:
        yield ngettext(
            "Measuring the baseline was interrupted %(n)d time and went on with the next item.",
            "Measuring the baseline was interrupted %(n)d times and went on with the next item.",
            interruptions,
        ) % {"n": interruptions}
    if baseline is not None and trial is not None:
        yield _(
            "The baseline is the simplest way to run the model, one item at a time on the processor. It is not the "
            "best that other software could do; the multiple says nothing about that."
        )


def payback_remark(case: Case | None) -> str:
    if case is None:
        return _("Both ways have to be measured first.")
    if case.saving_per_month <= 0:
        return _("Nothing is saved, so the cost of introduction is never paid back.")
    if case.introduction_cost == 0:
        return _("No cost of introduction was entered.")
    return ""


def quality_remark(verdict: str, margin: float) -> str:
    points = {"margin": round(margin * 100)}
    if verdict == "non_inferior":
        return _("Non-inferior: the trial's valid rate is at most %(margin)s percentage points lower.") % points
    if verdict == "inferior":
        return _("Inferior: the trial's valid rate is more than %(margin)s percentage points lower.") % points
    if verdict == "undecided":
        return (
            _(
                "Undecided: too few items to tell whether the trial's valid rate is more than %(margin)s percentage "
                "points lower."
            )
            % points
        )
    return _("Not assessed: the task's output contract asks for nothing that could be judged.")


def auditor_questions() -> list[str]:
    """What an auditor would ask next, with where the answer lies."""
    return [
        _("Are these the figures that were recorded? Export the evidence of the batch and run the verifier: it "
        "needs no "
          "Penstock and no network."),
        _("Can the outputs be made again? The requests decoded greedily; the same release gives the same tokens."),
        _("Were the items chosen before the results were known? Their file's digest stands in the ledger's entry "
        "that "
          "created the pilot, before either way was measured."),
        _("Do the items stand for the month's work? Whoever chose them has to say how; the pilot does not know."),
        _("Where do the prices come from? The rate card names its author and its date; ask for the invoices."),
        _("Would a second run give the same? Measure the baseline again, and run the batch again, on a quiet host."),
        _("Who read the outputs? Valid means that the rules were kept. A sample should be read by a person."),
    ]  # fmt: skip


def _method_values(run: BaselineRun | None) -> Mapping[str, Any]:
    method = run.method if run else {}
    libraries = method.get("libraries", {})
    return {
        "transformers": libraries.get("transformers", "–"),
        "torch": libraries.get("torch", "–"),
        "dtype": method.get("dtype", "–"),
        "threads": method.get("threads", "–"),
        "warm_up": method.get("warm_up_tokens", "–"),
    }


def money(amount: Decimal | None, currency: str) -> str:
    """An amount with its currency: two decimals, or three significant digits where it is below one."""
    if amount is None:
        return "–"
    if amount == 0 or abs(amount) >= 1:
        return f"{amount:,.2f} {currency}"
    return f"{significant(amount)} {currency}"


def significant(value: Decimal | float | int | None, digits: int = 3) -> str:
    """About three significant digits, with thousands separators."""
    if value is None:
        return "–"
    number = Decimal(repr(value)) if isinstance(value, float) else Decimal(value)
    if number == 0:
        return "0"
    places = max(0, digits - 1 - number.adjusted())
    return f"{number:,.{places}f}"


def percent(share: float | Decimal | None) -> str:
    return "–" if share is None else f"{float(share) * 100:.1f} %"
