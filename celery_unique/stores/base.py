"""The contract that every lock store keeps.

Each method is **one atomic act** on the record of one key: two calls, from any
two processes, never see each other half done. All durations are milliseconds
and all deadlines are computed from the store's own clock, never the caller's.

A store raises :class:`~celery_unique.exceptions.StoreUnavailable`, and nothing
else, when it cannot answer within its time-out. The act may then have happened
or not: callers treat it as "maybe".

Acts marked *one way* may return before the store has carried them out.

A store may also have ``diagnose()``, see :mod:`celery_unique.stores.diagnosis`, and
``begin_acquire(key, claim)``: an acquire in two steps, which sends the claim and returns a function
that waits for what :meth:`LockStore.acquire` would have returned. It is called once, or never.
Celery makes the message in between, while the store decides.
``begin_acquire_many(claims, confirmed)`` is the same for :meth:`LockStore.acquire_many`, with what
:meth:`LockStore.confirm_many` would have told: messages of other calls are sent in between.

A store whose parts fail one by one, such as a cluster, has ``shard_of(key)``: a name of the part
that holds the key, as far as it is known without asking.

A record that cannot be read concerns its key alone: an act on it raises
:class:`~celery_unique.exceptions.UnreadableRecord`, a batch has that error in its place, and a
walk has a record whose ``unreadable`` says what is wrong. To release the key deletes it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from celery_unique.exceptions import StoreUnavailable

from .record import Mark, Record, State, TaskEntry
from .record_followers import Follower

Guarantee = Literal["strong", "best-effort"]

#: Key, task id and lease of a task whose message is out.
Confirmed = tuple[str, str, int]

#: How many orphans one reply tells of.
ORPHANS_AT_ONCE = 1000


@dataclass(slots=True)
class Claim:
    """What a caller wants recorded: its task, and the policy it asks under."""

    task_id: str
    task_name: str
    states: str  # letters of the caller's states
    grace_ms: int  # the lease until the publish is confirmed
    on_conflict: str = "ignore"
    parent: str = ""  # the task in whose body the call is made: never its duplicate
    max_wait_ms: int = 0  # how long replacing may push a task back, 0 for any time
    window_ms: int = 0  # 0: no window
    delay_ms: int = 0  # time to the ETA, 0 for none
    keep: str = ""  # letters of the terminal states in which it stays recorded
    #: How long after its creation the ended task stays recorded; 0: while the window lasts.
    keep_ms: int = 0
    arguments: str = ""
    #: The same publish attempt asks again (its first answer was lost or is old).
    #: A *new* call that brings the holder's own id is a duplicate instead.
    again: bool = False
    #: The call's whole message, opaque here. Not empty: instead of being told ``duplicate`` the
    #: call is attached to the holder as its follower.
    join: str = ""
    #: A canvas or a callback waits for the id: a task that takes its place says so, see
    #: ``Acquired.followers``.
    canvas: bool = False


@dataclass(slots=True)
class Holder:
    """The task a duplicate is told about."""

    task_id: str
    state: State
    created_at: int
    lease: int
    arguments: str = ""
    eta: int = 0  # 0 for none; of a pending task, too, which is not shown as scheduled yet
    #: It waits, and whoever had its message is believed dead: see ``help``.
    abandoned: bool = False


@dataclass(slots=True)
class Acquired:
    """``created``; or ``duplicate`` / ``rejected`` / ``joined`` / ``ended`` with the holder.

    A created task may stand in for others (``replaced``, in limbo until it is published),
    or wait for an active one to end (``after``). Its message must carry its ETA.

    ``joined``: the call follows the holder now, or did so already. ``ended``: it would, but the
    holder's result is there to be read already, so nothing was attached.
    """

    outcome: Literal["created", "duplicate", "rejected", "joined", "ended"]
    holder: Holder | None = None
    now: int = 0  # the store's clock when it answered
    replaced: tuple[str, ...] = ()
    after: str = ""
    eta: int = 0  # of the created task: another one's, or brought forward by max_wait
    #: Those of ``replaced`` whose id a canvas waits for: they follow this task as soon as a
    #: worker reaches their messages, and have no end of their own before that.
    followers: tuple[str, ...] = ()


@dataclass(slots=True)
class Start:
    """What a worker tells of a message it is about to run."""

    task_id: str
    delivery: str
    task_name: str
    lease_ms: int  # lock lease: the run lease once the message is acked, else the queue lease
    run_lease_ms: int  # delivery lease
    mark_ms: int = 0  # how long the marks of what it replaced stay: the queue lease
    #: From the message's header, for a record that lapsed or was lost.
    created_at: int = 0
    window_ms: int = 0
    keep: str = ""
    arguments: str = ""


@dataclass(slots=True)
class Started:
    """``run`` with its token; ``superseded``, ``done`` or ``wait`` without."""

    verdict: Literal["run", "superseded", "done", "wait"]
    token: int = 0
    lost: bool = False  # run, although no live record of this task was found
    mark: str = ""  # why it is superseded: superseded, withdrawn or revoked
    by: str = ""  # the id that took its place


@dataclass(slots=True)
class Held:
    """One line of a renewal: a message that this worker still holds."""

    key: str
    task_id: str
    delivery: str  # empty: the message is only held, nothing runs
    lease_ms: int
    run_lease_ms: int = 0
    #: It runs, and its message may come back all the same: its end leaves a done mark.
    copies: bool = False
    #: Of a message that is only held: the delivery as which it starts. If it has done so by now,
    #: nothing is extended: its key would outlast its worker for as long as a message may wait.
    waits_as: str = ""
    #: Of such a message: for how long this worker is believed to be alive with it; 0: not said.
    held_ms: int = 0
    #: Of such a message: whoever had it, has it no more. It is in the broker; or, where ``held_ms``
    #: is given besides, what was said of it so far does not count.
    returned: bool = False


@dataclass(slots=True)
class Finish:
    """The end of a body: the final state and how long it may be kept."""

    task_id: str
    delivery: str
    state: State
    retention_ms: int  # how long an ended task without a window is kept
    mark_ms: int  # how long a done mark stays: the queue lease of the message
    settle_later: bool = False  # not acknowledged yet, or the message may exist twice
    #: How long this delivery is believed alive while it completes followers; its own delivery
    #: lease if that is longer. A task that never started has none.
    run_lease_ms: int = 0
    #: The token of the start that ends here, 0 for none: a delivery that stood still is told
    #: from the one that took its task over, also after that has let go of it for a retry.
    token: int = 0
    #: The message was rejected. It may come back from a dead letter exchange, and is then to run:
    #: no done mark stays, and a task that is kept does not stop it at the gate.
    rejected: bool = False


@dataclass(slots=True)
class Finished:
    """``ended`` (``settle``: call settle after result and ack) or ``not_yours``."""

    verdict: Literal["ended", "not_yours"]
    settle: bool = False
    duplicates: int = 0
    #: Somebody follows the task, or is to follow it soon; it is ``ending`` until settle.
    followers: bool = False


@dataclass(slots=True)
class Orphan:
    """A follower that nobody will complete, unless whoever reaped it does."""

    follower_id: str
    holder: str
    message: str
    promoted: bool = False  # its message may never have been published: see ``promote``
    #: What is known of the holder: ``revoked``, ``superseded``, ``withdrawn``, ``done``, or
    #: empty (it died, or it ended and left no trace).
    fate: str = ""


Promotion = Literal["publish", "follows", "gone"]


class LockStore(Protocol):
    """See the module's docstring for what every act promises."""

    guarantee: Guarantee
    #: Shown in the OJS manifest: by what means acts are atomic.
    mechanism: str
    #: Added to the store's clock, for tests that move time instead of waiting.
    clock_offset_ms: int

    # -- acts of the caller --------------------------------------------------
    def acquire(self, key: str, claim: Claim) -> Acquired:
        """Admit the claim as a pending task, or name the holder that blocks it."""

    def acquire_many(
        self, claims: Sequence[tuple[str, Claim]]
    ) -> list[Acquired | StoreUnavailable]:
        """As many acts as claims, in order, in as few round trips as the store can.

        Where only some could not be answered, the reply has the error in their place.
        """

    def confirm(self, key: str, task_id: str, lease_ms: int) -> None:
        """One way: pending becomes available. Anything else is left alone, none created.

        The lease runs from the ETA where there is one.
        """

    def confirm_many(self, confirmed: Sequence[Confirmed]) -> None:
        """One way: as many acts as there are tasks, in as few messages as the store can."""

    def give_back(self, key: str, task_id: str, mark_ms: int) -> bool:
        """Publishing failed: forget the pending task and mark its id withdrawn.

        No effect unless it is pending and no copy of it was published.
        """

    def help(
        self, key: str, task_id: str, claim_ms: int = 0
    ) -> Literal["go", "again", "published"]:
        """May this caller publish a copy under the holder's id?

        Where that is pending, or abandoned: then no other caller may for ``claim_ms``. Whoever
        has published a copy of the latter says so (``Held.returned``). Of a task in a canvas
        there is no copy: it would run without the callbacks that wait for the id.
        """

    def cancel(self, key: str, task_id: str, mark_ms: int) -> Literal["cancelled", "active"]:
        """Revoke a task that has not started, or whose delivery is dead."""

    def release(self, key: str, task_id: str | None = None) -> int:
        """An operator lets go of the key's live tasks (or of one): how many."""

    # -- acts of the worker --------------------------------------------------
    def start(self, key: str, start: Start) -> Started:
        """The gate: may this delivery run its body now?"""

    def renew(self, held: Sequence[Held]) -> list[int | StoreUnavailable]:
        """Extend leases, never create. 0: that task is no longer this delivery's; else one more
        than follow it.

        Where only some could not be answered, the reply has the error in their place.
        """

    def retry(self, key: str, task_id: str, delivery: str, lease_ms: int, copies: bool) -> None:
        """One way: active becomes retryable, the delivery lets go of it."""

    def finish(self, key: str, finish: Finish) -> Finished:
        """The body is over. Only the delivery that started may say so."""

    def settle(self, key: str, finish: Finish, mark_done: bool) -> None:
        """One way: result and acknowledgement are done, the ending task may go."""

    def forget(self, key: str, task_id: str) -> None:
        """One way: the message that a mark was waiting for was reached and dropped."""

    # -- followers -----------------------------------------------------------
    def follow(self, key: str, claim: Claim, holder_id: str) -> bool:
        """The task of a message in hand (``claim.join``) becomes a follower of another task, or
        of the one that took the place of that, and so on.

        Where that task is gone the follower is an orphan at once, and due. False: no effect,
        since its id is a task of the key itself.
        """

    def followers(self, key: str, holder_id: str | None = None) -> list[tuple[str, Follower]]:
        """Who follows this task (or any task of the key), oldest first. Reads only."""

    def complete_follower(self, key: str, follower_id: str) -> None:
        """The follower has its result: forget it. Absent: no effect."""

    def due(self, limit: int = 20) -> list[str]:
        """Keys whose followers should be looked after now, those that wait longest first.

        Its cost depends on what is due, never on how many locks there are.
        """

    def reap(self, key: str, reaper: str, claim_ms: int) -> list[Orphan]:
        """Claim the key's orphans for one reaper: those that are promoted first, then oldest first.

        A follower is an orphan when its holder neither lives nor is being settled by a living
        delivery, and a promoted one when its grace has passed unconfirmed. While another's
        claim lasts there are none. At most ``ORPHANS_AT_ONCE``: the same reaper may ask again.
        """

    def promote(
        self, key: str, follower_id: str, reaper: str, grace_ms: int, mark_ms: int
    ) -> Promotion:
        """What becomes of an orphan whose holder left no result.

        ``follows``: another task of the key lives, and all orphans of that holder follow it (a
        promoted one waits again, and its id is marked done). ``publish``: it is a pending task
        under its own id now, which the other orphans of its holder follow; publish its message
        and confirm it. ``gone``: it is no orphan any more, or another reaper's.
        """

    # -- reading -------------------------------------------------------------
    def read(self, key: str) -> tuple[Record, int]:
        """The record as it stands, without what has lapsed, and the store's clock.

        Of followers it tells how many there are (``record.following``), not who; and of the marks
        that have no room in it until when there are any (``record.more_until``): see ``mark``.
        """

    def mark(self, key: str, task_id: str) -> Mark | None:
        """The mark of this id, wherever it lies."""

    def walk(self, batch: int = 500, stop_at: float = math.inf) -> Iterator[tuple[str, Record]]:
        """Every key with its record, in batches; for people, never on a hot path.

        It ends before it is through at ``stop_at``, a moment of ``time.monotonic()``: where a
        store holds more than locks, finding the next one can take long.
        """

    # -- life ----------------------------------------------------------------
    def sweep(self, batch: int = 500) -> int:
        """Delete what has lapsed, where the store does not do so by itself."""

    def fingerprint(self) -> str:
        """A short name of this store without secrets, to tell two stores apart."""

    def ping(self) -> None:
        """Raise StoreUnavailable unless the store answers."""

    def flush(self, timeout_s: float | None = None) -> None:
        """Wait until every one-way act so far has been carried out (shutdown, lookup, tests).

        StoreUnavailable where they do not get on or, with a time-out, are not all over by then.
        """

    def close(self) -> None:
        """Let go of connections. The store connects again when it is used again."""


def shard_of(store: LockStore, key: str) -> str:
    """The part of the store that holds the key; empty for a store that has no parts."""
    of: Callable[[str], str] | None = getattr(store, "shard_of", None)
    return "" if of is None else of(key)


def holder_of(task_id: str, task: TaskEntry, now: int) -> Holder:
    state = task.shown_state(now)
    abandoned = task.is_abandoned(now)
    return Holder(task_id, state, task.created_at, task.lease, task.arguments, task.eta, abandoned)
