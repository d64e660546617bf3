"""What this process knows of its deliveries, beside what Celery's requests carry.

The process that runs a body releases its lock and, while the store is unavailable, retries that
in the background. A process of the pool that is killed or replaced meanwhile takes that with it:
then the worker's main process, which saw the task end, records the end.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Container
from dataclasses import dataclass
from typing import TYPE_CHECKING

from celery_unique.header import LockHeader
from celery_unique.stores.bounded import BoundedDict
from celery_unique.stores.circuit_breaker import OPEN_FOR_S

if TYPE_CHECKING:
    from celery_unique.config.app_state import AppState

    from .delivery import Delivery

REMEMBERED = 10_000
#: A store that failed is skipped for a while by each process that saw it fail.
RECENT_S = 2 * OPEN_FOR_S
#: How long the process that ran the body has, once the store answers again.
PATIENCE_S = 3.0


@dataclass(slots=True)
class Body:
    """A body that began in the pool, until it is certain that its end is recorded."""

    header: LockHeader
    task_name: str
    began_at: float
    rejected: bool = False
    gone_since: float = 0.0


class Deliveries:
    def __init__(self) -> None:
        #: Let through the gate, and not taken by a process or thread of the pool, as far as is
        #: known. Bounded, since Celery drops some when it reconnects.
        self.on_the_way: OrderedDict[str, Delivery] = OrderedDict()
        #: Finished, with messages that the event loop has yet to acknowledge. Until they are
        #: settled, a second delivery of the message must find the first alive.
        self.unacknowledged: BoundedDict[str, Delivery] = BoundedDict(REMEMBERED)
        #: Begun in processes of the pool. A body in a thread of this one records its own end.
        self.bodies: BoundedDict[str, Body] = BoundedDict(REMEMBERED)

    @classmethod
    def of(cls, app_state: AppState) -> Deliveries:
        return cls()

    def flush(self) -> None:
        """Nothing of this waits for anything."""

    def body_began(self, header: LockHeader, task_name: str) -> None:
        self.bodies.remember(header.delivery, Body(header, task_name, time.monotonic()))

    def unrecorded(self, failed_at: float, held: Container[str]) -> list[Body]:
        """The bodies whose end the process that ran them has not recorded: looked for every few
        seconds, with the deliveries that the worker still has, and when the store last failed."""
        now = time.monotonic()
        unrecorded = []
        for name, body in list(self.bodies.items()):
            if name in held:
                continue
            if failed_at < body.began_at - RECENT_S:  # there was no reason to fail
                self.bodies.pop(name, None)
                continue
            body.gone_since = body.gone_since or now
            if now - max(failed_at, body.gone_since) > PATIENCE_S:
                unrecorded.append(body)
        return unrecorded
