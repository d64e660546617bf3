"""Settings of the database that matter for locks, for ``celery unique doctor``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from celery_unique.stores.diagnosis import Diagnosis, Finding

from .database import Session

__all__ = ["Diagnosis", "diagnose"]

_POSTGRESQL = (
    "SELECT current_setting('server_version'), current_setting('fsync'), "
    "current_setting('synchronous_commit'), CAST(pg_is_in_recovery() AS TEXT)"
)
_SQLITE = (
    "SELECT sqlite_version(), (SELECT journal_mode FROM pragma_journal_mode), "
    "(SELECT synchronous FROM pragma_synchronous)"
)
_SYNCHRONOUS = {0: "off", 1: "normal", 2: "full", 3: "extra"}


def diagnose(session: Session, database: str, place: str) -> Diagnosis:
    from sqlalchemy import text

    if database == "sqlite":
        return _sqlite(session.execute(text(_SQLITE), {}).one(), place)
    if database == "postgresql":
        return _postgresql(session.execute(text(_POSTGRESQL), {}).one(), place)
    return Diagnosis("network", {"server": database, "place": place})


def _sqlite(row: Any, place: str) -> Diagnosis:
    version, journal, synchronous = row
    facts = {
        "server": f"SQLite {version}",
        "place": place,
        "journal": str(journal),
        "synchronous": _SYNCHRONOUS.get(synchronous, str(synchronous)),
    }
    return Diagnosis("machine", facts)


def _postgresql(row: Any, place: str) -> Diagnosis:
    version, fsync, synchronous_commit, in_recovery = row
    facts = {
        "server": f"PostgreSQL {version}",
        "place": place,
        "fsync": fsync,
        "synchronous_commit": synchronous_commit,
        "role": "standby" if in_recovery == "true" else "primary",
    }
    return Diagnosis("network", facts, tuple(_findings(facts)))


def _findings(facts: dict[str, str]) -> Iterator[Finding]:
    if facts["role"] == "standby":
        yield Finding(
            "role",
            "error",
            "the server is a standby: it refuses every act on a lock",
            "write the host of the primary in unique_store_url",
        )
    if facts["fsync"] == "off":
        yield Finding(
            "persistence",
            "warning",
            "the server runs without fsync: a crash of its machine can damage the locks",
            "set fsync = on",
        )
    if facts["synchronous_commit"] == "off":
        yield Finding(
            "persistence",
            "note",
            "the server confirms a commit before it is on disk (synchronous_commit = off): a "
            "crash frees the keys that were taken last",
            "set synchronous_commit = on for the user of unique_store_url",
        )
