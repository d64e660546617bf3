"""The tasks of every end, on any broker, result backend, pool and store."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from celery import Celery, Task

from tests.support.props import Props
from tests.workers.apps import ends
from tests.workers.apps.canvas import Define, set_up_django
from tests.workers.apps.faults import _look_often

CONF: dict[str, Any] = {
    # A worker that is killed is soon forgotten.
    "unique_run_lease": 3,
    "worker_prefetch_multiplier": 4,
}


def define(app: Celery, task: Define, props: Props) -> None:
    ends.define(app, task, props)

    @task(name="retry_later", bind=True, unique=True)
    def retry_later(self: Task, tag: str) -> str:
        if props.enter(tag) == 1:
            raise self.retry(countdown=1)
        return tag


def prepare(*, django_database: str = "", **settings: Any) -> dict[str, Any]:
    if django_database:
        set_up_django(Path(django_database))
    if "unacked_restore_interval" in settings.get("broker_transport_options", {}):
        _look_often()
    return settings
