"""The marks beside one key's record as the rows of a table, within one transaction."""

from __future__ import annotations

from typing import Any

from celery_unique.stores.record import LONGEST_ID, Mark

from .database import Session
from .statements import Statements


class MarkRows:
    """Reads and writes single rows, so that an act costs the same however many there are. The
    caller has locked the key's row."""

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
