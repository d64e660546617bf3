"""What differs between databases in the SQL of the lock table.

A new database is a new :class:`Dialect` here, its driver's set-up in ``drivers``
and its error codes in ``errors``.
"""

from __future__ import annotations

from dataclasses import dataclass

#: The clock in microseconds, read by the database in the middle of a statement.
POSTGRESQL_CLOCK = "CAST(extract(epoch FROM clock_timestamp()) * 1000000 AS BIGINT)"

#: SQLite's own clock has milliseconds, and a key can be started, finished and
#: started again within one: both deliveries would get the same token. It runs
#: in this process anyway, so its clock is ours. It is read again for every try
#: at the database's lock, so that it is never older than ``BUSY_MS``.
SQLITE_CLOCK = "CAST(:client_us AS INTEGER)"


@dataclass(frozen=True, slots=True)
class Dialect:
    """One database's ways."""

    name: str
    clock: str  # SQL: microseconds; ``:client_us`` is the caller's clock
    find: str  # SQL function (text, part): position of the part, 0 for none
    table_suffix: str  # after the closing parenthesis of CREATE TABLE
    begin: str  # begins a transaction in which nobody else changes the row ...
    lock_row: str  # ... once this was appended to a SELECT of it; empty: not needed
    skip_locked: str  # after the SELECT of rows to delete
    only_due: str  # after the index on due_at: leaves rows without followers out of it
    quote: str = '"'  # around the name of a table
    text: str = "TEXT"  # a type without a limit that a record or a message could reach


POSTGRESQL = Dialect(
    name="postgresql",
    clock=POSTGRESQL_CLOCK,
    find="strpos",
    table_suffix="",
    begin="BEGIN",
    lock_row="FOR UPDATE",
    skip_locked="FOR UPDATE SKIP LOCKED",
    only_due=" WHERE due_at IS NOT NULL",
)

SQLITE = Dialect(
    name="sqlite",
    clock=SQLITE_CLOCK,
    find="instr",
    table_suffix=" WITHOUT ROWID",
    begin="BEGIN IMMEDIATE",
    lock_row="",
    skip_locked="",
    only_due=" WHERE due_at IS NOT NULL",
)

#: utf8mb4_bin: two keys that differ in case alone are two keys. MySQL's TEXT ends at 64 kB.
MYSQL = Dialect(
    name="mysql",
    clock="",  # see mysql_statements
    find="instr",
    table_suffix=" ENGINE=InnoDB DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin",
    begin="BEGIN",
    lock_row="FOR UPDATE",
    skip_locked="",
    only_due="",
    quote="`",
    text="LONGTEXT",
)

DIALECTS = {dialect.name: dialect for dialect in (POSTGRESQL, SQLITE, MYSQL)}
