"""Stages for canvases, with any of Celery's result backends."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support import RedisServer
from tests.support.stage import Stage
from tests.support.worker import REPOSITORY
from tests.workers.conftest import MakeStage

#: More than the shapes that wait for each other need at once; a greenlet costs nothing.
CONCURRENCY = {"prefork": 2, "threads": 4, "gevent": 50, "solo": 1}

_MIGRATE = """
import sys
from pathlib import Path
from tests.workers.apps.canvas import set_up_django
set_up_django(Path(sys.argv[1]))
from django.core.management import call_command
call_command("migrate", verbosity=0)
"""


def backend_settings(backend: str, directory: Path) -> dict[str, str]:
    if backend == "redis":
        return {}
    if backend == "django-db":
        database = str(directory / "results.django")
        env = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
        command = [sys.executable, "-c", _MIGRATE, database]
        subprocess.run(command, check=True, cwd=REPOSITORY, env=env)
        return {"backend": "django-db", "django_database": database}
    if backend == "file":
        (directory / "results").mkdir()
    addresses = {
        "database": f"db+sqlite:///{directory / 'results.sqlite3'}?timeout=30",
        "file": f"file://{directory / 'results'}",
        "rpc": "rpc://",
    }
    return {"backend": addresses[backend]}


@contextmanager
def canvas_stages(
    redis_server: RedisServer, directories: pytest.TempPathFactory
) -> Iterator[Callable[..., Stage]]:
    make_stage = MakeStage(redis_server, directories, tasks="canvas")

    def make(pool: str = "threads", backend: str = "redis", **settings: Any) -> Stage:
        directory = directories.mktemp(f"{pool}-{backend}")
        settings = {**backend_settings(backend, directory), **settings}
        return make_stage(pool=pool, concurrency=CONCURRENCY[pool], directory=directory, **settings)

    yield make
    make_stage.close()


@pytest.fixture(scope="module")
def make_canvas_stage(
    redis_server: RedisServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[..., Stage]]:
    """``make_canvas_stage("prefork", "rpc", **settings)``, for the tests of a module."""
    with canvas_stages(redis_server, tmp_path_factory) as make:
        yield make


@pytest.fixture
def own_canvas_stage(
    redis_server: RedisServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[..., Stage]]:
    """The same for one test alone."""
    with canvas_stages(redis_server, tmp_path_factory) as make:
        yield make
