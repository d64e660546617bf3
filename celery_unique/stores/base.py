"""The contract of every lock store.

Each method is **one atomic act** on the record of one key: two calls, from any two processes,
never see each other half done. All durations are milliseconds, and all deadlines are computed from
the store's own clock, never the caller's.

A store raises :class:`~celery_unique.exceptions.StoreUnavailable`, and nothing else, when it cannot
reply within its time-out. The act may then have run or not: callers treat it as "maybe".

Acts marked *fire-and-forget* may return before the store has applied them.

A store may also have ``diagnose()``, see :mod:`celery_unique.stores.diagnosis`, and
``begin_acquire(key, claim)``: an acquire in two steps, which sends the claim and returns a function
that waits for the result of :meth:`LockStore.acquire`. It is called once, or never. Celery builds
the message in between, while the store decides. ``begin_acquire_many(claims, confirmed)`` is the
same for :meth:`LockStore.acquire_many`, combined with :meth:`LockStore.confirm_many`: messages of
other calls are sent in between.

A store that is the broker's own server, or that of the results, is a :class:`BrokerStore`.

A store whose parts fail separately, such as a cluster, has ``shard_of(key)``: the name of the part
that holds the key, as far as it is known without a query.

A record that cannot be read affects only its key: an act on it raises
:class:`~celery_unique.exceptions.UnreadableRecord`, a batch returns that error in its place, and a
walk yields a record whose ``unreadable`` describes the problem. Releasing the key deletes it.
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

#: Key, task id and lease of a task whose message is published.
Confirmed = tuple[str, str, int]

#: How many orphans one reap returns at most.
ORPHANS_AT_ONCE = 1000


#: A script that pushes a longer message, or writes a longer result, keeps the server from others
#: for too long: about 3.4 us for each kilobyte, where the command alone takes 0.6.
LONGEST_TEXT = 32_768


@dataclass(slots=True)
class Claim:
    """A call that is to be admitted: its task, and the policy of the call."""

    task_id: str
    task_name: str
    states: str  # letters of the caller's states
    grace_ms: int  # the lease until the publish is confirmed
    on_conflict: str = "ignore"
    parent: str = ""  # the task in whose body the call is made: never its duplicate
    max_wait_ms: int = 0  # how long replacing may postpone a task, 0 for any time
    window_ms: int = 0  # 0: no window
    delay_ms: int = 0  # time to the ETA, 0 for none
    keep: str = ""  # letters of the terminal states in which it stays recorded
    #: How long after its creation the ended task stays recorded; 0: while the window lasts.
    keep_ms: int = 0
    arguments: str = ""
    #: The same publish attempt is repeated (its first reply was lost or is old).
    #: A *new* call that has the holder's own id is a duplicate instead.
    again: bool = False
    #: The call's whole message, opaque here. If not empty, the call becomes a follower of the
    #: holder instead of a ``duplicate``.
    join: str = ""
    #: A canvas or a callback waits for the id: see ``Acquired.followers`` of its replacement.
    canvas: bool = False
    #: For ``follow``: when the task of the message was created, by the store's clock; 0: unknown.
    created_at: int = 0
    #: The call conflicts only if at least so many tasks block it.
    limit: int = 1
    #: With ``queue``: how many calls may be parked; 0: any number.
    max_queue: int = 0
    #: JSON: the values of the parameters that are merged. Only with ``merge``, and then not empty.
    merge: str = ""
    merge_max_bytes: int = 0  # how long the values of all calls of one task may be


@dataclass(slots=True)
class Holder:
    """The task that blocks a duplicate."""

    task_id: str
    state: State
    created_at: int
    lease: int
    arguments: str = ""
    eta: int = 0  # 0 for none; of a pending task, too, which is not shown as scheduled yet
    #: It waits, and the process that held its message is believed dead: see ``help``.
    abandoned: bool = False


@dataclass(slots=True)
class Acquired:
    """``created``; or ``duplicate`` / ``rejected`` / ``joined`` / ``ended`` / ``merged`` with the
    holder; or ``queued`` / ``full``, with the holder if a task blocks the call.

    A created task may replace others (``replaced``, in limbo until it is published), or wait for
    an active one to end (``after``). Its message must carry its ETA.

    ``joined``: the call follows the holder now, or did so before. ``ended``: it would, but the
    holder's result can be read already, so no follower was added.

    ``queued``: the call is parked, with its message, or was before. ``full``: it is not, since
    ``max_queue`` calls are.

    ``merged``: the holder runs with the values of the call; so it does for a call that ``joined``
    and has such values.
    """

    outcome: Literal[
        "created", "duplicate", "rejected", "joined", "ended", "queued", "full", "merged"
    ]
    holder: Holder | None = None
    now: int = 0  # the store's clock when it answered
    replaced: tuple[str, ...] = ()
    after: str = ""
    eta: int = 0  # of the created task: another one's, or brought forward by max_wait
    #: Those of ``replaced`` whose id a canvas waits for: they follow this task as soon as a
    #: worker receives their messages, and have no outcome before that.
    followers: tuple[str, ...] = ()
    position: int = 0  # how many calls are parked, this one included if it is


@dataclass(slots=True)
class Push:
    """The message of a call, which the store pushes in the act that admits the call."""

    queue: str  # the broker's list, with its prefix and priority
    lease_ms: int  # as of ``confirm``
    #: Differs between two publishes of one id: a publish that was withdrawn and arrives late is
    #: refused, a new call with that id is not.
    attempt: str
    #: The message, around the two values of its header that the store adds: the time of its
    #: creation, a number, and its outcome, ``replaced``, ``rerun`` or empty.
    head: str
    middle: str
    tail: str


@dataclass(slots=True)
class ResultWrite:
    """The result of a task, which the store writes in the act that finishes the task."""

    key: str  # also the channel on which the result is announced
    expires_s: int  # 0: it does not expire
    #: The encoded result, around the number of duplicates, which the store adds.
    head: str
    tail: str
    #: Do nothing if a result is stored already: see ``publish.stored_meta``.
    unless_stored: bool = False


@dataclass(slots=True)
class Start:
    """A message that a worker is about to run."""

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
    merge: bool = False  # the task may have a payload, even if its record is lost


@dataclass(slots=True)
class Started:
    """``run`` with its token; ``superseded``, ``done`` or ``wait`` without."""

    verdict: Literal["run", "superseded", "done", "wait"]
    token: int = 0
    lost: bool = False  # run, although no live record of this task was found
    mark: str = ""  # why it is superseded: superseded, withdrawn or revoked
    by: str = ""  # the id that replaced it
    #: The values of all calls that it runs for, see ``record_payloads``; empty: its message's.
    payload: str = ""
    wait_ms: int = 0  # of ``wait``: how long in any case, where that is known


@dataclass(slots=True)
class Held:
    """One message of a renewal, which this worker still holds."""

    key: str
    task_id: str
    delivery: str  # empty: the message is only held, nothing runs
    lease_ms: int
    run_lease_ms: int = 0
    #: Its message may exist twice, or be redelivered while it runs: its end leaves a done mark.
    copies: bool = False
    #: Of a message that is only held: the delivery under which it starts. If it has started by
    #: now, nothing is extended: its key would outlive its worker for as long as a message may wait.
    waits_as: str = ""
    #: Of such a message: for how long this worker is believed alive with it; 0: unknown.
    held_ms: int = 0
    #: Of such a message: its previous holder no longer has it. It is in the broker; or, if
    #: ``held_ms`` is given too, that replaces the earlier value.
    returned: bool = False
    merge: bool = False  # as of Start


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
    #: The token of the start that ends here, 0 for none: distinguishes a delivery that stalled
    #: from the one that took over its task, also after that has released it for a retry.
    token: int = 0
    #: The message was rejected. It may return from a dead letter exchange, and is then to run:
    #: no done mark stays, and a task that is kept does not stop it at the gate.
    rejected: bool = False
    merge: bool = False  # as of Start
    #: The same end is reported again, since its first reply was lost. A task that is gone has
    #: ended; calls whose publish is not confirmed are returned as if they were called again.
    again: bool = False


@dataclass(slots=True)
class Called:
    """A parked call that has its turn: a pending task, whose message is to be published and
    confirmed. If that does not happen within its grace, it is called again."""

    task_id: str
    message: str
    again: bool = False  # it was called before: it may have been published, and may have run


@dataclass(slots=True)
class Finished:
    """``ended`` (``settle``: call settle after result and ack) or ``not_yours``. ``stored``:
    nothing has changed, since there is a result already."""

    verdict: Literal["ended", "not_yours", "stored"]
    settle: bool = False
    duplicates: int = 0
    #: The task has followers, or will have soon; it is ``ending`` until settle.
    followers: bool = False
    #: Parked calls that have their turn now: the finishing worker publishes them.
    called: tuple[Called, ...] = ()


@dataclass(slots=True)
class Orphan:
    """A follower that only its reaper will complete; or a parked call that has its turn."""

    follower_id: str
    holder: str
    message: str
    promoted: bool = False  # its message may never have been published: see ``promote``
    #: What became of the holder: ``revoked``, ``superseded``, ``withdrawn``, ``done``, or
    #: empty (it died, or it ended without a trace). ``called``: it is a parked call, and its own
    #: holder; ``promoted`` if it was called before.
    fate: str = ""

    @property
    def called(self) -> Called | None:
        if self.fate != "called":
            return None
        return Called(self.follower_id, self.message, self.promoted)


Promotion = Literal["publish", "follows", "gone"]


class LockStore(Protocol):
    """See the module's docstring for the guarantees of every act."""

    guarantee: Guarantee
    #: Shown in the OJS manifest: how acts are made atomic.
    mechanism: str
    #: Added to the store's clock, for tests that move time instead of waiting.
    clock_offset_ms: int

    # -- acts of the caller --------------------------------------------------
    def acquire(self, key: str, claim: Claim) -> Acquired:
        """Admit the claim as a pending task, or return the holder that blocks it.

        With ``queue`` the call is parked with its message (``claim.join``) if ``limit`` tasks
        block it or others are parked: they are called in the order in which they were.
        """

    def acquire_many(
        self, claims: Sequence[tuple[str, Claim]]
    ) -> list[Acquired | StoreUnavailable]:
        """One act for each claim, in order, in as few round trips as possible.

        If only some of them fail, their errors are returned in their places.
        """

    def confirm(self, key: str, task_id: str, lease_ms: int) -> None:
        """Fire-and-forget: pending becomes available. Changes and creates nothing else.

        The lease runs from the ETA, if any.
        """

    def confirm_many(self, confirmed: Sequence[Confirmed]) -> None:
        """Fire-and-forget: one act for each task, in as few round trips as possible."""

    def give_back(self, key: str, task_id: str, mark_ms: int) -> bool:
        """The publish failed: remove the pending task and mark its id withdrawn.

        No effect unless it is pending and no copy of it was published. If calls were merged into
        it, it stays without its own values, for the copy that one of them publishes or has
        published.
        """

    def help(
        self, key: str, task_id: str, claim_ms: int = 0
    ) -> Literal["go", "again", "published"]:
        """May this caller publish a copy under the holder's id?

        Yes if that is pending or abandoned; if abandoned, no other caller may for ``claim_ms``,
        and after the publish the caller renews with ``Held.returned``. Never for a task in a
        canvas: the copy would run without the callbacks that wait for the id.
        """

    def cancel(self, key: str, task_id: str, mark_ms: int) -> Literal["cancelled", "active"]:
        """Revoke a task that has not started, or whose delivery is dead."""

    def unmerge(self, key: str, call_id: str) -> bool:
        """Remove the values of a call that may have been merged and is not made after all, or is
        made in another way. No effect once the task has started that they were merged into."""

    def release(self, key: str, task_id: str | None = None, lease: int = 0) -> int:
        """Release the key's live tasks, or one of them, for an operator; returns how many.

        With ``lease``, only a task that waits and whose lease is still this one, as it was read:
        every act that starts, renews or publishes a task changes it.
        """

    # -- acts of the worker --------------------------------------------------
    def start(self, key: str, start: Start) -> Started:
        """The gate: may this delivery run its body now?"""

    def renew(self, held: Sequence[Held]) -> list[int | StoreUnavailable]:
        """Extend leases, never create. 0: this delivery no longer holds that task; else 1 plus
        the number of its followers.

        If only some of them fail, their errors are returned in their places.
        """

    def retry(self, key: str, task_id: str, delivery: str, lease_ms: int, copies: bool) -> None:
        """Fire-and-forget: active becomes retryable, and the delivery releases it."""

    def finish(self, key: str, finish: Finish) -> Finished:
        """The body has finished. Only the delivery that started may report it.

        In the same act, parked calls of the key that have their turn now become pending tasks.
        """

    def settle(self, key: str, finish: Finish, mark_done: bool) -> None:
        """Fire-and-forget: result and acknowledgement are done, remove the ending task."""

    def forget(self, key: str, task_id: str) -> None:
        """Fire-and-forget: the message that a mark was waiting for was received and dropped.

        No effect on a lasting mark, since another message of this id may be waiting, too, nor on
        that of a call that a reaper awaits or has published again."""

    # -- followers -----------------------------------------------------------
    def follow(self, key: str, claim: Claim, holder_id: str) -> bool:
        """Make the task of a received message (``claim.join``) a follower of another task, or of
        the one that replaced that, and so on.

        If that task is gone, the follower is an orphan and due immediately. False: no effect,
        since its id is a task of the key itself.
        """

    def followers(self, key: str, holder_id: str | None = None) -> list[tuple[str, Follower]]:
        """The followers of this task, or of any task of the key, oldest first. Reads only."""

    def complete_follower(self, key: str, follower_id: str) -> None:
        """Remove a follower that has its result. Absent: no effect."""

    def due(self, limit: int = 20) -> list[str]:
        """Keys whose followers should be reaped now, those that wait longest first.

        The cost depends on what is due, never on the number of locks.
        """

    def reap(self, key: str, reaper: str, claim_ms: int) -> list[Orphan]:
        """Claim the key's orphans for one reaper: promoted ones first, then oldest first.

        A follower is an orphan when its holder neither lives nor is being settled by a living
        delivery, and a promoted one when its grace has passed unconfirmed. While the claim of
        another reaper lasts there are none. At most ``ORPHANS_AT_ONCE``: the same reaper may
        repeat it.

        In front of them, whatever is claimed: parked calls that have their turn, and are pending
        tasks by this act.
        """

    def promote(
        self, key: str, follower_id: str, reaper: str, grace_ms: int, mark_ms: int
    ) -> Promotion:
        """Decide what becomes of an orphan whose holder left no result.

        ``follows``: another task of the key lives, and all orphans of that holder follow it (a
        promoted one waits again, and its id is marked done). ``publish``: it is a pending task
        under its own id now, which the other orphans of its holder follow; publish its message
        and confirm it. ``gone``: it is no orphan any more, or claimed by another reaper.
        """

    def parked(self, key: str) -> list[str]:
        """The ids of the parked calls, the next one first; for operators. Reads only."""

    # -- reading -------------------------------------------------------------
    def read(self, key: str) -> tuple[Record, int]:
        """The current record, without what has lapsed, and the store's clock.

        It has the number of followers (``record.following``), not the followers; and of the marks
        beside it the latest deadline (``record.more_until``): see ``mark``.
        """

    def mark(self, key: str, task_id: str) -> Mark | None:
        """The mark of this id, in the record or beside it."""

    def walk(self, batch: int = 500, stop_at: float = math.inf) -> Iterator[tuple[str, Record]]:
        """Every key with its record, in batches; for operators, never on a hot path.

        It stops early at ``stop_at``, a time of ``time.monotonic()``: if a store holds more than
        locks, finding the next one can take long.
        """

    # -- life ----------------------------------------------------------------
    def sweep(self, batch: int = 500) -> int:
        """Delete what has lapsed, if the store does not do so by itself."""

    def fingerprint(self) -> str:
        """A short name of this store without secrets, to distinguish stores."""

    def ping(self) -> None:
        """Raise StoreUnavailable unless the store replies."""

    def flush(self, timeout_s: float | None = None) -> None:
        """Wait for every fire-and-forget act so far (shutdown, lookup, tests).

        StoreUnavailable if there is no progress or, with a time-out, not all finish by then.
        """

    def close(self) -> None:
        """Close connections. The store connects again when it is used again."""


class BrokerStore(LockStore, Protocol):
    """A store that can also push messages and write results: Redis, where it is the broker's or
    the result backend's own server and database."""

    @property
    def begin_transaction(self) -> Callable[..., Callable[[], None]]:
        """Runs commands of the broker, given as tuples, in one transaction. What it returns waits
        for the reply, once, and raises StoreUnavailable where not all are surely applied."""

    def begin_publish(
        self, pushes: Sequence[tuple[str, Claim, Push]]
    ) -> Callable[[], list[Acquired | StoreUnavailable]]:
        """Admit calls and push their messages: lock and message are one act for each.

        A created task is recorded as if it was acquired and confirmed. What is returned waits for
        the replies, once. A publish whose reply was lost is sent again, and pushes nothing if it
        has run before, whatever has become of its task. Not for ``replace_except_schedule`` and
        ``max_wait_ms``, which change the ETA: the message has it already.
        """

    def probe(self, key: str, claim: Claim) -> Acquired | None:
        """What ``acquire`` would return for a call that conflicts; None: it would be created, and
        nothing has changed."""

    def withdraw(
        self, key: str, task_id: str, attempt: str, mark_ms: int
    ) -> Literal["withdrawn", "active"]:
        """Undo a publish without a reply, which may have run, or may still: a task that has not
        started is removed, its message is dropped by the gate, and a publish of this attempt that
        arrives later is refused. ``active``: its task stays, or has ended. It has started, or
        another call was a duplicate of it or was replaced by it, or another publish created it.
        """

    def finish_with_result(self, key: str, finish: Finish, result: ResultWrite) -> Finished:
        """``finish``, and write and announce the result in the same act: also ``not_yours``, but
        not ``stored``."""


def shard_of(store: LockStore, key: str) -> str:
    """The part of the store that holds the key; empty for a store that has no parts."""
    of: Callable[[str], str] | None = getattr(store, "shard_of", None)
    return "" if of is None else of(key)


def holder_of(task_id: str, task: TaskEntry, now: int) -> Holder:
    state = task.shown_state(now)
    abandoned = task.is_abandoned(now)
    return Holder(task_id, state, task.created_at, task.lease, task.arguments, task.eta, abandoned)
