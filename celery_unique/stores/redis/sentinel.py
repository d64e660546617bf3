"""The lock store on the primary that Redis sentinels monitor."""

from __future__ import annotations

from collections.abc import Sequence
from time import monotonic
from typing import Any

from redis.exceptions import MasterDownError, ReadOnlyError, RedisError, ResponseError
from redis.exceptions import TimeoutError as TimedOut

from celery_unique.stores.base import Guarantee
from celery_unique.stores.failover import FailOvers, ServerFacts

from .connections import ConnectFailed, Connections
from .failover_connections import FailoverConnections, Pending
from .store import RedisStore
from .url import Connection, Sentinels, sentinels_of

#: Replies of a server that is no primary, or has lost its replicas: it ran nothing. In the text
#: too: Redis 6.2 wraps the error of a command inside a script.
NOT_NOW = (ReadOnlyError, MasterDownError)
NOT_NOW_IN_TEXT = ("READONLY", "NOREPLICAS", "MASTERDOWN")

#: How often a sentinel is queried while the primary replies.
QUERY_EVERY_S = 1.0


class _Primary(Connections):
    """Connections that are made only to a primary.

    A server that was demoted, or has not been promoted yet, replies as well.
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


class SentinelConnections(FailoverConnections):
    """All commands go to the one primary whose address the sentinels report."""

    kind = "Redis behind sentinels,"

    def __init__(self, servers: Sentinels, timeout_s: float) -> None:
        super().__init__(servers.label, timeout_s)
        self._servers = servers
        # The one that replied last comes first.
        self._sentinels = [Connections(address, timeout_s) for address in servers.sentinels]
        self._primary: Connections | None = None
        self._place: tuple[str, int] | None = None  # of the primary that was known last
        self._queried_at = 0.0

    def route(
        self, pending: Sequence[Pending], deadline: float
    ) -> list[tuple[Connections, list[Pending]]]:
        return [(self._find(deadline), list(pending))]

    def redirect(self, reply: Any, pending: Pending, server: Connections) -> bool:
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
            return self._use(self._query_sentinels(deadline))
        if monotonic() >= self._queried_at + QUERY_EVERY_S:
            return self._check(primary, deadline)
        return primary

    def _check(self, primary: Connections, deadline: float) -> Connections:
        """The primary, or its successor. After a planned fail-over the old one replies for
        seconds as if nothing had happened, and every write to it is lost."""
        self._queried_at = monotonic()  # first, so that one thread queries and the others do not
        try:
            place = self._query(self._sentinels[0], min(deadline, monotonic() + self.timeout_s / 8))
        except (RedisError, OSError):
            return primary  # it replies, and no sentinel reports another one
        if place == self._place:
            return primary
        primary.close()
        return self._use(place)

    def _use(self, place: tuple[str, int]) -> Connections:
        before, self._place = self._place, place
        self._queried_at = monotonic()
        address = self._servers.primary.at(*place)
        primary = self._primary = _Primary(address, self.timeout_s)
        if before is not None and before != place:
            self.failovers.notice("{}:{}".format(*before), "{}:{}".format(*place))
        return primary

    def _query_sentinels(self, deadline: float) -> tuple[str, int]:
        """The primary's address, from the first sentinel that knows it."""
        problem: Exception | None = None
        for sentinel in list(self._sentinels):
            # A sentinel that hangs must leave time for the others and for the act.
            until = min(deadline, monotonic() + self.timeout_s / 4)
            try:
                found = self._query(sentinel, until)
            except (RedisError, OSError) as error:
                problem = problem if isinstance(problem, ResponseError) else error
                continue
            self._sentinels.sort(key=lambda each: each is not sentinel)
            return found
        if isinstance(problem, (ResponseError, TimedOut, ConnectFailed)):
            raise problem
        raise ConnectFailed(f"no sentinel answers: {problem}") from problem

    def _query(self, sentinel: Connections, until: float) -> tuple[str, int]:
        name = self._servers.master_name
        if self._servers.min_other_sentinels:
            facts = sentinel.query(("SENTINEL", "MASTER", name), until)
            known = dict(zip(facts[::2], facts[1::2], strict=True))
            if int(known[b"num-other-sentinels"]) < self._servers.min_other_sentinels:
                raise ConnectFailed("a sentinel knows too few others: it may be cut off")
        found = sentinel.query(("SENTINEL", "GET-MASTER-ADDR-BY-NAME", name), until)
        if found is None:
            raise ResponseError(f"the sentinels know no primary called {name!r}")
        return found[0].decode(), int(found[1])


class SentinelStore(RedisStore):
    """All keys on the one primary that the sentinels report."""

    guarantee: Guarantee = "best-effort"
    mechanism = (
        "one Lua script for each act, run atomically by the primary that the sentinels name; "
        "a fail-over loses what was not replicated yet"
    )
    piggyback_limit = 0  # an act is repeated until a primary runs it: buffered ones have time

    _read_url = staticmethod(sentinels_of)
    _connections_class = SentinelConnections
    _connections: SentinelConnections

    @property
    def failovers(self) -> FailOvers:
        return self._connections.failovers

    def servers(self) -> list[ServerFacts]:
        return self._connections.facts()
