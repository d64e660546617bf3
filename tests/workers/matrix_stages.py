"""The stage of a cell of the matrix: its servers, its worker, what its broker can be made to do."""

from __future__ import annotations

import logging
import platform
import re
from contextlib import ExitStack
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any

import celery
import kombu
import pytest
import redis

from tests.support import TcpProxy, eventually, filesystem_settings
from tests.support.app import working
from tests.support.sqs import SqsServer
from tests.support.stage import Stage
from tests.workers.apps.faults import redis_broker_options
from tests.workers.canvas.conftest import backend_settings
from tests.workers.matrix import VISIBLE_AFTER_S, Cell
from tests.workers.redelivery import looking_for_lost_messages

#: Where the worker of a cell with this pool has room for the tests' tasks.
CONCURRENCY = {"prefork": 2, "threads": 4, "solo": 1, "gevent": 20, "eventlet": 20}


class MatrixStage(Stage):
    """A stage with the servers of a cell."""

    def __init__(self, cell: Cell, directory: Path, **settings: Any) -> None:
        super().__init__("matrix", directory, pool=cell.pool, **settings)
        self._concurrency = CONCURRENCY[cell.pool]
        self.cell = cell
        self.proxy: TcpProxy | None = None
        self.versions = {"python": platform.python_version(), "celery": celery.__version__}
        self.versions |= {"kombu": kombu.__version__}

    def start_worker(self, **options: Any) -> Any:
        if self.proxy is not None:  # the caller's connection is not cut
            broker = self.proxy.url_of(self.settings["broker"])
            options["settings"] = {"broker": broker, **options.get("settings", {})}
        return super().start_worker(**options)

    def ends(self, result: Any, state: str) -> None:  # type: ignore[override]
        """Where results can be read: it ends in this state. Else its key tells the end."""
        if self.cell.results != "none":
            self.end_of(result, state)

    def revoke(self, result: Any) -> None:
        result.revoke()

    def redeliver(self) -> None:
        """What has a visibility timeout delivers again by itself."""
        if self.pool == "solo":  # it takes no message while it runs a task
            self.start_worker()
        if self.proxy is not None:
            self.proxy.cut()
            self.proxy.restore()

    def check_delay(self) -> None:
        """Quorum queues: RabbitMQ has the message meanwhile."""
        if self.cell.id != "rabbitmq-quorum":
            return

        def waiting() -> int:
            with self.app.connection_for_read() as connection:
                channel = connection.default_channel
                queues = (f"celery_delayed_{bit}" for bit in range(3))
                counts = [channel.queue_declare(queue, passive=True) for queue in queues]
                return sum(declared.message_count for declared in counts)

        eventually(waiting, message="it waits in no delay queue")


class MemoryStage(MatrixStage):
    """Its worker is a thread of this process."""

    def __init__(self, *args: Any, ends: ExitStack, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._ends = ends
        self._text = StringIO()
        self._works = False

    def ensure_worker(self, **options: Any) -> Any:
        if not self._works:
            self._works = True
            handler = logging.StreamHandler(self._text)
            logging.getLogger("celery_unique").addHandler(handler)
            self._ends.callback(logging.getLogger("celery_unique").removeHandler, handler)
            self._ends.enter_context(working(self.app, pool=self.pool, concurrency=4))

    def log(self) -> str:
        return self._text.getvalue()


def make_matrix_stage(
    cell: Cell, request: pytest.FixtureRequest, directory: Path, ends: ExitStack
) -> MatrixStage:
    """What it starts ends with ``ends``."""
    server = partial(_server, request)
    redis_url = server("redis").fresh_url()
    settings: dict[str, Any] = {"redis_url": redis_url, **cell.settings}
    settings |= _broker(cell, server, redis_url, directory, ends)
    settings |= _results(cell, server, directory)
    settings |= _store(cell, server, directory)
    make: Any = MatrixStage
    if cell.broker == "memory":
        make = partial(MemoryStage, ends=ends)
    stage: MatrixStage = make(cell, directory, **settings)
    if cell.broker == "rabbitmq":
        stage.proxy = ends.enter_context(TcpProxy(server("rabbitmq").port))
    if cell.pool in ("gevent", "eventlet", "solo") and cell.broker == "redis":
        ends.enter_context(looking_for_lost_messages(stage.app))
    stage.versions |= _versions(cell, server)
    ends.callback(stage.close)
    return stage


def _server(request: pytest.FixtureRequest, name: str) -> Any:
    return request.getfixturevalue(
        {
            "cluster": "redis_cluster",
            "sentinel": "redis_sentinels",
            "postgresql": "postgres_server",
        }.get(name, f"{name}_server")
    )


def _broker(
    cell: Cell, server: Any, redis_url: str, directory: Path, ends: ExitStack
) -> dict[str, Any]:
    again = redis_broker_options(VISIBLE_AFTER_S)
    if cell.broker == "redis":
        return {"broker": redis_url, "broker_transport_options": again}
    if cell.broker == "valkey":
        return {"broker": server("valkey").fresh_url(), "broker_transport_options": again}
    if cell.broker == "sqs":
        sqs = ends.enter_context(SqsServer())
        return {
            "broker": sqs.url,
            "broker_transport_options": sqs.options(VISIBLE_AFTER_S),
            "worker_enable_remote_control": False,
        }
    if cell.broker == "filesystem":
        settings = filesystem_settings(directory / "broker")
        settings.pop("result_backend")
        return {"broker": settings.pop("broker_url"), **settings}
    if cell.broker == "memory":
        return {
            "broker": "memory://",
            "broker_transport_options": {"polling_interval": 0.01},
            "worker_hijack_root_logger": False,
            "worker_redirect_stdouts": False,
            "worker_timer_precision": 0.05,
        }
    return {"broker": server("rabbitmq").fresh_url()}


def _results(cell: Cell, server: Any, directory: Path) -> dict[str, Any]:
    if cell.results in ("redis", "file", "rpc"):
        return dict(backend_settings(cell.results, directory))
    if cell.results == "django":
        return dict(backend_settings("django-db", directory))
    if cell.results == "sqlite":
        return dict(backend_settings("database", directory))
    if cell.results == "none":
        return {"backend": "disabled://"}
    url = server(cell.results).fresh_url()
    return {"backend": url if cell.results == "valkey" else f"db+{url}"}


def _store(cell: Cell, server: Any, directory: Path) -> dict[str, Any]:
    if cell.store == "redis":
        return {}
    if cell.store == "sqlite":
        return {"unique_store_url": f"sqlite:///{directory / 'locks.sqlite3'}"}
    if cell.store in ("cluster", "sentinel"):
        return {"unique_store_url": server(cell.store).url, "unique_namespace": cell.id}
    return {"unique_store_url": server(cell.store).fresh_url()}


def _versions(cell: Cell, server: Any) -> dict[str, str]:
    """Of the servers that the axis of the cell is about."""
    name = getattr(cell, cell.axis)
    if name in ("redis", "valkey", "cluster", "sentinel"):
        return {name: _redis_version(server("redis" if name != "valkey" else name))}
    if name == "rabbitmq":
        text = server("rabbitmq").control("version")
        return {name: text.strip().splitlines()[-1]}
    if name in ("mariadb", "mysql", "postgresql"):
        found = server(name).execute("SELECT version()")
        return {name: _number(str(found[0][0] if found else ""))}
    packages = {"eventlet": "eventlet", "gevent": "gevent", "sqs": "moto"}
    if name in packages:
        from importlib.metadata import version

        return {packages[name]: version(packages[name])}
    return {}


def _redis_version(server: Any) -> str:
    with redis.Redis(host="127.0.0.1", port=server.port) as client:
        info: Any = client.info("server")
    return str(info.get("valkey_version") or info["redis_version"])


def _number(text: str) -> str:
    found = re.search(r"\d+(\.\d+)+", text)
    return found[0] if found else text
