"""The same no-op task under each library, as its own documentation says to set it up.

Each contender has a Celery app, a broker database and a lock database of its own, so that none
meets what another has left behind; ``shared=False``, or Celery would put the first one's task
into the apps of all others. A library that is not installed is left out, and named.
"""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from celery import Celery

PLAIN, OURS = "plain Celery", "celery_unique"
#: Name -> the module that must be there, None for what always is.
CONTENDERS: dict[str, str | None] = {
    PLAIN: None,
    OURS: None,
    "celery-once": "celery_once",
    "celery-singleton": "celery_singleton",
    "celery-heimdall": "celery_heimdall",
}
RIVALS = tuple(name for name, module in CONTENDERS.items() if module is not None)
TASK = "shop.tasks.rebuild_index"


@dataclass(frozen=True)
class Contender:
    name: str
    app: Celery
    task: Any
    #: The broker's database, and the one that holds the locks, by number.
    broker_db: int
    lock_db: int

    def call(self, number: int) -> Any:
        return self.task.apply_async((number, True), {"tag": "nightly"})

    def call_again(self, number: int) -> None:
        """The call of a task that waits already, which some libraries answer with an error."""
        # Whatever the library raises for a duplicate is its answer.
        with contextlib.suppress(Exception):
            self.call(number)


def installed() -> list[str]:
    return [
        name
        for name, module in CONTENDERS.items()
        if module is None or importlib.util.find_spec(module) is not None
    ]


def make(name: str, broker: str, locks: str) -> Contender:
    """``broker`` and ``locks`` are URLs of Redis servers, on which it gets databases of its own.

    ``locks`` may also be the URL of an SQL database, which is its own as it is.
    """
    number = list(CONTENDERS).index(name)
    broker_db, lock_db = 3 * number, 3 * number + 2
    queue = name.replace(" ", "-")
    app = Celery(
        queue,
        broker=_database(broker, broker_db),
        backend=_database(broker, broker_db + 1),
        set_as_current=False,
    )
    app.conf.update(
        task_default_queue=queue,
        worker_hijack_root_logger=False,
        # A waiting pool would fetch more than it runs, and a queue would look empty too soon.
        worker_prefetch_multiplier=4,
    )
    task = _MAKERS[name](app, _database(locks, lock_db))
    app.finalize()
    return Contender(name, app, app.tasks[task.name], broker_db, lock_db)


def _database(url: str, number: int) -> str:
    return f"{url.rpartition('/')[0]}/{number}" if url.startswith("redis:") else url


def no_op(shop_id: int, full: bool = False, tag: str = "") -> None:
    return None


def _plain(app: Celery, locks: str) -> Any:
    return app.task(name=TASK, shared=False)(no_op)


def _ours(app: Celery, locks: str) -> Any:
    import celery_unique

    celery_unique.install(app, store_url=locks)
    return app.task(name=TASK, shared=False, unique=True)(no_op)


def _once(app: Celery, locks: str) -> Any:
    from celery_once import QueueOnce

    backend = {"url": locks, "default_timeout": 3600}
    app.conf.ONCE = {"backend": "celery_once.backends.Redis", "settings": backend}
    # Graceful: a duplicate returns None instead of raising, which is its cheaper way.
    return app.task(name=TASK, shared=False, base=QueueOnce, once={"graceful": True})(no_op)


def _singleton(app: Celery, locks: str) -> Any:
    from celery_singleton import Singleton

    app.conf.singleton_backend_url = locks
    return app.task(name=TASK, shared=False, base=Singleton)(no_op)


def _heimdall(app: Celery, locks: str) -> Any:
    import redis
    from celery_heimdall import HeimdallTask

    class InItsOwnDatabase(HeimdallTask):
        abstract = True

        def setup_redis(self) -> Any:
            return redis.Redis.from_url(locks)

    return app.task(name=TASK, shared=False, base=InItsOwnDatabase, heimdall={"unique": True})(
        no_op
    )


_MAKERS: dict[str, Callable[[Celery, str], Any]] = {
    PLAIN: _plain,
    OURS: _ours,
    "celery-once": _once,
    "celery-singleton": _singleton,
    "celery-heimdall": _heimdall,
}
