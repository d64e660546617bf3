"""What of a Django project's caches and databases becomes a lock store, and what is refused."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import pytest
import redis

from celery_unique.config.app_state import state_of
from celery_unique.exceptions import ConfigurationError
from celery_unique.stores import open_store
from celery_unique.stores.redis import RedisStore
from celery_unique.stores.sql import SqlStore
from celery_unique.testing.store_contract.factories import claim, fresh_key
from tests.stores.django_project import DjangoProject
from tests.support import RedisServer, Server, eventually
from tests.support.app import advance, define, make_app
from tests.support.server import HOST, find_program
from tests.support.worker import REPOSITORY

DJANGOS = "django.core.cache.backends.redis.RedisCache"
DJANGO_REDIS = "django_redis.cache.RedisCache"


class OddClient:
    """A client of the project's own that is none of django-redis's."""

    def __init__(self, *arguments: Any) -> None: ...

    def close(self) -> None: ...


def hashed(key: str, prefix: str, version: int) -> str:
    return f"{prefix}{hash(key)}"


def suffixed_version(key: str, prefix: str, version: int) -> str:
    return f"{prefix}/{version}/{key}"


@pytest.fixture
def cache(django_project: DjangoProject, redis_url: str) -> Any:
    """``cache(BACKEND, **options)``: the store of a cache with these settings."""
    from django.test import override_settings

    overrides = []

    def make(backend: str, location: Any = None, **options: Any) -> Any:
        settings = {"BACKEND": backend, "LOCATION": location or redis_url, **options}
        override = override_settings(CACHES={"default": {**settings}})
        override.enable()
        overrides.append(override)
        return open_store("django-cache://default")

    yield make
    for override in reversed(overrides):
        override.disable()


# -- caches -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("backend", "options"),
    [
        pytest.param(DJANGOS, {}, id="django"),
        pytest.param(DJANGO_REDIS, {}, id="default-client"),
        pytest.param(
            DJANGO_REDIS,
            {"OPTIONS": {"CLIENT_CLASS": "django_redis.client.HerdClient"}},
            id="herd-client",
        ),
        pytest.param(
            DJANGO_REDIS,
            {
                "OPTIONS": {
                    "COMPRESSOR": "django_redis.compressors.zlib.ZlibCompressor",
                    "SERIALIZER": "django_redis.serializers.json.JSONSerializer",
                    "SOCKET_TIMEOUT": 5,
                    "CONNECTION_POOL_KWARGS": {"max_connections": 5, "retry_on_timeout": True},
                    "IGNORE_EXCEPTIONS": True,
                }
            },
            id="every-option",
        ),
    ],
)
def test_a_redis_cache_is_the_redis_store_on_its_server(cache, redis_url, backend, options):
    store = cache(backend, KEY_PREFIX="shop", VERSION=4, **options)
    plain = RedisStore.from_url(redis_url, key_prefix="shop:4:")
    key = fresh_key()

    assert store.acquire(key, claim("t1")).outcome == "created"

    assert isinstance(store, RedisStore)
    assert plain.read(key)[0].tasks.keys() == {"t1"}
    assert store.fingerprint() == plain.fingerprint()
    assert store.guarantee == "strong"
    store.close()
    plain.close()


def test_prefix_and_version_of_the_cache_keep_locks_apart(cache):
    key = fresh_key()
    stores = [
        cache(DJANGOS, KEY_PREFIX=prefix, VERSION=version)
        for prefix, version in (("a", 1), ("a", 2), ("b", 1))
    ]

    outcomes = [store.acquire(key, claim(f"t{n}")).outcome for n, store in enumerate(stores)]

    assert outcomes == ["created"] * 3
    assert [[found for found, _ in store.walk()] for store in stores] == [[key]] * 3
    assert len({store.fingerprint() for store in stores}) == 3
    for store in stores:
        store.close()


def test_a_key_function_that_puts_something_before_the_key_is_respected(cache, redis_url):
    store = cache(
        DJANGO_REDIS, KEY_PREFIX="shop", KEY_FUNCTION=f"{__name__}.{suffixed_version.__name__}"
    )
    key = fresh_key()
    store.acquire(key, claim("t1"))

    assert RedisStore.from_url(redis_url, key_prefix="shop/1/").read(key)[0].tasks
    assert [found for found, _ in store.walk()] == [key]


def test_of_several_servers_the_one_that_is_written_to_has_the_locks(cache, redis_url):
    for backend in (DJANGOS, DJANGO_REDIS):
        store = cache(backend, [redis_url, "redis://127.0.0.1:1/0"])
        assert store.acquire(fresh_key(), claim("t1")).outcome == "created"


@pytest.mark.parametrize(
    ("backend", "options", "reason"),
    [
        ("django.core.cache.backends.locmem.LocMemCache", {}, "LocMemCache, which is not Redis"),
        ("django.core.cache.backends.dummy.DummyCache", {}, "DummyCache, which is not Redis"),
        ("django.core.cache.backends.db.DatabaseCache", {}, "DatabaseCache, which is not Redis"),
        ("no.such.Cache", {}, "Django cannot open it"),
        (
            DJANGO_REDIS,
            {"OPTIONS": {"CLIENT_CLASS": "django_redis.client.ShardClient"}},
            "spreads keys over several servers",
        ),
        (
            DJANGO_REDIS,
            {"OPTIONS": {"CLIENT_CLASS": f"{__name__}.OddClient"}},
            "OddClient is not DefaultClient, HerdClient or SentinelClient",
        ),
        (DJANGOS, {"KEY_FUNCTION": f"{__name__}.hashed"}, "its KEY_FUNCTION changes keys"),
    ],
)
def test_any_other_cache_is_refused_with_the_reason(cache, backend, options, reason):
    with pytest.raises(ConfigurationError, match=reason) as refused:
        cache(backend, **options)

    assert str(refused.value).startswith("unique_store_url: django-cache://default cannot be")
    assert refused.value.setting == "unique_store_url"


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("django-cache://lokcs", "CACHES has no 'lokcs'. Did you mean 'locks'?"),
        ("django-cache://locks?ttl=5", "it has no options, and 'ttl' was given"),
        ("django-cache://user:hunter2@locks", "write only the alias"),
        ("django-db://lokcs", "DATABASES has no 'lokcs'. Did you mean 'locks'?"),
        ("django-db://locks?tabel=x", "no option 'tabel'. Did you mean 'table'?"),
        ("django-db://default", "it is in memory, as in Django's tests"),
    ],
)
def test_a_wrong_alias_or_option_names_the_right_one(django_project, url, reason):
    with pytest.raises(ConfigurationError) as refused:
        open_store(url)

    assert reason in str(refused.value)
    assert "hunter2" not in str(refused.value)


@pytest.mark.parametrize("url", ["django-cache://default", "django-db://default"])
def test_without_django_set_up_the_error_says_so(url):
    code = f"from celery_unique.stores import open_store; open_store({url!r})"
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    environment.pop("DJANGO_SETTINGS_MODULE", None)

    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60
    )

    assert "ConfigurationError" in done.stderr
    assert "Django is not set up in this process: set DJANGO_SETTINGS_MODULE" in done.stderr


# -- sentinels ----------------------------------------------------------------


class SentinelServer(RedisServer):
    """One sentinel that watches a master, and alone decides that it is gone."""

    def __init__(self, master: RedisServer) -> None:
        super().__init__()
        self._master = master

    def _command(self) -> list[str]:
        program = find_program("redis-server", install_command="apt-get install redis-server")
        return [program, "sentinel.conf", "--sentinel"]

    def _prepare(self) -> None:
        lines = [
            f"port {self.port}",
            f"bind {HOST}",
            f"sentinel monitor shop {HOST} {self._master.port} 1",
            # It fails over on command: a busy machine must not look like a dead server.
            "sentinel down-after-milliseconds shop 60000",
            "sentinel failover-timeout shop 5000",
        ]
        (self._home / "sentinel.conf").write_text("\n".join(lines) + "\n")

    _prepare_ports = _prepare

    def _answers(self) -> bool:
        with self.client() as client:
            return bool(client.ping())


@pytest.mark.slow
def test_sentinels_are_asked_for_the_master_and_the_new_one_is_found(cache, start_server):
    master = start_server(RedisServer)
    replica = start_server(RedisServer, extra_args=("--replicaof", HOST, str(master.port)))
    with master.client() as client:
        eventually(lambda: client.info("replication")["connected_slaves"] == 1, timeout=30)
    sentinel: Server = start_server(SentinelServer, master=master)
    with sentinel.client() as client:
        eventually(lambda: len(client.sentinel_slaves("shop")) == 1, timeout=30)
    store = cache(
        DJANGO_REDIS,
        "redis://shop/0",
        OPTIONS={
            "CLIENT_CLASS": "django_redis.client.SentinelClient",
            "CONNECTION_FACTORY": "django_redis.pool.SentinelConnectionFactory",
            "SENTINELS": [(HOST, 1), (HOST, sentinel.port)],  # the first one does not answer
        },
    )
    key = fresh_key()
    assert store.acquire(key, claim("t1")).outcome == "created"
    assert store.guarantee == "best-effort"
    with master.client() as client:
        eventually(lambda: client.wait(1, 1_000) == 1, timeout=30)

    with sentinel.client() as client:
        client.execute_command("SENTINEL", "FAILOVER", "shop")
    with replica.client() as client:
        eventually(
            lambda: client.info("replication")["role"] == "master",
            timeout=60,
            ignoring=redis.ConnectionError,  # the new role ends the connections of the old one
        )

    def asked_again() -> str:
        return str(store.acquire(key, claim("t2")).outcome)

    from celery_unique.exceptions import StoreUnavailable

    eventually(lambda: asked_again() == "duplicate", timeout=60, ignoring=StoreUnavailable)
    with replica.client() as client:
        assert client.dbsize() == 1
    store.close()


def test_sentinels_that_do_not_answer_are_an_error_in_time(cache):
    from celery_unique.exceptions import StoreUnavailable

    store = cache(
        DJANGO_REDIS,
        "redis://nothing/0",  # django-redis keeps a pool for each location
        OPTIONS={
            "CLIENT_CLASS": "django_redis.client.SentinelClient",
            "CONNECTION_FACTORY": "django_redis.pool.SentinelConnectionFactory",
            "SENTINELS": [(HOST, 1), (HOST, 2)],
        },
    )

    message = rf"Redis behind sentinels, nothing/0 of {HOST}:1,{HOST}:2, cannot be reached"
    with pytest.raises(StoreUnavailable, match=message):
        store.acquire(fresh_key(), claim("t1"))


# -- databases ----------------------------------------------------------------


def url_of(**settings: Any) -> Any:
    from celery_unique.stores.django.database import _postgresql_url

    engine = "django.db.backends.postgresql"
    return _postgresql_url({"ENGINE": engine, **settings}, "django-db://default")


def test_the_settings_of_a_database_become_its_url():
    url = url_of(
        NAME="shop",
        USER="me@home",
        PASSWORD="p/w:?#",
        HOST="db.internal",
        PORT="5433",
        OPTIONS={
            "sslmode": "require",
            "isolation_level": 2,
            "pool": True,
            "server_side_binding": True,
            "connect_timeout": 5,
        },
    )

    assert (url.database, url.username, url.password) == ("shop", "me@home", "p/w:?#")
    assert (url.host, url.port) == ("db.internal", 5433)
    assert dict(url.query) == {"sslmode": "require", "connect_timeout": "5"}


def test_a_socket_and_a_service_need_no_host():
    socket = url_of(NAME="shop", HOST="/var/run/postgresql")
    service = url_of(OPTIONS={"service": "shop", "passfile": ".pgpass"})

    assert (socket.host, dict(socket.query)) == (None, {"host": "/var/run/postgresql"})
    assert dict(service.query) == {"service": "shop", "passfile": ".pgpass"}


def test_a_role_that_django_assumes_is_assumed_here_too(django_project, postgres_server):
    name = postgres_server.fresh_url().rpartition("/")[2]
    postgres_server.execute('DROP ROLE IF EXISTS "the locks"')
    postgres_server.execute('CREATE ROLE "the locks"')
    postgres_server.execute('GRANT ALL ON SCHEMA public TO "the locks"', database=name)
    url = url_of(
        NAME=name,
        USER="postgres",
        HOST=HOST,
        PORT=postgres_server.port,
        OPTIONS={"assume_role": "the locks", "options": "-c search_path=public"},
    )
    store = SqlStore.from_url(url.render_as_string(hide_password=False))

    store.acquire(fresh_key(), claim("t1"))

    owner = "SELECT tableowner FROM pg_tables WHERE tablename = 'celery_unique_lock'"
    assert postgres_server.execute(owner, database=name) == [("the locks",)]
    store.close()


@pytest.mark.parametrize(
    ("vendor", "reason"),
    [
        ("mysql", "Give it a URL of its own"),
        ("oracle", "there is no lock store on Oracle"),
    ],
)
def test_a_database_without_a_lock_store_is_refused(monkeypatch, vendor, reason):
    from celery_unique.stores.django import database

    # Django's own of these vendors want a driver that is not installed here.
    wrapper = SimpleNamespace(
        vendor=vendor, display_name=vendor.capitalize(), settings_dict={"NAME": "shop"}
    )
    monkeypatch.setattr(database, "opened", lambda *_: wrapper)

    with pytest.raises(ConfigurationError, match=reason):
        open_store("django-db://default")


def test_options_of_the_sql_store_stand_in_the_query(django_project, postgres_server):
    store = open_store("django-db://locks?table=other_locks&pool_size=2", namespace="options")
    key = fresh_key()

    store.acquire(key, claim("t1"))

    name = django_project.settings["DATABASES"]["locks"]["NAME"]
    assert postgres_server.execute("SELECT count(*) FROM other_locks", database=str(name)) == [(1,)]
    store.close()


def test_the_locks_of_a_sqlite_database_are_in_a_file_beside_it(tmp_path):
    from celery_unique.stores.django.database import _sqlite_url

    named = _sqlite_url({"NAME": tmp_path / "db.sqlite3"}, "django-db://default")
    bare = _sqlite_url({"NAME": str(tmp_path / "shop")}, "django-db://default")

    assert named.database == str(tmp_path / "db.celery_unique.sqlite3")
    assert bare.database == str(tmp_path / "shop.celery_unique.sqlite3")


# -- stale holders ------------------------------------------------------------


@pytest.mark.parametrize("url", [DjangoProject.cache_url, DjangoProject.database_url])
@pytest.mark.parametrize("why", ["ended", "purged"])
def test_a_duplicate_of_a_stale_holder_releases_its_key(
    django_project: DjangoProject, redis_url: str, url: str, why: str
) -> None:
    app = make_app(url, broker=redis_url, backend=redis_url, unique_namespace=f"test-{uuid4()}")
    task = define(app, unique=True)
    first = task.delay(7)
    assert task.delay(7).id == first.id
    app.control.purge()
    if why == "ended":  # in a worker without the library
        app.backend.store_result(first.id, None, "SUCCESS")
    advance(app, 61)

    again = task.delay(7)

    assert (again.outcome, again.id != first.id) == ("created", True)
    state_of(app).store.close()
