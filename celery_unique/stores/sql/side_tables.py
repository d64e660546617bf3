"""The followers and marks of one key, as rows of their tables, within one transaction."""

from __future__ import annotations

import json
from collections.abc import ItemsView, Iterator, MutableMapping
from typing import Any

from celery_unique.stores.record import LONGEST_ID, Mark
from celery_unique.stores.record_followers import Joined

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

    def _all(self) -> dict[str, Joined]:
        rows: Any = self._session.execute(self._statements.all_followers, self._values).all()
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
            self._seen[task_id] = Mark(*found) if found else None
        return self._seen[task_id]

    def put(self, task_id: str, mark: Mark) -> None:
        row = {
            "task_id": task_id,
            "kind": mark.kind,
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


def _joined(facts: str, message: str) -> Joined:
    return Joined.of(json.loads(facts), message)
