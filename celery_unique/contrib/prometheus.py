"""Metrics for Prometheus, fed by this library's signals.

One line beside ``celery_unique.install(app)``::

    celery_unique.contrib.prometheus.install(app, port=9808)

A process that calls tasks counts in the registry that it already exports. A worker counts for its
whole pool, and serves the metrics itself if a port is given: the processes of a prefork pool send
their counts to the main process of the worker (``_prometheus_relay``).
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

from celery import signals as celery_signals

from celery_unique import reporting
from celery_unique.config.app_state import make_state, state_of
from celery_unique.exceptions import CeleryUniqueError, ConfigurationError, install_command
from celery_unique.policy.policy import UniquePolicy
from celery_unique.publish.coordinator import LONG_WAIT_MS
from celery_unique.stores.base import LockStore

from ._prometheus_relay import ADDRESS, Relay

logger = logging.getLogger("celery_unique")


try:
    import prometheus_client
    from prometheus_client import CollectorRegistry, Counter, Histogram
    from prometheus_client.core import GaugeMetricFamily, Metric
    from prometheus_client.multiprocess import MultiProcessCollector
except ImportError:
    raise ConfigurationError(
        "celery_unique.contrib.prometheus needs prometheus_client: "
        f"{install_command('prometheus')}",
        setting=None,
    ) from None

#: The acts of a store that wait for its reply.
TIMED_ACTS = (
    *("acquire", "acquire_many", "give_back", "help", "cancel", "release"),
    *("start", "renew", "finish", "read"),
)
#: Acts of some stores, each with the act that it is timed as.
OTHER_FORMS = {"probe": "acquire", "withdraw": "give_back", "finish_with_result": "finish"}
#: Acts that some stores can run in two steps, which are timed as one.
TWO_STEP_ACTS = {
    "begin_acquire": "acquire",
    "begin_acquire_many": "acquire_many",
    "begin_publish": "acquire",
}
#: The acts that ``unique_store_error`` names.
ERROR_ACTS = (
    *("acquire", "help", "confirm", "give_back", "start", "read", "renew", "retry", "finish"),
    *("settle", "forget", "cancel", "follow", "followers", "reap", "fail-over"),
)
#: How a task ends. (A manual release has no series before the first one: it is rare.)
ENDS = ("completed", "discarded", "cancelled")
BUCKETS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)

#: counter -> help, labels.
COUNTERS: dict[str, tuple[str, list[str]]] = {
    "acquired": ("Calls that acquired their key and were published", ["task"]),
    "conflicts": ("Calls whose key was held", ["task", "on_conflict"]),
    "long_waits": ("Calls whose key was held by a task that waited for an hour", ["task"]),
    "released": ("Released keys, by how the task ended", ["task", "reason"]),
    "superseded": ("Tasks replaced before they ran", ["task"]),
    "lost": ("Tasks that ran or ended without their lock", ["task"]),
    "store_errors": ("Failed operations of the lock store", ["act"]),
}

#: Set by users who have chosen the multiprocess mode of prometheus_client.
MULTIPROCESS = "PROMETHEUS_MULTIPROC_DIR"

FIXUP = "celery_unique.contrib.prometheus:InPool"

_installed: weakref.WeakKeyDictionary[CollectorRegistry, Metrics] = weakref.WeakKeyDictionary()


def install(
    app: Any,
    *,
    port: int | None = None,
    addr: str = "127.0.0.1",
    registry: CollectorRegistry = prometheus_client.REGISTRY,
) -> None:
    """Count the events of the locks of ``app``, in every process that runs this line.

    With ``port``, a worker of the app serves the metrics of the whole worker at
    ``http://ADDR:PORT/metrics``. Idempotent; does not connect.
    """
    state_of(app)  # raises where the library is not installed
    metrics = _watch(app, registry)
    if metrics is None:
        return
    app.fixups = {*app.fixups, FIXUP}
    service = _WorkerService(app, metrics, port, addr)
    for signal, receiver in (
        (celery_signals.worker_init, service.on_worker_init),
        (celery_signals.worker_ready, service.on_worker_ready),
        (celery_signals.worker_shutdown, service.on_worker_shutdown),
        (celery_signals.worker_process_shutdown, metrics.relay.flush),
    ):
        signal.connect(receiver, weak=False, dispatch_uid=object())


def _watch(app: Any, registry: CollectorRegistry) -> Metrics | None:
    """The metrics that count for this app from now on; None where they already do."""
    metrics = _installed.get(registry)
    if metrics is None:
        metrics = _installed[registry] = Metrics(registry)
    if app in metrics.apps:
        return None
    metrics.apps[app] = set()
    make_state(app).watch_stores(metrics.time_acts)
    return metrics


class InPool:
    """Celery fix-up that counts in a spawned process of a pool: the app arrives there pickled,
    with its fix-ups. The counts are sent to the main process of the worker."""

    def __init__(self, app: Any) -> None:
        metrics = _watch(app, prometheus_client.REGISTRY)
        if metrics is not None:
            celery_signals.worker_process_shutdown.connect(
                metrics.relay.flush, weak=False, dispatch_uid=object()
            )


class Metrics:
    """The metrics of one registry, and the receivers that change them."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        #: The apps that are counted for, with the tasks whose series have begun.
        self.apps: weakref.WeakKeyDictionary[Any, set[str]] = weakref.WeakKeyDictionary()
        self.relay = Relay(self._count)
        registry.register(Collector(self.begin))  # first, so that a scrape shows what it begins
        self._metrics: dict[str, Counter | Histogram] = {
            name: Counter(f"celery_unique_{name}", text, labels, registry=registry)
            for name, (text, labels) in COUNTERS.items()
        }
        self._metrics["store_seconds"] = Histogram(
            "celery_unique_store_seconds",
            "Duration of the operations of the lock store",
            ["act"],
            buckets=BUCKETS_S,
            registry=registry,
        )
        for signal, receiver in (
            (reporting.unique_acquired, self._receiver("acquired")),
            (reporting.unique_conflict, self._receiver("conflicts", "on_conflict")),
            (reporting.unique_released, self._receiver("released", "reason")),
            (reporting.unique_superseded, self._receiver("superseded")),
            (reporting.unique_lost, self._receiver("lost")),
            (reporting.unique_conflict, self._on_conflict),
            (reporting.unique_store_error, self._on_store_error),
        ):
            signal.connect(receiver, weak=False, dispatch_uid=object())

    def _receiver(self, name: str, *labels: str) -> Callable[..., None]:
        def on_signal(sender: str, app: Any = None, **facts: Any) -> None:
            if app in self.apps:
                self.count(name, [sender, *(str(facts.get(label)) for label in labels)])

        return on_signal

    def _on_conflict(self, sender: str, app: Any = None, waited_s: float = 0.0, **_: Any) -> None:
        if app in self.apps and waited_s * 1000 > LONG_WAIT_MS:
            self.count("long_waits", [sender])

    def _on_store_error(self, act: str = "", app: Any = None, **_: Any) -> None:
        if app in self.apps:
            self.count("store_errors", [act])

    def begin(self) -> list[Metric]:
        """Begin every series that is known in advance at zero: ``increase`` and ``rate`` do not
        see the event with which a series begins."""
        for act in ERROR_ACTS:
            self._metrics["store_errors"].labels(act)
        for app, begun in list(self.apps.items()):
            # Until then no task was called, and its tasks are not complete.
            for task, policy in _unique_tasks(app, begun) if app.finalized else ():
                begun.add(task)
                for name in ("acquired", "long_waits", "superseded", "lost"):
                    self._metrics[name].labels(task)
                self._metrics["conflicts"].labels(task, policy.on_conflict)
                for reason in ENDS:
                    self._metrics["released"].labels(task, reason)
        return []

    def count(self, name: str, labels: list[str], amount: float = 1.0) -> None:
        """Count here or, in a process of a pool, in the main process of the worker."""
        if not self.relay.take(name, labels, amount):
            self._count(name, labels, amount)

    def _count(self, name: str, labels: list[str], amount: float) -> None:
        metric = self._metrics[name].labels(*labels)
        if isinstance(metric, Histogram):
            metric.observe(amount)
        else:
            metric.inc(amount)

    def time_acts(self, store: LockStore) -> None:
        """Wrap the acts of this store object: other stores have no overhead."""
        watched: Any = store
        for act in TIMED_ACTS:
            setattr(watched, act, self._timed(act, getattr(watched, act)))
        for wrap, acts in (
            (self._timed, OTHER_FORMS),
            (self._timed_in_two_steps, TWO_STEP_ACTS),
        ):
            for name, act in acts.items():
                if hasattr(watched, name):
                    setattr(watched, name, wrap(act, getattr(watched, name)))

    def _timed(self, act: str, run: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **options: Any) -> Any:
            began = time.perf_counter()
            try:
                return run(*args, **options)
            finally:
                self.count("store_seconds", [act], time.perf_counter() - began)

        return timed

    def _timed_in_two_steps(self, act: str, begin: Callable[..., Any]) -> Callable[..., Any]:
        """Leave out the time between sending the request and waiting for the reply."""

        def timed(*args: Any) -> Any:
            began = time.perf_counter()
            try:
                wait = begin(*args)
            except BaseException:
                self.count("store_seconds", [act], time.perf_counter() - began)
                raise
            sending = time.perf_counter() - began

            def receive() -> Any:
                began = time.perf_counter()
                try:
                    return wait()
                finally:
                    self.count("store_seconds", [act], sending + time.perf_counter() - began)

            return receive

        return timed


def _unique_tasks(app: Any, known: set[str]) -> Iterator[tuple[str, UniquePolicy]]:
    app_state = state_of(app)
    defaults = app_state.settings.app_defaults
    for name, task in list(app.tasks.items()):
        if name in known or name.startswith("celery."):
            continue
        with contextlib.suppress(CeleryUniqueError):  # reported where it is defined or called
            policy, _ = app_state.policies.of(name, task, {}, defaults)
            if policy is not None:
                yield name, policy


class Collector:
    """Collects metrics by a call at each scrape."""

    def __init__(self, collect: Callable[[], Iterable[Metric]]) -> None:
        self.collect = collect

    def describe(self) -> Iterable[Metric]:
        return []


class _WorkerService:
    """The part of the main process of a worker: receives counts, and serves the metrics."""

    def __init__(self, app: Any, metrics: Metrics, port: int | None, addr: str) -> None:
        self._app = app
        self._metrics = metrics
        self._port = port
        self._addr = addr
        self._held: Collector | None = None

    def on_worker_init(self, sender: Any = None, **_: Any) -> None:
        """Before the pool is created: its processes inherit the address of the relay."""
        if sender is None or sender.app is not self._app:
            return
        self._held = Collector(partial(_held_locks, sender))
        self._metrics.registry.register(self._held)
        if MULTIPROCESS in os.environ:
            os.environ.pop(ADDRESS, None)  # of a worker that started this one
        else:
            self._metrics.relay.open()

    def on_worker_shutdown(self, sender: Any = None, **_: Any) -> None:
        if self._held is not None and sender is not None and sender.app is self._app:
            self._metrics.relay.close()
            self._metrics.registry.unregister(self._held)
            self._held = None

    def on_worker_ready(self, sender: Any = None, **_: Any) -> None:
        if sender is None or sender.app is not self._app:
            return
        self._metrics.begin()  # for the files of the multiprocess mode too
        if self._port is None:
            return
        try:
            prometheus_client.start_http_server(self._port, self._addr, self._served())
        except OSError as error:
            logger.error(
                "cannot serve metrics on %s:%d: %s. Give every worker of a machine a port of "
                "its own",
                self._addr,
                self._port,
                error,
            )

    def _served(self) -> CollectorRegistry:
        if MULTIPROCESS not in os.environ:
            return self._metrics.registry
        registry = CollectorRegistry()
        registry.register(Collector(self._metrics.begin))
        MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
        if self._held is not None:
            registry.register(self._held)
        return registry


def _held_locks(worker: Any) -> Iterator[Metric]:
    from celery_unique.worker.held_requests import held_requests

    held = held_requests(worker)
    running = sum(1 for request in held if request.unique_delivery.started)
    family = GaugeMetricFamily(
        "celery_unique_held_locks",
        "Locks of the messages that a worker holds",
        labels=["worker", "state"],
    )
    family.add_metric([worker.hostname, "active"], running)
    family.add_metric([worker.hostname, "waiting"], len(held) - running)
    yield family
