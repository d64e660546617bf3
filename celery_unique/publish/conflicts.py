"""What a call gets whose key is held: one function per strategy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from celery_unique.exceptions import LANE_IS_FULL, DuplicateTask
from celery_unique.policy.fields import REPLACING
from celery_unique.stores.base import Acquired, Holder
from celery_unique.stores.record import State

from .request import PublishRequest
from .results import CallOutcome


@dataclass(slots=True)
class Conflict:
    """A call and the task that is in its way."""

    task_name: str
    key: str
    holder: Holder
    conceal: bool = False  # do not reveal the holder to the caller
    by_idempotency_key: bool = False  # the key is the caller's idempotency key


def ignore(conflict: Conflict) -> CallOutcome:
    """The holder does the work: the call gets the holder's result."""
    if conflict.conceal:
        return reject(conflict)
    return CallOutcome("deduplicated", True, conflict.key, str(conflict.holder.state))


def reject(conflict: Conflict, reason: str | None = None) -> CallOutcome:
    """The call raises."""
    raise DuplicateTask(
        conflict.task_name,
        None if conflict.conceal else conflict.holder.task_id,
        None if conflict.conceal else str(conflict.holder.state),
        reason,
        conflict.by_idempotency_key,
        key=conflict.key,
    )


def cannot_replace(conflict: Conflict) -> CallOutcome:
    """The store has replaced what could be replaced: this is what could not."""
    if conflict.conceal:  # one answer for all states, or it would reveal the holder's
        return reject(conflict, "what holds it cannot be replaced")
    if conflict.holder.state is State.COMPLETED:  # its idempotency key returns its outcome
        return ignore(conflict)
    if conflict.holder.state is State.ACTIVE:
        return reject(conflict, "a task that runs cannot be replaced")
    return reject(conflict, "the call has the id of the task that it would replace")


def merge(conflict: Conflict) -> CallOutcome:
    """The holder runs with the values of the call."""
    return CallOutcome("merged", True, conflict.key, str(conflict.holder.state))


def cannot_merge(conflict: Conflict) -> CallOutcome:
    """The call has the id of a task that has started, so it can be no successor of that."""
    return reject(conflict, "the call has the id of a task that takes no more values")


#: What a call gets that the store has not admitted.
STRATEGIES: dict[str, Callable[[Conflict], CallOutcome]] = {
    "ignore": ignore,
    "reject": reject,
    "replace": cannot_replace,
    "replace_except_schedule": cannot_replace,
    "rerun": ignore,  # the holder has not started, so it will see what the caller has done
    "queue": ignore,  # the call has the very id of a task that has not ended
    "merge": cannot_merge,
}


def resolve(strategy: str, conflict: Conflict) -> CallOutcome:
    return STRATEGIES[strategy](conflict)


def admitted(request: PublishRequest, acquired: Acquired) -> CallOutcome:
    """What a call gets whose task was created."""
    if acquired.after:
        # A replacement follows a waiting task where that was pushed back for long enough.
        replaces = request.policy.on_conflict in REPLACING
        waits = replaces and acquired.after != request.parent_id
        state = State.AVAILABLE if waits else State.ACTIVE
        return CallOutcome("rerun", bool(acquired.replaced), request.key, str(state))
    return CallOutcome("replaced" if acquired.replaced else "created", False, request.key)


def queued(key: str, holder: Holder | None) -> CallOutcome:
    """What a call gets that is parked, and runs under its own id when its turn comes."""
    return CallOutcome("queued", False, key, None if holder is None else str(holder.state))


def lane_is_full(
    task_name: str, key: str, acquired: Acquired, *, conceal: bool = False
) -> DuplicateTask:
    holder = None if conceal else acquired.holder
    return DuplicateTask(
        task_name,
        holder.task_id if holder is not None else None,
        str(holder.state) if holder is not None else None,
        f"{LANE_IS_FULL}: {acquired.position} calls are parked (unique_max_queue)",
        key=key,
    )


def joined(key: str, holder: Holder) -> CallOutcome:
    """What a call gets that keeps its own id and shares the holder's outcome."""
    return CallOutcome("joined", True, key, str(holder.state))
