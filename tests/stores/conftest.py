"""The stores that every test in this directory runs on."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from celery_unique.stores import open_store
from celery_unique.stores.base import LockStore
from tests.kit import PostgresServer, RedisServer
from tests.stores.django_project import DjangoProject
from tests.stores.factories import fresh_key

_namespaces = itertools.count()

STORES = [
    pytest.param("memory", id="memory"),
    pytest.param("shared_sqlite_url", id="sqlite"),
    pytest.param("shared_postgres_url", id="postgresql", marks=pytest.mark.server),
    pytest.param("redis_url", id="redis", marks=pytest.mark.server),
    pytest.param("valkey_url", id="valkey", marks=pytest.mark.server),
]


# A database for each test would take longer than the tests: they share one, and each store
# has a namespace of its own in it.


@pytest.fixture(scope="session")
def shared_sqlite_url(tmp_path_factory: pytest.TempPathFactory) -> str:
    return f"sqlite:///{tmp_path_factory.mktemp('stores') / 'locks.sqlite3'}"


@pytest.fixture(scope="session")
def shared_postgres_url(postgres_server: PostgresServer) -> str:
    return postgres_server.fresh_url()


@pytest.fixture(scope="session")
def django_project(redis_server: RedisServer, postgres_server: PostgresServer) -> DjangoProject:
    """Django's settings belong to a process: those of the test run, once."""
    project = DjangoProject(redis_server, postgres_server)
    project.configure()
    return project


@pytest.fixture(params=STORES)
def store(request: pytest.FixtureRequest) -> Iterator[LockStore]:
    """An empty store of each kind; a server is started only when its turn comes."""
    url = "memory://" if request.param == "memory" else request.getfixturevalue(request.param)
    store = open_store(url, namespace=f"test{next(_namespaces)}")
    yield store
    store.close()


@pytest.fixture
def key() -> str:
    return fresh_key()
