import platform
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_platform_is_the_standard_librarys_module() -> None:
    assert platform.__file__ is not None
    assert not Path(platform.__file__).is_relative_to(ROOT)
    assert platform.python_version()


def test_the_source_root_is_not_a_package() -> None:
    assert not (ROOT / "platform" / "__init__.py").exists()


def test_people_are_told_apart(people) -> None:  # type: ignore[no-untyped-def]
    from penstock.accounts.access import has_role, visible_to
    from penstock.accounts.models import ApiKey, Role

    assert has_role(people.operator, people.team, Role.OPERATOR)
    assert not has_role(people.outsider, people.team, Role.OPERATOR)
    assert has_role(people.administrator, people.team, Role.APPROVER)
    assert not visible_to(people.outsider, ApiKey.objects.all()).exists()


def test_every_middleware_runs_on_the_event_loop() -> None:
    """One that is only synchronous would break streamed answers half-way."""
    from django.conf import settings
    from django.utils.module_loading import import_string

    assert [name for name in settings.MIDDLEWARE if not import_string(name).async_capable] == []
