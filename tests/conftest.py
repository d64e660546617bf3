"""Fixtures for real servers and workers, and the marker that tells which tests need a server.

Each server is started the first time that a test asks for it and ends with the test run; under
xdist every test process has its own. A test gets a database of its own on the shared server. A
test that kills, freezes or reconfigures a server starts a private one with ``start_server``.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest
from celery import _state
from hypothesis import HealthCheck, settings

from tests.compatibility import recorder
from tests.support import (
    MariaDBServer,
    PostgresServer,
    RabbitMQServer,
    RedisCluster,
    RedisSentinels,
    RedisServer,
    Server,
    TcpProxy,
    TlsRedisServer,
    ValkeyServer,
    Worker,
)
from tests.support.browser import chromium
from tests.support.distribution import ByServerOrFile, check_name, put_in_order
from tests.support.mysql import MySQLServer

# How long an example takes to draw is up to the machine, which several test processes share.
settings.register_profile(
    "busy machine", deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("busy machine")

AnyServer = TypeVar("AnyServer", bound=Server)

SERVER_FIXTURES = frozenset(
    {
        "redis_server",
        "valkey_server",
        "rabbitmq_server",
        "postgres_server",
        "mariadb_server",
        "mysql_server",
        "redis_cluster",
        "redis_sentinels",
        "tls_redis_server",
        "start_server",
        # No server, but a program that Debian brings as well.
        "browser",
    }
)


def pytest_configure(config: pytest.Config) -> None:
    recorder.register(config)


@pytest.hookimpl(tryfirst=True)  # before -m selects by marker
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if not SERVER_FIXTURES.isdisjoint(getattr(item, "fixturenames", ())):
            item.add_marker("server")
        check_name(item)
    put_in_order(items)


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    # Fourteen thousand tests are no garbage: looking through them took a fifth of a second here.
    gc.freeze()


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> ByServerOrFile | None:
    return ByServerOrFile(config, log) if config.getvalue("dist") == "loadfile" else None


def _must_be_marked(request: pytest.FixtureRequest) -> None:
    """A server asked for at run time is not seen when tests are selected."""
    if request.node.get_closest_marker("server") is None:
        pytest.fail(
            f"{request.node.nodeid} gets {request.fixturename} by getfixturevalue(): mark it, or "
            "the parameter that chooses the server, with pytest.mark.server",
            pytrace=False,
        )


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport() -> Iterator[None]:
    """Without garbage collection: a failure shows its source by ``ast.parse``, which fails in
    Python 3.11 when a finalizer of a Celery result runs in the middle of it, and then ends the
    whole test run (https://github.com/python/cpython/issues/106905)."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def _server(server_class: type[Any]) -> Any:
    """A fixture: a server that the tests of a session share."""

    @pytest.fixture(scope="session")
    def started() -> Iterator[Any]:
        with server_class() as server:
            yield server

    return started


redis_server = _server(RedisServer)
valkey_server = _server(ValkeyServer)
rabbitmq_server = _server(RabbitMQServer)
postgres_server = _server(PostgresServer)
mariadb_server = _server(MariaDBServer)
mysql_server = _server(MySQLServer)
redis_cluster = _server(RedisCluster)
redis_sentinels = _server(RedisSentinels)
tls_redis_server = _server(TlsRedisServer)


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """A selenium WebDriver for headless Chromium, shared by all tests of the process."""
    with chromium() as driver:
        yield driver


@pytest.fixture(autouse=True)
def _shared_tasks_of_this_test_only() -> Iterator[None]:
    """``shared_task``, and ``app.task`` too, give the task to every app to come."""
    before = set(_state._on_app_finalizers)
    yield
    _state._on_app_finalizers.intersection_update(before)


@pytest.fixture
def redis_url(request: pytest.FixtureRequest, redis_server: RedisServer) -> str:
    """An empty Redis database."""
    _must_be_marked(request)
    return redis_server.fresh_url()


@pytest.fixture
def valkey_url(request: pytest.FixtureRequest, valkey_server: ValkeyServer) -> str:
    """An empty Valkey database; the scheme is redis://."""
    _must_be_marked(request)
    return valkey_server.fresh_url()


@pytest.fixture
def rabbitmq_url(request: pytest.FixtureRequest, rabbitmq_server: RabbitMQServer) -> str:
    """A virtual host without queues."""
    _must_be_marked(request)
    return rabbitmq_server.fresh_url()


@pytest.fixture
def postgres_url(request: pytest.FixtureRequest, postgres_server: PostgresServer) -> Iterator[str]:
    """An empty PostgreSQL database; the scheme is postgresql+psycopg://."""
    _must_be_marked(request)
    url = postgres_server.fresh_url()
    yield url
    postgres_server.give_back(url)


@pytest.fixture
def mariadb_url(request: pytest.FixtureRequest, mariadb_server: MariaDBServer) -> Iterator[str]:
    """An empty MariaDB database; the scheme is mysql+pymysql://."""
    _must_be_marked(request)
    url = mariadb_server.fresh_url()
    yield url
    mariadb_server.drop(url)


@pytest.fixture
def cluster_url(request: pytest.FixtureRequest, redis_cluster: RedisCluster) -> str:
    """A cluster that others use too: take a namespace, or keys of your own."""
    _must_be_marked(request)
    return redis_cluster.url


@pytest.fixture
def sentinel_url(request: pytest.FixtureRequest, redis_sentinels: RedisSentinels) -> str:
    """Sentinels whose primary others use too: take a namespace, or keys of your own."""
    _must_be_marked(request)
    return redis_sentinels.url


@pytest.fixture
def sqlite_url(tmp_path: Path) -> str:
    """A SQLite database file that does not exist yet."""
    return f"sqlite:///{tmp_path / 'locks.sqlite3'}"


@pytest.fixture
def report(capfd: pytest.CaptureFixture[str]) -> Callable[[str], None]:
    """Show a line of figures, whether tests are captured or run by xdist or not."""

    def show(line: str) -> None:
        with capfd.disabled():
            os.write(2, f"\n{line}\n".encode())

    return show


@pytest.fixture
def start_server() -> Iterator[Callable[..., Any]]:
    """``start_server(RedisServer, append_only=True)``: a server for this test alone."""
    servers: list[Server] = []

    def start(server_class: type[AnyServer], **options: Any) -> AnyServer:
        server = server_class(**options)
        servers.append(server)
        return server.start()

    yield start
    for server in reversed(servers):
        server.stop()


@pytest.fixture
def start_proxy() -> Iterator[Callable[[int], TcpProxy]]:
    """``start_proxy(redis_server.port)``: a TCP proxy in front of a port of 127.0.0.1."""
    proxies: list[TcpProxy] = []

    def start(target_port: int) -> TcpProxy:
        proxy = TcpProxy(target_port).start()
        proxies.append(proxy)
        return proxy

    yield start
    for proxy in reversed(proxies):
        proxy.stop()


@pytest.fixture
def start_worker(tmp_path: Path) -> Iterator[Callable[..., Worker]]:
    """``start_worker("package.module", pool="threads", ...)``: a ready worker.

    Takes what ``Worker`` takes, less ``log_path``; ``wait=False`` returns without waiting. What
    still runs when the test ends is killed.
    """
    workers: list[Worker] = []

    def start(app: str, *, wait: bool = True, **options: Any) -> Worker:
        worker = Worker(app, log_path=tmp_path / f"worker{len(workers)}.log", **options)
        workers.append(worker)
        if wait:
            worker.start()
        else:
            worker.launch()
        return worker

    yield start
    for worker in workers:
        worker.kill()
