"""A store that records its acts, and calls on it, without a broker."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from celery_unique import StoreUnavailable, UniquePolicy
from celery_unique.config.leases import Leases
from celery_unique.header import HEADER
from celery_unique.publish.request import PublishRequest
from celery_unique.stores.base import Acquired
from celery_unique.stores.memory import MemoryStore

LEASES = Leases(
    queue_ms=60_000, run_ms=10_000, grace_ms=5_000, retention_ms=1, visibility_ms=60_000
)
KEY = "1:00"


class Journal(MemoryStore):
    """A memory store that records its acts beside the messages, and fails on request."""

    def __init__(self) -> None:
        super().__init__()
        self.acts: list[str] = []
        self.broken: set[str] = set()
        self.late: set[str] = set()  # sent, and not applied yet

    def note(self, name: str) -> None:
        self.acts.append(name)
        if name in self.broken:
            raise StoreUnavailable("away", store="journal")

    def acquire(self, *args: Any) -> Acquired:
        self.note("acquire")
        return super().acquire(*args)

    def confirm(self, *args: Any) -> None:
        self.note("confirm")
        if "confirm" not in self.late:
            super().confirm(*args)

    def give_back(self, *args: Any) -> Any:
        self.note("give_back")
        return super().give_back(*args)

    def help(self, *args: Any) -> Any:
        self.note("help")
        return super().help(*args)


def call(store: Journal, task_id: str, **fields: Any) -> PublishRequest:
    def send_task(name: str, args: Any, kwargs: Any, **options: Any) -> Any:
        store.note("send")
        return SimpleNamespace(id=options["task_id"], header=options["headers"][HEADER])

    state: Any = SimpleNamespace(app=None, sends_sent_events=False)
    request = PublishRequest(state, send_task, "shop.rebuild", (), {}, {}, task_id, KEY)
    request.policy = UniquePolicy()
    request.grace_ms, request.lease_ms = LEASES.grace_ms, LEASES.queue_ms
    for name, value in fields.items():
        setattr(request, name, value)
    return request
