"""The form of a task: what it is for, what it runs on, what its outputs must be and which objectives it has."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import TYPE_CHECKING, Any

from django import forms
from django.utils.translation import gettext_lazy as _

from penstock.accounts.access import has_role, teams_of
from penstock.accounts.models import Role, Team, User
from penstock.dashboard.forms.base import HouseForm
from penstock.registry.contracts import UNITS, Metric
from penstock.registry.models import LatencyClass, ModelRelease, RiskTier, Task

if TYPE_CHECKING:
    from django.utils.functional import _StrPromise

PERCENT = Decimal(100)


@dataclass(frozen=True, slots=True)
class Target:
    """How an objective is called on pages, and asked for in the form."""

    name: str | _StrPromise
    label: str | _StrPromise
    unit: str | _StrPromise


OBJECTIVES: Mapping[Metric, Target] = {
    "ttft_p95_seconds": Target(
        _("Time to first token, p95"), _("Time to first token, 95th percentile, at most"), _("seconds")
    ),
    "duration_p95_seconds": Target(_("Duration, p95"), _("Duration, 95th percentile, at most"), _("seconds")),
    "deadline_met_rate": Target(_("Deadline met"), _("Deadline met, at least"), _("percent of requests")),
    "error_rate": Target(_("Errors"), _("Errors, at most"), _("percent of requests")),
    "valid_rate": Target(_("Valid outputs"), _("Valid outputs, at least"), _("percent of assessed outputs")),
    "output_tokens_per_second": Target(_("Throughput"), _("Throughput, at least"), _("output tokens per second")),
    "cost_per_1k_output_tokens": Target(
        _("Cost per 1,000 output tokens"),
        _("Cost per 1,000 output tokens, at most"),
        _("in the rate card's currency"),
    ),
}


def objective_label(metric: str) -> str:
    return next((str(target.name) for known, target in OBJECTIVES.items() if known == metric), metric)


class TaskForm(HouseForm):
    """Creates a task or changes one (`task` given: name and team are fixed then)."""

    team = forms.ModelChoiceField(Team.objects.none(), label=_("Team"), empty_label=None)
    name = forms.SlugField(
        label=_("Name"),
        max_length=80,
        help_text=_("Lower-case letters, digits and hyphens, such as product-descriptions. Programs use it; it stays."),
    )
    title = forms.CharField(label=_("Title"), max_length=160, help_text=_("How people call it."))
    purpose = forms.CharField(
        label=_("Purpose"),
        widget=forms.Textarea(attrs={"rows": 3}),
        help_text=_("What it decides or writes, for whom, and what it is not for. An auditor reads this first."),
    )
    owner = forms.ModelChoiceField(
        User.objects.none(), label=_("Owner"), empty_label=None, help_text=_("Who answers for what it does.")
    )
    latency_class = forms.ChoiceField(
        label=_("Latency class"),
        choices=LatencyClass.choices,
        initial=LatencyClass.BATCH,
        help_text=_("How long someone waits. It fixes queue and priority; batch runs at the highest throughput."),
    )
    risk_tier = forms.ChoiceField(
        label=_("Risk tier"),
        choices=RiskTier.choices,
        help_text=_("As your own assessment says. It is recorded, not judged."),
    )
    model_release = forms.ModelChoiceField(
        ModelRelease.objects.none(),
        label=_("Model release"),
        empty_label=None,
        help_text=_("Fixed weights by digest. A task becomes active only on an approved release."),
    )
    system_prompt = forms.CharField(label=_("System prompt"), required=False, widget=forms.Textarea(attrs={"rows": 3}))
    prompt_template = forms.CharField(
        label=_("Prompt template"),
        required=False,
        widget=forms.Textarea(attrs={"rows": 5, "class": "mono"}),
        help_text=_(
            "For records that are not prompts yet: $field stands for the record's field, $$ for a dollar sign."
        ),
    )
    max_output_tokens = forms.IntegerField(label=_("Most output tokens a request"), min_value=1, initial=256)

    contract_language_from = forms.CharField(
        label=_("Language as named by"),
        required=False,
        max_length=64,
        help_text=_("Metadata key with the expected language, such as language. Empty: language is not checked."),
    )
    contract_min_characters = forms.IntegerField(label=_("At least, characters"), required=False, min_value=0)
    contract_max_characters = forms.IntegerField(label=_("At most, characters"), required=False, min_value=1)
    contract_repetition_limit = forms.DecimalField(
        label=_("Repetition, at most %"),
        required=False,
        min_value=0,
        max_value=99,
        help_text=_("Share of four-word sequences that repeat earlier ones."),
    )
    contract_copy_limit = forms.DecimalField(
        label=_("Copied from the prompt, at most %"),
        required=False,
        min_value=0,
        max_value=99,
        help_text=_("Share of the output that recites the prompt."),
    )
    contract_must_be_json = forms.BooleanField(
        label=_("Must be one JSON text"), required=False, help_text=_("The engine writes nothing else.")
    )
    contract_json_schema = forms.CharField(
        label=_("JSON schema"),
        required=False,
        widget=forms.Textarea(attrs={"rows": 6, "spellcheck": "false"}),
        help_text=_(
            "The engine writes nothing that breaks it; only an output cut at its token limit can. Properties come in"
            " the order given here."
        ),
    )
    contract_allow_refusal = forms.BooleanField(label=_("A refusal can be right"), required=False)
    contract_forbidden_phrases = forms.CharField(
        label=_("Forbidden phrases"),
        required=False,
        widget=forms.Textarea(attrs={"rows": 2}),
        help_text=_("One a line; case and width of letters do not matter."),
    )

    fairness_group = forms.CharField(
        label=_("Compare groups by"),
        required=False,
        max_length=64,
        initial="language",
        help_text=_("Metadata key whose values are compared. Thresholds stand on the fairness page."),
    )
    budget_amount = forms.DecimalField(
        label=_("Budget a month"),
        required=False,
        min_value=0,
        max_digits=14,
        decimal_places=2,
        help_text=_("Shown beside the month's cost; it stops no request."),
    )
    budget_currency = forms.CharField(label=_("Currency"), required=False, max_length=3, help_text=_("Such as TWD."))
    retention_days = forms.IntegerField(
        label=_("Retention, days"),
        min_value=1,
        initial=184,
        help_text=_("How long prompts and outputs are to be kept. On record only: nothing is erased by itself yet."),
    )

    def __init__(self, *args: Any, user: User, task: Task | None = None, currency: str, **kwargs: Any) -> None:
        self.task = task
        self.currency = currency
        if task is not None:
            kwargs["initial"] = {**initial_of(task), **(kwargs.get("initial") or {})}
        super().__init__(*args, **kwargs)
        teams = [team for team in teams_of(user) if has_role(user, team, Role.OPERATOR, Role.TASK_OWNER)]
        self._choices("team").queryset = Team.objects.filter(pk__in=[team.pk for team in teams])
        members = User.objects.filter(is_active=True)
        within = [task.team] if task is not None else teams
        self._choices("owner").queryset = (
            members.filter(memberships__team__in=within) | members.filter(pk=user.pk)
        ).distinct()
        if task is None:
            self._choices("owner").initial = user.pk
        releases = ModelRelease.objects.exclude(status=ModelRelease.Status.WITHDRAWN)
        if task is not None:
            releases = releases | ModelRelease.objects.filter(pk=task.model_release_id)
            del self.fields["team"], self.fields["name"]
        self._choices("model_release").queryset = releases
        for metric, target in OBJECTIVES.items():
            self.fields[field_of(metric)] = forms.DecimalField(
                label=target.label, required=False, min_value=0, help_text=target.unit
            )

    def _choices(self, name: str) -> Any:
        return self.fields[name]

    def sections(self) -> list[tuple[str | _StrPromise, str | _StrPromise, list[forms.BoundField]]]:
        """The form's parts with their headings, in the order of the page."""
        parts: list[tuple[str | _StrPromise, str | _StrPromise, Iterable[str]]] = [
            (_("What it is"), "", ("team", "name", "title", "purpose", "owner")),
            (_("What it runs on"), "", ("latency_class", "risk_tier", "model_release", "max_output_tokens")),
            (_("Prompt"), "", ("system_prompt", "prompt_template")),
            (
                _("What an output must be"),
                _("Each output is held against this; what fails is counted as not valid, and the reason is kept."),
                [name for name in self.fields if name.startswith("contract_")],
            ),
            (
                _("Objectives"),
                _("Targets over the last 30 days. Leave empty what does not matter to this task."),
                [field_of(metric) for metric in OBJECTIVES],
            ),
            (
                _("Fairness, budget, retention"),
                "",
                ("fairness_group", "budget_amount", "budget_currency", "retention_days"),
            ),
        ]
        return [(title, text, [self[name] for name in names if name in self.fields]) for title, text, names in parts]

    def content(self) -> dict[str, Any]:
        """What the services take, from cleaned data."""
        data = self.cleaned_data
        plan = dict(self.task.fairness_plan) if self.task is not None else {}
        if data["fairness_group"]:
            plan["group"] = data["fairness_group"]
        names = ("title", "purpose", "owner", "latency_class", "risk_tier", "model_release", "system_prompt")
        others = ("prompt_template", "max_output_tokens", "budget_amount", "retention_days")
        return {
            **{name: data[name] for name in (*names, *others)},
            "budget_currency": data["budget_currency"].upper(),
            "output_contract": self._contract(),
            "objectives": self._objectives(),
            "fairness_plan": plan,
        }

    def _contract(self) -> dict[str, Any]:
        data = self.cleaned_data
        contract: dict[str, Any] = dict(self.task.output_contract) if self.task is not None else {}
        contract |= {
            "language_from": data["contract_language_from"] or None,
            "min_characters": data["contract_min_characters"],
            "max_characters": data["contract_max_characters"],
            "repetition_limit": share_of(data["contract_repetition_limit"]),
            "copy_limit": share_of(data["contract_copy_limit"]),
            "must_be_json": data["contract_must_be_json"] or None,
            "json_schema": data["contract_json_schema"].strip() or None,
            "allow_refusal": data["contract_allow_refusal"] or None,
            "forbidden_phrases": [line for line in data["contract_forbidden_phrases"].splitlines() if line.strip()],
        }
        return {key: value for key, value in contract.items() if value not in (None, [])}

    def _objectives(self) -> list[dict[str, Any]]:
        given = {str(entry["metric"]): entry for entry in (self.task.objectives if self.task is not None else [])}
        objectives = []
        for metric in OBJECTIVES:
            target = self.cleaned_data[field_of(metric)]
            if target is None:
                continue
            objective: dict[str, Any] = {"metric": metric}
            objective["target"] = target / PERCENT if UNITS[metric] == "ratio" else target
            if not UNITS[metric]:
                objective["unit"] = given.get(metric, {}).get("unit") or self.currency
            objectives.append(objective)
        return objectives

    def field_for(self, name: str, problem: str) -> tuple[str, str]:
        """Objectives and the contract are a list and an object for the service, and fields of their own here."""
        place, separator, text = problem.partition(": ")
        head = place.split(".")[0]
        if name == "objectives" and separator and head.isdecimal():
            given = [metric for metric in OBJECTIVES if self.cleaned_data.get(field_of(metric)) is not None]
            if int(head) < len(given):
                return field_of(given[int(head)]), text
        if name == "output_contract" and separator:
            return f"contract_{head}", text
        if name == "fairness_plan":
            return "fairness_group", problem
        return super().field_for(name, problem)


def field_of(metric: str) -> str:
    return f"objective_{metric}"


def initial_of(task: Task) -> dict[str, Any]:
    """The form's first values for a task."""
    contract = task.output_contract
    values: dict[str, Any] = {
        name: getattr(task, name)
        for name in (
            "title",
            "purpose",
            "latency_class",
            "risk_tier",
            "system_prompt",
            "prompt_template",
            "max_output_tokens",
            "budget_amount",
            "budget_currency",
            "retention_days",
        )
    }
    values |= {"owner": task.owner_id, "model_release": task.model_release_id}
    values |= {f"contract_{key}": value for key, value in contract.items()}
    for name in ("repetition_limit", "copy_limit"):
        if contract.get(name) is not None:
            values[f"contract_{name}"] = plain(Decimal(str(contract[name])) * PERCENT)
    values["contract_forbidden_phrases"] = "\n".join(contract.get("forbidden_phrases", []))
    values["fairness_group"] = task.fairness_plan.get("group", "")
    for objective in task.objectives:
        target = Decimal(str(objective["target"]))
        if UNITS.get(objective["metric"]) == "ratio":
            target *= PERCENT
        values[field_of(objective["metric"])] = plain(target)
    return values


def share_of(percent: Decimal | None) -> float | None:
    return None if percent is None else float(percent / PERCENT)


def plain(value: Decimal) -> str:
    """A decimal without trailing zeros or an exponent, as a person would type it."""
    text = format(value, "f")
    return text.rstrip("0").rstrip(".") if "." in text else text
