"""What differs between databases in the SQL of the lock table.

A new database is a new :class:`Dialect` here, its driver's set-up in ``drivers``
and its error codes in ``errors``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from .rows import FILLED_IN, PLACEHOLDER

if TYPE_CHECKING:
    from sqlalchemy import TextClause

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

#: Layout of the table. The record in it carries a version of its own.
TABLE_VERSION = 1

_SEEN = (
    "held.record, held.token, held.revision, held.conflicts, held.conflict_at, "
    "held.holder_state, held.holder_since, held.holder_until"
)
_THIS = "namespace = :namespace AND lock_key = :key"
_ONE = f"{_THIS} AND follower_id = :follower_id"
_ONE_MARK = f"{_THIS} AND task_id = :task_id"


class Statements:
    """The statements for one table of one database."""

    _followers_suffix = ""  # after the closing parenthesis of that table

    def __init__(self, dialect: Dialect, table: str) -> None:
        self._dialect = dialect
        self._table = self._quoted(table)
        self._followers = self._quoted(f"{table}_followers")
        self._marks = self._quoted(f"{table}_marks")
        self._name = table.rpartition(".")[2]
        self.begin = dialect.begin
        self.acquire = _text(self._acquire())
        self.see = _text(self._see())
        self.lock = _text(self._lock()) if dialect.lock_row else None
        self.insert = _text(self._insert())
        self.update = _text(self._update())
        self.delete = _text(self._delete())
        self.delete_any = _text(f"DELETE FROM {self._table} WHERE {_THIS}")
        self.page = _text(self._page())
        self.sweep = _text(self._sweep())
        self.due = _text(self._due())
        self.abandoned = _text(self._abandoned())
        self.ping = _text(
            f"SELECT (SELECT count(*) FROM {self._table} WHERE 1 = 0)"
            f" + (SELECT count(*) FROM {self._followers} WHERE 1 = 0)"
            f" + (SELECT count(*) FROM {self._marks} WHERE 1 = 0)"
        )
        self.follower = _text(f"SELECT facts, message FROM {self._followers} WHERE {_ONE}")
        self.all_followers = _text(
            f"SELECT follower_id, facts, message FROM {self._followers} WHERE {_THIS}"
        )
        self.put_follower = _text(self._put_follower())
        self.delete_follower = _text(f"DELETE FROM {self._followers} WHERE {_ONE}")
        self.delete_followers = _text(f"DELETE FROM {self._followers} WHERE {_THIS}")
        self.mark = _text(
            f"SELECT kind, expires_at, replaced_by FROM {self._marks} WHERE {_ONE_MARK}"
        )
        self.put_mark = _text(self._put_mark())
        self.delete_mark = _text(f"DELETE FROM {self._marks} WHERE {_ONE_MARK}")
        self.sweep_marks = _text(self._sweep_marks())

    def ddl(self) -> list[str]:
        """What creates the tables, for people without the rights to let us do it."""
        return [
            f"""\
CREATE TABLE IF NOT EXISTS {self._table} (
    namespace      VARCHAR(100) NOT NULL,
    lock_key       VARCHAR(255) NOT NULL,
    record         {self._dialect.text:<12} NOT NULL,
    token          BIGINT       NOT NULL,
    revision       BIGINT       NOT NULL,
    expires_at     BIGINT       NOT NULL,
    conflicts      BIGINT       NOT NULL,
    conflict_at    BIGINT       NOT NULL,
    holder_state   CHAR(1)      NOT NULL,
    holder_since   BIGINT       NOT NULL,
    holder_until   BIGINT       NOT NULL,
    due_at         BIGINT,
    schema_version SMALLINT     NOT NULL DEFAULT {TABLE_VERSION},
    PRIMARY KEY (namespace, lock_key){self._indexes_in_table()}
){self._dialect.table_suffix}""",
            *self._indexes(),
            f"""\
CREATE TABLE IF NOT EXISTS {self._followers} (
    namespace      VARCHAR(100) NOT NULL,
    lock_key       VARCHAR(255) NOT NULL,
    follower_id    VARCHAR(255) NOT NULL,
    facts          {self._dialect.text:<12} NOT NULL,
    message        {self._dialect.text:<12} NOT NULL,
    PRIMARY KEY (namespace, lock_key, follower_id)
){self._followers_suffix}""",
            f"""\
CREATE TABLE IF NOT EXISTS {self._marks} (
    namespace      VARCHAR(100) NOT NULL,
    lock_key       VARCHAR(255) NOT NULL,
    task_id        VARCHAR(255) NOT NULL,
    kind           VARCHAR(20)  NOT NULL,
    expires_at     BIGINT       NOT NULL,
    replaced_by    VARCHAR(255) NOT NULL,
    PRIMARY KEY (namespace, lock_key, task_id){self._marks_index_in_table()}
){self._dialect.table_suffix}""",
            *self._marks_indexes(),
        ]

    def _indexes(self) -> list[str]:
        return [
            self._index("expires", self._table, "expires_at"),
            self._index("due", self._table, "due_at") + self._dialect.only_due,
        ]

    def _marks_indexes(self) -> list[str]:
        return [self._index("marks_expires", self._marks, "expires_at")]

    def _index(self, name: str, table: str, column: str) -> str:
        where = f"{table} (namespace, {column})"
        return f'CREATE INDEX IF NOT EXISTS "{self._name}_{name}" ON {where}'

    def _indexes_in_table(self) -> str:
        """Those that are declared with the table."""
        return ""

    def _marks_index_in_table(self) -> str:
        return ""

    def _quoted(self, table: str) -> str:
        quote = self._dialect.quote
        return ".".join(f"{quote}{part}{quote}" for part in table.split("."))

    def _clock(self) -> str:
        return f"(SELECT {self._dialect.clock} + CAST(:offset_us AS BIGINT) AS us)"

    def _acquire(self) -> str:
        """Insert a fresh record, or count a sure duplicate, and tell what is there.

        The clock is read once: the times in the record, the decision to count
        and the answer must agree on it.
        """
        record = "CAST(:record AS TEXT)"
        offsets = dict(zip(FILLED_IN, ("0", ":grace_ms", ":kept_ms", ":delay_ms"), strict=True))
        for name, offset in offsets.items():
            time = f"CAST(us / 1000 + CAST({offset} AS BIGINT) AS TEXT)"
            record = f"replace({record}, '{PLACEHOLDER}{name}', {time})"
        counts = (
            f"{self._dialect.find}(CAST(:sure_states AS TEXT), held.holder_state) > 0"
            " AND held.holder_until > excluded.holder_since"
            " AND (CAST(:window_ms AS BIGINT) = 0"
            " OR held.holder_since + CAST(:window_ms AS BIGINT) > excluded.holder_since)"
            " AND (CAST(:parent AS TEXT) = ''"
            f" OR {self._dialect.find}(held.record, CAST(:parent AS TEXT)) = 0)"
        )
        return f"""
            WITH clock AS MATERIALIZED {self._clock()}
            INSERT INTO {self._table} AS held
                (namespace, lock_key, record, token, revision, expires_at, conflicts, conflict_at,
                 holder_state, holder_since, holder_until)
            SELECT :namespace, :key, {record}, 0, :revision, us / 1000 + :grace_ms, 0, us,
                'p', us / 1000, us / 1000 + :grace_ms
            FROM clock WHERE 1 = 1
            ON CONFLICT (namespace, lock_key) DO UPDATE SET
                conflicts = held.conflicts + CASE WHEN {counts} THEN 1 ELSE 0 END,
                conflict_at = CASE WHEN {counts} THEN excluded.conflict_at
                    ELSE held.conflict_at END
            RETURNING {_SEEN.replace("held.", "")}, (SELECT us FROM clock)"""

    def _see(self) -> str:
        """One row always: the outer join gives the clock where nothing is recorded."""
        return f"""
            SELECT {_SEEN}, clock.us FROM {self._clock()} AS clock
            LEFT JOIN {self._table} AS held ON {_THIS}"""

    def _lock(self) -> str:
        return f"SELECT 1 FROM {self._table} WHERE {_THIS} {self._dialect.lock_row}"

    def _insert(self) -> str:
        return f"""
            INSERT INTO {self._table}
                (namespace, lock_key, record, token, revision, expires_at, conflicts, conflict_at,
                 holder_state, holder_since, holder_until, due_at)
            VALUES (:namespace, :key, :record, :token, :new_revision, :expires_at, 0, 0,
                :holder_state, :holder_since, :holder_until, :due_at)
            ON CONFLICT (namespace, lock_key) DO NOTHING"""

    def _update(self) -> str:
        """Compare-and-set; ``folded`` conflicts are in the record now, later ones stay."""
        return f"""
            UPDATE {self._table} SET record = :record, token = :token, revision = :new_revision,
                expires_at = :expires_at, conflicts = conflicts - :folded,
                holder_state = :holder_state, holder_since = :holder_since,
                holder_until = :holder_until, due_at = :due_at
            WHERE {_THIS} AND revision = :revision AND conflicts <= :most_conflicts"""

    def _delete(self) -> str:
        return f"""
            DELETE FROM {self._table}
            WHERE {_THIS} AND revision = :revision AND conflicts <= :most_conflicts"""

    def _page(self) -> str:
        return f"""
            SELECT held.lock_key, {_SEEN}, clock.us
            FROM {self._table} AS held CROSS JOIN {self._clock()} AS clock
            WHERE held.namespace = :namespace AND held.lock_key > :after
            ORDER BY held.lock_key LIMIT :batch"""

    def _sweep(self) -> str:
        """Found by the index, one batch however many have lapsed, and deleted by their keys.

        MATERIALIZED: else PostgreSQL may look for more than one batch. The condition is asked
        again of each row, since it may have come to life meanwhile; with a plus, or SQLite would
        look for the batch among all that have lapsed. A key with followers has rows in the other
        table too: see ``_abandoned``.
        """
        lapsed = (
            f"expires_at <= (SELECT us / 1000 FROM {self._clock()} AS clock) AND due_at IS NULL"
        )
        return f"""
            WITH lapsed AS MATERIALIZED (
                SELECT lock_key FROM {self._table} WHERE namespace = :namespace AND {lapsed}
                ORDER BY expires_at LIMIT :batch {self._dialect.skip_locked})
            DELETE FROM {self._table} WHERE namespace = :namespace AND +{lapsed}
                AND lock_key IN (SELECT lock_key FROM lapsed)
            RETURNING lock_key"""

    def _due(self) -> str:
        return f"""
            SELECT lock_key FROM {self._table}
            WHERE namespace = :namespace AND due_at <= (SELECT us / 1000 FROM {self._clock()} AS c)
            ORDER BY due_at LIMIT :batch"""

    def _abandoned(self) -> str:
        """Keys whose followers nobody has looked after for so long that they have lapsed."""
        return f"""
            SELECT lock_key FROM {self._table}
            WHERE namespace = :namespace
                AND due_at <= (SELECT us / 1000 - :kept_ms FROM {self._clock()} AS c)
            ORDER BY due_at LIMIT :batch"""

    def _put_follower(self) -> str:
        return f"""
            INSERT INTO {self._followers} (namespace, lock_key, follower_id, facts, message)
            VALUES (:namespace, :key, :follower_id, :facts, :message)
            ON CONFLICT (namespace, lock_key, follower_id)
            DO UPDATE SET facts = excluded.facts, message = excluded.message"""

    def _put_mark(self) -> str:
        return f"""
            INSERT INTO {self._marks}
                (namespace, lock_key, task_id, kind, expires_at, replaced_by)
            VALUES (:namespace, :key, :task_id, :kind, :until, :by)
            ON CONFLICT (namespace, lock_key, task_id) DO UPDATE SET kind = excluded.kind,
                expires_at = excluded.expires_at, replaced_by = excluded.replaced_by"""

    def _sweep_marks(self) -> str:
        """As ``_sweep``."""
        lapsed = f"expires_at <= (SELECT us / 1000 FROM {self._clock()} AS clock)"
        return f"""
            WITH lapsed AS MATERIALIZED (
                SELECT lock_key, task_id FROM {self._marks}
                WHERE namespace = :namespace AND {lapsed}
                ORDER BY expires_at LIMIT :batch {self._dialect.skip_locked})
            DELETE FROM {self._marks} WHERE namespace = :namespace AND +{lapsed}
                AND (lock_key, task_id) IN (SELECT lock_key, task_id FROM lapsed)
            RETURNING lock_key"""


def _text(sql: str) -> TextClause:
    from sqlalchemy import text

    return text(sql)
