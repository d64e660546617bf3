"""Desks on the shared Redis, and one on a server that is set up as it should be."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import RedisServer
from tests.workers.operating.desk import Desk


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("desk")


@pytest.fixture(scope="module")
def desk(redis_server: RedisServer, directory: Path) -> Iterator[Desk]:
    """Broker and locks in a database of the shared Redis server."""
    url = redis_server.fresh_url()
    desk = Desk(url, url, directory)
    yield desk
    desk.close()
