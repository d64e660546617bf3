"""Lock stores by URL. A store is imported only when its URL is used."""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import entry_points
from typing import Any

from celery_unique.exceptions import ConfigurationError

from .base import LockStore

#: URL scheme -> "module:class". Others come from ``celery_unique.stores`` entry points.
BUILT_IN = {
    "memory": "celery_unique.stores.memory:MemoryStore",
    "redis": "celery_unique.stores.redis:RedisStore",
    "rediss": "celery_unique.stores.redis:RedisStore",
    "redis+cluster": "celery_unique.stores.redis:ClusterStore",
    "rediss+cluster": "celery_unique.stores.redis:ClusterStore",
    "valkey": "celery_unique.stores.redis:RedisStore",
    "valkeys": "celery_unique.stores.redis:RedisStore",
    "sentinel": "celery_unique.stores.redis:SentinelStore",
    "sqlite": "celery_unique.stores.sql:SqlStore",
    "postgresql": "celery_unique.stores.sql:SqlStore",
    "mysql": "celery_unique.stores.sql:SqlStore",
    "mariadb": "celery_unique.stores.sql:SqlStore",
    "django-cache": "celery_unique.stores.django:DjangoCacheStore",
    "django-db": "celery_unique.stores.django:DjangoDatabaseStore",
}

ENTRY_POINT_GROUP = "celery_unique.stores"


def known_schemes() -> list[str]:
    installed = (point.name for point in entry_points(group=ENTRY_POINT_GROUP))
    return sorted({*BUILT_IN, *installed})


def open_store(
    url: str, *, namespace: str = "", timeout_s: float = 2.0, **options: Any
) -> LockStore:
    """The store behind ``url``. Connects to nothing: the first act does."""
    return _store_class(scheme_of(url)).from_url(  # type: ignore[no-any-return]
        url, namespace=namespace, timeout_s=timeout_s, **options
    )


def scheme_of(url: str) -> str:
    """``postgresql`` for ``postgresql+psycopg://...``: the driver is the store's business."""
    scheme, separator, _ = url.partition("://")
    if not separator or not scheme:
        raise ConfigurationError(
            "unique_store_url is not a URL: it must look like redis://host:6379/0, "
            f"sqlite:///locks.db or another of: {', '.join(known_schemes())}.",
            setting="unique_store_url",
        )
    scheme = scheme.lower()
    return scheme if scheme in BUILT_IN else scheme.partition("+")[0]


def _store_class(scheme: str) -> Any:
    target = BUILT_IN.get(scheme)
    if target is not None:
        module, _, name = target.partition(":")
        return getattr(import_module(module), name)
    for point in entry_points(group=ENTRY_POINT_GROUP, name=scheme):
        return point.load()
    raise ConfigurationError(
        f"unique_store_url has the scheme {scheme!r}, for which there is no lock store. "
        f"Use one of: {', '.join(known_schemes())}.",
        setting="unique_store_url",
    )
