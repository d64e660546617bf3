"""What a worker imports: the app, made from its environment, which tells its signals."""

from __future__ import annotations

import json
import os
from typing import Any

from celery_unique import reporting as signals

from .dying import die_in_time
from .faults import make_app

app = make_app(**json.loads(os.environ["FAULTS_APP"]))
die_in_time(app)

_keep_alive: list[Any] = []


def _tell(name: str) -> None:
    def receiver(
        sender: Any = None, task_id: str = "", reason: str = "", act: str = "", **_: Any
    ) -> None:
        app.props.tell(name, task_id, reason=reason, act=act, pid=os.getpid())

    getattr(signals, name).connect(receiver)
    _keep_alive.append(receiver)


for _name in ("unique_released", "unique_lost", "unique_store_error"):
    _tell(_name)
