"""An app whose tasks run in lanes and keep a journal of their bodies.

``LANES_REDIS`` is broker and backend, and lock store unless ``LANES_STORE`` is; ``LANES_JOURNAL`` a
file to which every body appends a line at its begin and at its end, with the clock that all
processes share.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from celery import Celery

import celery_unique
from tests.support.patience import PATIENT

URL = os.environ["LANES_REDIS"]
JOURNAL = os.environ["LANES_JOURNAL"]
RUN_LEASE_S = float(os.environ.get("LANES_RUN_LEASE", "3"))
#: Whether bodies note at their end if they still hold their lock.
CHECKED = "LANES_CHECKED" in os.environ

app = Celery("lanes", broker=URL, backend=URL)
app.conf.update(
    **PATIENT,
    unique_run_lease=RUN_LEASE_S,
    unique_publish_grace=3,
    unique_store_url=os.environ.get("LANES_STORE", URL),
    # The messages of a killed worker come back after this time.
    broker_transport_options={
        "visibility_timeout": 4,
        "unacked_restore_interval": 0.5,
        "unacked_restore_throttle": 1,
        "unacked_mutex_expire": 2,
    },
    result_expires=600,
    worker_prefetch_multiplier=1,
)
celery_unique.install(app)

LANE = {"unique": True, "unique_on_conflict": "queue", "unique_on": "lane"}


def note(what: str, **facts: Any) -> None:
    line = json.dumps({"what": what, "pid": os.getpid(), "at": time.monotonic(), **facts})
    with Path(JOURNAL).open("a") as journal:  # one write of a short line: no two are mixed
        journal.write(f"{line}\n")


def body(task: Any, lane: str, n: int, seconds: float) -> int:
    facts = {"lane": lane, "n": n, "id": task.request.id}
    note("begin", **facts)
    time.sleep(seconds)
    # A body whose lease has lapsed may run beside the next one.
    note("end", **facts, mine=not CHECKED or task.request.unique.still_mine())
    return n


@app.task(bind=True, name="lanes.early", **LANE)
def early(self: Any, lane: str, n: int, seconds: float = 0.0) -> int:
    return body(self, lane, n, seconds)


@app.task(bind=True, name="lanes.late", acks_late=True, **LANE)
def late(self: Any, lane: str, n: int, seconds: float = 0.0) -> int:
    return body(self, lane, n, seconds)


@app.task(bind=True, name="lanes.five", unique_limit=5, **LANE)
def five(self: Any, lane: str, n: int, seconds: float = 0.0) -> int:
    return body(self, lane, n, seconds)


@app.task(bind=True, name="lanes.late_two", acks_late=True, unique_limit=2, **LANE)
def late_two(self: Any, lane: str, n: int, seconds: float = 0.0) -> int:
    return body(self, lane, n, seconds)


@app.task(bind=True, name="lanes.gated", **LANE)
def gated(self: Any, lane: str, n: int) -> int:
    """Ends when the file ``LANES_JOURNAL`` + ``.open`` exists."""
    note("begin", lane=lane, n=n, id=self.request.id)
    while not Path(f"{JOURNAL}.open").exists():
        time.sleep(0.05)
    note("end", lane=lane, n=n, id=self.request.id, mine=True)
    return n


@app.task(name="lanes.total")
def total(values: list[int]) -> int:
    return sum(values)
