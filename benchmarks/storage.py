"""What a lock takes in Redis: bytes of memory, and the work of renewing."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterable
from typing import Any

from benchmarks.contenders import RIVALS, TASK, Contender
from benchmarks.measuring import median, progress, quantile
from benchmarks.servers import Server, server
from benchmarks.stage import Stage, forget_messages
from celery_unique.keys.digest import key_of
from celery_unique.stores import open_store
from celery_unique.stores.base import Claim, Finish, Held, Start
from celery_unique.stores.record import State

STATES = "pswrt"  # those of until_done
GRACE_MS, QUEUE_MS, RUN_MS = 30_000, 86_400_000, 60_000
#: A lease of 60 s is renewed every third of it.
RENEWED_EVERY_S = 20.0


# -- bytes ----------------------------------------------------------------------------------


def memory(stage: Stage) -> dict[str, Any]:
    """Bytes of ``used_memory`` for one lock, over many."""
    with server() as own:
        store = open_store(own.url(), namespace="", timeout_s=120.0)
        try:
            figures = Bytes(own, store, stage.sizes.locks).figures()
        finally:
            store.close()
    figures["rivals"] = {
        name: round(_rival_bytes(stage, one), 1)
        for name, one in stage.all.items()
        if name in RIVALS
    }
    return figures


class Bytes:
    """Fills a server with locks of each kind, and computes what one of them takes."""

    def __init__(self, own: Server, store: Any, locks: int) -> None:
        self._own = own
        self._store = store
        self._locks = locks
        # Scripts and connections are there before the first byte is counted.
        self._waiting([(key_of("warm"), "warm")])
        store.start(key_of("warm"), _start("warm", 0))

    def figures(self) -> dict[str, Any]:
        bare = self._of(self._locks, self._bare)
        fewer = max(100, self._locks // 10)
        taken = {
            "bare_set": bare,
            "waiting": self._of(self._locks, self._waiting),
            "waiting, long task name": self._of(fewer, self._waiting_long),
            "waiting, with duplicates": self._of(fewer, self._with_duplicates),
            "active": self._of(fewer, self.active),
            "ended and kept": self._of(fewer, self._kept),
            "active, with a successor": self._of(fewer, self._with_successor),
            "waiting, with a tombstone": self._of(fewer, self._replacing),
            "waiting, with a follower": self._of(fewer, self._followed),
        }
        return {
            "locks": self._locks,
            "bytes": {name: round(value, 1) for name, value in taken.items()},
            "times_bare": {name: round(value / bare, 3) for name, value in taken.items()},
        }

    def _of(self, count: int, make: Callable[[list[tuple[str, str]]], None]) -> float:
        progress(f"bytes of {count:,} locks: {make.__name__.strip('_').replace('_', ' ')}")
        self._own.client.flushall()
        pairs = [(key_of(str(n)), str(uuid.uuid4())) for n in range(count)]
        before = self._own.used_memory()
        make(pairs)
        self._store.flush()
        return (self._own.used_memory() - before) / count

    def _bare(self, pairs: list[tuple[str, str]]) -> None:
        for part in _parts(pairs, 1000):
            pipeline = self._own.client.pipeline(transaction=False)
            for key, task_id in part:
                pipeline.set(self._store._layout.name_of(key), task_id)
            pipeline.execute()

    def _waiting(self, pairs: list[tuple[str, str]], **claimed: Any) -> None:
        for part in _parts(pairs, 500):
            self._acquire(part, **claimed)
            for key, task_id in part:
                self._store.confirm(key, task_id, QUEUE_MS)
            self._store.flush()

    def _acquire(self, pairs: list[tuple[str, str]], **claimed: Any) -> None:
        facts = {"task_name": TASK, "states": STATES, "grace_ms": GRACE_MS, **claimed}
        claims = [(key, Claim(task_id=task_id, **facts)) for key, task_id in pairs]
        self._store.acquire_many(claims)

    def _waiting_long(self, pairs: list[tuple[str, str]]) -> None:
        self._waiting(pairs, task_name="company.shop.catalogue.tasks.rebuild_index")

    def _with_duplicates(self, pairs: list[tuple[str, str]]) -> None:
        self._waiting(pairs)
        for _ in range(2):
            self._acquire([(key, str(uuid.uuid4())) for key, _ in pairs])

    def active(self, pairs: list[tuple[str, str]]) -> None:
        self._waiting(pairs)
        for number, (key, task_id) in enumerate(pairs):
            self._store.start(key, _start(task_id, number))

    def _kept(self, pairs: list[tuple[str, str]]) -> None:
        self._waiting(pairs, states="pswrtc", window_ms=600_000, keep="c")
        for number, (key, task_id) in enumerate(pairs):
            start = _start(task_id, number)
            self._store.start(key, start)
            finish = Finish(task_id, start.delivery, State.COMPLETED, QUEUE_MS, QUEUE_MS)
            self._store.finish(key, finish)

    def _with_successor(self, pairs: list[tuple[str, str]]) -> None:
        self.active(pairs)
        self._waiting([(key, str(uuid.uuid4())) for key, _ in pairs], on_conflict="rerun")

    def _replacing(self, pairs: list[tuple[str, str]]) -> None:
        self._waiting(pairs)
        self._waiting([(key, str(uuid.uuid4())) for key, _ in pairs], on_conflict="replace")

    def _followed(self, pairs: list[tuple[str, str]]) -> None:
        self._waiting(pairs)
        # A message of a usual size: what is kept of a follower is mostly its message.
        self._acquire([(key, str(uuid.uuid4())) for key, _ in pairs], join="x" * 600)


def _start(task_id: str, number: int) -> Start:
    delivery = f"celery@worker1.example.org/12345/18769a7b3f2d1c00/{number}"
    return Start(task_id, delivery, TASK, RUN_MS, RUN_MS, QUEUE_MS)


def _parts(pairs: list[tuple[str, str]], size: int) -> Iterable[list[tuple[str, str]]]:
    return (pairs[n : n + size] for n in range(0, len(pairs), size))


def _rival_bytes(stage: Stage, one: Contender) -> float:
    one.call(next(stage.numbers))
    before = stage.redis.used_memory()
    for _ in range(stage.sizes.rival_locks):
        one.call(next(stage.numbers))
    forget_messages(one, stage.redis)  # they are in the same database
    taken = stage.redis.used_memory() - before
    return taken / stage.sizes.rival_locks


# -- renewing -------------------------------------------------------------------------------


def renewal(stage: Stage) -> dict[str, Any]:
    """One batch of renewals of a worker that holds many locks, and its share of a core."""
    count = stage.sizes.held
    with server() as own:
        store = open_store(own.url(), namespace="", timeout_s=120.0)
        pairs = [(key_of(str(n)), str(uuid.uuid4())) for n in range(count)]
        Bytes(own, store, count).active(pairs)
        held = [
            Held(key, task_id, _start(task_id, n).delivery, RUN_MS, RUN_MS)
            for n, (key, task_id) in enumerate(pairs)
        ]
        rounds = [_renewed(own, store, held) for _ in range(stage.sizes.renewals)]
        store.close()
    wall, client, on_server = (median(each) for each in zip(*rounds, strict=True))
    return {
        "held": count,
        "wall_ms": round(wall * 1000, 1),
        "p90_wall_ms": round(quantile([each[0] for each in rounds], 0.9) * 1000, 1),
        "client_cpu_ms": round(client * 1000, 1),
        "server_cpu_ms": round(on_server * 1000, 1),
        "client_share_of_a_core": round(client / RENEWED_EVERY_S, 5),
        "server_share_of_a_core": round(on_server / RENEWED_EVERY_S, 5),
    }


def _renewed(own: Server, store: Any, held: list[Held]) -> tuple[float, float, float]:
    server_before = server_cpu(own)
    began, cpu = time.perf_counter(), time.process_time()
    replies = store.renew(held)
    wall, cpu = time.perf_counter() - began, time.process_time() - cpu
    if not all(replies):
        raise RuntimeError("a lock that is held was not renewed")
    return wall, cpu, server_cpu(own) - server_before


def server_cpu(own: Server) -> float:
    used = own.client.info("cpu")
    return float(used["used_cpu_user"]) + float(used["used_cpu_sys"])
