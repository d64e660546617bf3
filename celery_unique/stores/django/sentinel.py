"""Connections like those of a pool of redis-py's, also of one that asks sentinels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from redis import Connection, ConnectionPool, Redis, SSLConnection
from redis.backoff import NoBackoff
from redis.exceptions import RedisError
from redis.retry import Retry
from redis.sentinel import MasterNotFoundError, SentinelConnectionPool

from celery_unique.stores.redis.url import Address, address_with

from .aliases import refused


def address_of_pool(pool: Any, timeout_s: float, what: str) -> Address:
    """How to make a connection to the server, or to the master, that the pool leads to."""
    if isinstance(pool, SentinelConnectionPool):
        return _sentinel_address(pool, timeout_s)
    if not isinstance(pool, ConnectionPool):
        raise refused(what, f"its pool {type(pool).__qualname__} leads to more than one server")
    return address_with(pool.connection_class, pool.connection_kwargs)


@dataclass(frozen=True)
class SentinelAddress(Address):
    """The master is asked for whenever a connection is made, so it is found after a fail-over."""

    service: str
    sentinels: tuple[dict[str, Any], ...]

    def connection(self) -> Any:
        host, port = self._master()
        return self.connection_class(**{**self.options, "host": host, "port": port})

    def _master(self) -> tuple[str, int]:
        reason = "no sentinel is configured"
        for options in self.sentinels:
            client = Redis(connection_pool=ConnectionPool(**options))
            try:
                found: Any = client.sentinel_get_master_addr_by_name(self.service)
                if found:
                    return str(found[0]), int(found[1])
                reason = "the sentinels do not know it"
            except RedisError as error:
                reason = str(error)
            finally:
                client.connection_pool.disconnect()
        raise MasterNotFoundError(f"the master of {self.service!r} was not found: {reason}")


def _sentinel_address(pool: Any, timeout_s: float) -> SentinelAddress:
    encrypted = issubclass(pool.connection_class, SSLConnection)
    # The URL's host is the service's name, not a host.
    options = {
        name: value
        for name, value in pool.connection_kwargs.items()
        if name not in ("host", "port", "connection_pool", "check_connection")
    }
    plain = address_with(SSLConnection if encrypted else Connection, options)
    sentinels = pool.sentinel_manager.sentinels
    return SentinelAddress(
        label=f"sentinel {pool.service_name}/{options.get('db') or 0}",
        connection_class=plain.connection_class,
        options=plain.options,
        service=pool.service_name,
        # All of them together in the quarter of the time-out that connecting may take.
        sentinels=tuple(_brief(sentinel, timeout_s / 4 / len(sentinels)) for sentinel in sentinels),
    )


def _brief(sentinel: Any, timeout_s: float) -> dict[str, Any]:
    """A sentinel's connection that gives up in time, and tries once."""
    return {
        **sentinel.connection_pool.connection_kwargs,
        "connection_class": sentinel.connection_pool.connection_class,
        "socket_timeout": timeout_s,
        "socket_connect_timeout": timeout_s,
        "retry": Retry(NoBackoff(), 0),
        "retry_on_timeout": False,
        "retry_on_error": [],
        "decode_responses": True,
    }
