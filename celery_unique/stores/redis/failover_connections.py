"""Servers that change places: an act follows them, within the time that it has."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from time import monotonic
from typing import Any, ClassVar, Self

from redis.exceptions import ConnectionError as Disconnected
from redis.exceptions import RedisError
from redis.exceptions import TimeoutError as TimedOut

from celery_unique.exceptions import StoreUnavailable
from celery_unique.stores.base import Guarantee
from celery_unique.stores.failover import FailOvers, ServerFacts

from . import diagnosis
from .connections import (
    Again,
    Command,
    ConnectFailed,
    Connections,
    packed,
    reply_of,
    set_deadline,
    what_happened,
)
from .diagnosis import server_facts
from .store import RedisStore
from .url import Connection

_NO_REPLY: Any = object()
#: Between two attempts, seconds; the last one repeats. The first is at once: whoever was sent
#: to another server can go there.
PAUSES = (0.0, 0.005, 0.01, 0.02, 0.05)


@dataclass(slots=True)
class Asked:
    """One command on its way to its reply."""

    place: int  # of its reply
    command: Command
    pinned: Connections | None = None  # the one server that can answer it
    server: Connections | None = None  # where it was sent on to; None: wherever its key is
    asking: bool = False  # that server does not own the slot yet
    reason: Exception | None = None  # why there is no reply yet
    whole: Command | None = None  # the command, where only a part of its keys was named


@dataclass(slots=True)
class _Flight:
    server: Connections
    connection: Connection
    asked: list[Asked]


class MovingConnections(ABC):
    """Connections to whichever servers have the locks at the moment.

    A command that a server did not carry out (it is a replica now, the slot has moved, it is
    gone) is sent to the right one, again and again until the time-out: a fail-over that is
    over by then costs the caller only time. What may have been carried out is sent again as
    ``again`` changes it. A time-out is not: see :class:`~.connections.Connections`.
    """

    kind: str

    def __init__(self, label: str, timeout_s: float) -> None:
        self.label = label
        self.timeout_s = timeout_s
        self.failovers = FailOvers()

    # -- what differs ----------------------------------------------------------

    @abstractmethod
    def places(
        self, asked: Sequence[Asked], deadline: float
    ) -> Iterable[tuple[Connections, list[Asked]]]:
        """Which server is to be sent what, in the order in which it was asked. What nobody can
        answer at the moment is left out, with the reason."""

    @abstractmethod
    def sent_elsewhere(self, reply: Any, asked: Asked, server: Connections) -> bool:
        """Whether the reply only tells that the command was not carried out, and is to be
        sent to another server or at another time."""

    @abstractmethod
    def suspect(self, server: Connections) -> None:
        """It did not answer: look for another one before the next attempt."""

    @abstractmethod
    def primaries(self, deadline: float) -> list[Connections]:
        """Every server that has locks."""

    @abstractmethod
    def conceal(self, text: str) -> str:
        """The text without passwords."""

    @abstractmethod
    def close(self) -> None:
        """Let go of idle connections."""

    # -- asking ----------------------------------------------------------------

    def exchange(
        self,
        commands: Sequence[Command],
        again: Again | None = None,
        server: Connections | None = None,
    ) -> list[Any]:
        """A reply, or an error reply, for each command; ``server``: all of them from this one.

        A server that does not answer is an error, StoreUnavailable, in the place of its replies:
        it concerns no other server's. Raised where no command was answered.
        """
        deadline = monotonic() + self.timeout_s
        replies: list[Any] = [_NO_REPLY] * len(commands)
        asked = [Asked(n, command, pinned=server) for n, command in enumerate(commands)]
        problem: Exception = TimedOut("no time is left")
        tries = 0
        try:
            left = asked
            while left := self._attempt(left, replies, deadline, again):
                self.pause(tries, deadline, left[0].reason)
                tries += 1
        except (RedisError, OSError) as error:
            problem = error
        silent = [each for each in asked if replies[each.place] is _NO_REPLY]
        if silent and len(silent) == len(commands):
            problem = silent[0].reason or problem
            raise self.unavailable(problem, server) from problem
        for each in silent:
            replies[each.place] = self.unavailable(each.reason or problem, server)
        return replies

    def begin(self, commands: Sequence[Command], again: Again) -> Callable[[], list[Any]]:
        """Asks at once: which server is the right one shows in its reply."""
        replies = self.exchange(commands, again)
        return lambda: replies

    def pause(self, tries: int, deadline: float, reason: Exception | None) -> None:
        pause = PAUSES[min(tries, len(PAUSES) - 1)]
        if monotonic() + pause >= deadline:
            raise reason or TimedOut("no time is left")
        if pause:
            time.sleep(pause)

    def _attempt(
        self,
        asked: list[Asked],
        replies: list[Any],
        deadline: float,
        again: Again | None,
    ) -> list[Asked]:
        """Ask all servers at once; what is left has to be asked again. That is not so for what a
        server does not answer in time: it may have been carried out."""
        flights: list[_Flight] = []
        places = list(self.places(asked, deadline))
        placed = {each.place for _, for_it in places for each in for_it}
        left = [each for each in asked if each.place not in placed]
        try:
            for server, for_it in places:
                left += self._send(server, for_it, flights, deadline, again)
            while flights:
                left += self._receive(flights[0], replies, deadline, again)
                del flights[0]
                # Behind a server that took all the time: the replies of the others have arrived.
                deadline = max(deadline, monotonic() + self.timeout_s / 20)
        except BaseException:  # replies are still to come
            for flight in flights:
                flight.connection.disconnect()
            raise
        return sorted(left, key=lambda each: each.place)

    def _send(
        self,
        server: Connections,
        asked: list[Asked],
        flights: list[_Flight],
        deadline: float,
        again: Again | None,
    ) -> list[Asked]:
        try:
            connection = server.take(deadline)
        except ConnectFailed as error:
            self.suspect(server)
            return _put_off(asked, error)
        commands: list[Command] = []
        for each in asked:
            commands += [("ASKING",), each.command] if each.asking else [each.command]
        try:
            connection.send_packed_command(packed(connection, commands), check_health=False)
        except Disconnected as error:
            connection.disconnect()
            self.suspect(server)
            return _put_off(asked, error, again)
        except BaseException:
            connection.disconnect()
            raise
        flights.append(_Flight(server, connection, asked))
        return []

    def _receive(
        self,
        flight: _Flight,
        replies: list[Any],
        deadline: float,
        again: Again | None,
    ) -> list[Asked]:
        left: list[Asked] = []
        for n, each in enumerate(flight.asked):
            try:
                # A socket's time-out starts again with every reply, ours does not.
                set_deadline(flight.connection, deadline)
                if each.asking:
                    reply_of(flight.connection)
                reply = reply_of(flight.connection)
            except Disconnected as error:
                flight.connection.disconnect()
                self.suspect(flight.server)
                return left + _put_off(flight.asked[n:], error, again)
            except TimedOut as error:
                flight.connection.disconnect()
                self.suspect(flight.server)
                _put_off(flight.asked[n:], error)
                return left
            if self.sent_elsewhere(reply, each, flight.server):
                each.reason = reply
                left.append(each)
            else:
                replies[each.place] = reply
        flight.server.keep(flight.connection)
        return left

    # -- for people --------------------------------------------------------------

    def primaries_now(self) -> list[Connections]:
        with self.told_as_unavailable():
            return self.primaries(monotonic() + self.timeout_s)

    def facts(self) -> list[ServerFacts]:
        """What every primary says of its replication. Needs the permission for INFO."""
        deadline = monotonic() + self.timeout_s
        with self.told_as_unavailable():
            return [_facts_of(server, deadline) for server in self.primaries(deadline)]

    @contextmanager
    def told_as_unavailable(self, server: Connections | None = None) -> Iterator[None]:
        """Errors of the driver in the words of the contract; ``server``: the one that is meant."""
        try:
            yield
        except (RedisError, OSError) as error:
            raise self.unavailable(error, server) from error

    def unavailable(self, error: Exception, server: Connections | None = None) -> StoreUnavailable:
        which = f"its server {name_of(server)}, " if server is not None else ""
        return StoreUnavailable(
            f"The lock store, {self.kind} {self.label}, {which}"
            f"{self.conceal(what_happened(error, self.timeout_s))}. Check that a primary can be "
            "reached and that unique_store_url leads to it; a fail-over may be under way",
            store=self.label,
        )


def _put_off(asked: list[Asked], reason: Exception, again: Again | None = None) -> list[Asked]:
    for each in asked:
        each.server, each.asking, each.reason = None, False, reason
        each.command, each.whole = each.whole or each.command, None
        if again is not None:
            each.command = again(each.command)
    return asked


def _facts_of(server: Connections, deadline: float) -> ServerFacts:
    return server_facts(name_of(server), server.ask(("INFO", "replication"), deadline))


def name_of(server: Connections) -> str:
    """Its host and port, for people."""
    return server.address.label.rpartition("/")[0]


class MovingStore(RedisStore):
    """As on one Redis, but for what is lost when a replica takes its primary's place."""

    guarantee: Guarantee = "best-effort"
    #: They may be another server's, and that may be away.
    takes_along = 0

    #: What a URL and its options say of the servers: what the store is made of.
    servers_of: ClassVar[Callable[..., Any]]

    _connections: MovingConnections

    @classmethod
    def from_url(
        cls,
        url: str,
        *,
        namespace: str = "",
        timeout_s: float = 2.0,
        key_prefix: str = "",
        ssl: Mapping[str, Any] | bool | None = None,
        **options: Any,
    ) -> Self:
        """``ssl`` is as ``broker_use_ssl``; other options are those of redis-py's connections,
        and behind sentinels kombu's."""
        servers = cls.servers_of(url, ssl=ssl, **options)
        return cls(servers, namespace=namespace, timeout_s=timeout_s, key_prefix=key_prefix)

    @property
    def failovers(self) -> FailOvers:
        return self._connections.failovers

    def servers(self) -> list[ServerFacts]:
        return self._connections.facts()

    def diagnose(self) -> diagnosis.Diagnosis:
        """Of every primary: each is set up for itself, and has locks of its own."""
        connections = self._connections
        return diagnosis.diagnosis_of_all(
            {
                name_of(server): connections.exchange(diagnosis.QUESTIONS, server=server)
                for server in connections.primaries_now()
            }
        )
