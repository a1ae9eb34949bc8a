"""The worker process: `python -m penstock.serving.worker`.

One process a machine. It hosts the engines, takes shards from Celery on a pool of threads, and answers single requests
through its inner listener. It is the one process that imports torch.

Asked to stop (SIGTERM, SIGINT), it takes nothing more, ends what runs, hands its leases back and leaves in seconds.
"""

import logging
import os
import threading
from typing import Any

import django


def main() -> None:
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "penstock.settings")
    django.setup()

    from celery import signals

    from penstock.celery import app
    from penstock.config import config
    from penstock.serving.dispatch import SHARD_QUEUES
    from penstock.serving.hosting.facts import host_facts
    from penstock.serving.hosting.heartbeat import Heartbeat
    from penstock.serving.hosting.host import EngineHostProcess, set_current_host
    from penstock.serving.hosting.listener import Listener

    host = EngineHostProcess()
    set_current_host(host)
    listener = Listener(host)
    heartbeat = Heartbeat(host, url=listener.start(), facts=host_facts())
    heartbeat.start()

    def on_shutdown(**_: Any) -> None:
        # From a thread: Celery sends this from its signal handler, where taking a lock could deadlock.
        threading.Thread(target=host.stopping.set, daemon=True).start()

    signals.worker_shutting_down.connect(on_shutdown, weak=False)
    # Each latency class may hold `worker_concurrency` shards, so that a full class never keeps another from a thread.
    threads = config().worker_concurrency * len(SHARD_QUEUES)
    try:
        app.worker_main(
            [
                "--quiet", "worker", "-n", f"engine-{os.getpid()}@%h", "-P", "threads", "-c", str(threads),
                "-Q", ",".join(SHARD_QUEUES), "-l", "WARNING", "--without-gossip", "--without-mingle",
            ]
        )  # fmt: skip
    finally:
        host.stopping.set()
        host.engines.close()
        listener.stop()
        heartbeat.stop()
        logging.getLogger(__name__).info("the worker has left")


if __name__ == "__main__":
    main()
