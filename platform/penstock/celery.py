"""The Celery application. Celery carries work; PostgreSQL remembers it.

Messages are wake-ups with identifiers: losing one costs time (a sweep sends it again), never work. One queue a latency
class feeds the engine; `control` carries intake, finalising and sweeps.
"""

import os
import warnings

from celery import Celery
from celery.platforms import SecurityWarning

# Running as root is a supported way on a machine of one's own; messages are JSON, never pickle.
warnings.simplefilter("ignore", SecurityWarning)

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "penstock.settings")

CONTROL_QUEUE = "control"

app = Celery("penstock")
app.config_from_object("django.conf:settings", namespace="CELERY")
app.conf.update(
    {
        "task_default_queue": CONTROL_QUEUE,
        "task_ignore_result": True,
        "task_serializer": "json",
        "accept_content": ["json"],
        # A message is done with when its task starts: the rows remember the work, and the sweep sends it again. Kombu
        # 5.7 also crashes a consumer that loses its broker while it holds messages to acknowledge.
        "task_acks_late": False,
        "worker_prefetch_multiplier": 1,
        "worker_hijack_root_logger": False,
        "broker_connection_retry_on_startup": True,
        "broker_connection_max_retries": None,
        "broker_transport_options": {
            "visibility_timeout": 3600,
            "socket_connect_timeout": 3,
            # A sender does not wait for a broker that is away: the sweep will send. Consumers reconnect on their own.
            "max_retries": 1,
            "interval_start": 0,
            "interval_step": 0.1,
            "interval_max": 0.1,
        },
        "beat_schedule": {
            "sweep": {"task": "serving.sweep", "schedule": 5.0, "options": {"expires": 10}},
            "sequence-ledger": {
                "task": "serving.sequence_ledger",
                "schedule": 2.0,
                "options": {"expires": 6},
            },
        },
    }
)
app.autodiscover_tasks()
