"""Tasks that collect numbers. Their key is the tag alone."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from celery import Celery, Task
from kombu.transport import virtual

from tests.support.props import Props
from tests.workers.apps.faults import redis_broker_options

CONF = {
    "result_expires": 600,
    "worker_prefetch_multiplier": 4,
    "broker_transport_options": redis_broker_options(3),
    "unique_run_lease": 2,
    "unique_check_after": 3,
    "unique_publish_grace": 3,
}


#: A key in Redis: a worker that fetches a message kills itself before kombu has a record of it.
DIES = "dies when it has fetched"


def define(app: Celery, task: Callable[..., Any], props: Props) -> None:
    def collect(self: Task, tag: str, numbers: list[int], work_s: float = 0.0) -> int:
        props.note(tag, "run", id=self.request.id, numbers=numbers)
        time.sleep(work_s)
        props.note(tag, "end", id=self.request.id, numbers=numbers)
        return len(numbers)

    deliver = virtual.Transport._deliver

    def die_or_deliver(self: Any, message: Any, queue: str) -> Any:
        if queue == app.conf.task_default_queue and props.redis.getdel(DIES):
            os.kill(os.getpid(), signal.SIGKILL)
        return deliver(self, message, queue)

    virtual.Transport._deliver = die_or_deliver

    merging = {"unique_on_conflict": "merge", "unique_merge": "numbers"}
    task = partial(task, bind=True, acks_late=True, unique=True, **merging)
    task(collect, name="collect")
    task(collect, name="collect_bounded", unique_max_wait=0.5)
