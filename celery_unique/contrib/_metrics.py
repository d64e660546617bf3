"""The metrics, by name: the same for Prometheus and for OpenTelemetry."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from celery_unique import reporting
from celery_unique.config.app_state import state_of
from celery_unique.exceptions import StoreUnavailable
from celery_unique.operations.count import count_all
from celery_unique.policy.states import TERMINAL
from celery_unique.publish.coordinator import LONG_WAIT_MS

PREFIX = "celery_unique_"

#: counter -> help, labels.
COUNTERS: dict[str, tuple[str, list[str]]] = {
    "acquired": ("Calls that acquired their key and were published", ["task"]),
    "conflicts": ("Calls whose key was held", ["task", "on_conflict"]),
    "long_waits": ("Calls whose key was held by a task that waited for an hour", ["task"]),
    "parked": ("Calls parked until their turn comes", ["task"]),
    "called": ("Parked calls that were published when their turn came", ["task"]),
    "released": ("Released keys, by how the task ended", ["task", "reason"]),
    "superseded": ("Tasks replaced before they ran", ["task"]),
    "lost": ("Tasks that ran or ended without their lock", ["task"]),
    "store_errors": ("Failed operations of the lock store", ["act"]),
}
#: gauge -> help, labels.
GAUGES: dict[str, tuple[str, list[str]]] = {
    "held_locks": ("Locks of the messages that a worker holds", ["worker", "state"]),
    "locks": ("Locks in the store, and calls that wait for one", ["state"]),
    "stale_locks": ("Locks of tasks that have waited in their queue for an hour", []),
    "oldest_waiting_seconds": ("The longest time that a task has waited in its queue", []),
    "locks_truncated": ("1 where the store has more locks than are counted", []),
}
STORE_SECONDS = "Duration of the operations of the lock store"
BUCKETS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)

#: The gauges count as many keys of the store at most, for as long at most. Beyond that they are
#: those of a sample, which ``locks_truncated`` reports.
MOST_KEYS = 10_000
WALK_S = 0.25
#: The states of the gauge, and those of the locks that are counted as each.
LOCKS = {
    "waiting": ("pending", "available", "retryable"),
    "scheduled": ("scheduled",),
    "active": ("active",),
    "ended": TERMINAL,
}


class Gauge(NamedTuple):
    name: str
    labels: list[str]  # their values
    value: float


#: Given the app, the name of a counter, and the values of its labels.
Count = Callable[[Any, str, list[str]], None]


def count_events(count: Count) -> None:
    """Call ``count`` for every event of every app in this process."""

    def receiver(name: str, *facts: str) -> Callable[..., None]:
        def on_signal(sender: str, app: Any = None, **given: Any) -> None:
            count(app, name, [sender, *(str(given.get(fact)) for fact in facts)])

        return on_signal

    def on_acquired(sender: str, app: Any = None, parked: bool = False, **_: Any) -> None:
        if parked:
            count(app, "called", [sender])

    def on_conflict(
        sender: str,
        app: Any = None,
        waited_s: float = 0.0,
        position: int | None = None,
        **_: Any,
    ) -> None:
        if waited_s * 1000 > LONG_WAIT_MS:
            count(app, "long_waits", [sender])
        if position is not None:
            count(app, "parked", [sender])

    def on_store_error(act: str = "", app: Any = None, **_: Any) -> None:
        count(app, "store_errors", [act])

    for signal, receive in (
        (reporting.unique_acquired, receiver("acquired")),
        (reporting.unique_acquired, on_acquired),
        (reporting.unique_conflict, receiver("conflicts", "on_conflict")),
        (reporting.unique_conflict, on_conflict),
        (reporting.unique_released, receiver("released", "reason")),
        (reporting.unique_superseded, receiver("superseded")),
        (reporting.unique_lost, receiver("lost")),
        (reporting.unique_store_error, on_store_error),
    ):
        signal.connect(receive, weak=False, dispatch_uid=object())


def locks_in_store(app: Any, most_keys: int = MOST_KEYS) -> Iterator[Gauge]:
    """All locks, which are the same in every process; nothing if the store does not reply."""
    try:
        counts = count_all(state_of(app), most_keys, WALK_S)
    except StoreUnavailable:
        return
    for name, states in LOCKS.items():
        yield Gauge("locks", [name], sum(counts.total.states[state] for state in states))
    yield Gauge("locks", ["parked"], counts.parked)
    yield Gauge("stale_locks", [], counts.total.stale)
    yield Gauge("oldest_waiting_seconds", [], counts.total.waited_ms / 1000)
    yield Gauge("locks_truncated", [], not counts.complete)


def held_locks(worker: Any) -> Iterator[Gauge]:
    """The locks of the messages that a worker holds."""
    from celery_unique.worker.held_requests import held_requests

    held = held_requests(worker)
    running = sum(1 for request in held if request.unique_delivery.started)
    yield Gauge("held_locks", [worker.hostname, "active"], running)
    yield Gauge("held_locks", [worker.hostname, "waiting"], len(held) - running)
