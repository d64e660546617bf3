"""What a worker imports: the app, made from its environment, which tells its signals."""

from __future__ import annotations

import json
import os
from typing import Any

from celery.signals import task_revoked

from celery_unique import reporting as signals

from .replacing import make_app

app = make_app(**json.loads(os.environ["REPLACING_APP"]))

_keep_alive: list[Any] = []


def _tell(name: str) -> None:
    def receiver(sender: Any = None, task_id: str = "", reason: str = "", **_: Any) -> None:
        app.props.tell(name, task_id, reason=reason)

    getattr(signals, name).connect(receiver)
    _keep_alive.append(receiver)


for _name in ("unique_released", "unique_lost", "unique_store_error"):
    _tell(_name)


@task_revoked.connect
def _revoked(
    request: Any = None, terminated: bool = False, expired: bool = False, **_: Any
) -> None:
    app.props.tell("task_revoked", request.id, terminated=terminated, expired=expired)
