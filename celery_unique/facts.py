"""What a call is told about uniqueness, as plain values."""

from __future__ import annotations

from .values import value

#: How much of a key is shown to people: its version and 12 of its 64 hexadecimal digits.
SHORT_KEY = 14

OUTCOMES = ("created", "deduplicated", "replaced", "joined", "rerun", "bypassed")


@value
class CallFacts:
    """What a caller can ask of the result about uniqueness."""

    outcome: str = "bypassed"
    deduplicated: bool = False
    unique_key: str | None = None
    holder_state: str | None = None


def shortened(key: str) -> str:
    """Enough of a key to tell it from others, and too little to stand for it."""
    return key[:SHORT_KEY]
