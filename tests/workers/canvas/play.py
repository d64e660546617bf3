"""Applies every shape, unique and not, all at once; tells what came of each as JSON."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from celery import Celery
from celery.result import GroupResult, ResultBase

from tests.support import eventually
from tests.support.stage import STAGED, staged_app
from tests.workers.apps.canvas import KINDS
from tests.workers.canvas.shapes import HANGS_IN_CELERY, HELD, RUNNING, SHAPES, Cast, shapes_for

#: For everything together: a shape that hangs is told as such.
PATIENCE_S = 90.0


def outcome(result: Any, deadline: float) -> Any:
    """What a result came to, as something that two casts can be compared by."""
    if result is None:
        return None
    if isinstance(result, (GroupResult, list)):
        return [outcome(each, deadline) for each in result]
    if not isinstance(result, ResultBase):
        return repr(result)
    try:
        left_s = max(0.1, deadline - time.monotonic())
        value = result.get(timeout=left_s, interval=0.05, propagate=False)
    except Exception as error:
        return f"no result: {type(error).__name__}"
    if isinstance(value, BaseException):
        # A chord's error names the task.
        return [result.state, type(value).__name__, str(value).partition(" raised ")[2]]
    return [result.state, value]


def play(backend: str) -> dict[str, Any]:
    app = staged_app(**json.loads(os.environ[STAGED]))
    names = shapes_for(backend)
    plays = [
        (name, kind)
        for name in names
        for kind in KINDS
        if kind == "unique" or (backend, name) not in HANGS_IN_CELERY
    ]
    told: dict[str, Any] = {name: {"plain": None} for name in names}
    _play_together(app, [play for play in plays if play[0] not in RUNNING], told)
    for name, kind in plays:
        if name in RUNNING:
            told[name][kind] = _play_running(app, name, kind)
    return told


def _play_together(app: Celery, plays: list[tuple[str, str]], told: dict[str, Any]) -> None:
    """Everything is called before the first of the holders is let through to the worker."""
    started = [(name, kind, *_start(Cast(app, kind), name)) for name, kind in plays]
    deadline = time.monotonic() + PATIENCE_S
    for name, _, cast, _ in started:
        eventually(cast.is_joined, timeout=60, message=f"{name}: a duplicate is not called")
    app.control.add_consumer(HELD, reply=True)
    for name, kind, cast, made in started:
        told[name][kind] = _told(cast, made, deadline)


def _play_running(app: Celery, name: str, kind: str) -> dict[str, Any]:
    cast, made = _start(Cast(app, kind), name)
    cast.let_go()
    return _told(cast, made, time.monotonic() + PATIENCE_S)


def _start(cast: Cast, name: str) -> tuple[Cast, Any]:
    try:
        return cast, SHAPES[name](cast)
    except Exception as error:
        cast.held = None
        return cast, error


def _told(cast: Cast, made: Any, deadline: float) -> dict[str, Any]:
    if isinstance(made, Exception):
        return {"result": f"not applied: {made!r}", "seen": None, "runs": 0}
    result, look = made if isinstance(made, tuple) else (made, lambda: None)
    came_to = outcome(result, deadline)
    try:
        seen = look()
    except Exception as error:
        seen = f"not seen: {error!r}"
    return {"result": came_to, "seen": seen, "runs": cast.runs}


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(json.dumps(play(sys.argv[2])))
    os._exit(0)  # results that unsubscribe while the interpreter ends say so at length
