"""Connections to servers that fail over: commands follow the primary within their time-out."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from time import monotonic
from typing import Any

from redis.exceptions import ConnectionError as Disconnected
from redis.exceptions import RedisError
from redis.exceptions import TimeoutError as TimedOut

from celery_unique.exceptions import StoreUnavailable
from celery_unique.stores.diagnosis import Diagnosis
from celery_unique.stores.failover import FailOvers, ServerFacts

from .connections import (
    Command,
    ConnectFailed,
    Connections,
    Resend,
    describe,
    reply_of,
    send,
    set_deadline,
)
from .diagnosis import QUESTIONS, diagnosis_of_all, server_facts
from .url import Connection

_NO_REPLY: Any = object()
#: Between two attempts, seconds; the last one repeats. The first is immediate: a redirected
#: command can go to the other server.
PAUSES_S = (0.0, 0.005, 0.01, 0.02, 0.05)


@dataclass(slots=True)
class Pending:
    """One command that has no reply yet."""

    place: int  # of its reply
    command: Command
    pinned: Connections | None = None  # the only server that can reply
    server: Connections | None = None  # where it was redirected to; None: the owner of its key
    asking: bool = False  # that server does not own the slot yet
    reason: Exception | None = None  # why there is no reply yet
    whole: Command | None = None  # the command, where only some of its keys were named

    def postpone(self, reason: Exception, resend: Resend | None = None) -> None:
        """Prepare it for the next attempt, as it was at first; ``resend``: it may have run."""
        self.server, self.asking, self.reason = None, False, reason
        self.command, self.whole = self.whole or self.command, None
        if resend is not None:
            self.command = resend(self.command)


@dataclass(slots=True)
class _Flight:
    """Commands on one connection whose replies are outstanding."""

    server: Connections
    connection: Connection
    pending: list[Pending]


class FailoverConnections(ABC):
    """Connections to the servers that hold the locks at the moment.

    A command that a server did not run (it is a replica now, the slot has moved, it is gone) is
    repeated on the right one until the time-out: a fail-over that finishes by then costs the
    caller only time. A command that may have run is repeated as ``resend`` changes it, but not
    after a time-out: see :class:`~.connections.Connections`.
    """

    kind: str

    def __init__(self, label: str, timeout_s: float) -> None:
        self.label = label
        self.timeout_s = timeout_s
        self.failovers = FailOvers()

    # -- what differs ----------------------------------------------------------

    @abstractmethod
    def route(
        self, pending: Sequence[Pending], deadline: float
    ) -> Iterable[tuple[Connections, list[Pending]]]:
        """The commands by server, in their order. One that no server can run at the moment is
        left out, with the reason."""

    @abstractmethod
    def redirect(self, reply: Any, pending: Pending, server: Connections) -> bool:
        """Prepare the command for another server or another time, if the reply only means that
        this server did not run it."""

    @abstractmethod
    def suspect(self, server: Connections) -> None:
        """It did not reply: look for another one before the next attempt."""

    @abstractmethod
    def primaries(self, deadline: float) -> list[Connections]:
        """Every server that holds locks."""

    @abstractmethod
    def conceal(self, text: str) -> str:
        """The text without passwords."""

    @abstractmethod
    def close(self) -> None:
        """Close idle connections."""

    # -- exchanges -------------------------------------------------------------

    def exchange(
        self,
        commands: Sequence[Command],
        resend: Resend | None = None,
        server: Connections | None = None,
    ) -> list[Any]:
        """A reply, or an error reply, for each command; ``server``: send all of them to this one.

        For a server that does not reply, the replies are StoreUnavailable: other servers are not
        affected. If no command got a reply, that error is raised.
        """
        deadline = monotonic() + self.timeout_s
        replies: list[Any] = [_NO_REPLY] * len(commands)
        pending = [Pending(n, command, pinned=server) for n, command in enumerate(commands)]
        problem: Exception = TimedOut("no time is left")
        tries = 0
        try:
            left = pending
            while left := self._attempt(left, replies, deadline, resend):
                pause = PAUSES_S[min(tries, len(PAUSES_S) - 1)]
                if monotonic() + pause >= deadline:
                    raise left[0].reason or problem
                if pause:
                    time.sleep(pause)
                tries += 1
        except (RedisError, OSError) as error:
            problem = error
        unanswered = [each for each in pending if replies[each.place] is _NO_REPLY]
        if unanswered and len(unanswered) == len(commands):
            problem = unanswered[0].reason or problem
            raise self.unavailable(problem, server) from problem
        for each in unanswered:
            replies[each.place] = self.unavailable(each.reason or problem, server)
        return replies

    def begin(
        self, commands: Sequence[Command], resend: Resend | None = None
    ) -> Callable[[], list[Any]]:
        """Waits immediately: which server is the right one shows in its reply."""
        replies = self.exchange(commands, resend)
        return lambda: replies

    def _attempt(
        self,
        pending: list[Pending],
        replies: list[Any],
        deadline: float,
        resend: Resend | None,
    ) -> list[Pending]:
        """Send to all servers, then receive; returns what has to be sent again. A command whose
        server timed out is not among them: it may have run."""
        flights: list[_Flight] = []
        routes = list(self.route(pending, deadline))
        routed = {each.place for _, to_it in routes for each in to_it}
        left = [each for each in pending if each.place not in routed]
        try:
            for server, to_it in routes:
                left += self._send(server, to_it, flights, deadline, resend)
            while flights:
                left += self._receive(flights[0], replies, deadline, resend)
                del flights[0]
                # If a server took all the time: the replies of the others have arrived.
                deadline = max(deadline, monotonic() + self.timeout_s / 20)
        except BaseException:  # replies are still to come
            for flight in flights:
                flight.connection.disconnect()
            raise
        return sorted(left, key=lambda each: each.place)

    def _send(
        self,
        server: Connections,
        pending: list[Pending],
        flights: list[_Flight],
        deadline: float,
        resend: Resend | None,
    ) -> list[Pending]:
        try:
            connection = server.take(deadline)
        except ConnectFailed as error:
            return self._postpone(server, pending, error)
        commands: list[Command] = []
        for each in pending:
            commands += [("ASKING",), each.command] if each.asking else [each.command]
        try:
            send(connection, commands)
        except Disconnected as error:
            return self._postpone(server, pending, error, resend)
        flights.append(_Flight(server, connection, pending))
        return []

    def _receive(
        self, flight: _Flight, replies: list[Any], deadline: float, resend: Resend | None
    ) -> list[Pending]:
        left: list[Pending] = []
        for n, each in enumerate(flight.pending):
            try:
                # A socket's time-out restarts with every reply, the deadline does not.
                set_deadline(flight.connection, deadline)
                if each.asking:
                    reply_of(flight.connection)
                reply = reply_of(flight.connection)
            except Disconnected as error:
                flight.connection.disconnect()
                return left + self._postpone(flight.server, flight.pending[n:], error, resend)
            except TimedOut as error:
                flight.connection.disconnect()
                self._postpone(flight.server, flight.pending[n:], error)
                return left
            if self.redirect(reply, each, flight.server):
                each.reason = reply
                left.append(each)
            else:
                replies[each.place] = reply
        flight.server.keep(flight.connection)
        return left

    def _postpone(
        self,
        server: Connections,
        pending: list[Pending],
        reason: Exception,
        resend: Resend | None = None,
    ) -> list[Pending]:
        self.suspect(server)
        for each in pending:
            each.postpone(reason, resend)
        return pending

    # -- for operators -----------------------------------------------------------

    def primaries_now(self) -> list[Connections]:
        with self.translated_errors():
            return self.primaries(monotonic() + self.timeout_s)

    def facts(self) -> list[ServerFacts]:
        """The replication state of every primary. Needs the permission for INFO."""
        deadline = monotonic() + self.timeout_s
        with self.translated_errors():
            return [
                server_facts(server.address.place, server.query(("INFO", "replication"), deadline))
                for server in self.primaries(deadline)
            ]

    def diagnose(self) -> Diagnosis:
        """Of every primary: each has its own configuration and its own locks."""
        replies = {
            server.address.place: self.exchange(QUESTIONS, server=server)
            for server in self.primaries_now()
        }
        return diagnosis_of_all(replies)

    @contextmanager
    def translated_errors(self) -> Iterator[None]:
        """Raise StoreUnavailable for errors of the driver."""
        try:
            yield
        except (RedisError, OSError) as error:
            raise self.unavailable(error) from error

    def unavailable(self, error: Exception, server: Connections | None = None) -> StoreUnavailable:
        which = f"its server {server.address.place}, " if server is not None else ""
        return StoreUnavailable(
            f"The lock store, {self.kind} {self.label}, {which}"
            f"{self.conceal(describe(error, self.timeout_s))}. Check that a primary can be "
            "reached and that unique_store_url leads to it; a fail-over may be under way",
            store=self.label,
        )
