"""The fail-overs of the lock store that workers or this process noticed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from celery_unique.config.app_state import AppState
from celery_unique.config.leases import moment_of
from celery_unique.publish.stale_holders.workers import Workers
from celery_unique.stores.diagnosis import Finding

HERE = "this process"


@dataclass(slots=True)
class SeenFailOver:
    before: str
    after: str
    noticed_at_ms: int = 0  # the last time
    noticed_by: list[str] = field(default_factory=list)

    def as_document(self) -> dict[str, Any]:
        return {
            "before": self.before,
            "after": self.after,
            "noticed_at": moment_of(self.noticed_at_ms),
            "noticed_by": self.noticed_by,
        }


def failovers_seen(app_state: AppState, workers: Workers) -> list[SeenFailOver]:
    """Fail-overs, the newest last; those between the same two servers are one."""
    seen: dict[tuple[str, str], SeenFailOver] = {}
    for who, failover in _noticed(app_state, workers):
        servers = (str(failover["before"]), str(failover["after"]))
        one = seen.setdefault(servers, SeenFailOver(*servers))
        one.noticed_at_ms = max(one.noticed_at_ms, int(failover["noticed_at_ms"]))
        if who not in one.noticed_by:
            one.noticed_by.append(who)
    return sorted(seen.values(), key=lambda each: each.noticed_at_ms)


def _noticed(app_state: AppState, workers: Workers) -> Iterator[tuple[str, dict[str, Any]]]:
    for name, reply in sorted(workers.replies.items()):
        for failover in reply.get("failovers", ()):
            yield name, failover
    for each in list(app_state.failovers):
        yield (
            HERE,
            {"before": each.before, "after": each.after, "noticed_at_ms": each.noticed_at * 1000},
        )


def findings(seen: list[SeenFailOver]) -> Iterator[Finding]:
    for each in seen:
        by = each.noticed_by[0]
        if len(each.noticed_by) > 1:
            by += f" and {len(each.noticed_by) - 1} more"
        yield Finding(
            "fail-over",
            "note",
            f"the lock store failed over from {each.before} to {each.after}, noticed at "
            f"{moment_of(each.noticed_at_ms):%Y-%m-%d %H:%M:%S} UTC by {by}: locks acquired "
            "in the last moments before that may be lost, as if they had lapsed",
            "no action is needed; min-replicas-to-write of the servers bounds how much is lost",
        )
