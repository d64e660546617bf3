"""The SQL databases of a run, each empty and on a server of its own.

The servers are those of the test suite: they do not wait for the disk, which is what a run on
another machine would differ in most and what the number of locks has nothing to do with.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

from tests.support import MariaDBServer, PostgresServer

#: The suite gives MariaDB little memory. A server for a million locks has enough for its tables.
MARIADB_MEMORY = "--innodb-buffer-pool-size=1G"


@contextmanager
def _sqlite() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="celery-unique-bench-") as directory:
        yield f"sqlite:///{directory}/locks.sqlite3"


@contextmanager
def _postgresql() -> Iterator[str]:
    with PostgresServer() as server:
        yield server.fresh_url()


@contextmanager
def _mariadb() -> Iterator[str]:
    with MariaDBServer(extra_args=(MARIADB_MEMORY,)) as server:
        yield server.fresh_url()


#: Name -> gives the URL of an empty database.
DATABASES: dict[str, Callable[[], AbstractContextManager[str]]] = {
    "SQLite": _sqlite,
    "PostgreSQL": _postgresql,
    "MariaDB": _mariadb,
}
