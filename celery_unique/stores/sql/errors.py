"""Classes of database errors, and the messages for them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .url import Options

#: Codes of MariaDB and MySQL.
DEADLOCK, LOCK_WAIT_OVER, CHANGED_SINCE_READ = 1213, 1205, 1020
NO_SUCH_TABLE, TABLE_EXISTS = 1146, 1050
NOT_ALLOWED = (1142, 1143)
READ_ONLY = (1290, 1836)


def is_busy(error: Any) -> bool:
    """Whether other processes lock the rows, or the file of SQLite. Nothing was done."""
    return _sqlite_name(error).startswith("SQLITE_BUSY") or _mysql_code(error) in (
        DEADLOCK,
        LOCK_WAIT_OVER,
        CHANGED_SINCE_READ,
    )


def is_missing_table(error: Any) -> bool:
    """PostgreSQL and MariaDB have a code for it; SQLite has only a text."""
    return (
        _sqlstate(error) == "42P01"
        or _mysql_code(error) == NO_SUCH_TABLE
        or "no such table" in _first_line(error)
    )


def is_create_race(error: Any) -> bool:
    """Whether two processes ran CREATE .. IF NOT EXISTS at the same time: it is not atomic."""
    return (
        _sqlstate(error) in ("23505", "42P07", "42710", "XX000")
        or _mysql_code(error) == TABLE_EXISTS
    )


def explain(error: Any, options: Options) -> str:
    """The error and its cure, without values and without the password."""
    cause = getattr(error, "orig", None) or error
    text = f"The lock store {options.shown_url} is not available: {_first_line(cause)}."
    return f"{text} {_cure(cause, options)}".rstrip()


def _cure(cause: Any, options: Options) -> str:
    forbidden = _sqlstate(cause) == "42501" or _mysql_code(cause) in NOT_ALLOWED
    if is_missing_table(cause) or forbidden:
        return (
            f"The tables {options.table}, {options.table}_followers, {options.table}_marks and "
            f"{options.table}_payloads must exist, and this user needs SELECT, INSERT, UPDATE and "
            "DELETE on them: as a user who may create tables, run "
            "celery_unique.stores.sql.SqlStore.from_url(url).create_tables(), or the SQL that its "
            "ddl() returns."
        )
    if _sqlstate(cause) == "25006":
        return "This server is read-only: add target_session_attrs=read-write to find the primary."
    if _mysql_code(cause) in READ_ONLY:
        return "This server is read-only: write the host of the primary."
    if _sqlite_name(cause).startswith("SQLITE_CANTOPEN"):
        return _cure_for_path(Path(options.url.database or ""))
    if is_busy(cause):
        return "Another process holds its write lock." if _sqlite_name(cause) else ""
    return ""


def _cure_for_path(path: Path) -> str:
    if not path.parent.is_dir():
        return f"The directory {path.parent} does not exist: create it."
    return f"{path} must be a file that this user can read and write, in such a directory."


def _first_line(error: Any) -> str:
    text = str(error.args[1]) if _mysql_code(error) else str(error)
    lines = text.strip().splitlines()
    return lines[0].rstrip(". ") if lines else type(error).__name__


def _sqlstate(error: Any) -> str | None:
    return getattr(error, "sqlstate", None)


def _mysql_code(error: Any) -> int:
    """The number of PyMySQL's error; 0 for errors of other drivers."""
    arguments: tuple[Any, ...] = getattr(error, "args", ())
    return arguments[0] if len(arguments) == 2 and isinstance(arguments[0], int) else 0


def _sqlite_name(error: Any) -> str:
    return getattr(error, "sqlite_errorname", None) or ""
