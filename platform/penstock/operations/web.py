"""The web process: uvicorn with Django's ASGI application."""

import uvicorn

from penstock.config import config


def main() -> None:
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
