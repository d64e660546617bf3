"""What waits in the broker, as far as it can be seen without taking it out."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from celery_unique.publish import queue_of
from celery_unique.runtime import Runtime

from .workers import broker_errors

#: Messages that workers have taken and not acknowledged are looked through up to here.
MOST_UNACKNOWLEDGED = 100_000


def queue_of_task(runtime: Runtime, task_name: str) -> str:
    """The queue that a call of the task goes to which asks for none."""
    task = runtime.app.tasks.get(task_name)
    options = task._get_exec_options() if task is not None else {}
    return queue_of(runtime, task_name, (), {}, task, options)


@dataclass(frozen=True, slots=True)
class Queue:
    messages: int = 0  # that wait, and that no worker has taken
    consumers: int = 0  # 0 where the broker does not tell


def look_into_queues(app: Any, names: Iterable[str]) -> dict[str, Queue]:
    """How many messages wait in each queue. One that is not there has none."""
    seen = {}
    with broker_errors(), app.connection_for_read() as connection:
        for name in names:
            # A channel for each: RabbitMQ closes it when asked for a queue that is not there.
            with connection.channel() as channel:
                try:
                    told = channel.queue_declare(queue=name, passive=True)
                    seen[name] = Queue(told.message_count, told.consumer_count)
                except connection.channel_errors:
                    seen[name] = Queue()
    return seen


def unacknowledged_ids(app: Any) -> set[str] | None:
    """Ids of messages that were delivered to a worker, perhaps a dead one, and come back.

    Redis keeps them where one can look; None: too many to look through. RabbitMQ gives those of
    a dead worker to the queue at once, so there is nothing to look for.
    """
    with broker_errors(), app.connection_for_read() as connection:
        channel = connection.default_channel
        if not hasattr(channel, "unacked_key"):
            return set()
        found = set()
        for n, payload in enumerate(_unacknowledged(channel)):
            if n >= MOST_UNACKNOWLEDGED:
                return None
            found.add(_id_of(payload))
        return found


def _unacknowledged(channel: Any) -> Iterator[Any]:
    # kombu's client puts its prefix before the keys of some commands, and this is none of them.
    name = f"{getattr(channel, 'global_keyprefix', '') or ''}{channel.unacked_key}"
    for _, payload in channel.client.hscan_iter(name, count=500):
        yield payload


def _id_of(payload: Any) -> str:
    try:
        message = json.loads(payload)[0]
        return str(message["headers"]["id"])
    except (ValueError, KeyError, TypeError, IndexError):
        return ""  # not a task's message
