"""Django's settings, with caches and databases on the servers of the tests.

There is no project around them: the stores need Django's settings and no more.
"""

from __future__ import annotations

from typing import Any

from tests.stores.racing import Round, acquire_racer
from tests.support import PostgresServer, RedisServer
from tests.support.server import HOST


class DjangoProject:
    """What a project's settings say of its cache ``locks`` and its database ``locks``."""

    cache_url = "django-cache://locks"
    database_url = "django-db://locks"

    def __init__(self, redis_server: RedisServer, postgres_server: PostgresServer) -> None:
        self.settings = {
            "CACHES": {
                "default": {"BACKEND": "django.core.cache.backends.locmem.LocMemCache"},
                "locks": {
                    "BACKEND": "django_redis.cache.RedisCache",
                    "LOCATION": redis_server.fresh_url(),
                    "KEY_PREFIX": "shop",
                    "VERSION": 3,
                },
            },
            "DATABASES": {
                "default": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"},
                "locks": {
                    "ENGINE": "django.db.backends.postgresql",
                    "NAME": postgres_server.fresh_url().rpartition("/")[2],
                    "USER": "postgres",
                    "HOST": HOST,
                    "PORT": postgres_server.port,
                },
            },
        }

    def configure(self) -> None:
        configure(self.settings)


def configure(settings: dict[str, Any]) -> None:
    """Configure Django in this process, unless that was done."""
    from django.conf import settings as djangos

    if not djangos.configured:
        djangos.configure(**settings)


def django_acquire_racer(settings: dict[str, Any], url: str, race: str, process: int) -> Round:
    """As ``acquire_racer``, in a process that has Django's settings."""
    configure(settings)
    return acquire_racer(url, race, process)
