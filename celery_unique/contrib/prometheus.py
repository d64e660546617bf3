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
import weakref
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

from celery import signals as celery_signals

from celery_unique.config.app_state import make_state, state_of
from celery_unique.exceptions import CeleryUniqueError, ConfigurationError, install_command
from celery_unique.policy.policy import UniquePolicy

from ._metrics import (
    BUCKETS_S,
    COUNTERS,
    GAUGES,
    MOST_KEYS,
    PREFIX,
    STORE_SECONDS,
    Gauge,
    count_events,
    held_locks,
    locks_in_store,
)
from ._prometheus_relay import ADDRESS, Relay
from ._store_acts import TIMED_ACTS, watch_acts

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

#: The acts that ``unique_store_error`` names.
ERROR_ACTS = (
    *("acquire", "help", "confirm", "give_back", "start", "read", "renew", "retry", "finish"),
    *("settle", "forget", "cancel", "follow", "followers", "unmerge", "reap", "fail-over"),
)
#: How a task ends. (A manual release has no series before the first one: it is rare.)
ENDS = ("completed", "discarded", "cancelled")
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
    locks: int = MOST_KEYS,
) -> None:
    """Count the events of the locks of ``app``, in every process that runs this line.

    With ``port``, a worker of the app serves the metrics of the whole worker at
    ``http://ADDR:PORT/metrics``. A scrape of a worker counts as many ``locks`` of the store at
    most; 0: none. Idempotent; does not connect.
    """
    state_of(app)  # raises where the library is not installed
    metrics = _watch(app, registry)
    if metrics is None:
        return
    app.fixups = {*app.fixups, FIXUP}
    service = _WorkerService(app, metrics, port, addr, locks)
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
    make_state(app).watch_stores(lambda store: watch_acts(store, metrics.time_act))
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
            name: Counter(f"{PREFIX}{name}", text, labels, registry=registry)
            for name, (text, labels) in COUNTERS.items()
        }
        self._metrics["store_seconds"] = Histogram(
            f"{PREFIX}store_seconds",
            STORE_SECONDS,
            ["act"],
            buckets=BUCKETS_S,
            registry=registry,
        )
        count_events(self._on_event)

    def _on_event(self, app: Any, name: str, labels: list[str]) -> None:
        if app in self.apps:
            self.count(name, labels)

    def begin(self) -> list[Metric]:
        """Begin every series that is known in advance at zero: ``increase`` and ``rate`` do not
        see the event with which a series begins."""
        for act in ERROR_ACTS:
            self._metrics["store_errors"].labels(act)
        for act in TIMED_ACTS:
            self._metrics["store_seconds"].labels(act)
        for app, begun in list(self.apps.items()):
            # Until then no task was called, and its tasks are not complete.
            for task, policy in _unique_tasks(app, begun) if app.finalized else ():
                begun.add(task)
                parks = ("parked", "called") if policy.on_conflict == "queue" else ()
                for name in ("acquired", "long_waits", "superseded", "lost", *parks):
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

    def time_act(self, act: str, _: float, seconds: float, __: BaseException | None) -> None:
        self.count("store_seconds", [act], seconds)


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

    def __init__(self, app: Any, metrics: Metrics, port: int | None, addr: str, locks: int) -> None:
        self._app = app
        self._metrics = metrics
        self._port = port
        self._addr = addr
        self._locks = locks
        self._gauges: Collector | None = None

    def on_worker_init(self, sender: Any = None, **_: Any) -> None:
        """Before the pool is created: its processes inherit the address of the relay."""
        if sender is None or sender.app is not self._app:
            return
        self._gauges = Collector(partial(self._collect, sender))
        self._metrics.registry.register(self._gauges)
        if MULTIPROCESS in os.environ:
            os.environ.pop(ADDRESS, None)  # of a worker that started this one
        else:
            self._metrics.relay.open()

    def on_worker_shutdown(self, sender: Any = None, **_: Any) -> None:
        if self._gauges is not None and sender is not None and sender.app is self._app:
            self._metrics.relay.close()
            self._metrics.registry.unregister(self._gauges)
            self._gauges = None

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
        if self._gauges is not None:
            registry.register(self._gauges)
        return registry

    def _collect(self, worker: Any) -> Iterator[Metric]:
        yield from families(held_locks(worker))
        if self._locks:
            yield from families(locks_in_store(self._app, self._locks))


def families(gauges: Iterable[Gauge]) -> Iterable[Metric]:
    found: dict[str, GaugeMetricFamily] = {}
    for name, labels, value in gauges:
        if name not in found:
            text, names = GAUGES[name]
            found[name] = GaugeMetricFamily(f"{PREFIX}{name}", text, labels=names)
        found[name].add_metric(labels, value)
    return found.values()
