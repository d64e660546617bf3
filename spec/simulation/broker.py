"""The simulated broker, result backend and store: what travels to them, and what gets lost."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from celery.backends.base import KeyValueStoreBackend
from kombu.exceptions import OperationalError
from kombu.transport import virtual

from celery_unique.exceptions import StoreUnavailable
from celery_unique.stores.memory import MemoryStore

from .environment import STORE_TIMEOUT_S, VISIBILITY_S, Current
from .scheduler import Process

# -- the broker --------------------------------------------------------------------------


@dataclass(slots=True)
class Message:
    """One message in the broker."""

    payload: str
    task_id: str
    number: int
    redelivered: bool = False


@dataclass(slots=True)
class Unacknowledged:
    message: Message
    connection: Connection
    restored_at: float


@dataclass(slots=True)
class Broker:
    """One queue. A message that is not acknowledged is delivered again: when its connection is
    lost, as RabbitMQ does it, or after the visibility timeout, as Redis."""

    by_time: bool
    waiting: list[Message] = field(default_factory=list)
    unacknowledged: dict[int, Unacknowledged] = field(default_factory=dict)
    pushed: int = 0
    on_message: Callable[[], None] = lambda: None

    def push(self, payload: dict[str, Any]) -> None:
        self.pushed += 1
        task_id = str(payload["headers"]["id"])
        self.waiting.append(Message(json.dumps(payload), task_id, self.pushed))
        Current.simulation.note("pushed", task=task_id, message=self.pushed)
        self.on_message()

    def take(self, connection: Connection, n: int) -> Message:
        message = self.waiting.pop(n)
        restored_at = Current.scheduler.now + VISIBILITY_S
        self.unacknowledged[message.number] = Unacknowledged(message, connection, restored_at)
        return message

    def remove(self, number: int) -> None:
        self.unacknowledged.pop(number, None)

    def restore(self, number: int) -> None:
        """Into the front of the queue, as brokers do."""
        taken = self.unacknowledged.pop(number, None)
        if taken is not None:
            message = taken.message
            message.redelivered = True
            self.waiting.insert(0, message)
            Current.simulation.note("redelivered", task=message.task_id, message=number)
            self.on_message()

    def connection_lost(self, connection: Connection) -> None:
        connection.is_lost = True
        for number, taken in list(self.unacknowledged.items())[::-1]:
            if taken.connection is connection and not self.by_time:
                self.restore(number)

    def restore_due(self) -> None:
        """What Redis brokers do every now and then."""
        for number, taken in list(self.unacknowledged.items())[::-1]:
            if self.by_time and taken.restored_at <= Current.scheduler.now:
                self.restore(number)

    def has(self, task_id: str) -> bool:
        taken = [each.message for each in self.unacknowledged.values()]
        return any(message.task_id == task_id for message in [*self.waiting, *taken])


class Connection:
    """The channel of one worker, as far as Celery uses it to acknowledge."""

    no_ack_consumers: Any = None

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self.is_lost = False

    def decode_body(self, body: Any, encoding: str | None = None) -> Any:
        return base64.b64decode(body) if encoding == "base64" else body

    def basic_ack(self, number: int, multiple: bool = False) -> None:
        self._settle(number, "ack")
        self._broker.remove(number)

    def basic_reject(self, number: int, requeue: bool = False) -> None:
        self._settle(number, "reject")
        if requeue:
            self._broker.restore(number)
        else:
            self._broker.remove(number)

    def _settle(self, number: int, what: str) -> None:
        if not self.is_lost:
            Current.scheduler.point(what)
        if self.is_lost:
            Current.simulation.note("acknowledgement lost", message=number)
            raise ConnectionResetError("the connection to the broker is lost")


def received(message: Message, connection: Connection) -> virtual.Message:
    payload = json.loads(message.payload)
    payload["properties"]["delivery_tag"] = message.number
    payload["properties"]["delivery_info"]["redelivered"] = message.redelivered
    return virtual.Message(payload, channel=connection)


class Channel(virtual.Channel):
    """Of a producer, in any process."""

    do_restore = False

    def _put(self, queue: str, message: dict[str, Any], **_: Any) -> None:
        fault = Current.scheduler.point("publish")
        if fault == "publish fails":
            raise OperationalError("the broker did not accept the message")
        Current.simulation.broker.push(message)
        if Current.scheduler.point("reply of the broker") == "publish fails after it arrived":
            raise OperationalError("the broker did not reply")

    def _size(self, queue: str) -> int:
        return 0

    def _has_queue(self, queue: str, **_: Any) -> bool:
        return True


class Transport(virtual.Transport):
    Channel = Channel
    driver_type = driver_name = "simulated"


# -- the result backend --------------------------------------------------------------------


class ResultBackend(KeyValueStoreBackend):
    """Keeps whole results, as Redis and caches do."""

    supports_autoexpire = True

    def get(self, key: Any) -> Any:
        Current.scheduler.point("read result")
        return Current.simulation.results.get(_text(key))

    def mget(self, keys: Any) -> Any:
        return [self.get(key) for key in keys]

    def set(self, key: Any, value: Any) -> None:
        Current.scheduler.point("store result")
        Current.simulation.results[_text(key)] = value
        meta = json.loads(value)
        if "task_id" in meta:
            Current.simulation.note(
                "result", task=meta["task_id"], state=meta["status"], value=str(meta.get("result"))
            )
        Current.simulation.result_stored()
        Current.scheduler.point("stored result")

    def delete(self, key: Any) -> None:
        Current.simulation.results.pop(_text(key), None)

    def as_uri(self, *_: Any, **__: Any) -> str:
        return "simulated://"


def _text(key: Any) -> str:
    return key.decode() if isinstance(key, bytes) else str(key)


# -- the store -----------------------------------------------------------------------------


class SimulatedClock:
    """In front of a store in memory: its clock is the simulation's."""

    def _now_us(self) -> int:
        return round(Current.scheduler.now * 1_000_000)


#: The acts of the contract, and the reads.
ACTS = (
    *("acquire", "acquire_many", "confirm", "confirm_many", "give_back", "help", "cancel"),
    *("unmerge", "release", "start", "renew", "retry", "finish", "settle", "forget", "follow"),
    *("complete_follower", "reap", "promote"),
)
READS = ("read", "walk", "due", "sweep", "mark", "followers", "parked", "payload")


class StoreClient:
    """The store, as one process reaches it: each act is a request and a reply, and both can be
    lost. A request that is late arrives when its caller has given up."""

    guarantee = "strong"
    mechanism = "simulated"

    def __init__(self, store: MemoryStore, process: Process) -> None:
        self._store = store
        self._process = process

    def __getattr__(self, name: str) -> Any:
        if name not in ACTS and name not in READS:
            raise AttributeError(name)

        def act(*arguments: Any) -> Any:
            return self._exchange(name, arguments)

        self.__dict__[name] = act
        return act

    def fingerprint(self) -> str:
        return "simulated"

    def flush(self, timeout_s: float | None = None) -> None:
        """No act is fire-and-forget here."""

    def close(self) -> None:
        """Nothing to close."""

    def _exchange(self, name: str, arguments: tuple[Any, ...]) -> Any:
        scheduler = Current.scheduler
        fault = scheduler.point(f"store {name}")
        if fault == "request lost":
            self._time_out()
        if isinstance(fault, tuple) and fault[0] == "request late":
            process = Process("network")
            process.worker_state = self._process.worker_state
            process.app = self._process.app

            def arrive() -> None:
                scheduler.sleep(STORE_TIMEOUT_S + fault[1])
                self._apply(name, arguments, late=True)

            scheduler.spawn(f"{self._process.name} late {name}", process, arrive)
            self._time_out()
        reply = self._apply(name, arguments)
        if fault == "reply lost":
            self._time_out()
        scheduler.point(f"reply to {name}")
        return reply

    def _time_out(self) -> None:
        Current.scheduler.sleep(STORE_TIMEOUT_S)
        raise StoreUnavailable("the store did not reply", store="simulated")

    def _apply(self, name: str, arguments: tuple[Any, ...], late: bool = False) -> Any:
        if name == "complete_follower":
            Current.simulation.note_removal(self._store, *arguments)
        reply = getattr(self._store, name)(*arguments)
        if name == "walk":
            reply = list(reply)
        Current.simulation.note_act(name, arguments, reply, late=late)
        return reply
