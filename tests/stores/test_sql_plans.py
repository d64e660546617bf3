"""No statement looks at more rows than it is about: each finds its own by an index.

As the database itself explains it, on tables in which half of the locks have lapsed: then a way
over all of them looks cheapest to it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from sqlalchemy import Connection, create_engine, text

from benchmarks import sql_rows
from celery_unique.stores.sql import SqlStore

LOCKS = 20_000
#: The statement -> the index or indexes by which it finds its rows. Those that only insert have
#: none to find but that of the same key.
FOUND_BY = {
    "see": {"locks"},
    "update": {"locks"},
    "delete": {"locks"},
    "delete_any": {"locks"},
    "page": {"locks"},
    "sweep": {"expires", "locks"},
    "due": {"due"},
    "abandoned": {"due"},
    "follower": {"followers"},
    "all_followers": {"followers"},
    "followers_in_groups": {"followers"},
    "delete_follower": {"followers"},
    "delete_followers": {"followers"},
    "mark": {"marks"},
    "delete_mark": {"marks"},
    "sweep_marks": {"marks expire", "marks"},
    "payload": {"payloads"},
    "last_chunk": {"payloads"},
    "keep_payload": {"payloads"},
    "delete_payload": {"payloads"},
    "delete_payloads": {"payloads"},
    "sweep_payloads": {"payloads expire", "payloads"},
}
NAMES = {
    "celery_unique_lock_expires": "expires",
    "celery_unique_lock_due": "due",
    # Primary keys: PostgreSQL's, SQLite's, MariaDB's.
    "celery_unique_lock_pkey": "locks",
    "celery_unique_lock_followers_pkey": "followers",
    "celery_unique_lock USING PRIMARY KEY": "locks",
    "held USING PRIMARY KEY": "locks",
    "sqlite_autoindex_celery_unique_lock_followers_1": "followers",
    "celery_unique_lock PRIMARY": "locks",
    "held PRIMARY": "locks",
    "celery_unique_lock_followers PRIMARY": "followers",
    "celery_unique_lock_marks_expires": "marks expire",
    "celery_unique_lock_marks_pkey": "marks",
    "celery_unique_lock_marks USING PRIMARY KEY": "marks",
    "celery_unique_lock_marks PRIMARY": "marks",
    "marked PRIMARY": "marks",
    "celery_unique_lock_payloads_expires": "payloads expire",
    "celery_unique_lock_payloads_pkey": "payloads",
    "sqlite_autoindex_celery_unique_lock_payloads_1": "payloads",
    "celery_unique_lock_payloads PRIMARY": "payloads",
    "merged PRIMARY": "payloads",
}


class Explained:
    """What one database says of the store's statements."""

    def __init__(self, store: SqlStore, connection: Connection) -> None:
        self._store = store
        self._connection = connection
        key = next(key for key, record in store.walk() if record.following)
        ((follower_id, _),) = store.followers(key)
        # MariaDB looks by the primary key first, and plans nothing for a row that is not there.
        connection.execute(
            text(f"INSERT INTO {sql_rows.MARKS} VALUES ('', '{key}', '7', 'done', 1, '')")
        )
        self._values = store._values(key) | {
            "after": key,
            "batch": 500,
            "due_at": 1,
            "expires_at": 1,
            "folded": 0,
            "follower_id": follower_id,
            "holder_since": 1,
            "holder_state": "w",
            "holder_until": 1,
            "kept_ms": 0,
            "most_conflicts": 0,
            "new_revision": 2,
            "rather_than": 1,
            "record": "{}",
            "revision": 1,
            "task_id": "7",
            "token": 1,
            "until": 1,
        }

    def plan(self, name: str) -> list[str]:
        sql = str(getattr(self._store._statements, name))
        values = {each: self._values[each] for each in re.findall(r"(?<!:):(\w+)", sql)}
        rows = self._connection.execute(text(self._explain + sql), values).mappings().all()
        return [self._line(row) for row in rows]

    @property
    def _explain(self) -> str:
        return "EXPLAIN QUERY PLAN " if self._connection.dialect.name == "sqlite" else "EXPLAIN "

    def _line(self, row: Any) -> str:
        if self._connection.dialect.name != "mysql":
            return str(row["detail"] if "detail" in row else row["QUERY PLAN"])
        return f"{row['type']} {row['table']} {row['key']}; {row['Extra']}"


@pytest.fixture(
    scope="module",
    params=[
        pytest.param("sqlite", id="sqlite"),
        pytest.param("postgres_server", id="postgresql", marks=pytest.mark.server),
        pytest.param("mariadb_server", id="mariadb", marks=pytest.mark.server),
    ],
)
def url(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path_factory.mktemp('plans') / 'locks.sqlite3'}"
    return str(request.getfixturevalue(request.param).fresh_url())


@pytest.fixture(scope="module")
def store(url: str) -> Iterator[SqlStore]:
    store = SqlStore.from_url(url, timeout_s=60)
    store.create_tables()
    sql_rows.fill(store, LOCKS)
    sql_rows.add_lapsed(store, LOCKS)
    sql_rows.add_marks(store, 2 * LOCKS)
    sql_rows.add_payloads(store, 2 * LOCKS)
    yield store
    store.close()


@pytest.fixture(scope="module")
def explained(store: SqlStore, url: str) -> Iterator[Explained]:
    engine = create_engine(url, isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        yield Explained(store, connection)
    engine.dispose()


@pytest.mark.parametrize("name", FOUND_BY)
def test_a_statement_finds_its_rows_by_an_index(explained, name):
    plan = "\n".join(explained.plan(name))

    found_by = {index for written, index in NAMES.items() if re.search(rf"\b{written}\b", plan)}
    assert found_by == FOUND_BY[name], plan
    assert not re.search(
        r"Seq Scan|SCAN (held|marked|merged|celery)|^(ALL|index) [hcm]", plan, re.MULTILINE
    ), plan
    assert not re.search(r"Sort\b|filesort|TEMP B-TREE", plan), plan


def test_every_statement_is_looked_at_or_only_inserts(store):
    inserting = {"acquire", "insert", "put_follower", "put_mark", "put_chunk"}
    # The first asks nothing of any row, the second locks the one that "see" then reads.
    others = {"ping", "lock"}

    texts = {name for name, each in vars(store._statements).items() if hasattr(each, "bindparams")}
    assert texts | {"lock"} == FOUND_BY.keys() | inserting | others
