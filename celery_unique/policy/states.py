"""The states of a task, as the Open Job Spec names them, and groups of them.

The life of a task: pending, then scheduled (its ETA lies ahead) or available (it waits in the
queue), then active, from there to retryable and back as often as it is retried, and in the end
completed, discarded or cancelled.
"""

from __future__ import annotations

from enum import StrEnum
from functools import lru_cache
from typing import Literal

__all__ = ["GROUPS", "LIVE", "STATES", "TERMINAL", "State", "explain_gaps"]


class State(StrEnum):
    """In the order of a task's life, which is the order a policy keeps them in."""

    PENDING = "pending"
    SCHEDULED = "scheduled"
    AVAILABLE = "available"
    ACTIVE = "active"
    RETRYABLE = "retryable"
    COMPLETED = "completed"
    DISCARDED = "discarded"
    CANCELLED = "cancelled"


#: For type checkers: the names of the states, and those of ``GROUPS``.
StateName = Literal[
    "pending",
    "scheduled",
    "available",
    "active",
    "retryable",
    "completed",
    "discarded",
    "cancelled",
]
StateGroup = Literal["until_start", "until_done", "until_success", "window"]

#: By name, as policies hold them.
STATES = tuple(state.value for state in State)
LIVE, TERMINAL = STATES[:5], STATES[5:]

GROUPS: dict[str, tuple[str, ...]] = {
    # A retried task has started before, so retryable is not among them.
    "until_start": ("pending", "scheduled", "available"),
    "until_done": LIVE,
    # Success keeps the key, failure and revoking free it: work that failed may be called again.
    "until_success": (*LIVE, "completed"),
    "window": STATES,
}

#: From which states a state is entered. Pending is in none of them: a pending task also counts
#: as the state it is about to enter, so leaving pending out leaves no gap.
_ENTERED_FROM = {
    "available": ("scheduled",),
    "active": ("available", "retryable"),
    "retryable": ("active",),
    "completed": ("active",),
    "discarded": ("active",),
    "cancelled": ("scheduled", "available", "active", "retryable"),
}

_CONSEQUENCE = {
    "scheduled": "while a task waits for its ETA, another call is admitted beside it",
    "available": "while a task waits in the queue, another call is admitted, and both may run "
    "at the same time",
    "active": "while a task runs, another call is admitted and may run beside it",
    "retryable": "while a task waits for a retry, another call is admitted, and may run beside "
    "the retry",
}


@lru_cache(maxsize=256)  # there are 255 choices of states
def explain_gaps(states: tuple[str, ...]) -> str:
    """Return the effects of gaps in `states` in plain words; empty if there are none.

    A gap is a state left out from which a task enters one that is in.
    """
    entered = {before for state in states for before in _ENTERED_FROM.get(state, ())}
    missing = [state for state in STATES if state in entered and state not in states]
    if not missing:
        return ""
    effects = "; ".join(f"{_CONSEQUENCE[state]} ({state!r} is left out)" for state in missing)
    return f"states {list(states)} have gaps in the life of a task: {effects}"
