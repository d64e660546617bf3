"""What the worker of a stage imports: the app of its environment, which tells its signals."""

from __future__ import annotations

import json
import os
from typing import Any

from celery.signals import task_revoked

from celery_unique import reporting
from tests.support.stage import STAGED, staged_app
from tests.workers.apps import dying
from tests.workers.canvas import dying as dying_with_followers

app = staged_app(**json.loads(os.environ[STAGED]))
dying.die_in_time(app)
dying_with_followers.die_in_time()

_keep_alive: list[Any] = []


def _tell(name: str) -> None:
    def receiver(
        sender: Any = None, task_id: str = "", reason: str = "", act: str = "", **_: Any
    ) -> None:
        app.props.tell(name, task_id, reason=reason, act=act, pid=os.getpid())

    getattr(reporting, name).connect(receiver)
    _keep_alive.append(receiver)


for _name in ("unique_released", "unique_lost", "unique_store_error"):
    _tell(_name)


@task_revoked.connect
def _revoked(
    request: Any = None, terminated: bool = False, expired: bool = False, **_: Any
) -> None:
    app.props.tell("task_revoked", request.id, terminated=terminated, expired=expired)
