"""One call on its way to the broker as plain values: what it asks for, and what became of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .exceptions import StoreUnavailable
from .facts import CallFacts
from .header import LockHeader
from .leases import milliseconds
from .policy import UniquePolicy
from .stores.base import Acquired, Claim, Confirmed
from .stores.record import QUEUE_NAMED, letters, terminal_letters
from .values import value


def never(_holder_id: str) -> bool:
    return False


def always(_holder_id: str) -> bool:
    return True


@value
class Attempt:
    """One call on its way to the broker, with its key."""

    task_name: str
    task_id: str
    key: str
    policy: UniquePolicy
    grace_ms: int
    lease_ms: int  # from the ETA, once the message is published
    delay_ms: int = 0
    #: Of a call that brings its own key, and of no other.
    arguments: str = ""
    keep_ms: int = 0
    #: The task in whose body the call is made.
    parent_id: str | None = None
    #: The call as text, to be kept with the lock: a duplicate then follows the holder under
    #: its own id, which somebody waits for (a canvas, a callback), instead of getting another's.
    join: str = ""
    #: A canvas or a callback waits for its id: whatever takes its place before it runs is followed.
    canvas: bool = False
    #: Somebody waits for this very id, or for a reply to it: its message is no other task's.
    own_life: bool = False
    #: Told who holds its key: whether the call is carried out all the same, without a lock.
    bypasses: Callable[[str], bool] = never
    #: Carried out on the spot, and not published.
    eager: bool = False
    #: The call said itself where its message goes, and not its task or the routes.
    queue_named: bool = False
    #: Sent while Celery finishes a task: an error here would turn that task into FAILURE.
    continues: bool = False


#: Publishes the message under this id, with this header and this delay in ms (None: as the
#: call asked), and returns Celery's result.
Send = Callable[[str, LockHeader | None, int | None], Any]

#: As Send, for a message that is made while the store is asked for its lock: waits for the
#: header before anything is sent, and lets through what is raised in its place.
SendWhen = Callable[[str, Callable[[], LockHeader]], Any]

#: ``begin_acquire`` of a store.
Begin = Callable[[str, Claim], Callable[[], Acquired]]

#: ``begin_acquire_many`` of a store.
BeginMany = Callable[
    [list[tuple[str, Claim]], list[Confirmed]], Callable[[], list[Acquired | StoreUnavailable]]
]


@value
class Published:
    """What became of a call: the id to ask for, the facts, and Celery's result if published."""

    task_id: str
    facts: CallFacts
    result: Any = None
    #: Tasks whose place this one took, and whose id nobody else waits for: they have ended.
    superseded: tuple[str, ...] = ()
    #: The task that the call follows: it keeps its own id, and gets that task's outcome.
    follows: str = ""
    #: That task has ended: nobody but the caller will complete the call.
    ended: bool = False


def claim_of(attempt: Attempt) -> Claim:
    """What the store is asked for."""
    policy = attempt.policy
    states = letters(policy.states)
    return Claim(
        task_id=attempt.task_id,
        task_name=attempt.task_name,
        states=states,
        grace_ms=attempt.grace_ms,
        on_conflict=policy.on_conflict,
        parent=attempt.parent_id or "",
        max_wait_ms=milliseconds(policy.max_wait) if policy.max_wait else 0,
        window_ms=window_ms(policy),
        delay_ms=attempt.delay_ms,
        keep=terminal_letters(states) + QUEUE_NAMED * attempt.queue_named,
        keep_ms=attempt.keep_ms,
        arguments=attempt.arguments,
        join=attempt.join,
        canvas=attempt.canvas,
    )


def confirmed_of(attempts: list[Attempt]) -> list[Confirmed]:
    """What the store is told once their messages are out."""
    return [(attempt.key, attempt.task_id, attempt.lease_ms) for attempt in attempts]


def window_ms(policy: UniquePolicy) -> int:
    return milliseconds(policy.period) if policy.period else 0


def changed_delay(attempt: Attempt, acquired: Acquired) -> int | None:
    """The delay that the store has decided on, where it is not the call's own: that of
    the task it replaces, or one that no longer postpones it."""
    delay_ms = max(0, acquired.eta - acquired.now) if acquired.eta else 0
    return delay_ms if delay_ms != attempt.delay_ms else None
