"""A worker that dies, all of it at once, while it completes followers."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from collections.abc import Callable
from typing import Any

from celery_unique.followers import complete as completing
from celery_unique.followers import promote
from celery_unique.worker.lock_client import WorkerLockClient

#: How many followers a worker completes before it dies.
DIES_AT = "CANVAS_DIES_AT"
#: When it dies, at the next one:
#: "before"  nothing is done for it;
#: "sent"    its callbacks are sent, its result is not stored;
#: "stored"  its result is stored, and nothing that Celery does after that;
#: "body"    its chord is complete, and the body is not sent;
#: "after"   it is completed, and the store has not heard of it;
#: "random"  at a moment that nobody chose, then or a little later.
DIES = "CANVAS_DIES"

#: It dies when the store has a superseded task as a follower, and its message is not acknowledged.
DIES_FOLLOWING = "CANVAS_DIES_FOLLOWING"


def die_in_time() -> None:
    """Where the environment asks for it."""
    if DIES_FOLLOWING in os.environ:
        WorkerLockClient.follow = then_die(WorkerLockClient.follow)
    if DIES_AT not in os.environ:
        return
    dies_at, when = int(os.environ[DIES_AT]), os.environ[DIES]
    real = promote.complete
    began: list[float] = []

    def complete(app: Any, call: Any, outcome: Any) -> None:
        began.append(time.monotonic())
        if len(began) - 1 == dies_at:
            if when == "random":
                die_within(3 * (began[-1] - began[-2]))
            elif when == "before":
                die()
            elif when == "sent":
                completing._send_on = then_die(completing._send_on)
            elif when == "stored":
                app.backend.store_result = then_die(app.backend.store_result)
            elif when == "body":
                app.amqp.send_task_message = lambda *_args, **_options: die()
        real(app, call, outcome)
        if when == "after" and len(began) - 1 == dies_at:
            die()

    promote.complete = complete


def die() -> None:
    os.killpg(os.getpgid(0), signal.SIGKILL)


def then_die(function: Callable[..., Any]) -> Callable[..., None]:
    def last(*args: Any, **kwargs: Any) -> None:
        function(*args, **kwargs)
        die()

    return last


def die_within(seconds: float) -> None:
    """Killed by another process: a thread of this one would only get its turn where this one
    waits for a server."""
    delay_s = random.uniform(0, seconds)
    subprocess.Popen(["sh", "-c", f"sleep {delay_s:.4f}; kill -9 -{os.getpgid(0)}"])
