"""The same no-op task under each library, configured as its own documentation says.

Each contender has a Celery app and one Redis database of its own, which is its broker, its result
backend and its lock store: the default of every library. ``shared=False``, or Celery would add the
first one's task to the apps of all others. A library that is not installed is left out, and named.
"""

from __future__ import annotations

import contextlib
import importlib.util
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import redis
from celery import Celery

PLAIN, OURS = "plain Celery", "celery_unique"
#: The same two on a kombu that keeps the Redis client of a channel. Kombu makes a new one for each
#: operation, which is most of what it adds to a command.
PLAIN_CACHED, OURS_CACHED = f"{PLAIN}, client cached", f"{OURS}, client cached"
#: Name -> the module that must be installed, None for what always is.
CONTENDERS: dict[str, str | None] = {
    PLAIN: None,
    OURS: None,
    "celery-once": "celery_once",
    "celery-singleton": "celery_singleton",
    "celery-heimdall": "celery_heimdall",
    PLAIN_CACHED: None,
    OURS_CACHED: None,
}
RIVALS = tuple(name for name, module in CONTENDERS.items() if module is not None)
CACHED = (PLAIN_CACHED, OURS_CACHED)
TASK = "shop.tasks.rebuild_index"
#: Of plain Celery and of ours: a task of a lane, and the counter of its runs.
LANE_TASK, RUNS = "shop.tasks.sync_account", "runs"

#: Option of the transport, read by ``_allow_cached_clients`` only.
CACHES_CLIENT = "bench_caches_client"


@dataclass(frozen=True)
class Contender:
    name: str
    app: Celery
    task: Any
    #: The number of its Redis database.
    database: int

    def call(self, number: int, **options: Any) -> Any:
        return self.task.apply_async((number, True), {"tag": "nightly"}, **options)

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


def base_of(name: str) -> str:
    """The plain Celery that a contender is compared with."""
    return PLAIN_CACHED if name in CACHED else PLAIN


def make(name: str, broker: str, store: str = "") -> Contender:
    """``broker`` is the URL of a Redis server, on which it gets a database of its own for
    everything. With ``store`` the locks are there: in an SQL database, or in a database of a Redis
    server, which has the results too if the broker is RabbitMQ."""
    number = list(CONTENDERS).index(name)
    queue = name.replace(", ", "-").replace(" ", "-")
    broker, store = _database(broker, number), _database(store, number)
    backend = broker if broker.startswith("redis:") else store
    app = Celery(queue, broker=broker, backend=backend, set_as_current=False)
    app.conf.update(
        task_default_queue=queue,
        worker_hijack_root_logger=False,
        # A waiting pool would fetch more than it runs, and a queue would look empty too soon.
        worker_prefetch_multiplier=4,
    )
    if name in CACHED:
        _allow_cached_clients()
        app.conf.broker_transport_options = {CACHES_CLIENT: True}
    task = _MAKERS[name](app, backend, store)
    app.finalize()
    return Contender(name, app, app.tasks[task.name], number)


def _database(url: str, number: int) -> str:
    return f"{url.rpartition('/')[0]}/{number}" if url.startswith("redis:") else url


@cache
def _allow_cached_clients() -> None:
    """Let channels with the option keep the client that they make for an operation.

    No subclass of the channel: it would not be the channel that users have.
    """
    from kombu.transport.redis import Channel

    create = Channel._create_client

    def create_client(channel: Any, asynchronous: bool = False) -> Any:
        if asynchronous or not channel.connection.client.transport_options.get(CACHES_CLIENT):
            return create(channel, asynchronous)
        pool, client = channel.__dict__.get(CACHES_CLIENT, (None, None))
        if pool is None or pool is not channel.pool:  # kombu replaces it when it reconnects
            client = create(channel)
            channel.__dict__[CACHES_CLIENT] = channel.pool, client
        return client

    Channel._create_client = create_client


def no_op(shop_id: int, full: bool = False, tag: str = "") -> None:
    return None


def _add_lane(app: Celery, backend: str, **options: Any) -> None:
    counter = redis.Redis.from_url(backend) if backend.startswith("redis:") else None

    @app.task(name=LANE_TASK, shared=False, ignore_result=True, **options)
    def sync_account(user_id: int, change: int, seconds: float) -> None:
        time.sleep(seconds)
        if counter is not None:
            counter.incr(RUNS)


def _plain(app: Celery, backend: str, _store: str) -> Any:
    _add_lane(app, backend)
    return app.task(name=TASK, shared=False)(no_op)


def _ours(app: Celery, backend: str, store: str) -> Any:
    import celery_unique

    celery_unique.install(app, **({"store_url": store} if store else {}))
    _add_lane(app, backend, unique=True, unique_on="user_id", unique_on_conflict="queue")
    return app.task(name=TASK, shared=False, unique=True)(no_op)


def _once(app: Celery, backend: str, _store: str) -> Any:
    from celery_once import QueueOnce

    settings = {"url": backend, "default_timeout": 3600}
    app.conf.ONCE = {"backend": "celery_once.backends.Redis", "settings": settings}
    # Graceful: a duplicate returns None instead of raising, which is its cheaper way.
    return app.task(name=TASK, shared=False, base=QueueOnce, once={"graceful": True})(no_op)


def _singleton(app: Celery, _backend: str, _store: str) -> Any:
    from celery_singleton import Singleton

    return app.task(name=TASK, shared=False, base=Singleton)(no_op)


def _heimdall(app: Celery, _backend: str, _store: str) -> Any:
    from celery_heimdall import HeimdallTask

    return app.task(name=TASK, shared=False, base=HeimdallTask, heimdall={"unique": True})(no_op)


_MAKERS: dict[str, Callable[[Celery, str, str], Any]] = {
    PLAIN: _plain,
    OURS: _ours,
    "celery-once": _once,
    "celery-singleton": _singleton,
    "celery-heimdall": _heimdall,
    PLAIN_CACHED: _plain,
    OURS_CACHED: _ours,
}
