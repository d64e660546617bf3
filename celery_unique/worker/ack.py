"""The acknowledgement of a message: the moment at which it is sent, and kombu's record of it.

Celery notes that a message is acknowledged, and leaves the sending to its event loop: to the
next turn of it, which in a solo worker may come after another task. What must not happen
before that waits here.

On Redis kombu records each message that a worker has and has not acknowledged. For each record, and
each removal, it makes a client, which takes longer than the exchange with the server. Where the
lock store is the broker, the gate's store sends the same transaction for unique messages, on a
connection that is open: that pays for the start of the task. Whatever the store does not confirm in
time, kombu records itself, since both transactions may be repeated.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kombu.transport.virtual import QoS as VirtualQoS
from kombu.utils.json import dumps

from celery_unique.exceptions import StoreUnavailable
from celery_unique.header import HEADER

if TYPE_CHECKING:
    from celery_unique.stores.circuit_breaker import Breaker

    from .lock_client import WorkerLockClient

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


def record_by_store(channel: Any, client: WorkerLockClient) -> None:
    """Let the gate's store write what kombu records of unique messages, if this channel of the
    broker leads to the store. To be called once for each channel: kombu makes new ones."""
    channel.__dict__[RECORDED_BY] = client
    qos = getattr(channel, "qos", None)
    if qos is None or not _is_kombus_own(channel, qos):
        return
    for name in ("append", "ack"):  # those of a client before a change of the settings
        qos.__dict__.pop(name, None)
    found = client.at_broker(channel)
    if found is not None:
        store, breaker = found
        _replace_records(qos, store.transact, breaker)


def _is_kombus_own(channel: Any, qos: Any) -> bool:
    """Another class may record messages elsewhere, or in another form."""
    if not hasattr(channel, "unacked_key"):
        return False
    from kombu.transport.redis import Channel, QoS  # imports redis

    return type(channel) is Channel and type(qos) is QoS


def _replace_records(qos: Any, transact: Callable[..., None], breaker: Breaker) -> None:
    append, ack = qos.append, qos.ack
    prefix = qos.channel.global_keyprefix or ""
    index, messages = f"{prefix}{qos.unacked_index_key}", f"{prefix}{qos.unacked_key}"

    def run(message: Any, *commands: tuple[Any, ...]) -> bool:
        if breaker.failures or HEADER not in message.headers:
            return False
        try:
            transact(*commands)
        except StoreUnavailable:
            return False
        return True

    def append_by_store(message: Any, delivery_tag: str) -> None:
        to, key = message.delivery_info["exchange"], message.delivery_info["routing_key"]
        text = dumps([message._raw, to, key])
        add = ("ZADD", index, time.time(), delivery_tag)
        if run(message, add, ("HSET", messages, delivery_tag, text)):
            VirtualQoS.append(qos, message, delivery_tag)
        else:
            append(message, delivery_tag)

    def ack_by_store(delivery_tag: str) -> None:
        message = qos._delivered.get(delivery_tag)
        remove = ("ZREM", index, delivery_tag)
        if message is not None and run(message, remove, ("HDEL", messages, delivery_tag)):
            VirtualQoS.ack(qos, delivery_tag)
        else:
            ack(delivery_tag)

    qos.append, qos.ack = append_by_store, ack_by_store
