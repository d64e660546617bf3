"""``django-cache://ALIAS``: the Redis store on the server of one of Django's caches.

Only the server, the connection options and the key prefix of the cache are used: locks are not
cache entries, and have neither its serializer nor its time-outs.
"""

from __future__ import annotations

import sys
from typing import Any

from celery_unique.stores.base import LockStore

from .aliases import alias_of, missing_package, opened, refused

SCHEME = "django-cache"


class DjangoCacheStore:
    """Makes a :class:`~celery_unique.stores.redis.RedisStore` from a cache."""

    @classmethod
    def from_url(cls, url: str, *, namespace: str = "", timeout_s: float = 2.0) -> LockStore:
        """The store at the URL. Does not connect yet."""
        alias, options = alias_of(url)
        what = f"{SCHEME}://{alias}"
        if options:
            name = next(iter(options))
            raise refused(what, f"it has no options, and {name!r} was given: write only the alias")
        try:
            from django.core.cache import caches

            cache = opened(caches, what, "CACHES", "BACKEND")
            pool = _pool(cache, what)
        except ImportError as error:
            raise missing_package(what, error) or error from error
        prefix = _key_prefix(cache, what)
        return _store(pool, what, namespace=namespace, timeout_s=timeout_s, key_prefix=prefix)


def _pool(cache: Any, what: str) -> Any:
    """The pool of redis-py to whose server the cache writes."""
    from django.core.cache.backends.redis import RedisCache

    # Django has imported the backend: if it is not loaded, the cache does not use it.
    django_redis = sys.modules.get("django_redis.cache")
    if isinstance(cache, RedisCache):
        client = cache._cache
    elif django_redis is not None and isinstance(cache, django_redis.RedisCache):
        client = _django_redis_client(cache, what)
    else:
        kind = f"{type(cache).__module__}.{type(cache).__qualname__}"
        raise refused(
            what,
            f"its backend is {kind}, which is not Redis. Locks need atomic operations on a server "
            "that all processes share: use a cache on django_redis.cache.RedisCache or "
            "django.core.cache.backends.redis.RedisCache, or another URL",
        )
    try:
        return client.get_client(write=True).connection_pool
    except ValueError:
        # Without its text, which can contain a part of the LOCATION and so of a password.
        raise refused(
            what,
            "the LOCATION of this cache is not the URL of a Redis server. Write it as "
            "redis://HOST:6379/0, with a port from 0 to 65535",
        ) from None
    except AttributeError:
        raise refused(
            what, f"its client {type(client).__qualname__} has no pool of connections to one server"
        ) from None


def _django_redis_client(cache: Any, what: str) -> Any:
    from django.core.exceptions import ImproperlyConfigured
    from django_redis.client import DefaultClient, ShardClient

    try:
        client = cache.client
    except ImproperlyConfigured as error:
        raise refused(what, str(error)) from error
    if isinstance(client, ShardClient):
        raise refused(
            what,
            "its client is ShardClient, which spreads keys over several servers and moves them "
            "when the list of servers changes, so that a lock would be free there. Use a cache "
            "on one server, or with Sentinel",
        )
    if not isinstance(client, DefaultClient):
        raise refused(
            what,
            f"its client {type(client).__qualname__} is not DefaultClient, HerdClient or "
            "SentinelClient of django-redis, and the server of a key is not known",
        )
    return client


def _key_prefix(cache: Any, what: str) -> str:
    """The prefix of the cache's keys: KEY_PREFIX and VERSION, or that of its KEY_FUNCTION."""
    prefix, probe = str(cache.make_key("")), "cu:{0}:probe"
    if str(cache.make_key(probe)) != prefix + probe:
        raise refused(
            what,
            "its KEY_FUNCTION changes keys in another way than by a prefix, and the locks could "
            "not be listed",
        )
    return prefix


def _store(pool: Any, what: str, **options: Any) -> LockStore:
    """The store on the server, or on the primary behind the sentinels, that the pool leads to."""
    from redis import Connection, ConnectionPool, SSLConnection
    from redis.sentinel import SentinelConnectionPool

    from celery_unique.stores.redis import RedisStore
    from celery_unique.stores.redis.sentinel import SentinelStore
    from celery_unique.stores.redis.url import Sentinels, address_with

    if isinstance(pool, SentinelConnectionPool):
        manager = pool.sentinel_manager
        pools = [sentinel.connection_pool for sentinel in manager.sentinels]
        is_encrypted = issubclass(pool.connection_class, SSLConnection)
        given = {
            name: value
            for name, value in pool.connection_kwargs.items()
            # The host of the LOCATION is the name of the service.
            if name not in ("host", "port", "connection_pool", "check_connection")
        }
        servers = Sentinels(
            master_name=pool.service_name,
            sentinels=tuple(address_with(p.connection_class, p.connection_kwargs) for p in pools),
            primary=address_with(SSLConnection if is_encrypted else Connection, given),
            min_other_sentinels=manager.min_other_sentinels,
        )
        return SentinelStore(servers, **options)
    if not isinstance(pool, ConnectionPool):
        raise refused(what, f"its pool {type(pool).__qualname__} leads to more than one server")
    return RedisStore(address_with(pool.connection_class, pool.connection_kwargs), **options)
