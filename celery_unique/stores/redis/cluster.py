"""The lock store on Redis Cluster: each key on the node that owns its slot."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from time import monotonic
from typing import Any

from redis.crc import REDIS_CLUSTER_HASH_SLOTS, key_slot
from redis.exceptions import (
    AskError,
    ClusterDownError,
    MovedError,
    RedisError,
    ResponseError,
    TryAgainError,
)

from celery_unique.exceptions import ConfigurationError, StoreUnavailable
from celery_unique.stores.base import Guarantee
from celery_unique.stores.bounded import BoundedDict
from celery_unique.stores.failover import FailOvers, ServerFacts
from celery_unique.stores.record import Record

from .commands import BATCH
from .connections import Command, ConnectFailed, Connections
from .failover_connections import FailoverConnections, Pending
from .scripts import ACQUIRE, MERGE, RECORD_ONLY
from .store import RedisStore, recent_keys
from .url import Cluster, cluster_of

#: Commands without a key: any node can run them.
KEYLESS = frozenset({"TIME", "PING", "SCAN"})
SCRIPTED = frozenset({"EVAL", "EVALSHA"})
#: These need all of their keys: while a slot is moved, a merged call waits for that.
_MERGING = frozenset({MERGE.sha, MERGE.body})
#: Not run: no node serves the slot at the moment.
NOT_NOW = frozenset({"CLUSTERDOWN", "MASTERDOWN"})


@dataclass(frozen=True, slots=True)
class _Slots:
    """The slots as one node saw them. Nodes are named by host and port."""

    owners: list[str]  # by slot; empty: none
    replicas: dict[str, list[str]]  # by owner

    def primaries(self) -> list[str]:
        return list(self.replicas)

    def nodes(self) -> list[str]:
        return [*self.replicas, *(each for found in self.replicas.values() for each in found)]

    def failed_over_to(self, now: _Slots) -> set[tuple[str, str]]:
        """Owners, each with the replica that owns its slots now; other slots were only moved."""
        pairs = set(zip(self.owners, now.owners, strict=True))
        return {(old, new) for old, new in pairs if old and new in self.replicas[old]}


class ClusterConnections(FailoverConnections):
    """Every command goes to the owner of its key's slot, to several nodes in parallel."""

    kind = "Redis Cluster at"

    def __init__(self, cluster: Cluster, timeout_s: float) -> None:
        super().__init__(cluster.label, timeout_s)
        self._seeds = cluster.seeds
        self._nodes: dict[str, Connections] = {}
        self._slots: _Slots | None = None
        self._moved: dict[int, str] = {}  # redirections since then
        self._is_stale = False
        self._suspects: set[str] = set()

    # -- where a command goes ----------------------------------------------------

    def route(
        self, pending: Sequence[Pending], deadline: float
    ) -> list[tuple[Connections, list[Pending]]]:
        slots = self._current_slots(deadline)
        by_node: dict[str, list[Pending]] = defaultdict(list)
        node = ""
        for each in reversed(pending):  # a command without a key goes with the next one that has
            try:
                node = self._node_of(each, slots) or node or slots.primaries()[0]
            except ConnectFailed as error:
                each.reason = error
            else:
                by_node[node].append(each)
        return [(self._node(name), commands[::-1]) for name, commands in by_node.items()]

    def _node_of(self, pending: Pending, slots: _Slots) -> str:
        server = pending.pinned or pending.server
        if server is not None:
            return _name_of(server)
        key = _key_in(pending.command)
        return "" if key is None else self._owner(key, slots)

    def _owner(self, key: str, slots: _Slots) -> str:
        slot = key_slot(key.encode())
        owner = self._moved.get(slot) or slots.owners[slot]
        if not owner:
            self._is_stale = True
            raise ConnectFailed(f"no node owns slot {slot}") from ClusterDownError(
                "the cluster does not cover all slots"
            )
        return owner

    def owner_of(self, name: str) -> str:
        """The node that has this key, as far as it is known without a query; else empty."""
        slots = self._slots
        if slots is None:
            return ""
        slot = key_slot(name.encode())
        return self._moved.get(slot) or slots.owners[slot]

    def by_node(self, keys: Sequence[str], name_of: Callable[[str], str]) -> list[list[str]]:
        """The keys whose records lie on one node, for each node."""
        found: dict[str, list[str]] = defaultdict(list)
        with self.translated_errors():
            slots = self._current_slots(monotonic() + self.timeout_s)
            for key in keys:
                found[self._owner(name_of(key), slots)].append(key)
        return list(found.values())

    # -- redirections ------------------------------------------------------------

    def redirect(self, reply: Any, pending: Pending, server: Connections) -> bool:
        if not isinstance(reply, ResponseError):
            return False
        word, slot, host, port = _redirection(reply)
        # A node that does not know its own name was reached by the right one.
        node = _name(host or _host_of(server), port)
        if word == "ASK":
            pending.server, pending.asking = self._node(node), True
            return True
        if word == "NEEDSKEYS" and pending.whole is not None:
            _name_only(pending, int(str(reply).split(" ")[1]))
        elif word == "TRYAGAIN":
            _name_fewer_keys(pending)
        elif word == "MOVED":
            self._moved[slot] = node
        elif word not in NOT_NOW:
            return False
        self._is_stale = True
        pending.server, pending.asking = None, False
        return True

    def suspect(self, server: Connections) -> None:
        server.close()
        self._suspects.add(_name_of(server))
        self._is_stale = True

    # -- learning the slots ----------------------------------------------------------

    def primaries(self, deadline: float) -> list[Connections]:
        self._is_stale = True
        return [self._node(name) for name in self._current_slots(deadline).primaries()]

    def _current_slots(self, deadline: float) -> _Slots:
        slots = self._slots
        if slots is None or self._is_stale:
            self._is_stale = False
            slots = self._learn(deadline)
        return slots

    def _learn(self, deadline: float) -> _Slots:
        """Query one node after another, first those that seem to be alive."""
        problem: Exception | None = None
        for node in self._candidates():
            # A node that hangs must leave time for the others and for the act.
            until = min(deadline, monotonic() + self.timeout_s / 4)
            try:
                slots = _slots_of(node.query(("CLUSTER", "SLOTS"), until), _host_of(node))
            except (RedisError, OSError) as error:
                problem = problem if isinstance(problem, ResponseError) else error
                continue
            if slots.replicas:
                self._take_over(slots)
                return slots
        self._is_stale = True
        raise problem or ConnectFailed("no node knows who owns the slots")

    def _candidates(self) -> list[Connections]:
        # The target of the last redirection is the best informed.
        names = list(self._moved.values())[::-1]
        names += self._slots.nodes() if self._slots else ()
        names += [_name_of_address(seed.options) for seed in self._seeds]
        names = list(dict.fromkeys(names))
        names.sort(key=lambda name: name in self._suspects)
        return [self._node(name) for name in names]

    def _take_over(self, slots: _Slots) -> None:
        before, self._slots = self._slots, slots
        self._moved = {}
        self._suspects = set()
        for old, new in before.failed_over_to(slots) if before else ():
            self.failovers.notice(old, new)

    def _node(self, name: str) -> Connections:
        node = self._nodes.get(name)
        if node is None:
            host, _, port = name.rpartition(":")
            address = self._seeds[0].at(host, int(port))
            # Two threads may create it at the same time: the same one for both.
            node = self._nodes.setdefault(name, Connections(address, self.timeout_s))
        return node

    def close(self) -> None:
        for node in list(self._nodes.values()):
            node.close()

    def conceal(self, text: str) -> str:
        return self._seeds[0].conceal(text)


def _redirection(reply: ResponseError) -> tuple[str, int, str, int]:
    """The first word of the reply, and for MOVED and ASK the slot, host and port.

    Newer redis-py removes the word from the text and has a class for it.
    """
    if isinstance(reply, AskError):
        word = "MOVED" if isinstance(reply, MovedError) else "ASK"
        return word, reply.slot_id, reply.host, reply.port
    if isinstance(reply, TryAgainError):
        return "TRYAGAIN", 0, "", 0
    if isinstance(reply, ClusterDownError):
        return "CLUSTERDOWN", 0, "", 0
    word, *facts = str(reply).split(" ")
    if word not in ("MOVED", "ASK"):
        return word, 0, "", 0
    host, _, port = facts[1].rpartition(":")
    return word, int(facts[0]), host, int(port)


def _name_fewer_keys(pending: Pending) -> None:
    """In a slot that is being moved, keys that do not exist must not be named beside others.

    A key without followers and with few marks, as nearly every one, has only its record. Acts on
    followers need these named, but hardly ever the marks beside the record.
    """
    whole = pending.whole or pending.command
    name, script, number, *rest = whole
    if name not in SCRIPTED or script in _MERGING or number not in (4, 5):
        return
    pending.whole = whole
    adds_a_follower = script in (ACQUIRE.sha, ACQUIRE.body) and rest[-3] != ""  # claim.join
    _name_only(pending, 1 if script in RECORD_ONLY and not adds_a_follower else 3)


def _name_only(pending: Pending, number: int) -> None:
    """Name so many keys, as the script has requested: with the record the marks beside it, or the
    followers and the due set, or all of them."""
    name, script, named, *rest = pending.whole or pending.command
    record, followers, due, marks = rest[:4]
    rest = rest[named:]  # without the payloads, too: they expire by themselves
    some = {1: (record,), 2: (record, marks), 3: (record, followers, due)}
    keys = some.get(number, (record, followers, due, marks))
    pending.command = (name, script, len(keys), *keys, *rest)


def _key_in(command: Command) -> str | None:
    if command[0] in SCRIPTED:
        return str(command[3])
    return None if command[0] in KEYLESS else str(command[1])


def _slots_of(reply: list[Any], default: str) -> _Slots:
    owners = [""] * REDIS_CLUSTER_HASH_SLOTS
    replicas: dict[str, list[str]] = {}
    for first, last, *nodes in reply:
        # A node without a name is reached at the host that was queried.
        named = [_name((host or b"").decode() or default, port) for host, port, *_ in nodes]
        owner, *others = named
        owners[first : last + 1] = [owner] * (last + 1 - first)
        replicas.setdefault(owner, others)
    return _Slots(owners, replicas)


def _name(host: str, port: int) -> str:
    return f"{host}:{port}"


def _name_of(server: Connections) -> str:
    return _name_of_address(server.address.options)


def _name_of_address(options: dict[str, Any]) -> str:
    return _name(options.get("host") or "localhost", options.get("port") or 6379)


def _host_of(server: Connections) -> str:
    return str(server.address.options.get("host") or "localhost")


class ClusterStore(RedisStore):
    """Every key on one of several primaries."""

    guarantee: Guarantee = "best-effort"
    mechanism = (
        "one Lua script for each act, run atomically by the cluster node that owns the key; "
        "a fail-over loses what was not replicated yet"
    )
    piggyback_limit = 0  # their keys may be on another node, which may be unavailable

    _read_url = staticmethod(cluster_of)
    _connections_class = ClusterConnections
    _connections: ClusterConnections

    def __init__(self, servers: Cluster, *, key_prefix: str = "", **options: Any) -> None:
        if "{" in key_prefix:
            raise ConfigurationError(
                "global_keyprefix has a brace, which would decide the cluster's slot in place of "
                "the key: leave it out",
                setting="broker_transport_options",
            )
        super().__init__(servers, key_prefix=key_prefix, **options)

    @property
    def failovers(self) -> FailOvers:
        return self._connections.failovers

    def servers(self) -> list[ServerFacts]:
        return self._connections.facts()

    def shard_of(self, key: str) -> str:
        """The node that holds the key: it fails independently of the others."""
        return self._connections.owner_of(self._layout.name_of(key))

    def ping(self) -> None:
        """Every primary must reply: each has its own locks."""
        for server in self._connections.primaries_now():
            self._connections.exchange([("PING",)], server=server)

    def walk(self, batch: int = BATCH, stop_at: float = math.inf) -> Iterator[tuple[str, Record]]:
        """An unavailable node is raised at the end, after the locks of the others."""
        seen = recent_keys()  # a slot that moves meanwhile is scanned on two nodes
        problem: StoreUnavailable | None = None
        for server in self._connections.primaries_now():
            try:
                yield from self._walk_node(server, batch, stop_at, seen)
            except StoreUnavailable as error:
                problem = problem or error
            if monotonic() > stop_at:
                return
        if problem is not None:
            raise problem

    def _walk_node(
        self, server: Connections, batch: int, stop_at: float, seen: BoundedDict[str, None]
    ) -> Iterator[tuple[str, Record]]:
        cursor = 0
        while True:
            scan = ("SCAN", cursor, "MATCH", self._layout.pattern, "COUNT", batch)
            [reply] = self._commands.check(self._connections.exchange([scan], server=server))
            keys = self._new_keys(reply[1], seen)
            for of_one_node in self._connections.by_node(keys, self._layout.name_of):
                yield from self._read_all(of_one_node)
            cursor = int(reply[0])
            if cursor == 0 or monotonic() > stop_at:
                return
