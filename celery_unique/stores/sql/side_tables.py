"""The followers, marks and payloads of one key, as rows of their tables, within one transaction."""

from __future__ import annotations

import json
from collections.abc import ItemsView, Iterator, MutableMapping
from typing import Any

from celery_unique.stores.record import LONGEST_ID, Mark
from celery_unique.stores.record_followers import Joined
from celery_unique.stores.record_payloads import lines_in, size_of

from .database import Session
from .statements import Statements


class FollowerRows(MutableMapping[str, Joined]):
    """Followers of one key. Reads and writes single rows, so that the cost of an act on one
    follower does not depend on their number. The caller has locked the row of the key."""

    def __init__(self, session: Session, statements: Statements, values: dict[str, Any]) -> None:
        self._session = session
        self._statements = statements
        self._values = values
        self._seen: dict[str, Joined | None] = {}

    def __getitem__(self, follower_id: str) -> Joined:
        if follower_id not in self._seen:
            found: Any = self._session.execute(
                self._statements.follower, self._values | {"follower_id": follower_id}
            ).first()
            self._seen[follower_id] = _joined(*found) if found else None
        joined = self._seen[follower_id]
        if joined is None:
            raise KeyError(follower_id)
        return joined

    def __setitem__(self, follower_id: str, joined: Joined) -> None:
        row = {
            "follower_id": follower_id,
            "facts": json.dumps(joined.facts(), separators=(",", ":")),
            "message": joined.message,
        }
        self._session.execute(self._statements.put_follower, self._values | row).close()
        self._seen[follower_id] = joined

    def __delitem__(self, follower_id: str) -> None:
        values = self._values | {"follower_id": follower_id}
        self._session.execute(self._statements.delete_follower, values).close()
        self._seen[follower_id] = None

    def items(self) -> ItemsView[str, Joined]:
        return self._all().items()

    def __iter__(self) -> Iterator[str]:
        return iter(self._all())

    def __len__(self) -> int:
        return len(self._all())

    def clear(self) -> None:
        self._session.execute(self._statements.delete_followers, self._values).close()
        self._seen.clear()

    def in_groups(self) -> ItemsView[str, Joined]:
        """Those that follow a task: they are neither parked nor promoted."""
        return self._all(self._statements.followers_in_groups).items()

    def _all(self, statement: Any = None) -> dict[str, Joined]:
        statement = self._statements.all_followers if statement is None else statement
        rows: Any = self._session.execute(statement, self._values).all()
        return {follower_id: _joined(facts, message) for follower_id, facts, message in rows}


class MarkRows:
    """Marks of one key that have no room in its record, as :class:`FollowerRows`."""

    def __init__(self, session: Session, statements: Statements, values: dict[str, Any]) -> None:
        self._session = session
        self._statements = statements
        self._values = values
        self._seen: dict[str, Mark | None] = {}

    def get(self, task_id: str) -> Mark | None:
        if task_id not in self._seen:
            values = self._values | {"task_id": task_id}
            found: Any = self._session.execute(self._statements.mark, values).first()
            self._seen[task_id] = Mark.unpacked(list(found)) if found else None
        return self._seen[task_id]

    def put(self, task_id: str, mark: Mark) -> None:
        row = {
            "task_id": task_id,
            "kind": mark.stored_kind,
            "until": mark.until,
            "by": mark.by[:LONGEST_ID],
        }
        self._session.execute(self._statements.put_mark, self._values | row).close()
        self._seen[task_id] = mark

    def remove(self, task_id: str) -> Mark | None:
        mark = self.get(task_id)
        if mark is not None:
            values = self._values | {"task_id": task_id}
            self._session.execute(self._statements.delete_mark, values).close()
            self._seen[task_id] = None
        return mark

    def forget_lapsed(self, now: int) -> int:
        """None: workers sweep the table."""
        return 0

    def clear(self) -> None:
        """Nothing to do: they have lapsed, and workers sweep the table."""


#: A row of a payload holds lines up to this length: one is added without reading the others.
CHUNK = 8192
#: A longer lease reaches the rows of a payload at most once a day.
DAY_MS = 24 * 3_600_000


class PayloadRows:
    """Payloads of the tasks of one key, as :class:`FollowerRows`."""

    def __init__(self, session: Session, statements: Statements, values: dict[str, Any]) -> None:
        self._session = session
        self._statements = statements
        self._values = values

    def size(self, task_id: str) -> int:
        return self._last(task_id)[2]

    def _last(self, task_id: str) -> tuple[int, str, int, int]:
        """Number and lines of the last chunk; the length of all values, and until when."""
        values = self._values | {"task_id": task_id}
        found: Any = self._session.execute(self._statements.last_chunk, values).first()
        return tuple(found) if found else (0, "", 0, 0)

    def text(self, task_id: str) -> str:
        values = self._values | {"task_id": task_id}
        rows: Any = self._session.execute(self._statements.payload, values).all()
        return "".join(lines for (lines,) in rows)

    def append(self, task_id: str, line: str, size: int, until: int) -> None:
        chunk, lines, total, known_until = self._last(task_id)
        if not chunk:
            self.drop(task_id)  # perhaps one that has lapsed
        if not chunk or len(lines) + len(line) > CHUNK:
            chunk, lines = chunk + 1, ""
        until = max(until, known_until)
        if known_until and chunk > 1:
            self.keep(task_id, until)
        row = {
            "task_id": task_id,
            "chunk": chunk,
            "lines": lines + line,
            "total": total + size,
            "until": until,
        }
        self._session.execute(self._statements.put_chunk, self._values | row).close()

    def remove(self, task_id: str, head: str) -> bool:
        _, _, total, until = self._last(task_id)
        lines = lines_in(self.text(task_id))
        found = next((line for line in lines if line.startswith(head)), None)
        if found is None:
            return False
        lines.remove(found)
        self.drop(task_id)
        for n in range(0, len(lines), 100):
            last = n + 100 >= len(lines)
            size = total - size_of(found, head) if last else 0
            self.append(task_id, "".join(lines[n : n + 100]), size, until)
        return True

    def move(self, task_id: str, other_id: str, until: int) -> None:
        _, _, total, known_until = self._last(task_id)
        text = self.text(task_id)
        self.drop(task_id)
        if text:
            self.append(other_id, text, total, max(until, known_until))

    def keep(self, task_id: str, until: int) -> None:
        values = {"task_id": task_id, "until": until + DAY_MS, "rather_than": until}
        self._session.execute(self._statements.keep_payload, self._values | values).close()

    def drop(self, task_id: str) -> None:
        values = self._values | {"task_id": task_id}
        self._session.execute(self._statements.delete_payload, values).close()

    def purge(self, now: int) -> None:
        """Nothing to do: what has lapsed is not read, and workers sweep the table."""

    def latest(self) -> int:
        return 0


def _joined(facts: str, message: str) -> Joined:
    return Joined.of(json.loads(facts), message)
