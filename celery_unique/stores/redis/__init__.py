"""Locks in Redis or Valkey: every act is one Lua script, atomic on the server."""

from __future__ import annotations

try:
    import redis as _redis  # noqa: F401
except ImportError as error:
    from celery_unique.exceptions import ConfigurationError, install_command

    raise ConfigurationError(
        "unique_store_url: a lock store on Redis, which a Redis broker or result backend is taken "
        f"for too, needs the redis package: {install_command('redis')}",
        setting="unique_store_url",
    ) from error

from .cluster import ClusterStore
from .sentinel import SentinelStore
from .store import RedisStore

__all__ = ["ClusterStore", "RedisStore", "SentinelStore"]
