"""The record of one key: the tasks that hold it, the marks they left, and their followers.

A key can have several tasks at a time: states with gaps, a passed window and a lapsed lease all
admit a second task while the first still lives. Every store keeps the same record in the same
packed form, so that a record means the same in each and a new field is added once.

Times are milliseconds of the store's clock; tokens are microseconds.
"""

from __future__ import annotations

import json
from base64 import b32decode, b32encode
from collections import OrderedDict
from collections.abc import MutableMapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Protocol

from celery_unique.policy.states import State as State  # noqa: PLC0414  (re-exported)

from .record_followers import Following, Joined, typed
from .record_payloads import Payloads, PayloadsInMemory

#: Version of the packed form. It is the first element of every packed task, so
#: that two releases of the library can share a store while one is rolled out.
SCHEMA_VERSION = 1


#: Each state is stored as one letter. SCHEDULED never is: an available task whose ETA lies ahead.
LETTER_OF = {
    State.PENDING: "p",
    State.SCHEDULED: "s",
    State.AVAILABLE: "w",
    State.ACTIVE: "r",
    State.RETRYABLE: "t",
    State.COMPLETED: "c",
    State.DISCARDED: "d",
    State.CANCELLED: "x",
}
STATE_OF = {letter: state for state, letter in LETTER_OF.items()}
TERMINAL_LETTERS = frozenset("cdx")
#: Among those letters, and without meaning to any act: the call named its queue or exchange, so
#: its message is not to be searched for in the queue of its task.
QUEUE_NAMED = "q"
#: As that: the caller chose the id, or a canvas did, so that it may have been used before.
ID_GIVEN = "i"
#: As those: the call was published through a connection to another broker than the app's.
OTHER_BROKER = "b"
#: Between those letters and a label, in base 32: that has no small letters.
LABELLED = "|"
#: Within a label, which has no control characters: what follows is the trace of the call.
TRACED = "\0"


def packed_label(label: str) -> str:
    """A text for operators, in a form that no act takes for a letter of a state."""
    return LABELLED + b32encode(label.encode()).decode().rstrip("=")


def _unpacked_label(packed: str) -> tuple[str, str]:
    """The label, and the trace of the call."""
    try:
        text = b32decode(packed + "=" * (-len(packed) % 8)).decode()
    except ValueError:
        text = ""
    label, _, trace = text.partition(TRACED)
    return label, trace


def letters(states: Any) -> str:
    """The given OJS state names as a string of letters, in a fixed order."""
    return _letters(tuple(states))


@lru_cache(maxsize=1024)  # once for every call, for the few sets of states that policies have
def _letters(states: tuple[str, ...]) -> str:
    wanted = {State(name) for name in states}
    return "".join(letter for state, letter in LETTER_OF.items() if state in wanted)


@lru_cache(maxsize=1024)
def terminal_letters(states: str) -> str:
    """The letters of final states among them."""
    return "".join(letter for letter in states if letter in TERMINAL_LETTERS)


def is_kept(state: State, keep: str) -> bool:
    """Whether a task stays recorded in this final state; ``keep`` as in `TaskEntry`."""
    return LETTER_OF[state] in keep


@dataclass(slots=True)
class TaskEntry:
    """One task of the key. The order of the fields is the packed order."""

    state: str  # a letter of STATE_OF
    created_at: int
    lease: int  # deadline: until then the task counts as existing
    task_name: str = ""
    window_ends: int = 0  # 0: no window; bounds how long an ended task is kept
    eta: int = 0
    #: Letters of the terminal states in which it stays recorded, QUEUE_NAMED, ID_GIVEN and
    #: OTHER_BROKER, and its label with its trace.
    keep: str = ""
    duplicates: int = 0
    last_duplicate_at: int = 0
    delivery: str = ""  # what runs it; new for every message received
    delivery_lease: int = 0  # until then that delivery is believed alive
    token: int = 0  # fencing number of the delivery that runs it
    #: Subset of "c" in a canvas, "e" ending, "f" expected by followers, "j" rejected, "m" copies,
    #: "o" released, "p" with a payload.
    flags: str = ""
    by: str = ""  # id of an unconfirmed replacement: this task is in limbo
    after: str = ""  # id of the active task this one succeeds
    arguments: str = ""  # fingerprint of the arguments behind an idempotency key
    since: int = 0  # when the first of the tasks was created that this one replaces
    #: Of a task that waits: until when the worker that holds its message is believed alive. 0: no
    #: worker is known to hold it, so it waits in the broker.
    held_until: int = 0

    @property
    def pending(self) -> bool:
        """Admitted; its publish is not confirmed yet."""
        return self.state == "p"

    @property
    def waiting(self) -> bool:
        """Published and not running: in the queue, or before a retry."""
        return self.state in "wt"

    @property
    def unstarted(self) -> bool:
        """No delivery has started it: pending, or in the queue for the first time."""
        return self.state in "pw"

    @property
    def running(self) -> bool:
        return self.state == "r"

    @property
    def terminal(self) -> bool:
        return self.state in TERMINAL_LETTERS

    @property
    def stored_state(self) -> State:
        """Its state without regard to the ETA, see ``shown_state``."""
        return STATE_OF[self.state]

    @property
    def queue_named(self) -> bool:
        """The call itself named the queue of its message."""
        return QUEUE_NAMED in self.keep

    @property
    def other_broker(self) -> bool:
        """The call itself named the broker of its message."""
        return OTHER_BROKER in self.keep

    @property
    def id_given(self) -> bool:
        """The caller chose its id."""
        return ID_GIVEN in self.keep

    @property
    def label(self) -> str:
        """The text that its policy makes for operators; empty for none."""
        return _unpacked_label(self.keep.partition(LABELLED)[2])[0]

    @property
    def trace(self) -> str:
        """The trace context of its call, where that is traced: a ``traceparent``."""
        return _unpacked_label(self.keep.partition(LABELLED)[2])[1]

    @property
    def ending(self) -> bool:
        """The body has finished and callers see the final state; the result is not settled."""
        return "e" in self.flags

    @property
    def copies(self) -> bool:
        """There may be a second message with this id."""
        return "m" in self.flags

    @property
    def in_canvas(self) -> bool:
        """A canvas or a callback waits for its id: superseded, it follows its replacement."""
        return "c" in self.flags

    @property
    def expected(self) -> bool:
        """It replaced a task in a canvas whose message has yet to arrive: its result must be
        stored before its record is deleted."""
        return "f" in self.flags

    @property
    def released(self) -> bool:
        """Released by an operator: it blocks no call, and no renewal revives it."""
        return "o" in self.flags

    @property
    def merges(self) -> bool:
        """The values of its call, and of those merged into it, are stored beside the record."""
        return "p" in self.flags

    @property
    def rejected(self) -> bool:
        """It has ended, and its message was rejected: if redelivered, it runs."""
        return "j" in self.flags

    @property
    def marked_for_good(self) -> bool:
        """Whether a mark of it must outlive the first message that finds it.

        No caller publishes a copy of a task in a canvas; and an older release takes a lasting mark
        for one of a kind that it does not know, so that the task would not follow its replacement.
        """
        return self.copies and not self.in_canvas

    def is_abandoned(self, now: int) -> bool:
        """Whether it waits, and the worker that held its message is believed dead."""
        return self.waiting and 0 < self.held_until <= now

    def flag(self, letter: str) -> None:
        if letter not in self.flags:
            self.flags += letter

    def unflag(self, letter: str) -> None:
        self.flags = self.flags.replace(letter, "")

    def shown_state(self, now: int) -> State:
        """The state as OJS names it: waiting tasks with an ETA ahead are scheduled."""
        if self.state == "w" and self.eta > now:
            return State.SCHEDULED
        return self.stored_state

    def counts_as(self, now: int) -> str:
        """Letters of every state that this task counts as for a call.

        A pending task also counts as the state that it is about to enter: its message may be
        published already.
        """
        waiting = "s" if self.eta > now else "w"
        if self.pending:
            return "p" + waiting
        return waiting if self.state == "w" else self.state

    def packed(self) -> list[Any]:
        values: list[Any] = [
            SCHEMA_VERSION,
            self.state,
            self.created_at,
            self.lease,
            self.task_name,
            self.window_ends,
            self.eta,
            self.keep,
            self.duplicates,
            self.last_duplicate_at,
            self.delivery,
            self.delivery_lease,
            # A string, since Lua's JSON writer keeps only 14 digits of a number.
            str(self.token) if self.token else "",
            self.flags,
            self.by,
            self.after,
            self.arguments,
            self.since,
            self.held_until,
        ]
        # Most tasks use the first five: the rest is left off while it is empty.
        while values[-1] in ("", 0):
            values.pop()
        return values

    @classmethod
    def unpacked(cls, values: list[Any]) -> TaskEntry:
        # Fields beyond those known here were written by a newer release: ignored.
        fields = values[1:19]
        if len(fields) > 11:
            fields[11] = int(fields[11] or 0)
        fields = typed(fields, _TASK_VALUES)
        if fields[0] not in STATE_OF:
            raise ValueError("a task has a state that is not known here")
        return cls(*fields)


#: The types of a task's values in their packed order, without the version.
_TASK_VALUES = (
    *(str, int, int, str, int, int, str, int, int),
    *(str, int, int, str, str, str, str, int, int),
)
_MARK_VALUES = (str, int, str)


MARK_KINDS = ("superseded", "withdrawn", "revoked", "done")
#: Behind the kind of a lasting mark, where every release and every column has room for it.
LASTING = "+"
#: No task has this id: under it a packed record has the latest deadline of the marks beside it,
#: and their number. An older release takes it for a mark, and keeps it.
BESIDE = ""


@dataclass(slots=True)
class Mark:
    """The trace of an id whose message may still arrive."""

    kind: str
    until: int
    by: str = ""  # of a superseded id: the id that replaced it
    #: There may be two messages of the id, and each must find the mark: `forget` leaves it.
    lasting: bool = False

    @property
    def stored_kind(self) -> str:
        return self.kind + LASTING if self.lasting else self.kind

    def packed(self) -> list[Any]:
        values = [self.stored_kind, self.until]
        return [*values, self.by] if self.by else values

    @classmethod
    def unpacked(cls, values: list[Any]) -> Mark:
        kind, until, *by = typed(values[:3], _MARK_VALUES)
        return cls(kind.removesuffix(LASTING), until, by[0] if by else "", kind.endswith(LASTING))


#: How many marks a record holds itself. Further ones are stored beside it, where an act finds those
#: that it needs by id: a key whose task was replaced 100,000 times costs no more than any other.
MARKS_INLINE = 16
#: A longer id has no room in a column: its mark stays in the record.
LONGEST_ID = 255
#: How many of the marks beside a record are checked when one is added: those that have lapsed are
#: deleted. More than one, so that they become fewer.
CHECKED = 3


class MarksBeside(Protocol):
    """The marks of one key that have no room in its record, by id. Some may have lapsed."""

    def get(self, task_id: str) -> Mark | None:
        """The mark, lapsed or not."""

    def put(self, task_id: str, mark: Mark) -> None:
        """Store it, and overwrite an older one."""

    def remove(self, task_id: str) -> Mark | None:
        """Delete it; None if there is none."""

    def forget_lapsed(self, now: int) -> int:
        """Delete some lapsed ones, unless the store expires them; returns how many."""

    def clear(self) -> None:
        """Delete all: they have lapsed."""


@dataclass(slots=True)
class MarksInMemory:
    _marks: OrderedDict[str, Mark] = field(default_factory=OrderedDict)

    def get(self, task_id: str) -> Mark | None:
        return self._marks.get(task_id)

    def put(self, task_id: str, mark: Mark) -> None:
        self._marks[task_id] = mark

    def remove(self, task_id: str) -> Mark | None:
        return self._marks.pop(task_id, None)

    def forget_lapsed(self, now: int) -> int:
        """In turn: one that has not lapsed moves to the end."""
        lapsed = 0
        for _ in range(min(CHECKED, len(self._marks))):
            task_id, mark = self._marks.popitem(last=False)
            if mark.until <= now:
                lapsed += 1
            else:
                self._marks[task_id] = mark
        return lapsed

    def clear(self) -> None:
        self._marks.clear()


@dataclass(slots=True)
class Record:
    """Everything that a store holds of one key."""

    token: int = 0
    tasks: dict[str, TaskEntry] = field(default_factory=dict)
    marks: dict[str, Mark] = field(default_factory=dict)
    following: Following | None = None
    #: The followers themselves, of which ``following`` is the summary. Only in an act: a record
    #: that was read has the summary alone, since they may be many.
    followers: MutableMapping[str, Joined] = field(default_factory=dict)
    #: The latest deadline of the marks beside the record; 0: there are none.
    more_until: int = 0
    #: Their approximate number: some lapsed ones are counted, others are not.
    more_marks: int = field(default=0, compare=False)
    #: Those marks. Only in an act, like the followers.
    beside: MarksBeside = field(default_factory=MarksInMemory, compare=False)
    #: The values of merged calls. Only in an act, like the followers.
    payloads: Payloads = field(default_factory=PayloadsInMemory, compare=False)

    #: In a walk: why the record cannot be read. Empty: it can.
    unreadable: str = ""

    def __bool__(self) -> bool:
        return bool(
            self.tasks
            or self.marks
            or self.following
            or self.more_until
            or self.unreadable
            or self.payloads.latest()
        )

    @property
    def parked(self) -> int:
        """How many calls wait for their turn."""
        lane = self.following.lane if self.following is not None else None
        return lane.count if lane is not None else 0

    @property
    def called_before(self) -> list[str]:
        """Calls that had their turn, and whose publish was not confirmed in time: they are
        published again, before those that are parked."""
        lane = self.following.lane if self.following is not None else None
        called = lane.called if lane is not None else {}
        return sorted((i for i in called if i not in self.tasks), key=lambda i: called[i])

    def mark_of(self, task_id: str, now: int) -> Mark | None:
        mark = self.marks.get(task_id)
        if mark is None and self.more_until:
            mark = self.beside.get(task_id)
        return mark if mark is not None and mark.until > now else None

    def put_mark(self, task_id: str, mark: Mark, now: int) -> None:
        has_room = not self.more_until and len(self.marks) < MARKS_INLINE
        if has_room or task_id in self.marks or len(task_id) > LONGEST_ID:
            self.marks[task_id] = mark
            return
        if self.mark_of(task_id, now) is None:
            self.more_marks += 1
        self.beside.put(task_id, mark)
        self.more_marks -= self.beside.forget_lapsed(now)
        self.more_until = max(self.more_until, mark.until)

    def drop_mark(self, task_id: str, now: int) -> Mark | None:
        """Remove the mark; returns it, or None if there was none or it had lapsed."""
        mark = self.marks.pop(task_id, None)
        if mark is None and self.more_until:
            mark = self.beside.remove(task_id)
            if mark is not None and mark.until > now:
                self.more_marks -= 1
            if not self.more_marks:
                self.more_until = 0
        return mark if mark is not None and mark.until > now else None

    def purge(self, now: int) -> None:
        """Remove what has lapsed: to every act, lapsed and absent are the same."""
        lapsed = {i: task.by for i, task in self.tasks.items() if task.lease <= now}
        for task_id in lapsed:
            del self.tasks[task_id]
        for task in self.tasks.values():
            # What a lapsed replacement replaced now waits for the replacement's own, if any.
            while task.by in lapsed:
                task.by = lapsed[task.by]
        for task_id in [i for i, mark in self.marks.items() if mark.until <= now]:
            del self.marks[task_id]
        if self.more_until and self.more_until <= now:
            self.more_until = self.more_marks = 0
            self.beside.clear()
        if self.following is not None and self.following.kept_until <= now:
            self.following = None
            self.followers.clear()
        self.payloads.purge(now)

    def latest_deadline(self) -> int:
        deadlines = [task.lease for task in self.tasks.values()]
        deadlines += [mark.until for mark in self.marks.values()]
        deadlines += [self.more_until, self.payloads.latest()]
        if self.following is not None:
            deadlines.append(self.following.kept_until)
        return max(deadlines)

    def dumps(self) -> str:
        document: dict[str, Any] = {"t": {i: t.packed() for i, t in self.tasks.items()}}
        if self.marks or self.more_until:
            document["m"] = {i: mark.packed() for i, mark in self.marks.items()}
        if self.more_until:
            document["m"][BESIDE] = ["more", self.more_until, self.more_marks]
        if self.following is not None:
            document["f"] = self.following.packed()
        return json.dumps(document, separators=(",", ":"))

    @classmethod
    def loads(cls, text: str, token: int = 0) -> Record:
        document = json.loads(text)
        following = document.get("f")
        marks = document.get("m", {})
        _, more_until, more_marks = marks.pop(BESIDE, ("more", 0, 0))[:3]
        return cls(
            token=token,
            tasks={i: TaskEntry.unpacked(values) for i, values in document["t"].items()},
            marks={i: Mark.unpacked(values) for i, values in marks.items()},
            following=Following.unpacked(following) if following else None,
            more_until=more_until,
            more_marks=more_marks,
        )
