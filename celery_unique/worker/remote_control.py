"""``celery inspect unique_held``: what a worker holds, and the state of its renewals.

Imported in every process that knows the command by its name: workers, and the command line,
which must load nothing for it. So the rest is imported when the command runs.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from typing import TYPE_CHECKING, Any

from celery.signals import worker_ready
from celery.worker.control import inspect_command

if TYPE_CHECKING:
    from celery_unique.config.app_state import AppState

logger = logging.getLogger("celery_unique")

#: More than this many would be a large message for every worker to send.
MOST_LISTED = 1000


@worker_ready.connect
def warn_without_install(sender: Any, **_: Any) -> None:
    """A worker that has the package, and not ``install``: options of tasks have no effect there."""
    from celery_unique.config.app_state import is_installed

    app = getattr(sender, "app", None)
    if app is None or is_installed(app):
        return
    names = sorted(name for name, task in app.tasks.items() if getattr(task, "unique", False))
    if names:
        logger.warning(
            "celery_unique is not installed in this app: %s run without locks. Call "
            "celery_unique.install(app), or add celery_unique.contrib.django to INSTALLED_APPS",
            ", ".join(names[:5]) + (", ..." if len(names) > 5 else ""),
        )


@inspect_command(
    signature="[limit=1000]", args=[("limit", int)], help="List the unique tasks a worker holds."
)
def unique_held(
    state: Any,
    limit: int = MOST_LISTED,
    task_ids: list[str] | None = None,
    store_identity: bool = False,
    **_: Any,
) -> dict[str, Any]:
    """What this worker holds of unique tasks. With ``task_ids``: those of them alone. With
    ``store_identity`` also the id that its store keeps."""
    from celery_unique import __version__
    from celery_unique.config.app_state import state_of
    from celery_unique.exceptions import ConfigurationError
    from celery_unique.keys.digest import KEY_VERSION

    reply: dict[str, Any] = {
        "installed": True,
        "library": __version__,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "clock_ms": time.time_ns() // 1_000_000,
        "key_version": KEY_VERSION,
    }
    try:
        app_state = state_of(state.app)
    except ConfigurationError:
        return {**reply, "installed": False}
    reply |= _store(app_state, store_identity)
    reply["failovers"] = [
        {"before": each.before, "after": each.after, "noticed_at_ms": int(each.noticed_at * 1000)}
        for each in list(app_state.failovers)
    ]
    reply["queues"] = _queues(state)
    reply["renewal"] = app_state.renewal.as_document() if app_state.renewal is not None else None
    return reply | _held(app_state, state, limit, task_ids)


def _store(app_state: AppState, store_identity: bool) -> dict[str, Any]:
    from celery_unique.exceptions import CeleryUniqueError

    try:
        return {
            "store": app_state.store.fingerprint(),
            "namespace": app_state.settings.namespace,
            **({"store_identity": app_state.store_identity()} if store_identity else {}),
        }
    except CeleryUniqueError as error:  # a worker without unique tasks needs none
        return {"store": None, "namespace": None, "store_error": str(error)}


def _queues(state: Any) -> list[str]:
    """Which queues this worker consumes from."""
    consumer = getattr(getattr(state, "consumer", None), "task_consumer", None)
    return sorted(str(queue.name) for queue in getattr(consumer, "queues", ()))


def _held(
    app_state: AppState, state: Any, limit: int, task_ids: list[str] | None
) -> dict[str, Any]:
    from .held_requests import held_requests

    worker = getattr(getattr(state, "consumer", None), "controller", None)
    requests = held_requests(worker)
    if task_ids is not None:
        wanted = set(task_ids)
        requests = [request for request in requests if request.id in wanted]
    return {
        "held_in_all": len(requests),
        "held": [_one(app_state, request) for request in requests[: max(0, limit)]],
    }


def _one(app_state: AppState, request: Any) -> dict[str, Any]:
    delivery, leases = request.unique_delivery, app_state.leases
    lock, started = delivery.header, delivery.started
    early = started and not request.task.acks_late
    return {
        "key": lock.key,
        "task_id": lock.task_id,
        "task": request.name,
        "state": "started" if started else "held",
        "delivery": lock.delivery,
        "process": request.worker_pid,  # None until one of the pool has taken it
        "lease_s": (leases.run_ms if early else leases.queue_ms) / 1000,
        "delivery_lease_s": leases.run_ms / 1000 if started else None,
        "alive_s_ago": round(time.monotonic() - delivery.alive_at, 1) if started else None,
    }
