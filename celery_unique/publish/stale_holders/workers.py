"""Queries the workers through Celery's remote control."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from kombu.exceptions import KombuError

from celery_unique.exceptions import CeleryUniqueError

DEFAULT_TIMEOUT_S = 2.0


class NoAnswer(CeleryUniqueError):
    """The broker or a worker did not reply; a later attempt may succeed."""

    retryable = True


class BrokerUnavailable(NoAnswer):
    """The broker is unavailable, so that neither queues nor workers can be queried."""


@dataclass(slots=True)
class Workers:
    """The running workers, and the replies of those with this library."""

    replies: dict[str, dict[str, Any]] = field(default_factory=dict)
    #: Running without this library, or without ``install``.
    without: list[str] = field(default_factory=list)
    #: Running, and did not reply in time.
    silent: list[str] = field(default_factory=list)
    #: Why workers cannot be queried; empty: they were.
    unreachable: str = ""
    #: Run a unique task, by its record, and did not reply; None: not yet known.
    running_unseen: list[str] | None = None
    #: The time of this machine at each reply, in milliseconds.
    replied_at_ms: dict[str, float] = field(default_factory=dict)

    @property
    def names(self) -> list[str]:
        return sorted([*self.replies, *self.without, *self.silent])


@contextmanager
def broker_errors() -> Iterator[None]:
    try:
        yield
    except (KombuError, OSError) as error:
        raise BrokerUnavailable(
            f"The broker is unavailable: {error}. Check that it runs and that broker_url names it"
        ) from error


def check_broker(app: Any) -> str:
    """Connect once, with a clear error: remote control would retry for long.

    Returns why workers cannot be queried through this broker; empty: they can.
    """
    with broker_errors(), app.connection_for_write() as connection:
        connection.ensure_connection(max_retries=1, interval_start=0, interval_step=0)
        # Remote control needs broadcasts, and a queue of this process's own for the replies.
        broadcasts = getattr(connection.default_channel, "supports_fanout", True)
        if broadcasts and not (connection.transport_options or {}).get("predefined_queues"):
            return ""
        return f"Celery has no remote control with this broker ({connection.transport.driver_type})"


def query_workers(app: Any, timeout_s: float = DEFAULT_TIMEOUT_S) -> Workers:
    """Ping all workers, then query those that replied; the second wait is as short as can be."""
    unreachable = check_broker(app)
    if unreachable:
        return Workers(unreachable=unreachable)
    with broker_errors():
        running = sorted(name for name, _ in _broadcast(app, "ping", timeout_s))
        workers = Workers()
        if running:
            _query(app, workers, running, timeout_s)
        return workers


def _query(app: Any, workers: Workers, running: list[str], timeout_s: float) -> None:
    def on_reply(reply: dict[str, Any]) -> None:
        for name in reply:
            workers.replied_at_ms[name] = time.time() * 1000

    for name, reply in _broadcast(
        app, "unique_held", timeout_s, running, {"limit": 0}, callback=on_reply
    ):
        # Celery replies with an error where it does not know the command.
        if isinstance(reply, dict) and reply.get("installed"):
            workers.replies[name] = reply
        else:
            workers.without.append(name)
    workers.silent = [n for n in running if n not in workers.replies and n not in workers.without]


def store_identities_of_workers(
    app: Any, names: Sequence[str], timeout_s: float = DEFAULT_TIMEOUT_S
) -> dict[str, str]:
    """The id that the lock store of each worker keeps."""
    with broker_errors():
        replies = dict(
            _broadcast(
                app, "unique_held", timeout_s, list(names), {"limit": 0, "store_identity": True}
            )
        )
    return {name: reply.get("store_identity") or "" for name, reply in replies.items() if reply}


def process_of(app: Any, name: str, task_id: str, timeout_s: float = 1.0) -> int | None:
    """The process of that worker which runs the task; None where it does not reply."""
    arguments = {"limit": 1, "task_ids": [task_id]}
    try:
        if check_broker(app):
            return None
        with broker_errors():
            replies = dict(_broadcast(app, "unique_held", timeout_s, [name], arguments))
    except BrokerUnavailable:
        return None
    held = (replies.get(name) or {}).get("held") or [{}]
    process: int | None = held[0].get("process")
    return process


def held_by_workers(
    app: Any, names: Sequence[str], task_ids: Sequence[str], timeout_s: float = DEFAULT_TIMEOUT_S
) -> tuple[set[str], list[str]]:
    """The tasks whose message a worker has, and the workers that did not reply."""
    if not names or not task_ids:
        return set(), []
    arguments = {"limit": len(task_ids), "task_ids": list(task_ids)}
    with broker_errors():
        replies = dict(_broadcast(app, "unique_held", timeout_s, list(names), arguments))
    useful = {name: reply for name, reply in replies.items() if "held" in (reply or {})}
    held = {held["task_id"] for reply in useful.values() for held in reply["held"]}
    return held, [name for name in names if name not in useful]


def held_by_plain_workers(
    app: Any, names: Sequence[str], task_ids: Sequence[str], timeout_s: float = DEFAULT_TIMEOUT_S
) -> tuple[set[str], list[str]]:
    """The same for workers without this library, by a command of Celery's own. It does not report
    tasks that wait for their rate limit or, up to Celery 5.6, for their ETA."""
    if not names or not task_ids:
        return set(), []
    with broker_errors():
        replies = dict(
            _broadcast(app, "query_task", timeout_s, list(names), {"ids": list(task_ids)})
        )
    useful = {name: reply for name, reply in replies.items() if "error" not in reply}
    held = {task_id for reply in useful.values() for task_id in reply}
    return held, [name for name in names if name not in useful]


def _broadcast(
    app: Any,
    command: str,
    timeout_s: float,
    destination: list[str] | None = None,
    arguments: dict[str, Any] | None = None,
    callback: Any = None,
) -> Iterator[tuple[str, Any]]:
    # A connection of its own: on one of Celery's pool the blocking read of an earlier broadcast may
    # still wait in Redis, and would take these replies, which all go to the same queue.
    with app.connection_for_write() as connection:
        replies = app.control.broadcast(
            command,
            arguments=arguments,
            reply=True,
            timeout=timeout_s,
            destination=destination,
            limit=len(destination) if destination else None,
            callback=callback,
            connection=connection,
        )
    for reply in replies or ():
        yield from reply.items()
