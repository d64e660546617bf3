"""A Django project on real servers: PostgreSQL behind the ORM, Redis behind the cache."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from tests.django.inside import DjangoProcess
from tests.django.site import DjangoSite
from tests.support import PostgresServer, RedisServer
from tests.support.server import HOST


def postgres_database(server: PostgresServer, url: str) -> dict[str, object]:
    """DATABASES['default'] for a database of the test server."""
    return {
        "ENGINE": "django.db.backends.postgresql",
        "NAME": url.rpartition("/")[2],
        "USER": "postgres",
        "HOST": HOST,
        "PORT": server.port,
    }


@pytest.fixture(scope="session")
def shop_environment(
    redis_server: RedisServer,
    postgres_server: PostgresServer,
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, str]:
    """What a deployment of the project sets."""
    small = {
        "ENGINE": "django.db.backends.sqlite3",
        "NAME": str(tmp_path_factory.mktemp("shop") / "small.sqlite3"),
    }
    database = postgres_database(postgres_server, postgres_server.fresh_url())
    cache = {
        "BACKEND": "django_redis.cache.RedisCache",
        "LOCATION": redis_server.fresh_url(),
        "KEY_PREFIX": "shop",
    }
    return {
        "DJANGO_SETTINGS_MODULE": "tests.django.shop.settings",
        "SHOP_APPS": "django_celery_results",
        "SHOP_DATABASES": json.dumps({"default": database, "small": small}),
        "SHOP_CACHES": json.dumps({"default": cache}),
        "SHOP_BROKER_URL": redis_server.fresh_url(),
        "SHOP_RESULT_BACKEND": "django-db",
        "SHOP_STORE_URL": "django-cache://default",
    }


@pytest.fixture(scope="session")
def django_process(shop_environment: dict[str, str]) -> Iterator[DjangoProcess]:
    with DjangoProcess(shop_environment) as process:
        yield process


@pytest.fixture(scope="session")
def site(shop_environment: dict[str, str], django_process: DjangoProcess) -> Iterator[DjangoSite]:
    """Served on the database that ``django_process`` has migrated."""
    django_process.call("tests.django.inside", "_is_set_up")
    with DjangoSite(shop_environment) as site:
        yield site
