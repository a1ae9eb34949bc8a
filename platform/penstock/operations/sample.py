"""Registers the bundled sample: a task, and a batch of 64 product records asking for descriptions."""

from django.db import transaction
from django.utils.translation import get_language
from django.utils.translation import gettext as _

from penstock.operations.acting import administrator, team
from penstock.registry.models import ModelRelease, Task
from penstock.registry.services import activate_task, create_task, submit_task
from penstock.sample.records import Language, batch_file, load_task
from penstock.serving.models import Batch
from penstock.serving.services import create_batch, create_file

FILENAME = "product-descriptions.jsonl"


@transaction.atomic
def register_sample_task(*, release_name: str) -> Task:
    sample = load_task()
    user = administrator()
    language: Language = "zh-Hant" if (get_language() or "").startswith("zh") else "en"
    variant = sample.prompt.variants[language]
    task = create_task(
        user=user,
        team=team(""),
        name=sample.name,
        title=sample.title[language],
        purpose=sample.purpose[language],
        latency_class=sample.latency_class,
        risk_tier=sample.risk_tier,
        model_release=ModelRelease.objects.get(name=release_name),
        system_prompt=variant.system,
        prompt_template=variant.template,
        max_output_tokens=sample.max_tokens,
        output_contract=sample.output_contract,
        objectives=[objective.model_dump(mode="json") for objective in sample.objectives],
        fairness_plan={"group": sample.group_attribute},
    )
    submit_task(user=user, task=task)
    activate_task(user=user, task=task)
    return task


def submit_sample_batch(*, task: Task) -> Batch:
    user = administrator()
    with transaction.atomic():
        file = create_file(
            user=user, team=task.team, filename=FILENAME, purpose="batch", chunks=iter([batch_file(task.name)])
        )
        return create_batch(
            user=user,
            team=task.team,
            input_file=file,
            endpoint="/v1/chat/completions",
            metadata={"task": task.name, "description": _("The sample: 64 product records")},
            task=task,
        )
