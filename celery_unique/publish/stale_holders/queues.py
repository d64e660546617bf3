"""Looks for messages in the broker, without consuming them.

Two brokers can be inspected. Redis shows every message, in a queue or with the worker that fetched
it. RabbitMQ shows how many messages of a queue are ready and how many consumers it has: a queue
can be known to be empty, and only its consumers know what they hold.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from celery.app.routes import MapRoute
from kombu.exceptions import KombuError
from kombu.utils.encoding import bytes_to_str

from celery_unique.config.app_state import AppState
from celery_unique.publish.request import address_of, queue_of

from .lock_view import LockView, StoreClock, locks_of
from .workers import BrokerUnavailable, Workers

#: Messages that are read at most, on Redis.
MOST_MESSAGES = 100_000
#: Elements of a list that are read together: messages may be large.
CHUNK = 100

_OTHER_BROKER = "its call was published through a connection to another broker"


@dataclass(frozen=True, slots=True)
class Limits:
    """How much is read, and what is assumed."""

    messages: int = MOST_MESSAGES
    #: Keys of a Redis database, among which its queues are found.
    keys: float = math.inf
    #: How long the locks are walked over, in seconds.
    walk_s: float = math.inf
    #: Whether every program routes a task as this one does, on RabbitMQ.
    same_routes: bool = True


#: For an operator, who has the last word.
NO_HURRY = Limits()


@dataclass(frozen=True, slots=True)
class NotInQueue:
    """A message that no queue has."""

    #: Why it may exist anyway; empty: the broker does not have it.
    unless: str = ""
    #: When Redis delivers it again, where a worker has fetched it and not acknowledged it.
    returns_at_ms: int = 0
    #: The broker shows what workers have fetched and not acknowledged. A worker without this
    #: library reports what it has acknowledged or runs, and not all that it has fetched.
    is_complete: bool = False


class NotInspectable(Exception):
    """The broker cannot be inspected now; the text is the reason."""


def not_in_queues(
    app_state: AppState, locks: list[LockView], workers: Workers, limits: Limits = NO_HURRY
) -> dict[str, NotInQueue]:
    """By task id: the locks whose message no queue has, or may have. The others are left out."""
    with _broker(app_state.app) as connection:
        channel, kind = connection.default_channel, connection.transport.driver_type
        try:
            _check_brokers(app_state.app, connection)
            if kind == "redis" and hasattr(channel, "unacked_key"):
                return _not_in_redis(app_state.app, channel, locks, workers, limits)
            if kind == "amqp":
                return _not_in_rabbitmq(app_state, connection, locks, workers, limits)
            raise NotInspectable(f"a broker of this kind ({kind}) cannot be inspected")
        except NotInspectable as reason:
            return {lock.task_id: NotInQueue(str(reason)) for lock in locks}


@contextmanager
def _broker(app: Any) -> Iterator[Any]:
    with app.connection_for_read() as connection:
        errors = tuple(
            {KombuError, OSError, *connection.connection_errors, *connection.channel_errors}
            - {KeyError}  # one of kombu's, which would hide a mistake here
        )
        try:
            yield connection
        except errors as error:
            raise BrokerUnavailable(
                f"The broker cannot be inspected: {error}. Check that it runs and that "
                "broker_url names it"
            ) from error


def _check_brokers(app: Any, connection: Any) -> None:
    """Raise NotInspectable where messages may be in another broker than the connection's."""
    write = app.connection_for_write()
    # The sentinels of one broker are listed in the same way.
    if connection.transport_cls != "sentinel" and len({*connection.alt, *write.alt}) > 1:
        raise NotInspectable("broker_url lists several brokers, and its message may be in another")
    if address_of(write) != address_of(connection):
        raise NotInspectable("broker_write_url and broker_read_url differ")


# -- Redis -------------------------------------------------------------------------------


def _not_in_redis(
    app: Any, channel: Any, locks: list[LockView], workers: Workers, limits: Limits
) -> dict[str, NotInQueue]:
    wanted = {lock.task_id for lock in locks}
    if limits.keys < math.inf and channel.client.dbsize() > limits.keys:
        raise NotInspectable(
            f"the broker's database has more than {limits.keys:,} keys, too many to search here"
        )
    search = _Search(limits.messages, limits.messages)
    # In this order: a message that was fetched returns to its queue, and one in a queue is fetched:
    # a worker without this library does not report it while it waits for its ETA or rate limit.
    fetched = _fetched(channel, wanted, search)
    left = wanted - _queued(app, channel, wanted, search)
    unless = _uncounted(app, channel, workers)
    if left - fetched.keys():
        search.left = search.most
        fetched |= _fetched(channel, left, search)
    unless = unless or search.unreadable
    elsewhere = {lock.task_id for lock in locks if lock.entry.other_broker}
    places = {}
    for task_id in left:
        if task_id in fetched:
            places[task_id] = _will_return(channel, fetched[task_id])
        else:
            why = _OTHER_BROKER if task_id in elsewhere else unless
            places[task_id] = NotInQueue(why, is_complete=True)
    return places


@dataclass(slots=True)
class _Search:
    """What one search may still read, and why it may have missed a message."""

    most: int
    left: int
    unreadable: str = ""

    def spend(self) -> None:
        self.left -= 1
        if self.left < 0:
            raise NotInspectable(
                f"the broker has more than {self.most:,} messages, too many to search"
            )


def _fetched(channel: Any, wanted: set[str], search: _Search) -> dict[str, Any]:
    """Id -> delivery tag, of messages that a worker, perhaps a dead one, has not acknowledged."""
    found = {}
    # kombu's client adds its prefix to the keys of some commands, and not of HSCAN.
    unacked = _key(channel, channel.unacked_key)
    for tag, payload in channel.client.hscan_iter(unacked, count=CHUNK):
        search.spend()
        task_id = _id_of(payload)
        if task_id is None:
            search.unreadable = f"an element of {unacked} cannot be read as a message"
        elif task_id in wanted:
            found[task_id] = tag
    return found


def _queued(app: Any, channel: Any, wanted: set[str], search: _Search) -> set[str]:
    """Ids in the queues. Any list may be one: of any name, priority and prefix. One that is no
    queue of the app, and has no message, is a list of something else."""
    found: set[str] = set()
    for name in channel.client.scan_iter(count=1000, _type="LIST"):
        queue = bytes_to_str(name).removeprefix(_key(channel, "")).partition(channel.sep)[0]
        is_queue, is_readable = queue in app.amqp.queues, True
        for payload in _messages(channel.client, name):
            search.spend()
            task_id = _id_of(payload)
            is_queue |= task_id is not None
            is_readable &= task_id is not None
            if task_id in wanted:
                found.add(task_id)
        if is_queue and not is_readable:
            search.unreadable = f"an element of queue {queue} cannot be read as a message"
    return found


def _messages(client: Any, name: Any) -> Iterator[Any]:
    """The elements of a queue, from its head, where new ones are added: those that it had only
    move back, and are seen at least once."""
    at = 0
    while chunk := client.lrange(name, at, at + CHUNK - 1):
        yield from chunk
        at += len(chunk)


def _id_of(payload: Any) -> str | None:
    """The id of a task's message; empty for a message whose headers and properties have none, as
    of other programs; None for what kombu would not read as a message."""
    try:
        message = json.loads(payload)
        if isinstance(message, list):  # unacknowledged
            message = message[0]
        headers, properties = message.get("headers") or {}, message["properties"] or {}
        return str(headers.get("id") or properties.get("correlation_id") or "")
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError):
        return None


def _will_return(channel: Any, tag: Any) -> NotInQueue:
    index = _key(channel, channel.unacked_index_key)
    fetched_at = channel.client.zscore(index, tag) or time.time()
    timeout_s = channel.visibility_timeout
    return NotInQueue(
        "its message was fetched by a worker that does not reply, and Redis delivers it again "
        f"when the visibility timeout ({timeout_s:g} s) has passed",
        round((fetched_at + timeout_s) * 1000),
        is_complete=True,
    )


def _key(channel: Any, name: str) -> str:
    return f"{getattr(channel, 'global_keyprefix', '') or ''}{name}"


def _uncounted(app: Any, channel: Any, workers: Workers) -> str:
    """Why a worker may exist that did not reply; empty: all have replied.

    Redis reports how many clients receive a broadcast, also workers that are too busy to reply.
    The message is addressed to none, so that none acts on it.
    """
    if not app.conf.worker_enable_remote_control:
        return "workers cannot be queried (worker_enable_remote_control is off)"
    exchange = app.control.mailbox.exchange.name
    body = {"method": "ping", "arguments": {}, "destination": ["(no worker)"]}
    message = channel.prepare_message(
        json.dumps(body), content_type="application/json", content_encoding="utf-8"
    )
    channel._inplace_augment_message(message, exchange, "")
    payload = json.dumps(message)
    listening = max(channel.client.publish(topic, payload) for topic in _topics(channel, exchange))
    replied = len(workers.replies) + len(workers.without)
    if listening > replied:
        return (
            f"{listening} workers listen for remote control and {replied} replied: "
            "one that is busy or stopped may hold it"
        )
    return ""


def _topics(channel: Any, exchange: str) -> list[str]:
    if hasattr(channel, "_get_publish_topics"):  # kombu 5.7
        topics: list[str] = channel._get_publish_topics(exchange, "")
        return topics
    return [channel._get_publish_topic(exchange, "")]


# -- RabbitMQ ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Queue:
    messages: int = 0  # ready: not those that a consumer holds
    consumers: int = 0
    unless: str = ""  # why its content is unknown


def _not_in_rabbitmq(
    app_state: AppState,
    connection: Any,
    locks: list[LockView],
    workers: Workers,
    limits: Limits,
) -> dict[str, NotInQueue]:
    # In this order: a delayed message moves from the delay queues to its own.
    delayed = _delayed(connection) if any(_may_be_delayed(lock) for lock in locks) else ""
    queues = {lock.entry.task_name: _queues_of(app_state, lock.entry.task_name) for lock in locks}
    if not limits.same_routes:
        replies = workers.replies.values()
        consumed = {name for reply in replies for name in reply.get("queues", ())}
        queues = {task_name: own | consumed for task_name, own in queues.items()}
    seen = {
        name: _inspect(app_state.app, connection, name, workers)
        for name in {name for names in queues.values() for name in names}
    }
    by_calls = _routed_by_calls(app_state)
    places = {}
    for lock in locks:
        own = [seen[name] for name in queues[lock.entry.task_name]]
        if any(queue.messages for queue in own):
            continue
        unless = _elsewhere(lock) or by_calls
        if not unless and _may_be_delayed(lock):
            unless = delayed
        unless = unless or next((queue.unless for queue in own if queue.unless), "")
        unless = unless or _held_unseen(app_state, lock)
        unless = unless or _stopping(app_state, workers, limits.walk_s)
        places[lock.task_id] = NotInQueue(unless)
    return places


def _queues_of(app_state: AppState, task_name: str) -> set[str]:
    """The queues of calls that name none: by the task, and by its name."""
    task = app_state.app.tasks.get(task_name)
    options = task._get_exec_options() if task is not None else {}
    return {queue_of(app_state, task_name, (), {}, task, each) for each in (options, {})}


def _routed_by_calls(app_state: AppState) -> str:
    if all(isinstance(route, MapRoute) for route in app_state.app.amqp.router.routes):
        return ""
    return (
        "task_routes has a function, which may send each call to another queue, and RabbitMQ "
        "does not list its queues"
    )


def _elsewhere(lock: LockView) -> str:
    if lock.entry.other_broker:
        return _OTHER_BROKER
    if lock.entry.queue_named:
        return "its call named a queue, which is not recorded"
    if lock.state == "retryable":
        return "it waits for a retry, and a retry may go to another queue"
    return ""


def _may_be_delayed(lock: LockView) -> bool:
    return bool(lock.entry.eta)


def _delayed(connection: Any) -> str:
    """Whether a message may be in the delay queues, which Celery uses with quorum queues: a
    message moves from those of the longest times to those of the shortest."""
    from kombu.transport import native_delayed_delivery as delaying

    waiting = 0
    for level in range(delaying.MAX_LEVEL, -1, -1):
        queue = _passively(connection, delaying.level_name(level))
        if queue.unless:
            return queue.unless
        waiting += queue.messages
    if not waiting:
        return ""
    return (
        f"{waiting} messages are in RabbitMQ's delay queues (celery_delayed_*), "
        "and it may be one of them"
    )


def _inspect(app: Any, connection: Any, name: str, workers: Workers) -> _Queue:
    if name not in app.amqp.queues:  # to which a route adds the queue that it chooses
        return _Queue(unless=f"calls of its task are sent to an exchange ({name}), not to a queue")
    known = app.amqp.queues[name]
    if "x-dead-letter-exchange" in (getattr(known, "queue_arguments", None) or {}):
        return _Queue(unless=f"queue {name} has a dead-letter exchange, and it may have gone there")
    queue = _passively(connection, name)
    replied = sum(name in reply.get("queues", ()) for reply in workers.replies.values())
    if queue.consumers > replied and not queue.unless:
        unless = (
            f"queue {name} has {queue.consumers} consumers, and {replied} of them replied: one "
            "that is busy or stopped may hold it"
        )
        return _Queue(queue.messages, queue.consumers, unless)
    return queue


def _passively(connection: Any, name: str) -> _Queue:
    """Declare the queue passively: one that does not exist has no messages."""
    # A channel for each: RabbitMQ closes it where the queue does not exist.
    with connection.channel() as channel:
        try:
            declared = channel.queue_declare(queue=name, passive=True)
        except connection.channel_errors as error:
            if getattr(error, "reply_code", None) == 404:
                return _Queue()
            return _Queue(unless=f"queue {name} cannot be inspected: {error}")
        return _Queue(declared.message_count, declared.consumer_count)


def _stopping(app_state: AppState, workers: Workers, walk_s: float) -> str:
    """Why a stopping worker may hold it: that waits for the tasks that it runs, whose locks name
    it. Up to Celery 5.6 it forgets its other messages, and no longer renews their leases."""
    if workers.running_unseen is None:  # once: this walks over all locks
        clock, stop_at = StoreClock(app_state), time.monotonic() + walk_s
        running = {
            lock.worker
            for key, record in app_state.store.walk(stop_at=stop_at)
            for lock in locks_of(key, record, clock.now())
            if lock.state == "active" and lock.entry.delivery_lease > lock.now
        }
        if time.monotonic() >= stop_at:
            return "the store has too many locks to look for workers that are stopping"
        workers.running_unseen = sorted(running - workers.replies.keys())
    if not workers.running_unseen:
        return ""
    return (
        f"these workers run tasks and did not reply: {', '.join(workers.running_unseen)}. One "
        "that is stopping may hold it unseen"
    )


def _held_unseen(app_state: AppState, lock: LockView) -> str:
    """Why a stopping worker may hold it: that neither consumes nor replies, and still renews the
    leases of its messages. Leases run from the ETA."""
    leases = app_state.leases
    renewed_at = lock.entry.lease - leases.queue_ms
    if renewed_at + leases.run_ms <= lock.now:
        return ""
    if lock.entry.eta > lock.now:
        return "its ETA is ahead: until then a worker that is stopping may hold it unseen"
    return (
        f"it was published, or its lease was renewed, in the last {leases.run_ms / 1000:g} s: "
        "until then a worker that is stopping may hold it unseen"
    )
