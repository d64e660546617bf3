"""The stores that every test in this directory runs on."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from celery_unique.stores import open_store
from celery_unique.stores.base import LockStore
from celery_unique.stores.redis.layout import Layout
from celery_unique.stores.sql import SqlStore
from celery_unique.testing.store_contract.factories import fresh_key
from tests.stores.django_project import DjangoProject
from tests.stores.timing import PATIENCE_S
from tests.support import MariaDBServer, PostgresServer, RedisServer, TlsRedisServer
from tests.support.mysql import MySQLServer
from tests.workers.matrix import CHOSEN

_namespaces = itertools.count()

STORES = [
    pytest.param("memory", id="memory"),
    pytest.param("shared_sqlite_url", id="sqlite"),
    pytest.param("shared_postgres_url", id="postgresql", marks=pytest.mark.server),
    pytest.param("redis_url", id="redis", marks=pytest.mark.server),
    pytest.param("valkey_url", id="valkey", marks=pytest.mark.server),
    pytest.param("cluster_url", id="cluster", marks=pytest.mark.server),
    pytest.param("sentinel_url", id="sentinel", marks=pytest.mark.server),
    pytest.param("tls_url", id="tls", marks=pytest.mark.server),
    pytest.param("shared_mariadb_url", id="mariadb", marks=pytest.mark.server),
]
if CHOSEN == "all":  # make test-matrix, which fetches it
    STORES.append(pytest.param("shared_mysql_url", id="mysql", marks=pytest.mark.server))

SLOW_TO_CONNECT = {
    "shared_postgres_url",
    "cluster_url",
    "sentinel_url",
    "tls_url",
    "shared_mariadb_url",
    "shared_mysql_url",
}

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "stores-redis.md"


# A database for each test would take longer than the tests: they share one, and each store
# has a namespace of its own in it.


@pytest.fixture(scope="session")
def shared_sqlite_url(tmp_path_factory: pytest.TempPathFactory) -> str:
    return f"sqlite:///{tmp_path_factory.mktemp('stores') / 'locks.sqlite3'}"


@pytest.fixture(scope="session")
def shared_postgres_url(postgres_server: PostgresServer) -> str:
    return postgres_server.fresh_url()


@pytest.fixture(scope="session")
def shared_mariadb_url(mariadb_server: MariaDBServer) -> str:
    return mariadb_server.fresh_url()


@pytest.fixture(scope="session")
def shared_mysql_url(mysql_server: MySQLServer) -> str:
    return mysql_server.fresh_url()


@pytest.fixture(scope="session")
def tls_url(tls_redis_server: TlsRedisServer) -> str:
    """TLS with a client's certificate, and a user with the documented permissions alone."""
    [command] = re.findall(r"(?m)^ACL SETUSER locks .*$", PAGE.read_text())
    with tls_redis_server.client() as admin:
        admin.execute_command(*command.split())
    return tls_redis_server.url_for("locks:PASSWORD")


@pytest.fixture(scope="session")
def opened_stores() -> Iterator[dict[str, LockStore]]:
    """Where connecting takes longer than a test, connections stay open for the next one."""
    opened: dict[str, LockStore] = {}
    yield opened
    for store in opened.values():
        store.close()


def in_namespace(store: LockStore, namespace: str) -> LockStore:
    """The same store with the same connections, but for its namespace."""
    other: Any = copy(store)
    if isinstance(other, SqlStore):
        other._options = replace(other._options, namespace=namespace)
    else:
        other._layout = Layout(namespace, "")
        other._commands = copy(other._commands)
        other._commands._layout = other._layout
    return cast("LockStore", other)


@pytest.fixture(scope="session")
def django_project(redis_server: RedisServer, postgres_server: PostgresServer) -> DjangoProject:
    """Django's settings belong to a process: those of the test run, once."""
    project = DjangoProject(redis_server, postgres_server)
    project.configure()
    return project


@pytest.fixture(params=[DjangoProject.cache_url, DjangoProject.database_url])
def django_store(
    request: pytest.FixtureRequest, django_project: DjangoProject
) -> Iterator[LockStore]:
    """The cache and the database of a Django project; for tests of their own, since Django
    then is a part of the test process."""
    store = open_store(request.param, namespace=f"test{next(_namespaces)}", timeout_s=PATIENCE_S)
    yield store
    store.close()


@pytest.fixture(params=STORES)
def store(
    request: pytest.FixtureRequest, opened_stores: dict[str, LockStore]
) -> Iterator[LockStore]:
    """An empty store of each kind; a server is started only when its turn comes."""
    url = "memory://" if request.param == "memory" else request.getfixturevalue(request.param)
    namespace = f"test{next(_namespaces)}"
    if request.param in SLOW_TO_CONNECT:
        if url not in opened_stores:
            opened_stores[url] = open_store(url, timeout_s=PATIENCE_S)
        yield in_namespace(opened_stores[url], namespace)
        return
    store = open_store(url, namespace=namespace, timeout_s=PATIENCE_S)
    yield store
    store.close()


@pytest.fixture(
    params=[
        pytest.param("sqlite_url", id="sqlite"),
        pytest.param("postgres_url", id="postgresql", marks=pytest.mark.server),
        pytest.param("mariadb_url", id="mariadb", marks=pytest.mark.server),
    ]
)
def sql_url(request: pytest.FixtureRequest) -> str:
    """An empty database of each kind."""
    url: str = request.getfixturevalue(request.param)
    return url


@pytest.fixture
def opened() -> Iterator[Callable[..., SqlStore]]:
    """``opened(url, timeout_s=1)``: a SQL store that is closed with the test."""
    stores: list[SqlStore] = []

    def open_one(url: str, **options: Any) -> SqlStore:
        store = SqlStore.from_url(url, **{"timeout_s": PATIENCE_S, **options})
        stores.append(store)
        return store

    yield open_one
    for store in stores:
        store.close()


@pytest.fixture
def key() -> str:
    return fresh_key()
