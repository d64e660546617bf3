"""The app of a chaos run: its tasks write down what happens to them, whatever that is.

Configured by the environment variable CHAOS, a JSON document that the stage makes.
"""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import time
from dataclasses import replace
from typing import Any

import psutil
from celery import Celery, Task, signals
from celery.exceptions import Retry
from celery.worker.request import Request

import celery_unique
from celery_unique.config import leases
from celery_unique.header import HEADER, LockHeader
from celery_unique.publish.store_client import CallerStoreClient
from celery_unique.stores.redis import RedisStore
from tests.chaos.journal import Journal

CHAOS: dict[str, Any] = json.loads(os.environ["CHAOS"])
RUN_LEASE_S: float = CHAOS["run_lease"]

journal = Journal(CHAOS["journal"], CHAOS["role"])
# Not seeded: forked children would all throw the same.
dice = random.SystemRandom()


class ChaosFailed(Exception):
    """What some bodies end with."""


class NotedRequest(Request):
    """Notes when a message is acknowledged, since what was acknowledged early can be lost; and when
    its task is about to be handed to the pool, after which a revoke may come too late."""

    def acknowledge(self) -> None:
        if not self.acknowledged:
            journal.note("ack", id=self.id, worker=CHAOS["role"], pid=self.worker_pid)
        super().acknowledge()

    def revoked(self) -> bool:
        journal.note("asked", id=self.id, worker=CHAOS["role"])  # the gate comes afterwards
        return bool(super().revoked())


class ChaosTask(Task):
    abstract = True
    Request = NotedRequest


def make_app() -> Celery:
    # The margin is for kombu's default of looking for lost messages every 100 s; here it looks
    # twice a second, and a queue lease of minutes would make every run that long.
    leases.RESTORE_MARGIN_S = 3
    app = Celery("chaos", broker=CHAOS["broker"], backend=CHAOS["backend"], set_as_current=False)
    app.conf.update(
        unique_store_url=CHAOS["store"],
        unique_run_lease=RUN_LEASE_S,
        unique_queue_lease=CHAOS["queue_lease"],
        unique_publish_grace=CHAOS["grace"],
        unique_store_timeout=1,
        # Not the time of a busy machine with a database: a gate that gives up needs a fault.
        unique_gate_timeout=0.5 if CHAOS["store"].startswith("redis") else 2.5,
        broker_connection_retry_on_startup=True,
        broker_connection_max_retries=None,
        broker_connection_timeout=1,
        broker_transport_options=_transport_options(CHAOS["broker"]),
        task_publish_retry_policy={"max_retries": 2, "interval_start": 0, "interval_max": 0.2},
        task_default_queue="chaos",
        result_expires=120,
        worker_prefetch_multiplier=2,
        worker_hijack_root_logger=True,
    )
    celery_unique.install(app)
    return app


def _transport_options(broker: str) -> dict[str, Any]:
    if broker.startswith("redis"):
        return {
            "visibility_timeout": CHAOS["visibility"],
            "unacked_restore_interval": 0.5,
            "unacked_restore_throttle": 1,
            # Else a worker killed while it restores keeps the others from it for 5 minutes.
            "unacked_mutex_expire": 2,
        }
    # Without confirms a publish returns before the broker has the message, and a cut connection
    # loses it: no library on top of that could know.
    return {"confirm_publish": True}


def _break_store(how: str) -> None:
    """A store that does not keep its contract, to see that the checker notices."""
    acquire = RedisStore.acquire
    if how == "acquire":  # everybody is admitted
        RedisStore.acquire = lambda self, key, claim: acquire(  # type: ignore[method-assign]
            self, key, replace(claim, states="")
        )
    elif how == "renew":  # nothing is ever renewed
        RedisStore.renew = lambda self, held: [True] * len(held)  # type: ignore[method-assign]
    elif how:
        raise ValueError(how)


def _end_with_the_run() -> None:
    """A run that is killed cannot end what it started: each process group ends itself."""
    while psutil.pid_exists(CHAOS["runner"]):
        time.sleep(1)
    os.killpg(os.getpgrp(), signal.SIGKILL)


# Of the group's leader alone: a process of a pool has another parent, and ends with its worker.
if os.getpid() == os.getpgrp():
    threading.Thread(target=_end_with_the_run, daemon=True).start()
_break_store(CHAOS.get("broken", ""))
app = make_app()


def _facts(task: Task, number: int, values: list[str] | None) -> dict[str, Any]:
    header = LockHeader.from_message(getattr(task.request, HEADER, None))
    unique = task.request.unique
    return {
        "id": task.request.id,
        "task": task.name,
        "arg": number,
        "worker": CHAOS["role"],
        "pid": os.getpid(),
        "delivery": header.delivery if header else "",
        "token": unique.token if unique else None,
        "retries": task.request.retries,
        **({} if values is None else {"values": values}),
    }


def _still_mine(task: Task) -> bool | None:
    try:
        return task.request.unique.still_mine() if task.request.unique else None
    except celery_unique.StoreUnavailable:
        return None


def _body(
    task: Task,
    number: int,
    values: list[str] | None = None,
    *,
    retrying: bool,
    failing: bool = True,
) -> int:
    facts = _facts(task, number, values)
    journal.note("start", **facts)
    # A few outlive their lease and, on Redis, the visibility timeout.
    long = dice.random() < CHAOS["long_bodies"]
    time.sleep(dice.uniform(1.1, 1.6) * RUN_LEASE_S if long else dice.uniform(0.02, 0.3))
    still_mine = _still_mine(task)
    if retrying and dice.random() < 0.4 and task.request.retries < 3:
        _retry(task, facts, still_mine)
    failed = failing and dice.random() < 0.1
    outcome = "failure" if failed else "success"
    journal.note("end", outcome=outcome, still_mine=still_mine, **facts)
    if failed:
        raise ChaosFailed(number)
    return number


def _retry(task: Task, facts: dict[str, Any], still_mine: bool | None) -> None:
    try:
        task.retry(countdown=dice.uniform(0.05, 0.5), max_retries=5)
    except Retry:
        journal.note("end", outcome="retry", still_mine=still_mine, **facts)
        raise
    except Exception:
        journal.note("end", outcome="failure", still_mine=still_mine, **facts)
        raise


@app.task(bind=True, base=ChaosTask, unique=True)
def early(self: Task, number: int) -> int:
    return _body(self, number, retrying=False)


@app.task(bind=True, base=ChaosTask, unique=True)
def early_retrying(self: Task, number: int) -> int:
    return _body(self, number, retrying=True)


@app.task(bind=True, base=ChaosTask, unique=True, acks_late=True, reject_on_worker_lost=True)
def late(self: Task, number: int) -> int:
    return _body(self, number, retrying=False)


@app.task(bind=True, base=ChaosTask, unique=True, acks_late=True, reject_on_worker_lost=True)
def late_retrying(self: Task, number: int) -> int:
    return _body(self, number, retrying=True)


LATE: dict[str, Any] = {"base": ChaosTask, "acks_late": True, "reject_on_worker_lost": True}


@app.task(bind=True, unique=True, unique_on_conflict="reject", **LATE)
def rejecting(self: Task, number: int) -> int:
    return _body(self, number, retrying=False)


@app.task(bind=True, unique=True, unique_on_conflict="replace", **LATE)
def replacing(self: Task, number: int) -> int:
    return _body(self, number, retrying=False)


@app.task(bind=True, unique=True, unique_on_conflict="replace_except_schedule", **LATE)
def rescheduling(self: Task, number: int) -> int:
    return _body(self, number, retrying=False)


@app.task(bind=True, unique=True, unique_on_conflict="replace", unique_max_wait=2, **LATE)
def debounced(self: Task, number: int) -> int:
    return _body(self, number, retrying=False)


@app.task(bind=True, unique=True, unique_on_conflict="rerun", **LATE)
def rerunning(self: Task, number: int) -> int:
    return _body(self, number, retrying=False)


@app.task(bind=True, **LATE)
def keyed(self: Task, number: int) -> int:
    return _body(self, number, retrying=False)


@app.task(bind=True, unique_guard=True, **LATE)
def guarded(self: Task, number: int) -> int:
    return _body(self, number, retrying=False)


@app.task(bind=True, unique=True, **LATE)
def member(self: Task, number: int) -> int:
    """Of the headers of chords: it never fails, so that their bodies run."""
    return _body(self, number, retrying=False, failing=False)


@app.task(**LATE)
def chord_body(values: list[int], chord: str) -> None:
    journal.note("chord_ran", chord=chord, values=values)


#: How long the outcome of a call with an idempotency key is kept.
KEYED_S = 3.0
TASKS = [
    *(early, early_retrying, late, late_retrying),
    *(rejecting, replacing, rescheduling, debounced, rerunning, keyed, guarded),
]

if not CHAOS["previous"]:  # the previous release has neither

    @app.task(bind=True, unique=True, unique_on_conflict="queue", **LATE)
    def queueing(self: Task, number: int) -> int:
        return _body(self, number, retrying=False)

    @app.task(
        bind=True,
        unique=True,
        unique_on="number",
        unique_on_conflict="merge",
        unique_merge="values",
        **LATE,
    )
    def merging(self: Task, number: int, values: list[str]) -> int:
        return _body(self, number, values, retrying=False)

    TASKS += [queueing, merging]

if CHAOS["tasks"]:
    TASKS = [task for task in TASKS if task.name.rpartition(".")[2] in CHAOS["tasks"]]


# -- what signals tell ---------------------------------------------------------------


def _published(sender: Any = None, headers: Any = None, task_id: str = "", **_: Any) -> None:
    task_id = headers["id"] if headers else task_id
    journal.note("published", id=task_id, role=CHAOS["role"], pid=os.getpid())


def _note_one_act() -> None:
    """Calls that are published in one act are counted, so that a run cannot miss that way."""
    begin_publish: Any = CallerStoreClient.begin_publish
    publish_many: Any = CallerStoreClient.publish_many

    def noted(self: Any, *arguments: Any) -> Any:
        journal.note("one_act", pid=os.getpid())
        return begin_publish(self, *arguments)

    def each_noted(self: Any, pushes: Any, *arguments: Any) -> Any:
        for _ in pushes:
            journal.note("one_act", pid=os.getpid())
        return publish_many(self, pushes, *arguments)

    CallerStoreClient.begin_publish = noted  # type: ignore[method-assign]
    CallerStoreClient.publish_many = each_noted  # type: ignore[method-assign]


# A receiver of Celery's signal makes every call of its process take two steps. The library's own
# signal is sent when the message is published, too, but not for the retries of workers.
if CHAOS["one_server"] and CHAOS["role"].startswith("p"):
    _note_one_act()
    celery_unique.unique_acquired.connect(_published)
else:
    signals.after_task_publish.connect(_published)


@signals.task_received.connect
def _received(sender: Any = None, request: Any = None, **_: Any) -> None:
    unique = getattr(request, "unique_delivery", None)
    journal.note(
        "received",
        id=request.id,
        worker=CHAOS["role"],
        pid=os.getpid(),
        delivery=unique.name if unique else "",
        redelivered=bool(request.delivery_info.get("redelivered")),
    )


@celery_unique.unique_lost.connect
def _lost(sender: Any = None, task_id: str = "", reason: str = "", **_: Any) -> None:
    journal.note("lost", id=task_id, worker=CHAOS["role"], pid=os.getpid(), reason=reason)


@celery_unique.unique_store_error.connect
def _store_error(sender: Any = None, task_id: str = "", act: str = "", **_: Any) -> None:
    journal.note("store_error", id=task_id, worker=CHAOS["role"], pid=os.getpid(), act=act)
