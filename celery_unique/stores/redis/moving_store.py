"""What the stores share whose servers change places: a cluster's, and those behind sentinels."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Self

from celery_unique.stores.base import Guarantee
from celery_unique.stores.failing_over import FailOvers, ServerFacts

from . import diagnosis
from .moving import MovingConnections, name_of
from .store import RedisStore


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
