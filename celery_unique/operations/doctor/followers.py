"""Calls that follow another one, and whether workers monitor them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from celery_unique.config.app_state import AppState
from celery_unique.publish.stale_holders.workers import Workers
from celery_unique.stores.diagnosis import Finding
from celery_unique.stores.record_followers import Following
from celery_unique.worker.reaper import ROUNDS_PER_LEASE

from .checks import LATE_ROUNDS

#: Tasks that are named in the finding.
NAMED = 3


@dataclass(slots=True)
class Followed:
    """Result of a walk over all records, in bounded memory: examples and counts."""

    checked_every_s: float
    calls: int = 0
    overdue: int = 0
    overdue_ms: int = 0  # of the one that waits longest
    named: list[str] = field(default_factory=list)
    parked: int = 0
    parked_overdue: int = 0

    def see(self, following: Following, now: int) -> None:
        count = len(following.promoted) + sum(each.count for each in following.groups.values())
        self.calls += count
        lane = following.lane
        parked = lane.count + len(lane.called) if lane is not None else 0
        self.parked += parked
        late_ms = now - following.due_at
        if late_ms <= self._patience_ms() or following.reaper_until > now:
            return
        self.overdue += count
        self.parked_overdue += parked
        self.overdue_ms = max(self.overdue_ms, late_ms)
        holders = [*(each.holder for each in following.groups.values()), *following.promoted]
        self.named += holders[: NAMED - len(self.named)]

    def _patience_ms(self) -> float:
        """As for renewals: a round on a busy machine may be late, and all workers may have just
        been restarted."""
        return (LATE_ROUNDS * self.checked_every_s + 1) * 1000

    def right(self) -> str:
        parked = f", {self.parked} parked" if self.parked else ""
        return self._followed() + parked

    def _followed(self) -> str:
        if not self.calls:
            return "no call follows another one"
        if self.calls == 1:
            return "1 call follows another one, and workers monitor it"
        return f"{self.calls} calls follow another one, and workers monitor them"

    def findings(self) -> Iterator[Finding]:
        if self.parked_overdue:
            yield Finding(
                "followers",
                "warning",
                f"{self.parked_overdue} of {self.parked} parked calls are under keys that were due "
                f"for a check {self.overdue_ms / 1000:.0f} s ago, and no worker has checked them: "
                "they do not run until one does",
                "start a worker of this app; every worker checks them once in "
                f"{self.checked_every_s:g} s, and logs an error if it cannot",
            )
        if self.overdue:
            yield Finding(
                "followers",
                "warning",
                f"{self.overdue} of {self.calls} calls that follow another one were due for a "
                f"check {self.overdue_ms / 1000:.0f} s ago, and no worker has checked them; they "
                f"follow {', '.join(self.named)}: if that task is lost, chains, groups and chords "
                "wait for them without end",
                "start a worker of this app; every worker checks them once in "
                f"{self.checked_every_s:g} s, and logs an error if it cannot",
            )


def no_followers_yet(app_state: AppState, workers: Workers) -> Followed:
    """The interval depends on the run lease, which may differ between processes."""
    leases = [app_state.settings.run_lease.total_seconds() / ROUNDS_PER_LEASE]
    others = [(each.get("renewal") or {}).get("every_s", 0.0) for each in workers.replies.values()]
    return Followed(max(leases + others))
