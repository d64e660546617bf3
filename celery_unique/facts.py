"""What a call is told about uniqueness, as plain values."""

from __future__ import annotations

from dataclasses import dataclass

OUTCOMES = ("created", "deduplicated", "replaced", "joined", "rerun", "bypassed")


@dataclass(frozen=True, slots=True)
class CallFacts:
    """What a caller can ask of the result about uniqueness."""

    outcome: str = "bypassed"
    deduplicated: bool = False
    unique_key: str | None = None
    holder_state: str | None = None
