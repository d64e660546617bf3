"""Connections to one Redis server: idle ones are reused, and every exchange has one deadline."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from time import monotonic
from typing import Any, Protocol

from redis.exceptions import AuthenticationError, ReadOnlyError, RedisError, ResponseError
from redis.exceptions import ConnectionError as Disconnected
from redis.exceptions import TimeoutError as TimedOut

from celery_unique.exceptions import StoreUnavailable
from celery_unique.stores.diagnosis import Diagnosis

from .diagnosis import QUESTIONS, diagnosis_of
from .url import Address, Connection

pack_command: Callable[[Command], bytes] | None
try:
    from hiredis import pack_command
except ImportError:  # optional, and faster
    pack_command = None

Command = tuple[Any, ...]
#: Returns the command as it is sent again after its reply was lost.
Resend = Callable[[Command], Command]

#: Connections beyond these are closed after a burst of threads or greenlets.
MOST_IDLE = 64
#: One that was used this recently is not checked: if it broke since, the commands are sent again.
SURELY_OPEN_S = 1.0
#: A socket keeps its time-out where that differs by less from what is left until the deadline.
DEADLINE_TOLERANCE_S = 0.001

_pools: weakref.WeakSet[Connections] = weakref.WeakSet()


class AnyConnections(Protocol):
    """What a store needs of its connections, to one server or to several."""

    timeout_s: float

    @property
    def label(self) -> str:
        """The address of the locks, without credentials."""

    def exchange(self, commands: Sequence[Command], resend: Resend | None = None) -> list[Any]:
        """Send all commands and return a reply, or an error reply, for each."""

    def begin(
        self, commands: Sequence[Command], resend: Resend | None = None
    ) -> Callable[[], list[Any]]:
        """``exchange`` in two steps: the returned function waits for the replies, once."""

    def unavailable(self, error: Exception) -> StoreUnavailable: ...

    def diagnose(self) -> Diagnosis: ...

    def close(self) -> None: ...


class Connections:
    """Connects on first use, and again when a connection turns out to be broken.

    Replaces redis-py's pool and client, whose retries have no total time limit.
    """

    def __init__(self, address: Address, timeout_s: float) -> None:
        self.address = address
        self.timeout_s = timeout_s
        # A list as a stack: append and pop are atomic, and the most recent one is reused first.
        #: Each with the time of its last use.
        self._idle: list[tuple[Connection, float]] = []
        _pools.add(self)

    @property
    def label(self) -> str:
        return self.address.label

    def exchange(self, commands: Sequence[Command], resend: Resend | None = None) -> list[Any]:
        deadline = monotonic() + self.timeout_s
        try:
            connection = self._send(commands, deadline)
            return self._receive_all(connection, commands, deadline, resend)
        except (RedisError, OSError) as error:
            raise self.unavailable(error) from error

    def begin_transaction(self, *commands: Command) -> Callable[[], None]:
        """Run commands as one transaction. What is returned waits for the reply, once, and raises
        StoreUnavailable unless the server has applied all of them; even then it may have: for
        commands that may be repeated."""
        return partial(self._end_transaction, self.begin([("MULTI",), *commands, ("EXEC",)]))

    def _end_transaction(self, wait: Callable[[], list[Any]]) -> None:
        *queued, applied = wait()
        for reply in (*queued, *(applied if isinstance(applied, list) else (applied,))):
            if isinstance(reply, Exception):
                raise self.unavailable(reply) from reply

    def begin(
        self, commands: Sequence[Command], resend: Resend | None = None
    ) -> Callable[[], list[Any]]:
        """The time-out does not count what happens between the two steps."""
        deadline = monotonic() + self.timeout_s
        try:
            in_flight = [self._send(commands, deadline)]
        except (RedisError, OSError) as error:
            raise self.unavailable(error) from error
        return partial(self._wait, in_flight, commands, deadline - monotonic(), resend)

    def _wait(
        self,
        in_flight: list[Connection | None],
        commands: Sequence[Command],
        left_s: float,
        resend: Resend | None,
    ) -> list[Any]:
        try:
            # Removed: once it is idle again, replies on it belong to another caller.
            connection = in_flight.pop()
            return self._receive_all(connection, commands, monotonic() + left_s, resend)
        except (RedisError, OSError) as error:
            raise self.unavailable(error) from error

    def _send(self, commands: Sequence[Command], deadline: float) -> Connection | None:
        """The connection on which they were sent; None: it broke."""
        connection = self.take(deadline)
        try:
            send(connection, commands)
        except Disconnected:
            return None
        return connection

    def _receive_all(
        self,
        connection: Connection | None,
        commands: Sequence[Command],
        deadline: float,
        resend: Resend | None,
    ) -> list[Any]:
        """A connection that broke is replaced once, and commands without a reply are sent again,
        changed by ``resend``: the server may have run them before."""
        replies: list[Any] = []
        try:
            if connection is None:
                raise Disconnected
            self._receive(len(commands), replies, deadline, connection)
        except Disconnected:
            left = commands[len(replies) :]
            left = [resend(command) for command in left] if resend else left
            self._exchange(left, replies, deadline, self.connect(deadline))
        return replies

    def _exchange(
        self,
        commands: Sequence[Command],
        replies: list[Any],
        deadline: float,
        connection: Connection,
    ) -> None:
        send(connection, commands)
        self._receive(len(commands), replies, deadline, connection)

    def _receive(
        self, number: int, replies: list[Any], deadline: float, connection: Connection
    ) -> None:
        is_primary = True
        try:
            for n in range(number):
                if n:  # a socket's time-out restarts with every reply, the deadline does not
                    set_deadline(connection, deadline)
                reply = reply_of(connection)
                if isinstance(reply, ReadOnlyError):
                    is_primary = False
                replies.append(reply)
        except BaseException:  # also a time limit of the caller: a reply is still to come
            connection.disconnect()
            raise
        if is_primary:
            self.keep(connection)
        else:
            connection.disconnect()
            self.close()  # the server is a replica now: the name may resolve to another one

    def query(self, command: Command, deadline: float) -> Any:
        """The reply to one command, without another attempt; an error reply is raised."""
        replies: list[Any] = []
        self._exchange([command], replies, deadline, self.take(deadline))
        if isinstance(replies[0], ResponseError):
            raise replies[0]
        return replies[0]

    def keep(self, connection: Connection) -> None:
        """Reuse a connection on which no reply is outstanding."""
        if len(self._idle) < MOST_IDLE:
            self._idle.append((connection, monotonic()))
        else:
            connection.disconnect()

    def take(self, deadline: float) -> Connection:
        while self._idle:
            try:
                connection, used_at = self._idle.pop()
            except IndexError:  # another thread was faster
                break
            if monotonic() - used_at < SURELY_OPEN_S or is_open(connection):
                set_deadline(connection, deadline)
                return connection
            connection.disconnect()
        return self.connect(deadline)

    def connect(self, deadline: float) -> Connection:
        """A new connection, with a quarter of the time to connect and for each handshake step.

        Those are AUTH and SELECT: the rest of the time is for the act itself.
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

    def diagnose(self) -> Diagnosis:
        return diagnosis_of(self.exchange(QUESTIONS))

    def unavailable(self, error: Exception) -> StoreUnavailable:
        problem = self.address.conceal(describe(error, self.timeout_s))
        return StoreUnavailable(
            f"The lock store, Redis at {self.address.label}, {problem}. "
            "Check that the server runs and that unique_store_url leads to it",
            store=self.address.label,
        )

    def close(self) -> None:
        idle, self._idle = self._idle, []
        for connection, _ in idle:
            connection.disconnect()


class ConnectFailed(RedisError):
    """Not a Disconnected: nothing was sent, and another attempt would fail as well."""


def describe(error: Exception, timeout_s: float) -> str:
    """The error as a verb phrase whose subject is the store."""
    reason = (error.__cause__ or error) if isinstance(error, ConnectFailed) else error
    if isinstance(reason, TimedOut):
        # Whichever of the two this store was opened with: the gate has its own store.
        settings = "unique_store_timeout, or unique_gate_timeout where a task starts"
        return f"did not answer in time, {timeout_s:g} s ({settings})"
    text = str(reason).rstrip(".")
    if isinstance(reason, (ResponseError, AuthenticationError)):
        return text if text.startswith("refused ") else f"refused: {text}"
    return f"cannot be reached: {text}"


def is_open(connection: Connection) -> bool:
    """Whether an idle connection is alive and has nothing to read, as far as it is known here."""
    try:
        return not connection.can_read(0)
    except (Disconnected, TimedOut, OSError):
        return False


def send(connection: Connection, commands: Sequence[Command]) -> None:
    try:
        connection.send_packed_command(_packed(connection, commands), check_health=False)
    except BaseException:
        connection.disconnect()
        raise


def _packed(connection: Connection, commands: Sequence[Command]) -> list[bytes]:
    """The commands as bytes. hiredis packs in one step; redis-py checks each argument first."""
    if pack_command is None:
        return connection.pack_commands(commands)  # type: ignore[no-any-return]
    # hiredis gets text only: it converts a number by calling Python, and a signal handler that
    # raises at that moment ends the process with a segmentation fault.
    packed = [
        pack_command(
            tuple(
                [
                    part if type(part) is str or isinstance(part, (str, bytes)) else str(part)
                    for part in command
                ]
            )
        )
        for command in commands
    ]
    return packed if len(packed) == 1 else [b"".join(packed)]


def set_deadline(connection: Connection, deadline: float) -> None:
    remaining = deadline - monotonic()
    if remaining <= 0:
        raise TimedOut("no time is left")
    # redis-py sets its time-outs when it connects and has no public way to change them. To set one
    # is a system call, and that of the exchange before mostly differs by microseconds.
    sock = connection._sock
    current = sock.gettimeout()
    if current is None or abs(current - remaining) > DEADLINE_TOLERANCE_S:
        sock.settimeout(remaining)


def reply_of(connection: Connection) -> Any:
    """The next reply; an error reply is returned, not raised."""
    try:
        return connection.read_response()
    except ResponseError as error:
        return error


def _forget_after_fork() -> None:
    # Forgotten, not shut down: the sockets belong to the parent.
    for pool in _pools:
        pool._idle = []


os.register_at_fork(after_in_child=_forget_after_fork)
