"""A row of the lock table: the record in it, and the columns beside it.

A duplicate only adds 1 to the ``conflicts`` of the row, in the statement of its ``acquire``. The
next change of the record adds them to it (they are *folded* in), and a reader adds them too. The
sum is exact because only a row with one task has conflicts: with several, each duplicate is
counted in the record itself.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Any

from celery_unique.stores import acts
from celery_unique.stores.base import Claim
from celery_unique.stores.record import Record, TaskEntry
from celery_unique.stores.record_followers import typed

#: ``holder_state`` of a record for which a state alone does not decide.
NO_SOLE_HOLDER = "-"

#: Precedes the name of a time that the database fills in. JSON text never contains a bare control
#: character, and so no argument of a user can contain this.
PLACEHOLDER = "\x01"
FILLED_IN = ("created_at", "lease", "window_ends", "eta")

_POSITIONS = {field.name: i for i, field in enumerate(dataclasses.fields(TaskEntry), start=1)}


@dataclass(frozen=True, slots=True)
class Row:
    """A row as one statement returned it, and the store's clock at that moment."""

    record: str | None  # None: there is no row
    token: int
    revision: int
    conflicts: int
    conflict_at: int  # microseconds, of the last one counted in ``conflicts``
    holder_state: str
    holder_since: int
    holder_until: int
    now_us: int

    @property
    def now(self) -> int:
        return self.now_us // 1000

    def load(self, conflicts: int | None = None) -> Record:
        """The record with the row's conflicts (or so many of them) folded in.

        Raises one of ``UNREADABLE`` where it is none.
        """
        if self.record is None:
            return Record()
        # SQLite keeps any value in any column.
        numbers = (self.token, self.revision, self.conflicts, self.conflict_at)
        typed(
            [self.record, *numbers, self.holder_state, self.holder_since, self.holder_until],
            (str, *(int,) * 4, str, int, int),
        )
        record = Record.loads(self.record, self.token)
        count = self.conflicts if conflicts is None else conflicts
        task = next(iter(record.tasks.values()), None)  # conflicts: there is just one
        if count and task is not None:
            task.duplicates += count
            task.last_duplicate_at = self.conflict_at // 1000
        return record

    def counted(self, claim: Claim) -> bool:
        """Whether the statement that read this row counted the claim as a duplicate.

        The same condition as in the statement, on the same clock.
        """
        return (
            self.holder_state in sure_states(claim)
            and self.holder_until > self.now
            and (not claim.window_ms or self.holder_since + claim.window_ms > self.now)
            and (not claim.parent or parent_text(claim) not in (self.record or ""))
        )


def sure_states(claim: Claim) -> str:
    """The stored states in which a sole holder blocks the claim, whatever else is recorded.

    A state may be missing here: then the rules in ``acts`` decide, with one more statement.
    """
    if claim.again or claim.join or claim.on_conflict not in ("ignore", "reject"):
        return ""
    if claim.limit > 1:
        return ""
    # Waiting is scheduled or available by the ETA: sure only where both block.
    waiting = "pw" if "s" in claim.states and "w" in claim.states else ""
    return "".join(letter for letter in claim.states if letter not in "sw") + waiting


def parent_text(claim: Claim) -> str:
    """The id of the task that made the call, as it is written in a record; empty for none.

    The rules decide on a record that contains it: a task is never its own duplicate.
    """
    return json.dumps(claim.parent) if claim.parent else ""


def columns_of(record: Record) -> dict[str, Any]:
    """The columns that follow from the record."""
    state, since, until = _sole_holder(record)
    return {
        "record": record.dumps(),
        "token": record.token,
        "expires_at": record.latest_deadline(),
        "holder_state": state,
        "holder_since": since,
        "holder_until": until,
        "due_at": record.following.due_at if record.following is not None else None,
    }


def _sole_holder(record: Record) -> tuple[str, int, int]:
    if len(record.tasks) == 1:
        (task,) = record.tasks.values()
        if not (task.released or task.by or task.after):
            # From then on the reply to a duplicate depends on more than the state.
            until = task.held_until if task.state in "wt" else 0
            return task.state, task.created_at, min(task.lease, until or task.lease)
    return NO_SOLE_HOLDER, 0, 0


def sole_task(record: Record) -> str | None:
    """The id that the conflicts of this row belong to, while the task has not finished."""
    if len(record.tasks) != 1:
        return None
    ((task_id, task),) = record.tasks.items()
    return None if task.terminal else task_id


def fresh_record(claim: Claim) -> str:
    """The record of a new key, with placeholders where the database's clock belongs."""
    record = Record()
    acts.acquire(record, claim, 1)
    task = record.tasks[claim.task_id]
    values = [json.dumps(value) for value in task.packed()]
    for name in FILLED_IN:
        if getattr(task, name):
            values[_POSITIONS[name]] = PLACEHOLDER + name
    return f'{{"t":{{{json.dumps(claim.task_id)}:[{",".join(values)}]}}}}'
