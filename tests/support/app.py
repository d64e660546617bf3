"""Apps for tests: a broker in this process, a lock store of choice, a worker in a thread."""

from __future__ import annotations

import base64
import json
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from celery import Celery, _state
from celery.worker import state as worker_state
from kombu.transport import memory

import celery_unique
from celery_unique.config.app_state import state_of
from celery_unique.exceptions import ConfigurationError
from tests.support.patience import PATIENT


def make_app(store_url: str | None = None, **conf: Any) -> Celery:
    """An installed app, by default as ``plain_app`` makes it."""
    app = plain_app(**{**PATIENT, **conf})
    return celery_unique.install(app, **({} if store_url is None else {"store_url": store_url}))


def plain_app(
    name: str = "", *, broker: str = "memory://", backend: str = "cache+memory://", **conf: Any
) -> Celery:
    """An app without the library.

    Without a name it has queues of its own in this process, so that no two tests share a message.
    """
    if name:
        app = Celery(name, broker=broker, backend=backend, set_as_current=False)
        app.conf.update(conf)
        return app
    name = f"test-{uuid.uuid4().hex[:12]}"
    app = Celery(name, broker=broker, backend=backend, set_as_current=False)
    ours = {
        "task_default_queue": name,
        "broker_transport_options": {"polling_interval": 0.01},
        # How long a worker that is told to end sleeps while a task waits for its ETA.
        "worker_timer_precision": 0.05,
        # The worker of a test shares its process, and with it the logging of pytest.
        "worker_hijack_root_logger": False,
        "worker_redirect_stdouts": False,
    }
    app.conf.update({**ours, **conf})
    return app


def define(app: Celery, name: str = "shop.rebuild", *, function: Any = None, **options: Any) -> Any:
    """A task of the app alone, of this function or of one that takes a shop."""

    def run(shop_id: int, full: bool = False) -> None: ...

    return app.task(name=name, **{"shared": False, **options})(function or run)


# -- the broker --------------------------------------------------------------------------


@dataclass(frozen=True)
class Sent:
    """A message that waits in a queue."""

    headers: dict[str, Any]
    properties: dict[str, Any]
    args: list[Any]
    kwargs: dict[str, Any]

    @property
    def id(self) -> str:
        return str(self.headers["id"])

    @property
    def task(self) -> str:
        return str(self.headers["task"])


def messages(app: Celery, queue: str | None = None) -> list[Sent]:
    """What waits in the app's default queue, or in another one, oldest first."""
    waiting = memory.Channel.queues.get(queue or app.conf.task_default_queue)
    return [_sent(payload) for payload in list(waiting.queue)] if waiting is not None else []


def take_messages(app: Celery) -> list[Sent]:
    """What waits in the app's default queue, which is empty afterwards."""
    taken = messages(app)
    if taken:
        memory.Channel.queues[app.conf.task_default_queue].queue.clear()
    return taken


def _sent(payload: dict[str, Any]) -> Sent:
    args, kwargs, _ = json.loads(base64.b64decode(payload["body"]))
    return Sent(payload["headers"], payload["properties"], args, kwargs)


# -- the store ---------------------------------------------------------------------------


def locks(app: Celery) -> list[str]:
    """The keys of everything the store holds: tasks and marks."""
    flush(app)
    return [key for key, record in state_of(app).store.walk() if record.tasks]


def flush(app: Celery) -> None:
    """Wait for what was told to the store one way: confirmations, above all."""
    state_of(app).store.flush()


def advance(app: Celery, seconds: float) -> None:
    """Move the clock of the app's store, after what is on its way has arrived."""
    flush(app)
    runtime = state_of(app)
    for store in {id(each): each for each in (runtime.store, runtime.gate_store)}.values():
        store.clock_offset_ms += round(seconds * 1000)


# -- the worker --------------------------------------------------------------------------


@contextmanager
def working(app: Celery, **options: Any) -> Iterator[Any]:
    """A worker in a thread of this process while the block runs."""
    from celery.contrib.testing.worker import start_worker  # pytest alone needs it

    before = _state.default_app, getattr(_state._tls, "current_app", None)
    try:
        with start_worker(app, perform_ping_check=False, loglevel="WARNING", **options) as worker:
            yield worker
            _end_soon(app)
        # What its threads have told the store has arrived, as after the end of a process.
        with suppress(ConfigurationError):  # an app without the library
            state_of(app).flush()
    finally:
        _state.default_app, _state._tls.current_app = before
        # It does not send worker_shutdown: processes that tests start would send metrics here.
        os.environ.pop("CELERY_UNIQUE_METRICS_SOCKET", None)


def value_of(result: Any, timeout: float = 30.0) -> Any:
    """What the task returned; asked for more often than Celery does."""
    return result.get(timeout=timeout, interval=0.01)


def _end_soon(app: Celery) -> None:
    """The worker waits for messages two seconds at a time, and once more when it is told to
    end: give it two."""
    worker_state.should_terminate = 0
    app.control.broadcast("ping")
    app.control.broadcast("ping")
