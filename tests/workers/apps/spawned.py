"""An app as a user writes it, for a pool whose processes are not forked.

Each of them is a new interpreter, which gets the app by pickling.
"""

from __future__ import annotations

import os

from celery import Celery, Task

import celery_unique
from celery_unique.contrib import prometheus
from tests.support.patience import PATIENT
from tests.support.props import Props

URL = os.environ["SPAWNED_APP_URL"]

app = Celery("spawned", broker=URL, backend=URL, set_as_current=False)
app.conf.update(PATIENT, worker_pool_start_method="spawn")
celery_unique.install(app)
if "SPAWNED_METRICS" in os.environ:
    prometheus.install(app, port=int(os.environ["SPAWNED_METRICS"]))
props = Props(URL)


@app.task(name="spawned.inner", unique=True)
def inner(tag: str) -> str:
    props.wait_for_word(tag)
    return tag


@app.task(name="spawned.outer", bind=True, unique=True)
def outer(self: Task, tag: str) -> list[object]:
    calls = [inner.delay(tag), inner.delay(tag)]
    return [os.getpid(), self.request.unique.key, *(call.outcome for call in calls)]


@app.task(name="spawned.fail", unique=True)
def fail(tag: str) -> None:
    raise ValueError(tag)
