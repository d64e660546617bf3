"""Locks in Redis or Valkey: every act is one Lua script, atomic on the server."""

from __future__ import annotations

try:
    import redis as _redis  # noqa: F401
except ImportError as error:
    raise ImportError(
        'the redis:// lock store needs the redis package: pip install "celery-unique-tasks[redis]"'
    ) from error

from .cluster import ClusterStore
from .sentinel import SentinelStore
from .store import RedisStore

__all__ = ["ClusterStore", "RedisStore", "SentinelStore"]
