"""What each act costs the lock server: processor time and bytes on the wire."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any

from benchmarks.contenders import TASK
from benchmarks.measuring import progress
from benchmarks.servers import Server, server
from benchmarks.stage import Stage
from benchmarks.storage import GRACE_MS, QUEUE_MS, RUN_MS, STATES, server_cpu
from celery_unique.keys.digest import key_of
from celery_unique.stores import open_store
from celery_unique.stores.base import Claim, Finish, Start
from celery_unique.stores.record import State

Act = Callable[[str, str], Any]


def run(stage: Stage) -> dict[str, Any]:
    """One act at a time on one connection, as callers and workers send them."""
    count = max(50, stage.sizes.locks // 20)
    with server() as own:
        store = open_store(own.url(), namespace="", timeout_s=120.0)
        acts = _acts(store)
        _warm_up(store, acts)
        pairs = [(key_of(str(n)), str(uuid.uuid4())) for n in range(count)]
        told = {}
        for name, act in acts.items():
            progress(f"{count:,} times: {name}")
            told[name] = _cost(own, store, act, pairs)
        store.close()
    life = ("acquire", "confirm", "start", "finish")
    return {
        "acts": told,
        "life": {
            field: round(sum(told[name][field] for name in life), 2)
            for field in ("server_cpu_us", "bytes_in", "bytes_out")
        },
    }


def _warm_up(store: Any, acts: dict[str, Act]) -> None:
    """Connected, and every script is known: a server is sent each of them whole only once."""
    key, task_id = key_of("warm"), str(uuid.uuid4())
    for act in acts.values():
        act(key, task_id)
        store.flush()


def _acts(store: Any) -> dict[str, Act]:
    def claim(task_id: str) -> Claim:
        return Claim(task_id, TASK, STATES, GRACE_MS)

    def delivery(task_id: str) -> str:
        return f"celery@worker1.example.org/12345/18769a7b3f2d1c00/{task_id[:6]}"

    return {
        "acquire": lambda key, task_id: store.acquire(key, claim(task_id)),
        "confirm": lambda key, task_id: store.confirm(key, task_id, QUEUE_MS),
        "duplicate": lambda key, task_id: store.acquire(key, claim(f"another {task_id[:8]}")),
        "start": lambda key, task_id: store.start(
            key, Start(task_id, delivery(task_id), TASK, RUN_MS, RUN_MS, QUEUE_MS)
        ),
        "finish": lambda key, task_id: store.finish(
            key, Finish(task_id, delivery(task_id), State.COMPLETED, QUEUE_MS, QUEUE_MS)
        ),
    }


def _cost(own: Server, store: Any, act: Act, pairs: list[tuple[str, str]]) -> dict[str, float]:
    cpu, before = server_cpu(own), own.client.info("stats")
    for key, task_id in pairs:
        act(key, task_id)
    store.flush()
    cpu, after = server_cpu(own) - cpu, own.client.info("stats")

    def each(field: str) -> float:
        return round((after[field] - before[field]) / len(pairs), 1)

    return {
        "server_cpu_us": round(cpu / len(pairs) * 1e6, 2),
        "bytes_in": each("total_net_input_bytes"),
        "bytes_out": each("total_net_output_bytes"),
    }
