"""How stores report that their servers failed over.

A server that replaces another one may not have received its last writes. Locks of that moment can
be lost, as if they had lapsed, so a fail-over is always reported.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

logger = logging.getLogger("celery_unique")


#: How many are remembered, the newest ones.
REMEMBERED = 20


@dataclass(frozen=True, slots=True)
class FailOver:
    """One server replaced another one, as this process noticed it."""

    before: str  # host and port of the primary that was
    after: str  # and of the one that is
    noticed_at: float = field(default_factory=time.time)

    def __str__(self) -> str:
        return (
            f"The lock store failed over from {self.before} to {self.after}: locks taken in the "
            "last moments before that may be lost, as if they had lapsed"
        )


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """The replication state of one primary, for operators."""

    server: str
    replicas: int
    was_promoted: bool  # it was a replica, and replaced another one


@dataclass(slots=True)
class FailOvers:
    """What a store has noticed since it was opened. ``tell`` hears of each one once."""

    noticed: deque[FailOver] = field(default_factory=lambda: deque(maxlen=REMEMBERED))
    tell: Callable[[FailOver], None] | None = None

    def notice(self, before: str, after: str) -> None:
        last = self.noticed[-1] if self.noticed else None
        if last is not None and (last.before, last.after) == (before, after):
            return  # two threads found out at the same moment
        failover = FailOver(before, after)
        self.noticed.append(failover)
        if self.tell is not None:
            self.tell(failover)
        else:
            logger.warning("lock store failed over: %s", failover)
