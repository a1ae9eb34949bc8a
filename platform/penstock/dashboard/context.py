from django.http import HttpRequest


def page(request: HttpRequest) -> dict[str, object]:
    """What every page's frame needs."""
    return {}
