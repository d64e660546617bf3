"""Connection pool that no signal can corrupt.

SQLAlchemy's own pool counts connections and keeps its queue in a ``Condition``. A signal whose
handler raises, a time limit for example, can interrupt it between two steps: a lock stays taken
and all other threads wait for it, or a connection stays counted that no longer exists.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy.pool import ConnectionPoolEntry, Pool


class IdleConnections(Pool):
    """Keeps idle connections, and connects where there is none. ``Database`` limits their number.
    Garbage collection closes a connection that an interrupted act lost."""

    def __init__(self, creator: Any, pool_size: int, **options: Any) -> None:
        super().__init__(creator, **options)
        self._size = pool_size
        # A stack: append and pop are atomic, and the last one used is used again first.
        self._idle: list[ConnectionPoolEntry] = []

    def _do_get(self) -> ConnectionPoolEntry:
        try:
            return self._idle.pop()
        except IndexError:
            return self._create_connection()

    def _do_return_conn(self, record: ConnectionPoolEntry) -> None:
        if len(self._idle) < self._size:
            self._idle.append(record)
        else:
            record.close()

    def recreate(self) -> IdleConnections:
        return type(self)(
            self._creator,
            pool_size=self._size,
            recycle=self._recycle,
            echo=self.echo,
            logging_name=self._orig_logging_name,
            reset_on_return=self._reset_on_return,
            pre_ping=self._pre_ping,
            dialect=self._dialect,
            _dispatch=self.dispatch,
        )

    def dispose(self) -> None:
        while self._idle:
            try:
                self._idle.pop().close()
            except IndexError:  # another thread was faster
                return

    def status(self) -> str:
        return f"{len(self._idle)} connections are idle"
