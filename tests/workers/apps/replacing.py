"""Tasks whose calls replace, succeed and postpone each other. Their key is the tag alone."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

from celery import Celery, Task

from tests.support.props import Props

CONF = {"worker_prefetch_multiplier": 4, "result_expires": 600}


def define(app: Celery, task: Callable[..., Any], props: Props) -> None:
    plain_task = task
    task = partial(plain_task, bind=True, unique=True, unique_on="tag")

    def run(self: Task, tag: str, value: int = 0) -> int:
        props.note(tag, "run", id=self.request.id, value=value)
        return value

    task(run, name="replace", unique_on_conflict="replace")
    task(run, name="keep_schedule", unique_on_conflict="replace_except_schedule")
    debounced = partial(task, unique_on_conflict="replace", unique_states="until_start")
    debounced(run, name="debounce")
    debounced(run, name="debounce_bounded", unique_max_wait=3)

    @task(name="work", unique_on_conflict="replace")
    def work(self: Task, tag: str, value: int = 0) -> None:
        props.note(tag, "run", id=self.request.id, value=value)
        time.sleep(0.005)
        props.note(tag, "end", id=self.request.id, value=value)

    @task(name="rerun", unique_on_conflict="rerun")
    def rerun(self: Task, tag: str, value: int = 0) -> int:
        """The first run waits for the test's word."""
        props.note(tag, "run", id=self.request.id, value=value)
        if value == 0:
            props.wait_for_word(tag)
        props.note(tag, "end", id=self.request.id, value=value)
        return value

    @task(name="hold_on")
    def hold_on(self: Task, tag: str) -> None:
        """Runs until the test's word, for an hour if need be."""
        props.note(tag, "run", id=self.request.id, value=0)
        ends_at = time.monotonic() + 3600
        while time.monotonic() < ends_at and not props.redis.exists(f"go:{tag}:1"):
            time.sleep(0.1)

    @task(name="poll")
    def poll(self: Task, tag: str, value: int = 1, last: int = 100) -> None:
        props.note(tag, "run", id=self.request.id, value=value)
        if value < last:
            self.apply_async((tag, value + 1, last))
        props.note(tag, "end", id=self.request.id, value=value)

    @plain_task(name="hold")
    def hold(tag: str) -> None:
        props.enter(tag)
        props.wait_for_word(tag)

    @plain_task(name="plain")
    def plain(tag: str) -> str:
        return tag
