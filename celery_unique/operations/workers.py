"""Asking the workers, by Celery's remote control."""

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
    """Somebody who had to be asked did not answer: another time it may work."""

    retryable = True


class BrokerUnavailable(NoAnswer):
    """The broker does not answer, so that neither queues nor workers can be asked."""


@dataclass(slots=True)
class Workers:
    """The workers that are there, and what those with this library have told of themselves."""

    told: dict[str, dict[str, Any]] = field(default_factory=dict)
    #: They are there and do not know this library, or not this app's use of it.
    without: list[str] = field(default_factory=list)
    #: They are there and did not answer in time.
    silent: list[str] = field(default_factory=list)
    #: Why no worker can be asked, and so none is named here; empty: they were asked.
    unasked: str = ""
    #: Those that run a unique task, by its record, and did not answer; None: not looked for yet.
    running_unseen: list[str] | None = None
    #: The time of this machine when each answered, in milliseconds.
    answered_at_ms: dict[str, float] = field(default_factory=dict)

    @property
    def names(self) -> list[str]:
        return sorted([*self.told, *self.without, *self.silent])


@contextmanager
def broker_errors() -> Iterator[None]:
    try:
        yield
    except (KombuError, OSError) as error:
        raise BrokerUnavailable(
            f"The broker does not answer: {error}. Check that it runs and that broker_url leads "
            "to it"
        ) from error


def check_broker(app: Any) -> str:
    """Once, with a clear error: remote control would go on trying for long.

    Returns why workers cannot be asked through this broker; empty: they can.
    """
    with broker_errors(), app.connection_for_write() as connection:
        connection.ensure_connection(max_retries=1, interval_start=0, interval_step=0)
        # Remote control needs broadcasts, and a queue of this process's own for the replies.
        broadcasts = getattr(connection.default_channel, "supports_fanout", True)
        if broadcasts and not (connection.transport_options or {}).get("predefined_queues"):
            return ""
        return f"Celery has no remote control with this broker ({connection.transport.driver_type})"


def ask_workers(app: Any, timeout_s: float = DEFAULT_TIMEOUT_S) -> Workers:
    """Who is there, then what each has to say; the second question waits no longer than it must."""
    unasked = check_broker(app)
    if unasked:
        return Workers(unasked=unasked)
    with broker_errors():
        there = sorted(name for name, _ in _broadcast(app, "ping", timeout_s))
        workers = Workers()
        if there:
            _hear(app, workers, there, timeout_s)
        return workers


def _hear(app: Any, workers: Workers, there: list[str], timeout_s: float) -> None:
    def on_reply(reply: dict[str, Any]) -> None:
        for name in reply:
            workers.answered_at_ms[name] = time.time() * 1000

    for name, told in _broadcast(
        app, "unique_held", timeout_s, there, {"limit": 0}, callback=on_reply
    ):
        # Celery's own answer where the command is not known is an error.
        if isinstance(told, dict) and told.get("installed"):
            workers.told[name] = told
        else:
            workers.without.append(name)
    workers.silent = [n for n in there if n not in workers.told and n not in workers.without]


def store_marks_of_workers(
    app: Any, names: Sequence[str], timeout_s: float = DEFAULT_TIMEOUT_S
) -> dict[str, list[str]]:
    """The ids that each of the workers finds kept in its lock store."""
    with broker_errors():
        replies = dict(
            _broadcast(
                app, "unique_held", timeout_s, list(names), {"limit": 0, "store_marks": True}
            )
        )
    return {name: reply.get("store_marks") or [] for name, reply in replies.items() if reply}


def process_of(app: Any, name: str, task_id: str, timeout_s: float = 1.0) -> int | None:
    """The process of that worker which runs the task; None where it does not tell."""
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
    """Which of the tasks a worker has the message of, and the workers that did not tell."""
    if not names or not task_ids:
        return set(), []
    arguments = {"limit": len(task_ids), "task_ids": list(task_ids)}
    with broker_errors():
        replies = dict(_broadcast(app, "unique_held", timeout_s, list(names), arguments))
    told = {name: reply for name, reply in replies.items() if "held" in (reply or {})}
    held = {held["task_id"] for reply in told.values() for held in reply["held"]}
    return held, [name for name in names if name not in told]


def _broadcast(
    app: Any,
    command: str,
    timeout_s: float,
    destination: list[str] | None = None,
    arguments: dict[str, Any] | None = None,
    callback: Any = None,
) -> Iterator[tuple[str, Any]]:
    replies = app.control.broadcast(
        command,
        arguments=arguments,
        reply=True,
        timeout=timeout_s,
        destination=destination,
        limit=len(destination) if destination else None,
        callback=callback,
    )
    for reply in replies or ():
        yield from reply.items()
