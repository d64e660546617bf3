"""A plain late acknowledged task that takes longer than the broker believes a worker alive.

Run as plain Celery, with Celery's own ``worker_deduplicate_successful_tasks``, or guarded.
"""

from __future__ import annotations

import json
import os
import signal
import time
from typing import Any

import redis
from celery import Celery
from kombu.transport.redis import QoS
from kombu.utils.url import safequote

import celery_unique
from tests.workers.apps.faults import _look_often

#: The stage of this process, as JSON.
VARIABLE = "CELERY_UNIQUE_REDELIVERED"
TASK = "redelivered.work"
MODES = ("plain", "deduplicated", "guarded")


def make_app(
    broker: str,
    redis_url: str,
    mode: str,
    seconds: float = 0.0,
    run_lease_s: float = 5.0,
    transport_options: dict[str, Any] | None = None,
    dies_before_record: bool = False,
) -> Celery:
    app = Celery("redelivered", broker=broker, backend=redis_url, set_as_current=False)
    app.conf.update(
        broker_transport_options=transport_options or {},
        broker_connection_retry_on_startup=True,
        worker_prefetch_multiplier=1,
        task_default_queue="work",
        worker_deduplicate_successful_tasks=mode == "deduplicated",
        # Not what this is about; and SQS has neither.
        worker_enable_remote_control=not broker.startswith("sqs"),
        worker_send_task_events=False,
        result_expires=600,
    )
    if mode == "guarded":
        celery_unique.install(
            app,
            guard="late",
            store_url=redis_url,
            run_lease=run_lease_s,
            gate_timeout=5,
            store_timeout=10,
        )
    if "unacked_restore_interval" in app.conf.broker_transport_options:
        _look_often()
    if dies_before_record:
        QoS.append = _die
    diary = redis.Redis.from_url(redis_url, decode_responses=True)

    @app.task(name=TASK, bind=True, acks_late=True, shared=False)
    def work(self: Any, number: int) -> int:
        run = f"{self.request.hostname}/{os.getpid()}/{time.time_ns()}"
        diary.rpush(f"begins:{number}", json.dumps([run, self.request.hostname, time.time()]))
        time.sleep(seconds)
        diary.hset(f"ends:{number}", run, time.time())
        return number

    return app


def _die(self: Any, message: Any, delivery_tag: str) -> None:
    """In place of kombu's record of a message that it has popped."""
    os.kill(os.getpid(), signal.SIGKILL)


def sqs_url(port: int) -> str:
    return f"sqs://{safequote('key')}:{safequote('secret')}@127.0.0.1:{port}//"


if VARIABLE in os.environ:
    app = make_app(**json.loads(os.environ[VARIABLE]))
