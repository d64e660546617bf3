"""The acknowledgement of a message: the moment at which it is sent, and kombu's record of it.

Celery notes that a message is acknowledged, and leaves the sending to its event loop: to the
next turn of it, which in a solo worker may come after another task. What must not happen
before that waits here.

On Redis kombu records each message that a worker has and has not acknowledged. For each record, and
each removal, it makes a client, which takes longer than the exchange with the server. Where the
lock store is the broker, the gate's store sends the same transaction for unique messages, on a
connection that is open, and the worker does not wait for its reply: that pays for the start of the
task. Whatever the store does not confirm in time, kombu records itself, since both transactions may
be repeated.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from kombu.transport.virtual import QoS as VirtualQoS
from kombu.utils.json import dumps

from celery_unique.exceptions import StoreUnavailable
from celery_unique.header import HEADER

if TYPE_CHECKING:
    from celery_unique.stores.base import BrokerStore
    from celery_unique.stores.circuit_breaker import Breaker

    from .lock_client import WorkerLockClient

logger = logging.getLogger("celery_unique")

#: On a channel of the broker: its `UnackedRecords`, if the store writes them.
RECORDS = "_celery_unique_records"
#: On a channel of the broker: the lock client that has been offered to record its messages.
RECORDED_BY = "_celery_unique_recorded_by"


class Acknowledgement:
    """Of one message; made before Celery sends it."""

    def __init__(self, message: Any) -> None:
        self._message = message
        self._then: list[Callable[[], None]] = []
        #: Sent, or failed to be.
        self.is_over = False
        message.ack, message.reject = self._noticing(message.ack), self._noticing(message.reject)

    @property
    def failed(self) -> bool:
        """The broker did not receive it, and will deliver the message again."""
        return self.is_over and not self._message.acknowledged

    def then(self, act: Callable[[], None]) -> None:
        """Run this as soon as it is sent, or has failed."""
        self._then.append(act)
        if self.is_over:  # meanwhile: the thread that pops an act runs it
            self._run_acts()

    def _noticing(self, send: Callable[..., Any]) -> Callable[..., Any]:
        def send_and_run(*args: Any, **kwargs: Any) -> Any:
            try:
                return send(*args, **kwargs)
            finally:
                del self._message.ack, self._message.reject  # the class's own are back
                self.is_over = True
                self._run_acts()

        return send_and_run

    def _run_acts(self) -> None:
        while self._then:
            try:
                act = self._then.pop(0)
            except IndexError:
                return
            act()


class UnackedRecords:
    """Kombu's records of the messages that one channel has received and not acknowledged.

    Of a unique message the store sends a transaction, and the worker does not wait for the reply.
    It is read before anything else is done with a record, before the message becomes a request, and
    after an early acknowledgement in the next turn of the event loop.
    """

    def __init__(self, qos: Any, store: BrokerStore, breaker: Breaker, hub: Any) -> None:
        self._qos = qos
        self._begin = store.begin_transaction
        self._breaker = breaker
        self._hub = hub
        self._append, self._ack = qos.append, qos.ack
        prefix = qos.channel.global_keyprefix or ""
        self._index = f"{prefix}{qos.unacked_index_key}"
        self._messages = f"{prefix}{qos.unacked_key}"
        #: For each transaction whose reply is not read: waits for it; what kombu does in its place.
        self._unconfirmed: deque[tuple[Callable[[], None], Callable[[], None]]] = deque()

    def replace(self) -> None:
        qos = self._qos
        qos.append, qos.ack = self.append, self.ack
        for name in ("reject", "restore_by_tag"):
            setattr(qos, name, self._confirming(getattr(qos, name)))
        setattr(qos.channel, RECORDS, self)

    @staticmethod
    def restore(qos: Any) -> None:
        """Kombu records for itself again."""
        records: UnackedRecords | None = getattr(qos.channel, RECORDS, None)
        if records is not None:
            records.confirm()
            setattr(qos.channel, RECORDS, None)
        for name in ("append", "ack", "reject", "restore_by_tag"):
            qos.__dict__.pop(name, None)

    def append(self, message: Any, delivery_tag: str) -> None:
        self.confirm()
        if self._is_kombus(message):
            self._append(message, delivery_tag)
            return
        info = message.delivery_info
        text = dumps([message._raw, info["exchange"], info["routing_key"]])
        add = ("ZADD", self._index, time.time(), delivery_tag)
        put = ("HSET", self._messages, delivery_tag, text)
        VirtualQoS.append(self._qos, message, delivery_tag)
        self._run(partial(self._append, message, delivery_tag), add, put)

    def ack(self, delivery_tag: str) -> None:
        self.confirm()
        message = self._qos._delivered.get(delivery_tag)
        if message is None or self._is_kombus(message):
            self._ack(delivery_tag)
            return
        remove = ("ZREM", self._index, delivery_tag)
        drop = ("HDEL", self._messages, delivery_tag)
        if self._hub is None or "ack" in message.__dict__:  # what follows waits for it
            try:
                self._begin(remove, drop)()
            except StoreUnavailable:
                self._ack(delivery_tag)
            else:
                VirtualQoS.ack(self._qos, delivery_tag)
            return
        VirtualQoS.ack(self._qos, delivery_tag)
        self._run(partial(_logging_errors, partial(self._ack, delivery_tag), message), remove, drop)
        self._hub.call_soon(self.confirm)

    def _is_kombus(self, message: Any) -> bool:
        return bool(self._breaker.failures) or HEADER not in message.headers

    def _run(self, by_kombu: Callable[[], None], *commands: tuple[Any, ...]) -> None:
        try:
            self._unconfirmed.append((self._begin(*commands), by_kombu))
        except StoreUnavailable:
            by_kombu()

    def confirm(self) -> None:
        """Read the replies that have not been read. Kombu makes the record where one failed."""
        while self._unconfirmed:
            try:
                wait, by_kombu = self._unconfirmed.popleft()
            except IndexError:  # another greenlet was faster
                return
            try:
                wait()
            except StoreUnavailable:
                by_kombu()

    def _confirming(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def confirmed(*args: Any, **kwargs: Any) -> Any:
            self.confirm()
            return original(*args, **kwargs)

        return confirmed


def _logging_errors(ack: Callable[[], None], message: Any) -> None:
    """In the event loop, where Celery's acknowledgements are sent: as those handle an error."""
    try:
        ack()
    except message.channel.connection.client.connection_errors as error:
        logger.error("cannot acknowledge message %s: %r", message.delivery_tag, error)


def record_by_store(channel: Any, client: WorkerLockClient, hub: Any = None) -> None:
    """Let the gate's store write what kombu records of unique messages, if this channel of the
    broker leads to the store. To be called once for each channel: kombu makes new ones."""
    if not hasattr(channel, "unacked_key"):  # another broker than Redis
        return
    setattr(channel, RECORDED_BY, client)
    qos = channel.qos
    if not _is_kombus_own(channel, qos):
        return
    UnackedRecords.restore(qos)  # that of a client before a change of the settings
    found = client.at_broker(channel)
    if found is not None:
        UnackedRecords(qos, *found, hub).replace()


def _is_kombus_own(channel: Any, qos: Any) -> bool:
    """Another class may record messages elsewhere, or in another form."""
    from kombu.transport.redis import Channel, QoS  # imports redis

    return type(channel) is Channel and type(qos) is QoS
