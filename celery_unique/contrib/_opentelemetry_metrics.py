"""The metrics of :mod:`celery_unique.contrib.opentelemetry`."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

from celery import signals as celery_signals
from opentelemetry import metrics

from celery_unique.config.app_state import state_of

from ._metrics import (
    BUCKETS_S,
    COUNTERS,
    GAUGES,
    PREFIX,
    STORE_SECONDS,
    Gauge,
    count_events,
    held_locks,
    locks_in_store,
)
from ._store_acts import watch_acts

#: The gauges of one collection are read one after the other, well within this time.
SAME_COLLECTION_S = 2.0


def measure(app: Any, meter: metrics.Meter, locks: int) -> None:
    counters = {
        name: meter.create_counter(f"{PREFIX}{name}", description=text)
        for name, (text, _) in COUNTERS.items()
    }
    seconds = meter.create_histogram(
        f"{PREFIX}store_seconds",
        unit="s",
        description=STORE_SECONDS,
        explicit_bucket_boundaries_advisory=BUCKETS_S,
    )

    def count(of_app: Any, name: str, labels: list[str]) -> None:
        if of_app is app:
            counters[name].add(1, dict(zip(COUNTERS[name][1], labels, strict=True)))

    def time_act(act: str, _: float, duration: float, __: BaseException | None) -> None:
        seconds.record(duration, {"act": act})

    count_events(count)
    state_of(app).watch_stores(lambda store: watch_acts(store, time_act))
    gauges = _Gauges(app, locks)
    for name, (text, _) in GAUGES.items():
        if locks or name == "held_locks":
            observe = partial(gauges.observe, name)
            meter.create_observable_gauge(f"{PREFIX}{name}", [observe], description=text)


class _Gauges:
    """What is counted when metrics are collected: one walk for all gauges."""

    def __init__(self, app: Any, locks: int) -> None:
        self._app = app
        self._locks = locks
        self._worker: tuple[int, Any] = (0, None)
        self._counted: tuple[float, list[Gauge]] = (-math.inf, [])
        celery_signals.worker_init.connect(self._on_worker_init, weak=False, dispatch_uid=object())

    def _on_worker_init(self, sender: Any = None, **_: Any) -> None:
        if sender is not None and sender.app is self._app:
            self._worker = os.getpid(), sender  # not in the processes of its pool

    def observe(self, name: str, _: metrics.CallbackOptions) -> Iterator[metrics.Observation]:
        for gauge in self._held() if name == "held_locks" else self._in_store():
            if gauge.name == name:
                labels = dict(zip(GAUGES[name][1], gauge.labels, strict=True))
                yield metrics.Observation(gauge.value, labels)

    def _held(self) -> Iterable[Gauge]:
        pid, worker = self._worker
        return held_locks(worker) if pid == os.getpid() else ()

    def _in_store(self) -> list[Gauge]:
        if time.monotonic() - self._counted[0] > SAME_COLLECTION_S:
            self._counted = time.monotonic(), list(locks_in_store(self._app, self._locks))
        return self._counted[1]
