"""PyMySQL's set-up: what a session is told, and a deadline for every wait."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from .connecting import connect_within
from .deadline import Deadline
from .options import Options

if TYPE_CHECKING:
    from sqlalchemy import Engine


def prepare_pymysql(engine: Engine, options: Options, deadline: Deadline) -> None:
    from sqlalchemy import event

    connection_class, found_rows = _bounded_connection(deadline)

    def connect(*args: Any, client_flag: int = 0, **given: Any) -> Any:
        # Rows are to be counted only when they are changed: else an INSERT that found its row
        # could not be told from one that inserted it.
        return connection_class(*args, client_flag=client_flag & ~found_rows, **given)

    connect_within(engine, deadline, connect)

    @event.listens_for(engine, "connect")
    def set_up(connection: Any, _record: Any) -> None:
        with connection.cursor() as cursor:
            for statement in _session_settings(options.timeout_s, connection.get_server_info()):
                cursor.execute(statement)


def _session_settings(timeout_s: float, server: str) -> tuple[str, ...]:
    settings: dict[str, str | float] = {
        # The hour that comes twice when summer time ends would move the clock back.
        "time_zone": "'+00:00'",
        # What does not fit into a column is an error, not cut off.
        "sql_mode": "'STRICT_ALL_TABLES,NO_ENGINE_SUBSTITUTION'",
        # Nobody goes on waiting for a row when the caller has given up.
        "innodb_lock_wait_timeout": max(1, math.ceil(timeout_s)),
    }
    if "MariaDB" in server:  # MySQL can be told neither
        # The server must not go on with what the caller has given up ...
        settings["max_statement_time"] = timeout_s
        # ... nor keep a row for a process that was stopped in a transaction.
        settings["idle_transaction_timeout"] = max(1, math.ceil(timeout_s))
    return (
        # A compare-and-set that lost must see what it lost to.
        "SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED",
        "SET SESSION " + ", ".join(f"{name} = {value}" for name, value in settings.items()),
    )


def _bounded_connection(deadline: Deadline) -> tuple[Any, int]:
    """PyMySQL's connection, whose waits for the server end with the act's deadline."""
    from pymysql.connections import Connection
    from pymysql.constants import CLIENT, SERVER_STATUS

    class BoundedConnection(Connection):
        # PyMySQL reads these before every wait. What it was given itself is not used.
        @property
        def _read_timeout(self) -> float:
            return max(deadline.remaining(), 0.001)

        @_read_timeout.setter
        def _read_timeout(self, value: float | None) -> None:
            pass

        _write_timeout = _read_timeout

        def rollback(self) -> None:
            """Only where there is a transaction: a pool asks for it after every act, and that
            would be one more round trip."""
            if self.server_status & SERVER_STATUS.SERVER_STATUS_IN_TRANS:
                super().rollback()

    return BoundedConnection, CLIENT.FOUND_ROWS
