"""Ends that the store has not heard of.

The process that runs a body gives its lock back and, while the store is away, tries again
in the background. A process of the pool that is killed or replaced meanwhile takes that
with it: then the worker's main process, which saw the task end, gives the lock back.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Container
from dataclasses import dataclass
from typing import TYPE_CHECKING

from celery_unique import reporting
from celery_unique.header import LockHeader
from celery_unique.stores.circuit_breaker import OPEN_FOR_S

if TYPE_CHECKING:
    from .lock_client import WorkerLockClient

REMEMBERED = 10_000
#: A store that failed is left alone for a while by each process that saw it fail.
RECENT_S = 2 * OPEN_FOR_S
#: How long the process that ran the body has, once the store answers again.
PATIENCE_S = 3.0


@dataclass(slots=True)
class _Body:
    header: LockHeader
    task_name: str
    began_at: float
    rejected: bool = False
    gone_since: float = 0.0


class UnreportedEnds:
    """Which bodies began in this worker, until it is certain that their end was told."""

    def __init__(self) -> None:
        self._bodies: OrderedDict[str, _Body] = OrderedDict()

    def began(self, header: LockHeader, task_name: str) -> None:
        self._bodies[header.delivery] = _Body(header, task_name, time.monotonic())
        while len(self._bodies) > REMEMBERED:
            self._bodies.popitem(last=False)

    def goes_on(self, delivery: str) -> None:
        """A retry, or a message that goes back to the queue: the key is not free."""
        self._bodies.pop(delivery, None)

    def rejected(self, delivery: str) -> None:
        """Its message was rejected, and may come back from a dead letter exchange."""
        if delivery in self._bodies:
            self._bodies[delivery].rejected = True

    def look(self, holding: WorkerLockClient, held: Container[str]) -> None:
        """Told every few seconds which deliveries the worker still has."""
        now = time.monotonic()
        for delivery, body in list(self._bodies.items()):
            if delivery in held:
                continue
            # Told already, or retried in this very process; or there was no reason to fail.
            if holding.has_ended_here(delivery) or holding.failed_at < body.began_at - RECENT_S:
                self.goes_on(delivery)
                continue
            body.gone_since = body.gone_since or now
            if now - max(holding.failed_at, body.gone_since) > PATIENCE_S:
                self._end(holding, body)
                self.goes_on(delivery)

    def _end(self, holding: WorkerLockClient, body: _Body) -> None:
        if holding.end_for_another(body.header, body.task_name, rejected=body.rejected):
            reporting.released_for_pool(body.task_name, body.header.task_id)
