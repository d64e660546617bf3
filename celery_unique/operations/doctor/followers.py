"""Calls that follow another one, and whether a worker looks after them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from celery_unique.config.app_state import AppState
from celery_unique.operations.workers import Workers
from celery_unique.stores.diagnosis import Finding
from celery_unique.stores.record_followers import Following
from celery_unique.worker.reaper import LOOKS_PER_LEASE

from .checks import LATE_ROUNDS

#: Tasks that are named in the finding.
NAMED = 3


@dataclass(slots=True)
class Followed:
    """What a walk over all records has found. Bounded: examples and counts."""

    looked_at_every_s: float
    calls: int = 0
    overdue: int = 0
    overdue_ms: int = 0  # that which waits longest
    named: list[str] = field(default_factory=list)

    def see(self, following: Following, now: int) -> None:
        count = len(following.promoted) + sum(each.count for each in following.groups.values())
        self.calls += count
        late_ms = now - following.due_at
        if late_ms <= self._patience_ms() or following.reaper_until > now:
            return
        self.overdue += count
        self.overdue_ms = max(self.overdue_ms, late_ms)
        holders = [*(each.holder for each in following.groups.values()), *following.promoted]
        self.named += holders[: NAMED - len(self.named)]

    def _patience_ms(self) -> float:
        """As for renewing: a round on a busy machine may be late, and all workers may have
        been restarted a moment ago."""
        return (LATE_ROUNDS * self.looked_at_every_s + 1) * 1000

    def right(self) -> str:
        if not self.calls:
            return "no call follows another one"
        if self.calls == 1:
            return "1 call follows another one, and workers look after it"
        return f"{self.calls} calls follow another one, and workers look after them"

    def findings(self) -> Iterator[Finding]:
        if self.overdue:
            yield Finding(
                "followers",
                "warning",
                f"{self.overdue} of {self.calls} calls that follow another one should have been "
                f"looked after {self.overdue_ms / 1000:.0f} s ago, and no worker has done so; "
                f"they follow {', '.join(self.named)}: if that task is gone, chains, groups and "
                "chords wait for them in vain",
                "start a worker of this app; every worker looks after them once in "
                f"{self.looked_at_every_s:g} s, and one that cannot says why in its log "
                "(looking after followers failed, or the lock store's error)",
            )


def nobody_seen_yet(app_state: AppState, workers: Workers) -> Followed:
    """How often somebody looks depends on the run lease, which may differ between processes."""
    leases = [app_state.settings.run_lease.total_seconds() / LOOKS_PER_LEASE]
    told = [(each.get("renewal") or {}).get("every_s", 0.0) for each in workers.told.values()]
    return Followed(max(leases + told))
