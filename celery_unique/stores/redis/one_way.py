"""Acts that nobody waits for: sent on a connection of their own whose replies are off."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic

from redis.exceptions import ConnectionError as Disconnected
from redis.exceptions import RedisError, ResponseError
from redis.exceptions import TimeoutError as TimedOut

from .address import Connection
from .connections import Command, Connections, packed, set_deadline

_senders: weakref.WeakSet[OneWay] = weakref.WeakSet()

FLUSHED = b"celery_unique flushed"


class OneWay:
    """Sends and returns: about as long as one system call takes.

    Commands arrive in the order in which they were sent here, but may be overtaken
    by those on other connections. What was sent before the server died is lost.
    """

    def __init__(self, connections: Connections) -> None:
        self._connections = connections
        self._connection: Connection | None = None
        self._mutex = threading.Lock()
        self._unflushed = False
        _senders.add(self)

    def send(self, *commands: Command) -> None:
        with self._exclusive() as deadline:
            connection = self._open(deadline)
            message = packed(connection, commands)
            try:
                connection.send_packed_command(message, check_health=False)
            except Disconnected:
                self._connect(deadline).send_packed_command(message, check_health=False)
            self._unflushed = True

    def flush(self) -> None:
        """Wait until everything sent before was carried out."""
        with self._exclusive() as deadline:
            if not self._unflushed:
                return
            self._unflushed = False
            connection = self._connection
            if connection is None:
                raise Disconnected("the connection broke: one-way acts may be lost")
            set_deadline(connection, deadline)
            commands = [("CLIENT", "REPLY", "ON"), ("ECHO", FLUSHED), ("CLIENT", "REPLY", "OFF")]
            connection.send_packed_command(connection.pack_commands(commands), check_health=False)
            # Replies that were not off after all (a proxy that ignores CLIENT REPLY) come first.
            while _reply(connection) != FLUSHED:
                pass

    def close(self) -> None:
        with self._mutex:
            self._drop()

    @contextmanager
    def _exclusive(self) -> Iterator[float]:
        deadline = monotonic() + self._connections.timeout_s
        try:
            if not self._mutex.acquire(timeout=self._connections.timeout_s):
                raise TimedOut("another thread is still sending")
            try:
                yield deadline
            except BaseException:  # half a command may have been sent
                self._drop()
                raise
            finally:
                self._mutex.release()
        except (RedisError, OSError) as error:
            raise self._connections.unavailable(error) from error

    def _open(self, deadline: float) -> Connection:
        connection = self._connection
        if connection is None:
            return self._connect(deadline)
        try:
            # A server that went away has closed the connection: noticed here, since writing
            # to it would still succeed. Replies that are not off are read and forgotten.
            while connection.can_read(0):
                _reply(connection)
        except (Disconnected, TimedOut, OSError):
            return self._connect(deadline)
        set_deadline(connection, deadline)
        return connection

    def _connect(self, deadline: float) -> Connection:
        self._drop()
        connection = self._connections.connect(deadline)
        connection.send_packed_command(connection.pack_command("CLIENT", "REPLY", "OFF"))
        self._connection = connection
        return connection

    def _drop(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.disconnect()


def _reply(connection: Connection) -> object:
    try:
        return connection.read_response()
    except ResponseError as error:
        return error


def _forget_after_fork() -> None:
    # The connection is the parent's, and the mutex may be held by a thread that is not here.
    for sender in _senders:
        sender._mutex = threading.Lock()
        sender._connection = None
        sender._unflushed = False


os.register_at_fork(after_in_child=_forget_after_fork)
