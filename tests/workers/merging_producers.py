"""Processes that each call a task many times, with a number of their own in every call."""

from __future__ import annotations

import json
import os
import time
from typing import Any

from tests.support.producers import serve
from tests.support.stage import STAGED, staged_app


def call(job: dict[str, Any]) -> None:
    """``job``: task, tag, the numbers from ``first`` to ``last``, and in how many seconds."""
    app = staged_app(**json.loads(os.environ[STAGED]))
    props, collect = app.props, app.tasks[job["task"]]
    tag, first, last = job["tag"], job["first"], job["last"]
    began = time.monotonic()
    for number in range(first, last):
        due_s = job["seconds"] * (number - first) / (last - first)
        time.sleep(max(0.0, began + due_s - time.monotonic()))
        options = {"countdown": job["countdown"]} if job["countdown"] else {}
        result = collect.apply_async((tag, [number], job["work_s"]), **options)
        props.redis.rpush(f"accepted:{tag}", json.dumps([number, result.outcome, result.id]))
    props.redis.rpush(f"done:{tag}", os.getpid())


if __name__ == "__main__":
    staged_app(**json.loads(os.environ[STAGED]))  # everything is imported before the first fork
    serve(call)
