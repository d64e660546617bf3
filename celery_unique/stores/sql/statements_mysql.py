"""The SQL of the lock table on MariaDB and MySQL, where it has no common form with the others.

Their clock is read in two ways. ``NOW(6)`` is the same throughout a statement, so that the times
in a new record, the decision to count and the answer agree on it. ``SYSDATE(6)`` is read when the
row has been found: a fencing token made from it is never older than what the row says.
"""

from __future__ import annotations

from .rows import FILLED_IN, PLACEHOLDER
from .statements import _SEEN, _THIS, Statements

_US = "(CAST(UNIX_TIMESTAMP({}(6)) * 1000000 AS SIGNED) + :offset_us)"
_COLUMNS = (
    "namespace, lock_key, record, token, revision, expires_at, conflicts, conflict_at, "
    "holder_state, holder_since, holder_until"
)


class MySqlStatements(Statements):
    """``acquire`` needs INSERT .. RETURNING, which MariaDB has from 10.5 on, and MySQL has not."""

    @property
    def _followers_suffix(self) -> str:  # type: ignore[override]
        return self._dialect.table_suffix

    def _indexes(self) -> list[str]:
        return []

    def _indexes_in_table(self) -> str:
        """CREATE INDEX cannot say IF NOT EXISTS on MySQL, nor leave rows out."""
        return self._declared("expires", "expires_at") + self._declared("due", "due_at")

    def _marks_indexes(self) -> list[str]:
        return []

    def _marks_index_in_table(self) -> str:
        return self._declared("marks_expires", "expires_at")

    def _declared(self, name: str, column: str) -> str:
        return f",\n    INDEX {self._quoted(f'{self._name}_{name}')} (namespace, {column})"

    def _acquire(self) -> str:
        us = _US.format("NOW")
        ms = f"({us} DIV 1000)"
        record = ":record"
        for name, offset in zip(
            FILLED_IN, ("0", ":grace_ms", ":kept_ms", ":delay_ms"), strict=True
        ):
            record = f"replace({record}, '{PLACEHOLDER}{name}', {ms} + {offset})"
        counts = (
            f"(instr(:sure_states, holder_state) > 0 AND holder_until > {ms}"
            f" AND (:window_ms = 0 OR holder_since + :window_ms > {ms})"
            " AND (:parent = '' OR instr(record, :parent) = 0))"
        )
        # Assigned from left to right, and no condition looks at what is assigned.
        return f"""
            INSERT INTO {self._table} ({_COLUMNS})
            VALUES (:namespace, :key, {record}, 0, :revision, {ms} + :grace_ms, 0, {us},
                'p', {ms}, {ms} + :grace_ms)
            ON DUPLICATE KEY UPDATE
                conflict_at = CASE WHEN {counts} THEN {us} ELSE conflict_at END,
                conflicts = conflicts + CASE WHEN {counts} THEN 1 ELSE 0 END
            RETURNING {_SEEN.replace("held.", "")}, {us}"""

    def _see(self) -> str:
        return f"""
            SELECT {_SEEN}, {_US.format("SYSDATE")} FROM (SELECT 1 AS number) AS one_row
            LEFT JOIN {self._table} AS held ON {_THIS}"""

    def _insert(self) -> str:
        """No row is changed where there is one already."""
        return f"""
            INSERT INTO {self._table} ({_COLUMNS}, due_at)
            VALUES (:namespace, :key, :record, :token, :new_revision, :expires_at, 0, 0,
                :holder_state, :holder_since, :holder_until, :due_at)
            ON DUPLICATE KEY UPDATE revision = revision"""

    def _page(self) -> str:
        return f"""
            SELECT held.lock_key, {_SEEN}, {_US.format("NOW")}
            FROM {self._table} AS held
            WHERE held.namespace = :namespace AND held.lock_key > :after
            ORDER BY held.lock_key LIMIT :batch"""

    def _sweep(self) -> str:
        """As elsewhere. A plain DELETE with ORDER BY and LIMIT would read, lock and sort all rows
        that have lapsed, or the whole table, to delete one batch of them."""
        lapsed = f"expires_at <= {_US.format('NOW')} DIV 1000 AND due_at IS NULL"
        return f"""
            DELETE held FROM {self._table} AS held
            JOIN (SELECT lock_key AS lapsed_key FROM {self._table}
                WHERE namespace = :namespace AND {lapsed}
                ORDER BY expires_at LIMIT :batch) AS lapsed ON lock_key = lapsed_key
            WHERE namespace = :namespace AND {lapsed}"""

    def _due(self) -> str:
        return f"""
            SELECT lock_key FROM {self._table}
            WHERE namespace = :namespace AND due_at <= {_US.format("NOW")} DIV 1000
            ORDER BY due_at LIMIT :batch"""

    def _abandoned(self) -> str:
        return f"""
            SELECT lock_key FROM {self._table}
            WHERE namespace = :namespace AND due_at <= {_US.format("NOW")} DIV 1000 - :kept_ms
            ORDER BY due_at LIMIT :batch"""

    def _put_follower(self) -> str:
        return f"""
            INSERT INTO {self._followers} (namespace, lock_key, follower_id, facts, message)
            VALUES (:namespace, :key, :follower_id, :facts, :message)
            ON DUPLICATE KEY UPDATE facts = VALUES(facts), message = VALUES(message)"""

    def _put_mark(self) -> str:
        return f"""
            INSERT INTO {self._marks}
                (namespace, lock_key, task_id, kind, expires_at, replaced_by)
            VALUES (:namespace, :key, :task_id, :kind, :until, :by)
            ON DUPLICATE KEY UPDATE kind = VALUES(kind), expires_at = VALUES(expires_at),
                replaced_by = VALUES(replaced_by)"""

    def _sweep_marks(self) -> str:
        lapsed = f"expires_at <= {_US.format('NOW')} DIV 1000"
        return f"""
            DELETE marked FROM {self._marks} AS marked
            JOIN (SELECT lock_key AS lapsed_key, task_id AS lapsed_id FROM {self._marks}
                WHERE namespace = :namespace AND {lapsed}
                ORDER BY expires_at LIMIT :batch) AS lapsed
                ON lock_key = lapsed_key AND task_id = lapsed_id
            WHERE namespace = :namespace AND {lapsed}"""
