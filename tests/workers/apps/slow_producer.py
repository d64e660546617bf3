"""A producer that takes its time between taking the lock, publishing and confirming."""

from __future__ import annotations

import json
import os
import time
from dataclasses import replace
from typing import Any

from celery_unique.config.app_state import state_of
from celery_unique.publish.coordinator import UniqueTaskCoordinator
from tests.support.producers import serve
from tests.support.stage import STAGED, staged_app

app = staged_app(**json.loads(os.environ[STAGED]))


def call(job: dict[str, Any]) -> None:
    publish = app.amqp.send_task_message

    def send_task_message(*args: Any, **kwargs: Any) -> Any:
        time.sleep(job["before_publish_s"])
        sent = publish(*args, **kwargs)
        time.sleep(job["after_publish_s"])
        return sent

    app.amqp.send_task_message = send_task_message
    if "grace_s" in job:  # in place of the app's own
        coordinator = state_of(app).part(UniqueTaskCoordinator)
        coordinator.leases = replace(coordinator.leases, grace_ms=round(job["grace_s"] * 1000))
    app.tasks[job["task"]].delay(job["tag"])


if __name__ == "__main__":
    # Imports what a call needs, so that a fork begins with the call itself.
    app.tasks["quick"].delay("warm")
    serve(call)
