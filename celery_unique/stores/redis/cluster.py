"""Locks on a Redis Cluster: every key on the node that owns its slot at the moment."""

from __future__ import annotations

import math
from collections.abc import Iterator
from time import monotonic

from celery_unique.exceptions import ConfigurationError, StoreUnavailable
from celery_unique.stores.record import Record

from .acting import BATCH
from .cluster_nodes import ClusterConnections
from .connections import Connections
from .moving_store import MovingStore
from .recent import Recent
from .server_groups import Cluster, cluster_of


class ClusterStore(MovingStore):
    """Every key on one of several primaries."""

    mechanism = (
        "one Lua script for each act, run atomically by the cluster node that owns the key; "
        "a fail-over loses what was not replicated yet"
    )

    servers_of = staticmethod(cluster_of)

    _connections: ClusterConnections

    def __init__(
        self,
        cluster: Cluster,
        *,
        namespace: str = "",
        timeout_s: float = 2.0,
        key_prefix: str = "",
    ) -> None:
        if "{" in key_prefix:
            raise ConfigurationError(
                "global_keyprefix has a brace, which would decide the cluster's slot in place of "
                "the key: leave it out",
                setting="broker_transport_options",
            )
        super().__init__(
            cluster.seeds[0],
            namespace=namespace,
            timeout_s=timeout_s,
            key_prefix=key_prefix,
            connections=ClusterConnections(cluster, timeout_s),
        )

    def shard_of(self, key: str) -> str:
        """The node that holds the key: the others answer without it."""
        return self._connections.owner_of(self._layout.name_of(key))

    def ping(self) -> None:
        """Every primary must answer: each has locks of its own."""
        for server in self._connections.primaries_now():
            self._connections.exchange([("PING",)], server=server)

    def walk(self, batch: int = BATCH, stop_at: float = math.inf) -> Iterator[tuple[str, Record]]:
        """A node that does not answer is raised at the end, after the locks of the others."""
        seen = Recent()  # a slot that moves meanwhile is met on two nodes
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
        self, server: Connections, batch: int, stop_at: float, seen: Recent
    ) -> Iterator[tuple[str, Record]]:
        cursor = 0
        while True:
            scan = ("SCAN", cursor, "MATCH", self._layout.pattern, "COUNT", batch)
            [reply] = self._checked(self._connections.exchange([scan], server=server))
            keys = self._new_keys(reply[1], seen)
            for of_one_node in self._connections.by_node(keys, self._layout.name_of):
                yield from self._read_all(of_one_node)
            cursor = int(reply[0])
            if cursor == 0 or monotonic() > stop_at:
                return
