"""The cells of the compatibility matrix: each is a broker, result backend, pool and lock store
with which the tests of ``test_matrix.py`` run.

What a cell cannot show is left out with the reason, which the published page repeats; it is not
skipped by the test.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Axis = Literal["broker", "results", "pool", "store"]

#: The cells that run: "part" (make test), "all" (make test-matrix), or ids with commas between.
CHOSEN = os.environ.get("CELERY_UNIQUE_MATRIX", "part")
#: After which time brokers with a visibility timeout deliver a message again.
VISIBLE_AFTER_S = 2

NO_CHILD = "its tasks run in the worker's own process, which ends with them"
NO_LIMIT = "Celery enforces hard time limits in prefork pools only"
NO_TERMINATE = "Celery cannot end a single task of this pool"
NO_REMOTE_CONTROL = "Celery has no remote control there"
NO_RETURN = "this broker never delivers a message a second time by itself"
GONE = "a message that a killed worker had is gone in this broker, with or without this library"
OF_DEBIAN = (
    "for both kinds of queues RabbitMQ is the package of Debian 12: no newer one has been run"
)
ONE_PROCESS = "broker and worker are one process: nothing is left when it is killed"


@dataclass(frozen=True)
class Cell:
    axis: Axis
    id: str
    name: str
    broker: str = "redis"
    results: str = "redis"
    pool: str = "prefork"
    store: str = "redis"
    #: Name of a test without ``test_`` -> why this cell has no such test.
    without: Mapping[str, str] = field(default_factory=dict)
    #: What a reader must know besides.
    note: str = ""
    #: Whether make test runs it: what no other test of the suite uses.
    in_part: bool = False
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def chosen(self) -> bool:
        if CHOSEN in ("part", "all"):
            return CHOSEN == "all" or self.in_part
        return self.id in CHOSEN.split(",")


_NO_PROCESSES = {"hard_time_limit": NO_LIMIT, "lost_child": NO_CHILD}
_UNTERMINATED = {**_NO_PROCESSES, "terminated": NO_TERMINATE}

BROKERS = (
    Cell("broker", "redis", "Redis"),
    Cell("broker", "valkey", "Valkey", broker="valkey", note="URLs `redis://` and `valkey://`"),
    Cell(
        "broker",
        "rabbitmq-classic",
        "RabbitMQ, classic queues",
        broker="rabbitmq",
        note=OF_DEBIAN,
    ),
    Cell(
        "broker",
        "rabbitmq-quorum",
        "RabbitMQ, quorum queues",
        broker="rabbitmq",
        settings={"task_default_queue_type": "quorum", "task_default_exchange_type": "topic"},
        note="with Celery's native delayed delivery: RabbitMQ holds a message until its ETA. Row "
        "B2 of [failure modes](../explanation/failure-modes.md#rabbitmq) is about delivery limits",
        in_part=True,
    ),
    Cell(
        "broker",
        "sqs",
        "Amazon SQS",
        broker="sqs",
        without={"terminated": NO_REMOTE_CONTROL},
        note="moto's server in place of Amazon's. Standard queues",
        in_part=True,
    ),
    Cell(
        "broker",
        "filesystem",
        "filesystem",
        broker="filesystem",
        without={"redelivered_while_it_runs": NO_RETURN, "killed_worker": GONE},
        note="with a transport that writes a message before it gives it its name: kombu's own lets "
        "a worker read half a message, which ends the worker. For development",
        in_part=True,
    ),
    Cell(
        "broker",
        "memory",
        "memory",
        broker="memory",
        pool="threads",
        without={
            **_UNTERMINATED,
            "redelivered_while_it_runs": NO_RETURN,
            "killed_worker": ONE_PROCESS,
        },
        note="for tests: caller and worker are one process",
        in_part=True,
    ),
)

_NOT_READ = "nobody can ask for the result: nothing is stored"
RESULTS = (
    Cell("results", "results-redis", "Redis"),
    Cell("results", "results-valkey", "Valkey", results="valkey"),
    Cell(
        "results",
        "results-sqlite",
        "database (SQLAlchemy), SQLite",
        results="sqlite",
    ),
    Cell("results", "results-postgresql", "database, PostgreSQL", results="postgresql"),
    Cell("results", "results-mariadb", "database, MariaDB", results="mariadb"),
    Cell("results", "results-django", "Django's database (`django-db`)", results="django"),
    Cell("results", "results-file", "files (`file://`)", results="file"),
    Cell(
        "results",
        "results-rpc-rabbitmq",
        "messages (`rpc://`), RabbitMQ",
        broker="rabbitmq",
        results="rpc",
        note="a result reaches one caller: duplicates that want it "
        "[join](../howto/combine-with-canvas.md)",
    ),
    Cell("results", "results-none", "none (`disabled://`)", results="none"),
)

POOLS = (
    Cell("pool", "pool-prefork", "prefork"),
    Cell("pool", "pool-threads", "threads", pool="threads", without=_UNTERMINATED),
    Cell("pool", "pool-solo", "solo", pool="solo", without=_UNTERMINATED),
    Cell("pool", "pool-gevent", "gevent", pool="gevent", without=_NO_PROCESSES),
    Cell("pool", "pool-eventlet", "eventlet", pool="eventlet", without=_NO_PROCESSES, in_part=True),
)

STORES = (
    Cell("store", "store-redis", "Redis"),
    Cell("store", "store-valkey", "Valkey", store="valkey"),
    Cell("store", "store-cluster", "Redis Cluster", store="cluster"),
    Cell("store", "store-sentinel", "Redis with Sentinel", store="sentinel"),
    Cell("store", "store-postgresql", "PostgreSQL", store="postgresql"),
    Cell("store", "store-mariadb", "MariaDB", store="mariadb"),
    Cell(
        "store",
        "store-mysql",
        "MySQL",
        store="mysql",
        note="MySQL 8 was not run, since Debian packages 9 only. `make test` runs the statements "
        "for MySQL on MariaDB",
    ),
    Cell("store", "store-sqlite", "SQLite", store="sqlite"),
)

CELLS = (*BROKERS, *RESULTS, *POOLS, *STORES)
#: Run with each version of Python and Celery, as the Makefile names them; the last one with the
#: oldest redis-py and SQLAlchemy, and a store that uses the latter.
OF_VERSIONS = ("redis", "memory")
OF_OLDEST = (*OF_VERSIONS, "store-sqlite")
OLDEST_REDIS = "5.3"
VERSIONS = (
    *("3.11-5.5", "3.11-5.6", "3.11-5.7", "3.12-5.7", "3.13-5.5", "3.13-5.7", "3.14-5.7"),
    "3.11-5.5-oldest",
)
#: Why the other combinations of those versions are not run, nor a redis-py between the oldest and
#: the newest.
NOT_COMBINED = (
    "each of these versions runs in another combination. `tox` has an environment with all tests "
    "for each, except Celery 5.5 with Python 3.14, which that Celery does not support"
)
BETWEEN = "the oldest and the newest run. `tox` has an environment with all tests for each"
DJANGOS = ("5.2", "6.0", "6.1")


def cell_of(cell_id: str) -> Cell:
    [cell] = [cell for cell in CELLS if cell.id == cell_id]
    return cell
