"""Locks on a primary that sentinels watch over, wherever it is at the moment."""

from __future__ import annotations

from collections.abc import Sequence
from time import monotonic
from typing import Any

from redis.exceptions import MasterDownError, ReadOnlyError, RedisError, ResponseError
from redis.exceptions import TimeoutError as TimedOut

from .connections import ConnectFailed, Connections
from .failover_connections import Asked, MovingConnections, MovingStore
from .url import Connection, Sentinels, sentinels_of

#: With these a server says that it is no primary, or has lost its replicas. Nothing was carried
#: out. In the text too: Redis 6.2 wraps what a command inside a script is refused with.
NOT_NOW = (ReadOnlyError, MasterDownError)
NOT_NOW_IN_TEXT = ("READONLY", "NOREPLICAS", "MASTERDOWN")

#: How often the sentinels are asked while all goes well.
ASK_EVERY_S = 1.0


class SentinelStore(MovingStore):
    """All keys on the one primary that the sentinels name."""

    mechanism = (
        "one Lua script for each act, run atomically by the primary that the sentinels name; "
        "a fail-over loses what was not replicated yet"
    )

    servers_of = staticmethod(sentinels_of)

    _connections: SentinelConnections

    def __init__(
        self,
        servers: Sentinels,
        *,
        namespace: str = "",
        timeout_s: float = 2.0,
        key_prefix: str = "",
    ) -> None:
        super().__init__(
            servers.primary,
            namespace=namespace,
            timeout_s=timeout_s,
            key_prefix=key_prefix,
            connections=SentinelConnections(servers, timeout_s),
        )


class _Primary(Connections):
    """Connections that are made only to a primary.

    A server that was demoted, or has not been promoted yet, answers as well.
    """

    def connect(self, deadline: float) -> Connection:
        connection = super().connect(deadline)
        try:
            connection.send_packed_command(connection.pack_command("ROLE"), check_health=False)
            role = connection.read_response()[0]
        except (RedisError, OSError) as error:
            connection.disconnect()
            raise ConnectFailed(str(error)) from error
        if role != b"master":
            connection.disconnect()
            raise ConnectFailed(f"{self.address.label} is a {role.decode()}, not the primary")
        return connection


class SentinelConnections(MovingConnections):
    """All commands go to the one primary; the sentinels say where it is."""

    kind = "Redis behind sentinels,"

    def __init__(self, servers: Sentinels, timeout_s: float) -> None:
        super().__init__(servers.label, timeout_s)
        self._servers = servers
        # The one that answered last is asked first.
        self._sentinels = [Connections(address, timeout_s) for address in servers.sentinels]
        self._primary: Connections | None = None
        self._place: tuple[str, int] | None = None  # of the primary that was known last
        self._asked_at = 0.0

    def places(
        self, asked: Sequence[Asked], deadline: float
    ) -> list[tuple[Connections, list[Asked]]]:
        return [(self._find(deadline), list(asked))]

    def sent_elsewhere(self, reply: Any, asked: Asked, server: Connections) -> bool:
        refused = isinstance(reply, NOT_NOW) or (
            isinstance(reply, ResponseError) and any(word in str(reply) for word in NOT_NOW_IN_TEXT)
        )
        if refused:
            self.suspect(server)
        return refused

    def suspect(self, server: Connections) -> None:
        server.close()
        if self._primary is server:
            self._primary = None

    def primaries(self, deadline: float) -> list[Connections]:
        return [self._find(deadline)]

    def close(self) -> None:
        for connections in (self._primary, *self._sentinels):
            if connections is not None:
                connections.close()

    def conceal(self, text: str) -> str:
        for address in (self._servers.primary, *self._servers.sentinels):
            text = address.conceal(text)
        return text

    def _find(self, deadline: float) -> Connections:
        primary = self._primary
        if primary is None:
            return self._use(self._ask_sentinels(deadline))
        if monotonic() >= self._asked_at + ASK_EVERY_S:
            return self._look_again(primary, deadline)
        return primary

    def _look_again(self, primary: Connections, deadline: float) -> Connections:
        """Whether it still is the primary. After a planned fail-over the old one goes on for
        seconds as if nothing had happened, and all that it is told is lost."""
        self._asked_at = monotonic()  # first, so that one thread asks and the others go on
        try:
            place = self._ask(self._sentinels[0], min(deadline, monotonic() + self.timeout_s / 8))
        except (RedisError, OSError):
            return primary  # it answers, and nobody says otherwise
        if place == self._place:
            return primary
        primary.close()
        return self._use(place)

    def _use(self, place: tuple[str, int]) -> Connections:
        before, self._place = self._place, place
        self._asked_at = monotonic()
        address = self._servers.primary.at(*place)
        primary = self._primary = _Primary(address, self.timeout_s)
        if before is not None and before != place:
            self.failovers.notice("{}:{}".format(*before), "{}:{}".format(*place))
        return primary

    def _ask_sentinels(self, deadline: float) -> tuple[str, int]:
        """The primary's address, from the first sentinel that knows it."""
        problem: Exception | None = None
        for sentinel in list(self._sentinels):
            # A sentinel that hangs must leave time for the others and for the act.
            until = min(deadline, monotonic() + self.timeout_s / 4)
            try:
                found = self._ask(sentinel, until)
            except (RedisError, OSError) as error:
                problem = problem if isinstance(problem, ResponseError) else error
                continue
            self._sentinels.sort(key=lambda each: each is not sentinel)
            return found
        if isinstance(problem, (ResponseError, TimedOut, ConnectFailed)):
            raise problem
        raise ConnectFailed(f"no sentinel answers: {problem}") from problem

    def _ask(self, sentinel: Connections, until: float) -> tuple[str, int]:
        name = self._servers.master_name
        if self._servers.min_other_sentinels:
            facts = sentinel.ask(("SENTINEL", "MASTER", name), until)
            known = dict(zip(facts[::2], facts[1::2], strict=True))
            if int(known[b"num-other-sentinels"]) < self._servers.min_other_sentinels:
                raise ConnectFailed("a sentinel knows too few others: it may be cut off")
        found = sentinel.ask(("SENTINEL", "GET-MASTER-ADDR-BY-NAME", name), until)
        if found is None:
            raise ResponseError(f"the sentinels know no primary called {name!r}")
        return found[0].decode(), int(found[1])
