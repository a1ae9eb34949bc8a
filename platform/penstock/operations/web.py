"""The web process: uvicorn with Django's ASGI application."""

import os
import threading

import django
import uvicorn

from penstock.config import config


def main() -> None:
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "penstock.settings")
    django.setup()
    from inference.background import start_in_background
    from penstock.serving.outcome import warm_up

    # The checks of an output load a language model of a second or so: before the first answer, not within it.
    start_in_background(threading.Thread(target=warm_up, name="warm", daemon=True))
    settings = config()
    uvicorn.run(
        "penstock.asgi:application",
        host=settings.host,
        port=settings.port,
        lifespan="off",
        access_log=False,
        log_level="warning",
        server_header=False,
        timeout_graceful_shutdown=5,
        forwarded_allow_ips="127.0.0.1",
    )


if __name__ == "__main__":
    main()
