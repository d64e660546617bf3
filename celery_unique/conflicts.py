"""What a call hears when its key is held: one function per strategy."""

from __future__ import annotations

from collections.abc import Callable

from .exceptions import DuplicateTask
from .facts import CallFacts
from .policy_fields import REPLACING
from .stores.base import Acquired, Holder
from .stores.record import State
from .values import value


@value
class Conflict:
    """A call and the task that is in its way."""

    task_name: str
    key: str
    holder: Holder
    conceal: bool = False  # do not tell a caller who holds the key
    by_idempotency_key: bool = False  # the call brought the key itself


def ignore(conflict: Conflict) -> CallFacts:
    """The holder does the work: the call gets the holder's result."""
    if conflict.conceal:
        return reject(conflict)
    return CallFacts("deduplicated", True, conflict.key, str(conflict.holder.state))


def reject(conflict: Conflict, reason: str | None = None) -> CallFacts:
    """The caller is told, loudly."""
    raise DuplicateTask(
        conflict.task_name,
        None if conflict.conceal else conflict.holder.task_id,
        None if conflict.conceal else str(conflict.holder.state),
        reason,
        conflict.by_idempotency_key,
        key=conflict.key,
    )


def cannot_replace(conflict: Conflict) -> CallFacts:
    """The store has replaced what could be replaced: this is what could not."""
    if conflict.conceal:  # one answer for all states, or it would tell the holder's
        return reject(conflict, "what holds it cannot be replaced")
    if conflict.holder.state is State.COMPLETED:  # its idempotency key answers for it
        return ignore(conflict)
    if conflict.holder.state is State.ACTIVE:
        return reject(conflict, "a task that runs cannot be replaced")
    return reject(conflict, "the call brings the id of the task that it would replace")


#: What is left to a call that the store has not admitted.
STRATEGIES: dict[str, Callable[[Conflict], CallFacts]] = {
    "ignore": ignore,
    "reject": reject,
    "replace": cannot_replace,
    "replace_except_schedule": cannot_replace,
    "rerun": ignore,  # the holder has not started, so it will see what the caller has done
}


def resolve(strategy: str, conflict: Conflict) -> CallFacts:
    return STRATEGIES[strategy](conflict)


def admitted(key: str, acquired: Acquired, on_conflict: str, parent: str | None) -> CallFacts:
    """What a call hears whose task was created."""
    if acquired.after:
        # A replacement comes after a task that waits where that was pushed back for long enough.
        waits = on_conflict in REPLACING and acquired.after != parent
        state = State.AVAILABLE if waits else State.ACTIVE
        return CallFacts("rerun", bool(acquired.replaced), key, str(state))
    return CallFacts("replaced" if acquired.replaced else "created", False, key)


def joined(key: str, holder: Holder) -> CallFacts:
    """What a call hears that keeps its own id and shares the holder's outcome."""
    return CallFacts("joined", True, key, str(holder.state))
