"""The six signals, and the log line of every decision.

The sender of a signal is the task's name. Receivers run where the event happens: in the calling
process, in the pool's child or in the worker's main process. They receive the facts below and
``**extra``: accept ``**kwargs``, so that a new fact never breaks a receiver.
"""

from __future__ import annotations

import logging
from logging import DEBUG, ERROR, INFO, WARNING
from typing import Any

from celery.utils.dispatch import Signal

from .exceptions import StoreUnavailable, UnreadableRecord
from .stores.base import Acquired, Holder
from .stores.bounded import BoundedDict
from .stores.failover import FailOver

logger = logging.getLogger("celery_unique")


#: A call acquired its key. ``task_id, key, app``; ``parked`` (true) if it has waited in a lane
unique_acquired = Signal(name="unique_acquired")

#: A call found its key held. ``task_id`` (the holder's), ``state, key, on_conflict, waited_s``
#: (how long the holder has waited in the queue; 0 in any other state), ``app``; ``dry_run`` in one;
#: ``position`` (in its lane) if the call is parked
unique_conflict = Signal(name="unique_conflict")

#: A key was released: its task finished or was revoked, or an operator released it.
#: ``task_id, key, reason, app``
unique_released = Signal(name="unique_released")

#: A task was replaced before it ran. ``task_id, key, by, app``
unique_superseded = Signal(name="unique_superseded")

#: A task runs or finishes although its lock lapsed or has another holder.
#: ``task_id, key, reason, app``
unique_lost = Signal(name="unique_lost")

#: The store was unavailable. ``act, exception, task_id, key, app``
unique_store_error = Signal(name="unique_store_error")

#: The reason of a release by an operator: ``release()``, the command or the admin.
MANUAL = "released manually"


class Event:
    """A kind of event: its log line with the record's attributes, and its signal.

    Attributes and line show only the facts that are named here: a key is made from arguments,
    and no line above DEBUG shows it.
    """

    __slots__ = ("facts", "level", "outcome", "signal", "text")

    def __init__(
        self, level: int, outcome: str, text: str, *facts: str, signal: Signal | None = None
    ) -> None:
        self.level = level
        self.outcome = outcome
        self.text = text
        self.facts = facts
        self.signal = signal

    def __call__(self, task_name: str, task_id: str, *, outcome: str = "", **facts: Any) -> None:
        if logger.isEnabledFor(self.level):
            extra = {"task_name": task_name, "task_id": task_id}
            extra["outcome"] = outcome or self.outcome
            extra |= {name: facts[name] for name in self.facts}
            logger.log(self.level, self.text, extra, extra=extra, stacklevel=2)
        if self.signal is not None and self.signal.receivers:
            self.signal.send(sender=task_name, task_id=task_id, **facts)


_TASK = "%(task_name)s[%(task_id)s]"
_RELEASE_IT = "release the key with celery -A APP unique release --task-id ID"

# -- at a call ---------------------------------------------------------------------------------

acquired = Event(
    DEBUG, "created", f"acquired key %(key)s for {_TASK}", "key", signal=unique_acquired
)
skipped_publish = Event(
    INFO,
    "conflict",
    "skipped publish of %(task_name)s: task %(task_id)s (%(holder_state)s) holds its key",
    "holder_state",
    "on_conflict",
)
_dry_run_conflict = Event(
    INFO,
    "would_deduplicate",
    "publishing %(task_name)s in a dry run, although task %(task_id)s (%(holder_state)s) holds its "
    "key",
    "holder_state",
    "on_conflict",
)
would_raise = Event(
    WARNING,
    "would_raise",
    f"publishing {_TASK} in a dry run without a lock. Otherwise it would raise: %(reason)s",
    "reason",
)
superseded = Event(
    INFO, "superseded", f"superseded {_TASK} by task %(by)s", "by", signal=unique_superseded
)
joined = Event(INFO, "joined", f"joined {_TASK} to holder %(by)s", "by")
joined_replacement = Event(INFO, "joined", f"joined {_TASK} to its replacement %(by)s", "by")
_parked = Event(
    INFO,
    "queued",
    f"parked {_TASK} at position %(position)d of its lane",
    "position",
)
_lane_full = Event(
    INFO,
    "lane_full",
    "refused %(task_name)s: its lane is full, with %(position)d parked calls",
    "position",
)
called = Event(
    DEBUG,
    "called",
    f"published parked {_TASK}: it has its turn under key %(key)s",
    "key",
    "parked",
    signal=unique_acquired,
)
called_again = Event(
    WARNING,
    "called_again",
    f"published parked {_TASK} once more: its first publish was not confirmed in time",
)
unpublishable = Event(
    ERROR,
    "unpublishable",
    f"failed parked {_TASK}: it has its turn and cannot be published: %(error)s",
    "error",
    "reason",
    signal=unique_released,
)
promoted = Event(
    WARNING, "promoted", f"promoted follower {_TASK}: holder %(by)s died or was dropped", "by"
)
publishing_unlocked = Event(
    WARNING, "bypassed", f"publishing {_TASK} without a lock: %(reason)s", "reason"
)
running_unlocked = Event(
    WARNING, "bypassed", f"running {_TASK} without a lock: %(reason)s", "reason"
)
long_wait = Event(
    WARNING,
    "long_wait",
    "found key of %(task_name)s held by task %(task_id)s, which has waited for %(minutes)d "
    f"minutes. If its message is lost (a purged queue), {_RELEASE_IT}",
    "minutes",
)
held_by_itself = Event(
    WARNING,
    "held_by_itself",
    "found key of %(task_name)s held by task %(task_id)s, which has the id of this call. To run "
    f"it again, call it without task_id; if its message is lost, first {_RELEASE_IT}",
)
result_elsewhere = Event(
    WARNING,
    "result_elsewhere",
    f"cannot share the result of {_TASK}: with rpc:// it reaches only the caller that published "
    "the task. To wait for it here, use another result backend",
)
not_withdrawn = Event(
    WARNING,
    "not_withdrawn",
    f"cannot withdraw {_TASK}, whose call raised since the lock store did not reply: it may be "
    "published, may run, or may have run",
)
republished = Event(
    WARNING,
    "published_again",
    f"republished {_TASK} under the same id: the worker that had its message died",
)

# -- in a worker -------------------------------------------------------------------------------

started = Event(DEBUG, "started", f"started {_TASK} with key %(key)s", "key")
held_back = Event(
    INFO,
    "held_back",
    f"held back {_TASK}: another delivery or its predecessor is running, until %(until)s",
    "until",
)
ended_delivery = Event(
    WARNING,
    "ended_delivery",
    f"ended the delivery lease of {_TASK}: process %(pid)s of worker %(worker)s has died",
    "worker",
    "pid",
)
dropped = Event(INFO, "dropped", f"dropped {_TASK}: %(reason)s", "reason")
released = Event(
    DEBUG,
    "released",
    f"released key %(key)s of {_TASK} (%(reason)s)",
    "key",
    "reason",
    signal=unique_released,
)
lost = Event(WARNING, "lost", f"lost lock of {_TASK}: %(reason)s", "reason", signal=unique_lost)
_unreadable_header = Event(
    WARNING,
    "unreadable_header",
    f"cannot read the lock of {_TASK}: %(reason)s. %(effect)s. The sender is a newer release of "
    "celery-unique-tasks (upgrade this worker) or another program that sets this header (remove "
    f"it there). Its key is free when its lease ends; to free it now, {_RELEASE_IT}",
    "reason",
    "effect",
)
taken_over = Event(
    WARNING, "taken_over", f"left message of {_TASK} to the delivery that took it over"
)
other_store = Event(
    WARNING,
    "other_store",
    f"found no lock of {_TASK}: its caller uses another store or namespace. Set the same "
    "unique_store_url and unique_namespace for callers and workers, or such locks are never "
    "released (logged once). If both use the same store by two addresses, only this lock lapsed",
)
released_for_pool = Event(
    WARNING,
    "ended_for_another",
    f"released key of {_TASK} in the worker's main process: the process that ran it died before "
    "the lock store answered",
)

# -- at the store ------------------------------------------------------------------------------

_unreadable_record = Event(
    ERROR,
    "unreadable_record",
    f"cannot read the record of {_TASK} (%(act)s): %(reason)s",
    "act",
    "reason",
)
_store_error = Event(
    ERROR,
    "store_error",
    "lock store unavailable (%(act)s of task %(task_id)s): %(reason)s",
    "act",
    "reason",
)

#: Keys with an unreadable record that this process has reported: every act on such a key fails,
#: and a renewal comes every few seconds.
_unreadable_keys: BoundedDict[str | None, None] = BoundedDict(1000)


def switches(*, enabled: bool, dry_run: bool) -> None:
    """Once in a process, and again when they are set."""
    if not enabled:
        logger.warning(
            "unique_enabled is False: calls are published without locks. Locks that are held are "
            "released as their tasks end"
        )
    elif dry_run:
        logger.warning(
            "unique_dry_run is True: locks are acquired, and duplicates are published anyway"
        )


def conflict(
    app: Any,
    task_name: str,
    holder: Holder,
    key: str,
    on_conflict: str,
    waited_ms: int,
    dry_run: bool = False,
) -> None:
    state = str(holder.state)
    event = _dry_run_conflict if dry_run else skipped_publish
    event(task_name, holder.task_id, holder_state=state, on_conflict=on_conflict)
    if not unique_conflict.receivers:
        return
    unique_conflict.send(
        sender=task_name,
        task_id=holder.task_id,
        state=state,
        key=key,
        on_conflict=on_conflict,
        waited_s=waited_ms / 1000,
        **({"dry_run": True} if dry_run else {}),
        app=app,
    )


def parked(app: Any, task_name: str, task_id: str, acquired: Acquired, key: str) -> None:
    """Without a task id: the lane was full."""
    (_parked if task_id else _lane_full)(task_name, task_id, position=acquired.position)
    if not unique_conflict.receivers:
        return
    holder = acquired.holder
    unique_conflict.send(
        sender=task_name,
        task_id="" if holder is None else holder.task_id,
        state="" if holder is None else str(holder.state),
        key=key,
        on_conflict="queue",
        waited_s=0.0,
        **({"position": acquired.position} if task_id else {}),
        app=app,
    )


def unreadable_header(
    app: Any, task_name: str, task_id: str, wrong: str, *, runs: bool = True
) -> None:
    """Also ``unique_lost``: no worker renews or releases the lock that its caller acquired."""
    reason = f"its header celery_unique cannot be read: {wrong}"
    effect = "The task runs without a lock" if runs else "The message was dropped"
    _unreadable_header(task_name, task_id, reason=reason, effect=effect)
    unique_lost.send(sender=task_name, task_id=task_id, key="", reason=reason, app=app)


def store_error(
    app: Any, act: str, error: StoreUnavailable, task_name: str, task_id: str, key: str
) -> None:
    if not isinstance(error, UnreadableRecord):
        _store_error(task_name, task_id, act=act, reason=str(error))
    elif error.key not in _unreadable_keys:
        _unreadable_keys.remember(error.key, None)
        _unreadable_record(task_name, task_id, act=act, reason=str(error))
    unique_store_error.send(
        sender=task_name, act=act, exception=error, task_id=task_id, key=key, app=app
    )


def failed_over(app: Any, failover: FailOver) -> None:
    """Concerns no single task: the signal's sender, task id and key are empty."""
    logger.warning("lock store failed over: %s", failover)
    error = StoreUnavailable(str(failover), store=failover.after)
    unique_store_error.send(
        sender="", act="fail-over", exception=error, task_id="", key="", app=app
    )
