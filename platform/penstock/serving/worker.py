"""The worker process: `python -m penstock.serving.worker`.

One process a machine. It hosts the engines, takes shards from Celery on a pool of threads, and answers single requests
through its inner listener. It is the one process that imports torch.

Asked to stop (SIGTERM, SIGINT), it takes nothing more, ends what runs, hands its leases back and leaves in seconds.
"""

import logging
import os
import threading
from typing import TYPE_CHECKING, Any

import django

if TYPE_CHECKING:
    from celery import Celery


logger = logging.getLogger(__name__)

RESTART_SECONDS = 2.0


def consume(app: "Celery", command: list[str]) -> None:
    """Runs Celery's consumer until it ends, by whatever cause."""
    try:
        app.worker_main(command)
    except SystemExit as ended:
        if ended.code:
            logger.warning("the Celery consumer ended with %s", ended.code)
    except Exception:
        logger.exception("the Celery consumer failed")


def main() -> None:
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "penstock.settings")
    os.environ.setdefault("TQDM_DISABLE", "1")  # libraries' progress bars are no lines for a log
    django.setup()

    from celery import signals

    from inference.background import start_in_background
    from penstock.celery import app
    from penstock.config import config
    from penstock.serving.dispatch import SHARD_QUEUES
    from penstock.serving.hosting.facts import host_facts
    from penstock.serving.hosting.heartbeat import Heartbeat
    from penstock.serving.hosting.host import EngineHostProcess, set_current_host
    from penstock.serving.hosting.listener import Listener
    from penstock.serving.hosting.warmth import warm

    host = EngineHostProcess()
    set_current_host(host)
    listener = Listener(host)
    heartbeat = Heartbeat(host, url=listener.start(), facts=host_facts())
    heartbeat.start()
    start_in_background(threading.Thread(target=warm, args=(host.engines,), name="warm", daemon=True))

    def on_shutdown(**_: Any) -> None:
        # From a thread: Celery sends this from its signal handler, where taking a lock could deadlock.
        threading.Thread(target=host.stopping.set, daemon=True).start()

    signals.worker_shutting_down.connect(on_shutdown, weak=False)
    # Each latency class may hold `worker_concurrency` shards, so that a full class never keeps another from a thread.
    threads = config().worker_concurrency * len(SHARD_QUEUES)
    command = [
        "--quiet", "worker", "-n", f"engine-{os.getpid()}@%h", "-P", "threads", "-c", str(threads),
        "-Q", ",".join(SHARD_QUEUES), "-l", "WARNING", "--without-gossip", "--without-mingle",
    ]  # fmt: skip
    try:
        while not host.stopping.is_set():
            consume(app, command)
            # A consumer that ends unasked (kombu can trip over a lost broker) is begun anew: the engines stay loaded.
            host.stopping.wait(RESTART_SECONDS)
    finally:
        host.stopping.set()
        host.engines.close()
        listener.stop()
        heartbeat.stop()
        logger.info("the worker has left")


if __name__ == "__main__":
    main()
