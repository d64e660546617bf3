"""One-way acts on a cluster: sent by a thread that hears when a slot has moved."""

from __future__ import annotations

import os
import time
import weakref
from collections import deque
from time import monotonic

from redis.exceptions import ResponseError

from celery_unique.exceptions import StoreUnavailable
from celery_unique.stores.one_way import OneWay, logger

from .connections import Command
from .moving import MovingConnections

#: Sent at once before their replies are read.
BATCH = 500
#: How long the thread tries: a fail-over takes longer than one act may.
PATIENCE_S = 30.0
PAUSE_S = 0.2

_senders: weakref.WeakSet[QueuedOneWay] = weakref.WeakSet()


class QueuedOneWay:
    """Puts the command into a queue and returns.

    With replies turned off, as on one server, nobody would hear that a node no longer has
    the slot, and the act would be lost in silence.
    """

    def __init__(self, connections: MovingConnections) -> None:
        self._connections = connections
        self._acts = OneWay(connections.timeout_s)
        self._begin()
        _senders.add(self)

    def _begin(self) -> None:
        self._waiting: deque[tuple[Command, float]] = deque()  # and when to give it up

    def send(self, *commands: Command) -> None:
        # There first: whichever act comes next takes it along, and its own then finds nothing.
        give_up_at = monotonic() + PATIENCE_S
        self._waiting.extend((command, give_up_at) for command in commands)
        for _ in range(0, len(commands), BATCH):
            self._acts.put(self._send_waiting)

    def flush(self) -> None:
        self._acts.flush()

    def close(self) -> None:
        self._acts.drain(self._connections.timeout_s)

    def _send_waiting(self) -> None:
        waiting = [self._waiting.popleft() for _ in range(min(BATCH, len(self._waiting)))]
        if waiting:
            for reply in self._exchanged([command for command, _ in waiting], waiting[0][1]):
                if isinstance(reply, ResponseError):
                    logger.warning("A one-way act on the lock store was refused: %s", reply)

    def _exchanged(self, commands: list[Command], give_up_at: float) -> list[object]:
        while True:
            try:
                return self._connections.exchange(commands)
            except StoreUnavailable:
                # Each of them can be carried out twice and late without harm.
                if monotonic() >= give_up_at:
                    raise
            time.sleep(PAUSE_S)


def _forget_in_child() -> None:
    """The parent has the thread, and sends what it has queued."""
    for sender in _senders:
        sender._begin()


os.register_at_fork(after_in_child=_forget_in_child)
