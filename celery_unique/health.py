"""How the renewing of leases has gone in one worker process, for whoever asks."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class RenewalHealth:
    """Written by the renewing thread, read by another: single assignments only."""

    every_s: float
    began_at: float = field(default_factory=time.monotonic)
    round_at: float | None = None  # the last round that went well, with locks to renew or none
    renewed_at: float | None = None  # the last renewal that the store answered
    renewed: int = 0  # leases asked for in it
    failures: int = 0  # rounds in a row that failed
    failed_at: float | None = None
    error: str = ""

    def round_ended(self, renewed: int) -> None:
        now = time.monotonic()
        if renewed:
            self.renewed_at = now
            self.renewed = renewed
        self.round_at = now
        self.failures = 0

    def round_failed(self, error: Exception) -> None:
        self.failed_at = time.monotonic()
        self.error = str(error) or type(error).__name__
        self.failures += 1

    def as_document(self) -> dict[str, Any]:
        """In seconds that have passed: the clocks of two machines may differ."""
        return {
            "every_s": self.every_s,
            "running_for_s": _since(self.began_at),
            "last_round_s_ago": _since(self.round_at),
            "last_renewal_s_ago": _since(self.renewed_at),
            "leases_renewed": self.renewed,
            "failures_in_a_row": self.failures,
            "last_failure_s_ago": _since(self.failed_at),
            "last_error": self.error or None,
        }


def _since(moment: float | None) -> float | None:
    return None if moment is None else round(time.monotonic() - moment, 1)
