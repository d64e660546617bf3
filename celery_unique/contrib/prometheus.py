"""Metrics for Prometheus, fed by this library's signals.

One line beside ``celery_unique.install(app)``::

    celery_unique.contrib.prometheus.install(app, port=9808)

A process that calls tasks counts into the registry that it exports anyway. A worker counts
for its whole pool, and serves the figures itself where it is given a port: processes of a
prefork pool send what they count to the worker's main process (``relay``).
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
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

#: The acts of a store that wait for its answer.
TIMED_ACTS = (
    "acquire",
    "acquire_many",
    "give_back",
    "help",
    "cancel",
    "release",
    "start",
    "renew",
    "finish",
    "read",
)
#: Those that some stores can do in two steps, which then are timed as one.
TWO_STEP_ACTS = ("acquire", "acquire_many")
#: What ``unique_store_error`` names.
ERROR_ACTS = (
    *("acquire", "help", "confirm", "give_back", "start", "read", "renew", "retry", "finish"),
    *("settle", "forget", "cancel", "follow", "followers", "reap", "fail-over"),
)
#: How a task ends. (A key that is released for it is a rare act of a person.)
ENDS = ("completed", "discarded", "cancelled")
BUCKETS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)

#: prometheus_client's own way to add up processes, where the user has chosen it.
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
    """Count what happens to the locks of ``app``, in every process that runs this line.

    With ``port``, a worker of the app serves the figures of the whole worker at
    ``http://ADDR:PORT/metrics``. Idempotent; connects to nothing.
    """
    state_of(app)  # or an error that says what to do
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
    """The metrics that count for this app from now on; None where they did already."""
    metrics = _installed.get(registry)
    if metrics is None:
        metrics = _installed[registry] = Metrics(registry)
    if app in metrics.apps:
        return None
    metrics.apps[app] = set()
    make_state(app).watch_stores(metrics.time_acts)
    return metrics


class InPool:
    """Counts in a process of a pool that spawns: the app comes there by pickling, and brings
    its fix-ups along. What it counts goes to the worker's main process."""

    def __init__(self, app: Any) -> None:
        metrics = _watch(app, prometheus_client.REGISTRY)
        if metrics is not None:
            celery_signals.worker_process_shutdown.connect(
                metrics.relay.flush, weak=False, dispatch_uid=object()
            )


class Metrics:
    """The figures of one registry, and how the signals change them."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        #: The apps that are counted for, with the tasks whose series have begun.
        self.apps: weakref.WeakKeyDictionary[Any, set[str]] = weakref.WeakKeyDictionary()
        self.relay = Relay(self._count)
        self._metrics: dict[str, Counter | Histogram] = {}
        registry.register(Beginning(self))  # first, so that a scrape shows what it begins
        self._add("acquired", "Calls that took their key and were published", ["task"])
        self._add("conflicts", "Calls that found their key held", ["task", "on_conflict"])
        self._add("long_waits", "Calls whose key a task held that had waited for an hour", ["task"])
        self._add("released", "Keys given back, by how the task ended", ["task", "reason"])
        self._add("superseded", "Tasks replaced before they ran", ["task"])
        self._add("lost", "Tasks that ran or ended without their lock", ["task"])
        self._add("store_errors", "Acts that the lock store did not answer", ["act"])
        self._metrics["store_seconds"] = Histogram(
            "celery_unique_store_seconds",
            "How long the lock store took to answer",
            ["act"],
            buckets=BUCKETS_S,
            registry=registry,
        )
        self._connect()

    def _add(self, name: str, help_: str, labels: list[str]) -> None:
        counter = Counter(f"celery_unique_{name}", help_, labels, registry=self.registry)
        self._metrics[name] = counter

    def _connect(self) -> None:
        for signal, name, facts in (
            (reporting.unique_acquired, "acquired", ()),
            (reporting.unique_conflict, "conflicts", ("on_conflict",)),
            (reporting.unique_released, "released", ("reason",)),
            (reporting.unique_superseded, "superseded", ()),
            (reporting.unique_lost, "lost", ()),
        ):
            signal.connect(self._receiver(name, facts), weak=False, dispatch_uid=object())
        reporting.unique_conflict.connect(self._on_conflict, weak=False, dispatch_uid=object())
        reporting.unique_store_error.connect(
            self._on_store_error, weak=False, dispatch_uid=object()
        )

    def _receiver(self, name: str, facts: Sequence[str]) -> Callable[..., None]:
        def on_signal(sender: str, app: Any = None, **told: Any) -> None:
            if app in self.apps:
                self.count(name, [sender, *(str(told.get(fact)) for fact in facts)])

        return on_signal

    def _on_conflict(self, sender: str, app: Any = None, waited_s: float = 0.0, **_: Any) -> None:
        if app in self.apps and waited_s * 1000 > LONG_WAIT_MS:
            self.count("long_waits", [sender])

    def _on_store_error(self, act: str = "", app: Any = None, **_: Any) -> None:
        if app in self.apps:
            self.count("store_errors", [act])

    def begin(self) -> None:
        """Begin every series that is known ahead, with nothing counted: ``increase`` and ``rate``
        do not see the event with which a series begins."""
        for act in ERROR_ACTS:
            self._metrics["store_errors"].labels(act)
        for app, begun in list(self.apps.items()):
            if app.finalized:  # or nothing has been called yet, and the tasks are not made
                for name, policy in _unique_tasks(app, begun):
                    begun.add(name)
                    self._begin_task(name, policy)

    def _begin_task(self, task: str, policy: UniquePolicy) -> None:
        for name in ("acquired", "long_waits", "superseded", "lost"):
            self._metrics[name].labels(task)
        self._metrics["conflicts"].labels(task, policy.on_conflict)
        for reason in ENDS:
            self._metrics["released"].labels(task, reason)

    def count(self, name: str, labels: list[str], amount: float = 1.0) -> None:
        """Here or, in a process of a pool, in the worker's main process."""
        if not self.relay.take(name, labels, amount):
            self._count(name, labels, amount)

    def _count(self, name: str, labels: list[str], amount: float) -> None:
        metric = self._metrics[name].labels(*labels)
        if isinstance(metric, Histogram):
            metric.observe(amount)
        else:
            metric.inc(amount)

    def time_acts(self, store: LockStore) -> None:
        """Wrap the acts of this very store: one that nobody watches pays nothing."""
        watched: Any = store
        for act in TIMED_ACTS:
            setattr(watched, act, self._timed(act, getattr(watched, act)))
        for act in TWO_STEP_ACTS:
            begin = getattr(watched, f"begin_{act}", None)
            if begin is not None:
                setattr(watched, f"begin_{act}", self._timed_in_two_steps(act, begin))

    def _timed(self, act: str, run: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **options: Any) -> Any:
            began = time.perf_counter()
            try:
                return run(*args, **options)
            finally:
                self.count("store_seconds", [act], time.perf_counter() - began)

        return timed

    def _timed_in_two_steps(self, act: str, begin: Callable[..., Any]) -> Callable[..., Any]:
        """What is done between asking and listening is not the store's time."""

        def timed(*args: Any) -> Any:
            began = time.perf_counter()
            wait, asking = None, 0.0
            try:
                wait = begin(*args)
                asking = time.perf_counter() - began
            finally:
                if wait is None:
                    self.count("store_seconds", [act], time.perf_counter() - began)

            def heard() -> Any:
                began = time.perf_counter()
                try:
                    return wait()
                finally:
                    self.count("store_seconds", [act], asking + time.perf_counter() - began)

            return heard

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


class Beginning:
    """Has no figures of its own: it is the first in a registry to be asked for them."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def describe(self) -> Iterable[Metric]:
        return []

    def collect(self) -> Iterable[Metric]:
        self._metrics.begin()
        return []


class _WorkerService:
    """What the main process of a worker does: collect, look at what it holds, and serve."""

    def __init__(self, app: Any, metrics: Metrics, port: int | None, addr: str) -> None:
        self._app = app
        self._metrics = metrics
        self._port = port
        self._addr = addr
        self._held: HeldLocks | None = None

    def on_worker_init(self, sender: Any = None, **_: Any) -> None:
        """Before the pool is made: its processes inherit where to send what they count."""
        if sender is None or sender.app is not self._app:
            return
        self._held = HeldLocks(sender)
        self._metrics.registry.register(self._held)
        if MULTIPROCESS in os.environ:
            os.environ.pop(ADDRESS, None)  # of a worker that has started this one
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
        self._metrics.begin()  # also where files are scraped, and not this process
        if self._port is None:
            return
        try:
            prometheus_client.start_http_server(self._port, self._addr, self._served())
        except OSError as error:
            logger.error(
                "no metrics are served on %s:%d: %s. Give every worker of a machine a port of "
                "its own",
                self._addr,
                self._port,
                error,
            )

    def _served(self) -> CollectorRegistry:
        if MULTIPROCESS not in os.environ:
            return self._metrics.registry
        registry = CollectorRegistry()
        registry.register(Beginning(self._metrics))
        MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
        if self._held is not None:
            registry.register(self._held)
        return registry


class HeldLocks:
    """Looks, when somebody asks, at what the worker holds: nothing is counted meanwhile."""

    def __init__(self, worker: Any) -> None:
        self._worker = worker

    def describe(self) -> Iterable[Metric]:
        return []

    def collect(self) -> Iterable[Metric]:
        from celery_unique.worker.held_requests import held_requests

        held = [
            request
            for request in held_requests(self._worker)
            if getattr(request, "unique_lock", None) is not None
        ]
        running = sum(1 for request in held if request.unique_started)
        family = GaugeMetricFamily(
            "celery_unique_held_locks",
            "Locks of the messages that a worker holds",
            labels=["worker", "state"],
        )
        family.add_metric([self._worker.hostname, "active"], running)
        family.add_metric([self._worker.hostname, "waiting"], len(held) - running)
        yield family
