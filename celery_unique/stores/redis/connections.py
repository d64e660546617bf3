"""The connections of one store: idle ones are kept, and every exchange has one deadline."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Sequence
from time import monotonic
from typing import Any, Protocol

from redis.exceptions import AuthenticationError, ReadOnlyError, RedisError, ResponseError
from redis.exceptions import ConnectionError as Disconnected
from redis.exceptions import TimeoutError as TimedOut

from celery_unique.exceptions import StoreUnavailable

from .url import Address, Connection

pack_command: Callable[[Command], bytes] | None
try:
    from hiredis import pack_command
except ImportError:  # it is faster, and not needed
    pack_command = None

Command = tuple[Any, ...]
#: The command as it is sent again after its reply was lost.
Again = Callable[[Command], Command]

#: More than these are closed when a burst of threads or greenlets is over.
MOST_IDLE = 64

_pools: weakref.WeakSet[Connections] = weakref.WeakSet()


class Exchanging(Protocol):
    """What a store needs of its connections, to one server or to several."""

    timeout_s: float

    @property
    def label(self) -> str:
        """Where the locks are, without credentials."""

    def exchange(self, commands: Sequence[Command], again: Again | None = None) -> list[Any]: ...

    def begin(self, commands: Sequence[Command], again: Again) -> Callable[[], list[Any]]:
        """``exchange`` in two steps: what is returned waits for the replies, once."""

    def unavailable(self, error: Exception) -> StoreUnavailable: ...

    def close(self) -> None: ...


class Connections:
    """Connects on first use, and again when a connection turns out to be dead.

    Own code in place of redis-py's pool and client, whose retries know no total time.
    """

    def __init__(self, address: Address, timeout_s: float) -> None:
        self.address = address
        self.timeout_s = timeout_s
        # A list as a stack: append and pop are atomic, and the warmest is used again first.
        self._idle: list[Connection] = []
        _pools.add(self)

    @property
    def label(self) -> str:
        return self.address.label

    def exchange(self, commands: Sequence[Command], again: Again | None = None) -> list[Any]:
        """Send all commands at once and return a reply, or an error reply, for each.

        A connection that breaks is replaced once, and what had no reply is sent
        again, changed by ``again``: the server may have carried it out before.
        """
        deadline = monotonic() + self.timeout_s
        replies: list[Any] = []
        try:
            try:
                self._exchange(commands, replies, deadline, self.take(deadline))
            except Disconnected:
                left = commands[len(replies) :]
                left = [again(command) for command in left] if again else left
                self._exchange(left, replies, deadline, self.connect(deadline))
        except (RedisError, OSError) as error:
            raise self.unavailable(error) from error
        return replies

    def begin(self, commands: Sequence[Command], again: Again) -> Callable[[], list[Any]]:
        """``exchange`` in two steps: what is returned waits for the replies, once.

        The time-out does not count what happens in between.
        """
        deadline = monotonic() + self.timeout_s
        try:
            connection: Connection | None = self.take(deadline)
            try:
                _send(connection, commands)
            except Disconnected:
                connection = None
        except (RedisError, OSError) as error:
            raise self.unavailable(error) from error
        left_s = deadline - monotonic()
        under_way = [connection]

        def wait() -> list[Any]:
            # Taken out: once it is idle again, replies on it are those of somebody else.
            connection = under_way.pop()
            deadline = monotonic() + left_s
            replies: list[Any] = []
            try:
                try:
                    if connection is None:
                        raise Disconnected
                    set_deadline(connection, deadline)
                    self._receive(len(commands), replies, deadline, connection)
                except Disconnected:
                    left = [again(command) for command in commands[len(replies) :]]
                    self._exchange(left, replies, deadline, self.connect(deadline))
            except (RedisError, OSError) as error:
                raise self.unavailable(error) from error
            return replies

        return wait

    def _exchange(
        self,
        commands: Sequence[Command],
        replies: list[Any],
        deadline: float,
        connection: Connection,
    ) -> None:
        _send(connection, commands)
        self._receive(len(commands), replies, deadline, connection)

    def _receive(
        self, number: int, replies: list[Any], deadline: float, connection: Connection
    ) -> None:
        try:
            for n in range(number):
                if n:  # a socket's time-out starts again with every reply, ours does not
                    set_deadline(connection, deadline)
                replies.append(reply_of(connection))
        except BaseException:  # a time limit of the caller's too: a reply is still to come
            connection.disconnect()
            raise
        if any(isinstance(reply, ReadOnlyError) for reply in replies):
            connection.disconnect()
            self.close()  # the server is a replica now: the name may lead to another one
        else:
            self.keep(connection)

    def ask(self, command: Command, deadline: float) -> Any:
        """The reply to one command, without another attempt; an error reply is raised."""
        replies: list[Any] = []
        self._exchange([command], replies, deadline, self.take(deadline))
        if isinstance(replies[0], ResponseError):
            raise replies[0]
        return replies[0]

    def keep(self, connection: Connection) -> None:
        """A connection that has been told everything: for the next one who asks."""
        if len(self._idle) < MOST_IDLE:
            self._idle.append(connection)
        else:
            connection.disconnect()

    def take(self, deadline: float) -> Connection:
        while self._idle:
            try:
                connection = self._idle.pop()
            except IndexError:  # another thread was faster
                break
            if is_open(connection):
                set_deadline(connection, deadline)
                return connection
            connection.disconnect()
        return self.connect(deadline)

    def connect(self, deadline: float) -> Connection:
        """A new connection. A quarter of the time to connect, and for each step of the handshake.

        Those are AUTH and SELECT: what is left is for the act itself.
        """
        connection = self.address.connection()
        step = min(self.timeout_s / 4, max(deadline - monotonic(), 0.001))
        connection.socket_connect_timeout = step
        connection.socket_timeout = step
        try:
            connection.connect()
            set_deadline(connection, deadline)
        except (Disconnected, TimedOut, OSError) as error:
            connection.disconnect()
            raise ConnectFailed(str(error)) from error
        return connection

    def unavailable(self, error: Exception) -> StoreUnavailable:
        what = self.address.conceal(what_happened(error, self.timeout_s))
        return StoreUnavailable(
            f"The lock store, Redis at {self.address.label}, {what}. "
            "Check that the server runs and that unique_store_url leads to it",
            store=self.address.label,
        )

    def close(self) -> None:
        idle, self._idle = self._idle, []
        for connection in idle:
            connection.disconnect()


class ConnectFailed(RedisError):
    """Not a Disconnected: nothing was sent, and another attempt would fail as well."""


def what_happened(error: Exception, timeout_s: float) -> str:
    reason = (error.__cause__ or error) if isinstance(error, ConnectFailed) else error
    if isinstance(reason, TimedOut):
        # Whichever of the two this store was opened with: the gate has a store of its own.
        settings = "unique_store_timeout, or unique_gate_timeout where a task starts"
        return f"did not answer in time, {timeout_s:g} s ({settings})"
    said = str(reason).rstrip(".")  # it stands within a sentence
    if isinstance(reason, (ResponseError, AuthenticationError)):
        return f"refused: {said}"
    return f"cannot be reached: {said}"


def is_open(connection: Connection) -> bool:
    """Whether an idle connection is alive and has nothing to read, as far as it is known here."""
    try:
        return not connection.can_read(0)
    except (Disconnected, TimedOut, OSError):
        return False


def _send(connection: Connection, commands: Sequence[Command]) -> None:
    try:
        connection.send_packed_command(packed(connection, commands), check_health=False)
    except BaseException:
        connection.disconnect()
        raise


def packed(connection: Connection, commands: Sequence[Command]) -> list[bytes]:
    """The commands as bytes. hiredis makes them in one step; redis-py looks at each argument
    before it asks hiredis."""
    commands = [_as_text(command) for command in commands]
    if pack_command is None:
        return connection.pack_commands(commands)  # type: ignore[no-any-return]
    if len(commands) == 1:
        return [pack_command(commands[0])]
    return [b"".join([pack_command(command) for command in commands])]


def _as_text(command: Command) -> Command:
    """hiredis gets text only: it turns a number into text by calling Python, and a signal whose
    handler raises just then ends the process with a segmentation fault."""
    return tuple([part if isinstance(part, (str, bytes)) else str(part) for part in command])


def set_deadline(connection: Connection, deadline: float) -> None:
    remaining = deadline - monotonic()
    if remaining <= 0:
        raise TimedOut("no time is left")
    # redis-py sets its time-outs when it connects and has no public way to change them.
    connection._sock.settimeout(remaining)


def reply_of(connection: Connection) -> Any:
    """The next reply; a refusal of the command is a reply too."""
    try:
        return connection.read_response()
    except ResponseError as error:
        return error


def _forget_after_fork() -> None:
    # Only forgotten, not shut down: the sockets are the parent's.
    for pool in _pools:
        pool._idle = []


os.register_at_fork(after_in_child=_forget_after_fork)
