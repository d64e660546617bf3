"""The SQL of the four tables: locks, followers, marks and payloads.

A database differs from others by its :class:`Dialect` here, by the set-up of its driver in
``engine`` and by its error codes in ``errors``. MariaDB and MySQL also have statements of their
own, in ``statements_mysql``.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .rows import FILLED_IN, PLACEHOLDER

if TYPE_CHECKING:
    from sqlalchemy import TextClause


@dataclass(frozen=True, slots=True)
class Dialect:
    """The parts of the statements that differ between databases."""

    name: str
    clock: str  # SQL: microseconds; ``:client_us`` is the caller's clock
    find: str  # SQL function (text, part): position of the part, 0 for none
    table_suffix: str  # after the closing parenthesis of CREATE TABLE ...
    followers_suffix: str  # ... and of that for followers
    begin: str  # begins a transaction in which no other process changes the row ...
    lock_row: str  # ... once this was appended to a SELECT of it; empty: not needed
    skip_locked: str  # after the SELECT of rows to delete
    only_due: str  # after the index on due_at: leaves rows without followers out of it
    quote: str = '"'  # around the name of a table
    text: str = "TEXT"  # a type without a limit that a record or a message could reach
    declares_indexes: bool = False  # in CREATE TABLE: it has no CREATE INDEX IF NOT EXISTS


POSTGRESQL = Dialect(
    name="postgresql",
    clock="CAST(extract(epoch FROM clock_timestamp()) * 1000000 AS BIGINT)",
    find="strpos",
    table_suffix="",
    followers_suffix="",
    begin="BEGIN",
    lock_row="FOR UPDATE",
    skip_locked="FOR UPDATE SKIP LOCKED",
    only_due=" WHERE due_at IS NOT NULL",
)

SQLITE = Dialect(
    name="sqlite",
    # SQLite's clock has milliseconds, and a key can be started, finished and started again within
    # one: both deliveries would get the same token. SQLite runs in this process, so the clock of
    # the process is used. It is read for every attempt, and so never older than ``BUSY_MS``.
    clock="CAST(:client_us AS INTEGER)",
    find="instr",
    table_suffix=" WITHOUT ROWID",
    followers_suffix="",
    begin="BEGIN IMMEDIATE",
    lock_row="",
    skip_locked="",
    only_due=" WHERE due_at IS NOT NULL",
)

#: utf8mb4_bin: two keys that differ in case alone are two keys. MySQL's TEXT ends at 64 kB.
_INNODB = " ENGINE=InnoDB DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin"
MYSQL = Dialect(
    name="mysql",
    # The same throughout a statement, unlike PostgreSQL's.
    clock="CAST(UNIX_TIMESTAMP(NOW(6)) * 1000000 AS SIGNED)",
    find="instr",
    table_suffix=_INNODB,
    followers_suffix=_INNODB,
    begin="BEGIN",
    lock_row="FOR UPDATE",
    skip_locked="",
    only_due="",
    quote="`",
    text="LONGTEXT",
    declares_indexes=True,
)

DIALECTS = {dialect.name: dialect for dialect in (POSTGRESQL, SQLITE, MYSQL)}

#: Layout of the table. The record in it carries a version of its own.
TABLE_VERSION = 1

#: The columns of a :class:`~.rows.Row`, without its clock.
SEEN = (
    "held.record, held.token, held.revision, held.conflicts, held.conflict_at, "
    "held.holder_state, held.holder_since, held.holder_until"
)
COLUMNS = (
    "namespace, lock_key, record, token, revision, expires_at, conflicts, conflict_at, "
    "holder_state, holder_since, holder_until"
)
THIS = "namespace = :namespace AND lock_key = :key"


class Statements:
    """The statements for one table of one database."""

    def __init__(self, dialect: Dialect, table: str) -> None:
        self._dialect = dialect
        self._table = locks = self._quoted(table)
        self._followers = followers = self._quoted(f"{table}_followers")
        self._marks = marks = self._quoted(f"{table}_marks")
        self._payloads = payloads = self._quoted(f"{table}_payloads")
        self._name = table.rpartition(".")[2]
        self.begin = dialect.begin
        self.acquire = _text(self._acquire())
        self.see = _text(self._see())
        self.lock = (
            _text(f"SELECT 1 FROM {locks} WHERE {THIS} {dialect.lock_row}")
            if dialect.lock_row
            else None
        )
        self.insert = _text(
            f"INSERT INTO {locks} ({COLUMNS}, due_at) "
            "VALUES (:namespace, :key, :record, :token, :new_revision, :expires_at, 0, 0, "
            ":holder_state, :holder_since, :holder_until, :due_at) "
            + self._on_conflict("namespace, lock_key", ())
        )
        unchanged = f"{THIS} AND revision = :revision AND conflicts <= :most_conflicts"
        # ``folded`` conflicts are in the record now; later ones stay.
        self.update = _text(
            f"UPDATE {locks} SET record = :record, token = :token, revision = :new_revision, "
            "expires_at = :expires_at, conflicts = conflicts - :folded, "
            "holder_state = :holder_state, holder_since = :holder_since, "
            f"holder_until = :holder_until, due_at = :due_at WHERE {unchanged}"
        )
        self.delete = _text(f"DELETE FROM {locks} WHERE {unchanged}")
        self.delete_any = _text(f"DELETE FROM {locks} WHERE {THIS}")
        self.page = _text(self._page())
        lapsed = f"expires_at <= {self._now_ms()}"
        # A key with followers has rows in the other table too: see ``abandoned``.
        self.sweep = _text(self._sweep(locks, "held", ["lock_key"], f"{lapsed} AND due_at IS NULL"))
        self.sweep_marks = _text(self._sweep(marks, "marked", ["lock_key", "task_id"], lapsed))
        self.sweep_payloads = _text(
            self._sweep(payloads, "merged", ["lock_key", "task_id", "chunk"], lapsed)
        )
        self.due = _text(self._due(self._now_ms()))
        # Keys whose followers were not reaped for so long that they have lapsed.
        self.abandoned = _text(self._due(f"{self._now_ms()} - :kept_ms"))
        self.ping = _text(
            "SELECT "
            + " + ".join(
                f"(SELECT count(*) FROM {each} WHERE 1 = 0)"
                for each in (locks, followers, marks, payloads)
            )
        )
        one = f"{THIS} AND follower_id = :follower_id"
        self.follower = _text(f"SELECT facts, message FROM {followers} WHERE {one}")
        self.all_followers = _text(
            f"SELECT follower_id, facts, message FROM {followers} WHERE {THIS}"
        )
        # Facts begin with the name of the group: see ``Joined``.
        self.followers_in_groups = _text(
            f"SELECT follower_id, facts, message FROM {followers} WHERE {THIS} "
            "AND SUBSTR(facts, 1, 3) <> '[\"\"'"
        )
        self.put_follower = _text(
            f"INSERT INTO {followers} (namespace, lock_key, follower_id, facts, message) "
            "VALUES (:namespace, :key, :follower_id, :facts, :message) "
            + self._on_conflict("namespace, lock_key, follower_id", ("facts", "message"))
        )
        self.delete_follower = _text(f"DELETE FROM {followers} WHERE {one}")
        self.delete_followers = _text(f"DELETE FROM {followers} WHERE {THIS}")
        one = f"{THIS} AND task_id = :task_id"
        self.mark = _text(f"SELECT kind, expires_at, replaced_by FROM {marks} WHERE {one}")
        self.put_mark = _text(
            f"INSERT INTO {marks} (namespace, lock_key, task_id, kind, expires_at, replaced_by) "
            "VALUES (:namespace, :key, :task_id, :kind, :until, :by) "
            + self._on_conflict(
                "namespace, lock_key, task_id", ("kind", "expires_at", "replaced_by")
            )
        )
        self.delete_mark = _text(f"DELETE FROM {marks} WHERE {one}")
        # The plus keeps SQLite from the index on expires_at, in which it would visit the payloads
        # of all keys: without statistics, a range looks cheaper to it than three equal columns.
        live = f"{one} AND +expires_at > {self._now_ms()}"
        self.payload = _text(f"SELECT call_lines FROM {payloads} WHERE {live} ORDER BY chunk")
        self.last_chunk = _text(
            f"SELECT chunk, call_lines, total_bytes, expires_at FROM {payloads} "
            f"WHERE {live} ORDER BY chunk DESC LIMIT 1"
        )
        self.put_chunk = _text(
            f"INSERT INTO {payloads} "
            "(namespace, lock_key, task_id, chunk, call_lines, total_bytes, expires_at) "
            "VALUES (:namespace, :key, :task_id, :chunk, :lines, :total, :until) "
            + self._on_conflict(
                "namespace, lock_key, task_id, chunk", ("call_lines", "total_bytes", "expires_at")
            )
        )
        self.keep_payload = _text(
            f"UPDATE {payloads} SET expires_at = :until WHERE {one} AND +expires_at < :rather_than"
        )
        self.delete_payload = _text(f"DELETE FROM {payloads} WHERE {one}")
        self.delete_payloads = _text(f"DELETE FROM {payloads} WHERE {THIS}")

    def ddl(self) -> list[str]:
        """The SQL that creates the tables and their indexes."""
        locks, marks = {"expires": "expires_at", "due": "due_at"}, {"marks_expires": "expires_at"}
        payloads = {"payloads_expires": "expires_at"}
        dialect, text = self._dialect, f"{self._dialect.text:<12}"
        return [
            f"""\
CREATE TABLE IF NOT EXISTS {self._table} (
    namespace      VARCHAR(100) NOT NULL,
    lock_key       VARCHAR(255) NOT NULL,
    record         {text} NOT NULL,
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
    PRIMARY KEY (namespace, lock_key){self._declared(locks)}
){dialect.table_suffix}""",
            *self._indexes(self._table, locks),
            f"""\
CREATE TABLE IF NOT EXISTS {self._followers} (
    namespace      VARCHAR(100) NOT NULL,
    lock_key       VARCHAR(255) NOT NULL,
    follower_id    VARCHAR(255) NOT NULL,
    facts          {text} NOT NULL,
    message        {text} NOT NULL,
    PRIMARY KEY (namespace, lock_key, follower_id)
){dialect.followers_suffix}""",
            f"""\
CREATE TABLE IF NOT EXISTS {self._marks} (
    namespace      VARCHAR(100) NOT NULL,
    lock_key       VARCHAR(255) NOT NULL,
    task_id        VARCHAR(255) NOT NULL,
    kind           VARCHAR(20)  NOT NULL,
    expires_at     BIGINT       NOT NULL,
    replaced_by    VARCHAR(255) NOT NULL,
    PRIMARY KEY (namespace, lock_key, task_id){self._declared(marks)}
){dialect.table_suffix}""",
            *self._indexes(self._marks, marks),
            f"""\
CREATE TABLE IF NOT EXISTS {self._payloads} (
    namespace      VARCHAR(100) NOT NULL,
    lock_key       VARCHAR(255) NOT NULL,
    task_id        VARCHAR(255) NOT NULL,
    chunk          INTEGER      NOT NULL,
    call_lines     {text} NOT NULL,
    total_bytes    BIGINT       NOT NULL,
    expires_at     BIGINT       NOT NULL,
    PRIMARY KEY (namespace, lock_key, task_id, chunk){self._declared(payloads)}
){dialect.followers_suffix}""",
            *self._indexes(self._payloads, payloads),
        ]

    def _declared(self, indexes: dict[str, str]) -> str:
        if not self._dialect.declares_indexes:
            return ""
        return "".join(
            f",\n    INDEX {self._quoted(f'{self._name}_{name}')} (namespace, {column})"
            for name, column in indexes.items()
        )

    def _indexes(self, table: str, indexes: dict[str, str]) -> list[str]:
        if self._dialect.declares_indexes:
            return []
        return [
            f'CREATE INDEX IF NOT EXISTS "{self._name}_{name}" ON {table} (namespace, {column})'
            + (self._dialect.only_due if column == "due_at" else "")
            for name, column in indexes.items()
        ]

    def _quoted(self, table: str) -> str:
        quote = self._dialect.quote
        return ".".join(f"{quote}{part}{quote}" for part in table.split("."))

    def _clock(self) -> str:
        return f"(SELECT {self._dialect.clock} + CAST(:offset_us AS BIGINT) AS us)"

    def _now_ms(self) -> str:
        return f"(SELECT us / 1000 FROM {self._clock()} AS clock)"

    def _on_conflict(self, key: str, updated: Iterable[str]) -> str:
        changes = ", ".join(f"{column} = excluded.{column}" for column in updated)
        return f"ON CONFLICT ({key}) DO " + (f"UPDATE SET {changes}" if changes else "NOTHING")

    def _acquire(self) -> str:
        """Insert a new record, or count a sure duplicate, and return the row.

        The clock is read once: the times in the record, the decision to count and the reply must
        agree on it.
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
            INSERT INTO {self._table} AS held ({COLUMNS})
            SELECT :namespace, :key, {record}, 0, :revision, us / 1000 + :grace_ms, 0, us,
                'p', us / 1000, us / 1000 + :grace_ms
            FROM clock WHERE 1 = 1
            ON CONFLICT (namespace, lock_key) DO UPDATE SET
                conflicts = held.conflicts + CASE WHEN {counts} THEN 1 ELSE 0 END,
                conflict_at = CASE WHEN {counts} THEN excluded.conflict_at
                    ELSE held.conflict_at END
            RETURNING {SEEN.replace("held.", "")}, (SELECT us FROM clock)"""

    def _see(self) -> str:
        """One row always: the outer join returns the clock where nothing is recorded."""
        return f"""
            SELECT {SEEN}, clock.us FROM {self._clock()} AS clock
            LEFT JOIN {self._table} AS held ON {THIS}"""

    def _page(self) -> str:
        return f"""
            SELECT held.lock_key, {SEEN}, clock.us
            FROM {self._table} AS held CROSS JOIN {self._clock()} AS clock
            WHERE held.namespace = :namespace AND held.lock_key > :after
            ORDER BY held.lock_key LIMIT :batch"""

    def _sweep(self, table: str, alias: str, key: list[str], lapsed: str) -> str:
        """Delete one batch, found by the index however many have lapsed.

        MATERIALIZED: else PostgreSQL may look for more than one batch. The condition is checked
        again for each row, since it may have been renewed meanwhile; with a plus, or SQLite would
        search for the batch among all that have lapsed.
        """
        columns = ", ".join(key)
        return f"""
            WITH lapsed AS MATERIALIZED (
                SELECT {columns} FROM {table} WHERE namespace = :namespace AND {lapsed}
                ORDER BY expires_at LIMIT :batch {self._dialect.skip_locked})
            DELETE FROM {table} WHERE namespace = :namespace AND +{lapsed}
                AND ({columns}) IN (SELECT {columns} FROM lapsed)
            RETURNING lock_key"""

    def _due(self, time_ms: str) -> str:
        return f"""
            SELECT lock_key FROM {self._table}
            WHERE namespace = :namespace AND due_at <= {time_ms} ORDER BY due_at LIMIT :batch"""


def _text(sql: str) -> TextClause:
    from sqlalchemy import text

    return text(sql)
