"""A process of the pool leaves by the back door, with no exit handlers."""

from __future__ import annotations

from celery import Celery, signals

import celery_unique
from celery_unique.config.app_state import state_of
from celery_unique.exceptions import StoreUnavailable
from celery_unique.stores.memory import MemoryStore


class Slow(MemoryStore):
    """Keeps what it is told one way until it is flushed, as a queue may at any moment."""

    def __init__(self, *, answers: bool = True) -> None:
        super().__init__()
        self.waiting: list[tuple[str, str, int]] = []
        self._answers = answers

    def confirm(self, key: str, task_id: str, lease_ms: int) -> None:
        self.waiting.append((key, task_id, lease_ms))

    def flush(self, timeout_s: float | None = None) -> None:
        if not self._answers:
            raise StoreUnavailable("down")
        for act in self.waiting:
            super().confirm(*act)
        self.waiting.clear()


def app_on(store: MemoryStore) -> Celery:
    app = Celery("shop", broker="memory://", set_as_current=False)
    celery_unique.install(app)

    @app.task(name="rebuild", unique=True, shared=False)
    def rebuild(shop: int) -> None: ...

    state_of(app).use_store(store)
    return app


def test_what_was_told_one_way_is_told_before_a_pool_process_leaves():
    store = Slow()
    result = app_on(store).tasks["rebuild"].delay(7)
    before, _ = store.read(result.unique_key)

    signals.worker_process_shutdown.send(sender=None, pid=1, exitcode=0)

    after, _ = store.read(result.unique_key)
    assert [record.tasks[result.id].state for record in (before, after)] == ["p", "w"]


def test_a_store_that_is_down_does_not_keep_a_pool_process_from_leaving():
    app = app_on(Slow(answers=False))
    app.tasks["rebuild"].delay(7)

    state_of(app).flush()

    lock = celery_unique.lookup(app.tasks["rebuild"], (7,))
    assert lock is not None
    assert lock.state == "pending"
