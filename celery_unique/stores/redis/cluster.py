"""Locks on a Redis Cluster: every key on the node that owns its slot at the moment."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from time import monotonic
from typing import Any

from celery_unique.exceptions import ConfigurationError
from celery_unique.stores.base import Guarantee
from celery_unique.stores.failing_over import FailOvers, ServerFacts
from celery_unique.stores.record import Record

from .cluster_nodes import ClusterConnections
from .recent import Recent
from .server_groups import Cluster, cluster_of
from .store import BATCH, RedisStore


class ClusterStore(RedisStore):
    """As on one Redis, but for what is lost when a replica takes its primary's place."""

    guarantee: Guarantee = "best-effort"
    mechanism = (
        "one Lua script for each act, run atomically by the cluster node that owns the key; "
        "a fail-over loses what was not replicated yet"
    )

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
    ) -> ClusterStore:
        """``ssl`` is as ``broker_use_ssl``; other options are those of redis-py's connections."""
        cluster = cluster_of(url, ssl=ssl, **options)
        return cls(cluster, namespace=namespace, timeout_s=timeout_s, key_prefix=key_prefix)

    @property
    def failovers(self) -> FailOvers:
        return self._connections.failovers

    def servers(self) -> list[ServerFacts]:
        return self._connections.facts()

    def ping(self) -> None:
        """Every primary must answer: each has locks of its own."""
        for server in self._connections.primaries_now():
            self._connections.exchange([("PING",)], server=server)

    def walk(self, batch: int = BATCH, stop_at: float = math.inf) -> Iterator[tuple[str, Record]]:
        seen = Recent()  # a slot that moves meanwhile is met on two nodes
        for server in self._connections.primaries_now():
            cursor = 0
            while True:
                scan = ("SCAN", cursor, "MATCH", self._layout.pattern, "COUNT", batch)
                [reply] = self._checked(self._connections.exchange([scan], server=server))
                keys = self._new_keys(reply[1], seen)
                for of_one_node in self._connections.by_node(keys, self._layout.name_of):
                    yield from self._read_all(of_one_node)
                cursor = int(reply[0])
                if monotonic() > stop_at:
                    return
                if cursor == 0:
                    break
