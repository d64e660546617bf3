"""The statements of MariaDB and MySQL that have no form in common with other databases.

Their clock is read in two ways. ``NOW(6)`` is the same throughout a statement, so that the times
in a new record, the decision to count and the reply agree on it. ``SYSDATE(6)`` is read when the
row has been found: a fencing token made from it is never older than the row.
"""

from __future__ import annotations

from collections.abc import Iterable

from .rows import FILLED_IN, PLACEHOLDER
from .statements import COLUMNS, SEEN, THIS, Statements


class MySqlStatements(Statements):
    """``acquire`` needs INSERT .. RETURNING, which MariaDB has since 10.5, and MySQL has not."""

    def _clock(self) -> str:
        return f"({self._dialect.clock} + :offset_us)"

    def _now_ms(self) -> str:
        return f"({self._clock()} DIV 1000)"

    def _on_conflict(self, key: str, updated: Iterable[str]) -> str:
        changes = ", ".join(f"{column} = VALUES({column})" for column in updated)
        # Without changes, no row is affected where there is one already.
        return f"ON DUPLICATE KEY UPDATE {changes or 'revision = revision'}"

    def _acquire(self) -> str:
        us, ms = self._clock(), self._now_ms()
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
        # Assigned from left to right, and no condition reads a column that was assigned.
        return f"""
            INSERT INTO {self._table} ({COLUMNS})
            VALUES (:namespace, :key, {record}, 0, :revision, {ms} + :grace_ms, 0, {us},
                'p', {ms}, {ms} + :grace_ms)
            ON DUPLICATE KEY UPDATE
                conflict_at = CASE WHEN {counts} THEN {us} ELSE conflict_at END,
                conflicts = conflicts + CASE WHEN {counts} THEN 1 ELSE 0 END
            RETURNING {SEEN.replace("held.", "")}, {us}"""

    def _see(self) -> str:
        return f"""
            SELECT {SEEN}, {self._clock().replace("NOW", "SYSDATE")}
            FROM (SELECT 1 AS number) AS one_row LEFT JOIN {self._table} AS held ON {THIS}"""

    def _page(self) -> str:
        return f"""
            SELECT held.lock_key, {SEEN}, {self._clock()} FROM {self._table} AS held
            WHERE held.namespace = :namespace AND held.lock_key > :after
            ORDER BY held.lock_key LIMIT :batch"""

    def _sweep(self, table: str, alias: str, key: list[str], lapsed: str) -> str:
        """A plain DELETE with ORDER BY and LIMIT would read, lock and sort all rows that have
        lapsed, or the whole table, to delete one batch of them."""
        columns = ", ".join(f"{column} AS lapsed_{column}" for column in key)
        same = " AND ".join(f"{column} = lapsed_{column}" for column in key)
        return f"""
            DELETE {alias} FROM {table} AS {alias}
            JOIN (SELECT {columns} FROM {table}
                WHERE namespace = :namespace AND {lapsed}
                ORDER BY expires_at LIMIT :batch) AS lapsed ON {same}
            WHERE namespace = :namespace AND {lapsed}"""
