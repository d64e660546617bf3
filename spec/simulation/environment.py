"""The library in simulated processes: time, threads, process ids and random numbers come from the
simulation, everything else of the library is as shipped.

Patched while a simulation runs, and only in modules of the library (and where Celery makes a task
id): ``time``, ``threading``, ``random``, ``os.getpid`` and ``uuid``.
"""

from __future__ import annotations

import importlib
import logging
import os
import pkgutil
import random
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from types import ModuleType
from typing import Any, ClassVar

import celery.utils
from celery import Celery, _state
from celery.app import base as celery_app_base
from celery.app import task as celery_app_task
from celery.worker import state as worker_state
from celery.worker.request import Request
from greenlet import getcurrent
from kombu.transport import TRANSPORT_ALIASES

import celery_unique
from celery_unique.config import leases
from celery_unique.config.app_state import AppState, state_of
from celery_unique.header import DeliveryName
from celery_unique.stores import retry_queue
from celery_unique.worker.delivery import on_received
from celery_unique.worker.request import use_unique_requests

from .scheduler import Event, Process, Scheduler

#: The settings of every app; times are short, so that they lapse within a run.
RUN_LEASE_S, GRACE_S, VISIBILITY_S, RESTORE_S = 9.0, 5.0, 20.0, 10.0
STORE_TIMEOUT_S = 0.5
#: Longer than any message of a run waits.
QUEUE_LEASE_S = 600.0

TASK = "shop.rebuild"
LATE = "shop.rebuild_late"


class Current:
    """The simulation that runs: there is one at a time in a process."""

    scheduler: ClassVar[Scheduler]
    simulation: ClassVar[Any]


def scheduler() -> Scheduler:
    return Current.scheduler


def _process() -> Process:
    actor = Current.scheduler.current
    assert actor is not None
    return actor.process


class Thread:
    """``threading.Thread`` as an actor of the process that starts it."""

    def __init__(
        self,
        target: Callable[..., object],
        name: str = "thread",
        daemon: bool | None = None,
        args: tuple[Any, ...] = (),
    ) -> None:
        self._target, self._args = target, args
        self.name = name
        self._actor: Any = None
        self._ended = Event(scheduler)

    def start(self) -> None:
        process = _process()

        def run() -> None:
            self._target(*self._args)
            self._ended.set()

        short = self.name.removeprefix("celery_unique").strip(" .")
        self._actor = Current.scheduler.spawn(f"{process.name} {short}", process, run)

    def join(self, timeout: float | None = None) -> None:
        self._ended.wait(timeout)

    def is_alive(self) -> bool:
        return self._actor is not None and not self._actor.is_done


class Local:
    """``threading.local`` for actors."""

    def __init__(self) -> None:
        object.__setattr__(self, "_values", {})

    def __getattr__(self, name: str) -> Any:
        try:
            return self._values[getcurrent()][name]
        except KeyError:
            raise AttributeError(name) from None

    def __setattr__(self, name: str, value: Any) -> None:
        self._values.setdefault(getcurrent(), {})[name] = value


class _Module:
    """A module with some of its names replaced."""

    def __init__(self, module: ModuleType, **replaced: Any) -> None:
        self._module = module
        self.__dict__.update(replaced)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def _sleep(seconds: float) -> None:
    Current.scheduler.sleep(seconds)


def _now() -> float:
    return Current.scheduler.now


def _now_ns() -> int:
    return round(Current.scheduler.now * 1e6) * 1000


def _getpid() -> int:
    actor = Current.scheduler.current
    return actor.process.pid if actor is not None else os.getpid()


def _uuid() -> str:
    return str(Current.simulation.next_id())


def _uniform(low: float, high: float) -> float:
    return _process().random.uniform(low, high)


def _shuffle(items: list[Any]) -> None:
    _process().random.shuffle(items)


def _never_forked(**_: object) -> None:
    """A hook for each of thousands of runs would never be removed."""


_TIME = _Module(time, monotonic=_now, time=_now, time_ns=_now_ns, sleep=_sleep)
_THREADING = _Module(threading, Thread=Thread, Event=lambda: Event(scheduler), local=Local)
_OS = _Module(os, getpid=_getpid, register_at_fork=_never_forked)
_RANDOM = _Module(random, uniform=_uniform, shuffle=_shuffle)
_IN_PLACE_OF: list[tuple[Any, Any]] = [
    (time, _TIME),
    (time.monotonic, _now),
    (time.time, _now),
    (time.sleep, _sleep),
    (threading, _THREADING),
    (random, _RANDOM),
    (os, _OS),
    (celery.utils.uuid, _uuid),
]


def _modules() -> Iterator[ModuleType]:
    """Of the library's callers, workers and stores in Python."""
    for package in ("config", "followers", "publish", "stores", "worker"):
        top = importlib.import_module(f"celery_unique.{package}")
        yield top
        for found in pkgutil.walk_packages(top.__path__, f"{top.__name__}."):
            if not any(word in found.name for word in (".redis", ".sql", ".django", "queues")):
                yield importlib.import_module(found.name)
    yield sys.modules["celery_unique.header"]


@contextmanager
def patched() -> Iterator[None]:
    """While this lasts, the library runs in simulated processes."""
    before: list[tuple[Any, str, Any]] = []

    def put(owner: Any, name: str, value: Any) -> None:
        before.append((owner, name, getattr(owner, name)))
        setattr(owner, name, value)

    for module in _modules():
        for name, value in list(vars(module).items()):
            for original, replacement in _IN_PLACE_OF:
                if value is original:
                    put(module, name, replacement)
            if isinstance(value, threading.local):
                put(module, name, Local())
    put(leases, "RESTORE_MARGIN_S", RESTORE_S)
    put(retry_queue, "drain_when_this_process_ends", lambda: None)
    put(sys.modules["celery_unique.header"], "BOOT", "boot")
    put(sys.modules["celery_unique.followers.promote"], "BOOT", "boot")
    put(DeliveryName, "has_died", _has_died)
    put(celery_app_base, "uuid", _uuid)
    put(celery_app_task, "uuid", _uuid)
    app = getattr(_state._tls, "current_app", None)
    level = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)
        _state._tls.current_app = app
        worker_state.reset_state()
        for owner, name, value in reversed(before):
            setattr(owner, name, value)


def _has_died(self: DeliveryName) -> bool:
    return bool(Current.simulation.has_died(int(self.process or 0)))


# -- apps --------------------------------------------------------------------------------


class NumberedRequest(Request):
    """Celery keeps requests in sets: their order must not depend on where they are in memory."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._number = Current.simulation.next_number()
        super().__init__(*args, **kwargs)

    def __hash__(self) -> int:
        return int(self._number)

    def __eq__(self, other: object) -> bool:
        return self is other


def _body(self: Any, *args: Any, **kwargs: Any) -> Any:
    return Current.simulation.run_body(self, *args, **kwargs)


_apps: dict[str, Celery] = {}


def app_of(name: str) -> Celery:
    """An app for a process of this name, as new: apps are kept, since they take long to make."""
    app = _apps.get(name)
    if app is None:
        app = _apps[name] = _made(name)
    _reset(state_of(app))
    return app


def _made(name: str) -> Celery:
    TRANSPORT_ALIASES["simulated"] = "spec.simulation.broker:Transport"
    app = Celery(f"simulated-{name}", set_as_current=False, broker="simulated://")
    app.conf.update(
        result_backend="spec.simulation.broker:ResultBackend",
        task_default_queue="simulated",
        broker_connection_timeout=0.1,
        broker_transport_options={"visibility_timeout": VISIBILITY_S},
        task_publish_retry=False,
        task_publish_retry_policy={"max_retries": 0},
        task_store_eager_result=False,
        worker_enable_remote_control=False,
        unique_run_lease=RUN_LEASE_S,
        unique_queue_lease=QUEUE_LEASE_S,
        unique_publish_grace=GRACE_S,
        unique_store_timeout=STORE_TIMEOUT_S,
        unique_gate_timeout=0.1,
        unique_on_store_error="raise",
        unique_store_url="memory://",
    )
    celery_unique.install(app)
    for task_name, late in ((TASK, False), (LATE, True)):
        task = app.task(
            _body,
            name=task_name,
            bind=True,
            shared=False,
            unique=True,
            acks_late=late,
            reject_on_worker_lost=late,
            max_retries=None,
            Request="spec.simulation.environment:NumberedRequest",
        )
        assert task is not None
    app.finalize()
    app.now = lambda: datetime.fromtimestamp(Current.scheduler.now, UTC)
    app_state = state_of(app)
    for task_name in (TASK, LATE):
        use_unique_requests(app_state, app.tasks[task_name])
    from celery import signals

    signals.task_received.connect(on_received, dispatch_uid=on_received.__qualname__)
    return app


def _reset(app_state: AppState) -> None:
    """As in a process that has just begun."""
    app_state.parts.clear()
    app_state.joined.clear()
    app_state.failovers.clear()
    app_state.background = app_state.register_waiting = app_state.renewal = None
    app_state.found_keys = (0.0, 0.0, {})


# -- what Celery keeps for a whole process --------------------------------------------------


class WorkerState:
    """Celery's module ``worker.state`` of one process: of several here, each has its own."""

    loaded: ClassVar[WorkerState | None] = None

    def __init__(self) -> None:
        self._saved: Any = None

    def load(self) -> None:
        if WorkerState.loaded is self:
            return
        if WorkerState.loaded is not None:
            WorkerState.loaded._save()
        if _is_used():
            worker_state.reset_state()
        if self._saved is not None:
            requests, sets, revoked = self._saved
            worker_state.requests.update(requests)
            for target, saved in zip(_sets(), sets, strict=True):
                if saved:
                    target.update(saved)
            if revoked:
                worker_state.revoked.update(revoked)
        WorkerState.loaded = self

    def _save(self) -> None:
        self._saved = None
        if _is_used():
            sets = [type(each)(each) if each else () for each in _sets()]
            self._saved = (dict(worker_state.requests), sets, list(worker_state.revoked))


def _is_used() -> bool:
    return bool(worker_state.requests or worker_state.revoked or any(map(len, _sets())))


def _sets() -> list[Any]:
    names = ("reserved_requests", "active_requests", "scheduled_requests")
    return [getattr(worker_state, name) for name in names if hasattr(worker_state, name)]


def enter(process: Process) -> None:
    """From here on, code of this process runs."""
    _state._tls.current_app = process.app
    process.worker_state.load()
