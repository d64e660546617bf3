"""Store URLs with everything wrong that each scheme allows, and what the error must name.

``{port}`` is a port of this machine at which somebody listens and nobody may call, ``{directory}``
one that must stay empty. The password is never to be seen.
"""

from __future__ import annotations

from typing import Any

#: kind of wrong -> URLs, each with a part of the error that tells which part of it is wrong.
Wrong = dict[str, list[tuple[str, str]]]


def redis(scheme: str) -> Wrong:
    server = f"{scheme}://me:hunter2@127.0.0.1:{{port}}"
    return {
        "type": [
            (f"{scheme}://me:hunter2@127.0.0.1:port/0", "the port"),
            (f"{server}/word", "the number of a database"),
            (f"{server}?db=word", "'db'"),
            (f"{server}?socket_keepalive=perhaps", "'socket_keepalive'"),
            (f"{server}?socket_read_size=word", "'socket_read_size'"),
            (f"{server}?protocol=word", "'protocol'"),
        ],
        "value": [
            (f"{scheme}://me:hunter2@127.0.0.1:99999/0", "the port"),
            (f"{scheme}://me:hunter2@{'a' * 70}/0", "the host"),
            (f"{scheme}://me:hunter2@[::1/0", "cannot be read"),
            (f"{scheme}://me:hunter2@a..b/0", "the host"),
            (f"{server}/-1", "the number of a database"),
            (f"{server}?db=-1", "'db'"),
            (f"{scheme}://me:hunter2/2@127.0.0.1:{{port}}/0", "%-encoded"),
        ],
        "unknown": [
            (f"{server}/0?bogus=1", "'bogus'"),
            (f"{server}/0?bogus=1&bogus=2", "'bogus'"),
            (f"{server}/0?usrename=a", "'username'"),
        ],
        "clash": [
            (f"{server}/1?db=2", "'db'"),
            (f"{server}/0?host=elsewhere", "'host'"),
            (f"{server}/0?port=1", "'port'"),
            (f"{server}/0?password=hunter22", "'password'"),
        ],
    }


def with_tls(wrong: Wrong, server: str) -> Wrong:
    return {
        "type": [*wrong["type"], (f"{server}?ssl_check_hostname=perhaps", "'ssl_check_hostname'")],
        "value": [
            *wrong["value"],
            (f"{server}?ssl_cert_reqs=perhaps", "perhaps"),
            (f"{server}?ssl_min_version=word", "'ssl_min_version'"),
            (f"{server}?ssl_ca_certs={{directory}}/none.pem", "ssl_ca_certs"),
            (f"{server}?ssl_certfile={{directory}}/none.pem", "ssl_certfile"),
            (f"{server}?ssl_keyfile={{directory}}/none.pem", "ssl_keyfile"),
            (f"{server}?ssl_ciphers=bogus", "ssl_ciphers"),
        ],
        "unknown": [*wrong["unknown"], (f"{server}?ssl_ca_cert=/ca.pem", "'ssl_ca_certs'")],
        "clash": wrong["clash"],
    }


def cluster(scheme: str) -> Wrong:
    node = "127.0.0.1:{port}"
    server = f"{scheme}://me:hunter2@{node},{node}"
    return {
        "type": [
            (f"{scheme}://me:hunter2@{node},127.0.0.1:port", "the port"),
            (f"{server}/word", "database 0"),
            (f"{server}?socket_keepalive=perhaps", "'socket_keepalive'"),
        ],
        "value": [
            (f"{scheme}://me:hunter2@127.0.0.1:99999,{node}", "the port"),
            (f"{scheme}://me:hunter2@{node},{'a' * 70}", "the host"),
            (f"{server}/3", "database 0"),
        ],
        "unknown": [(f"{server}?bogus=1", "'bogus'"), (f"{server}?clientname=a", "'client_name'")],
        "clash": [
            (f"{server}?db=2", "'db'"),
            (f"{server}?host=elsewhere", "'host'"),
            (f"{server}?sentinel_master=main", "'sentinel_master'"),
        ],
    }


SENTINEL = "sentinel://me:hunter2@127.0.0.1:{port};127.0.0.1:{port}/0"


def sql(scheme: str, server: str) -> Wrong:
    """What all databases have in common; ``server`` is a URL to which a query can be added."""
    return {
        "type": [
            (f"{server}?pool_size=many", "pool_size"),
            (f"{server}?create_table=maybe", "create_table"),
        ],
        "value": [
            (f"{server}?pool_size=0", "pool_size"),
            (f"{server}?table=drop%20table", "table"),
            (f"{server}?table=", "table"),
            (f"{server}?pool_size=1&pool_size=2", "pool_size"),
        ],
        "unknown": [
            (f"{server}?bogus=hunter2", "'bogus'"),
            (f"{server}?tabel=a", "'table'"),
            (server.replace(f"{scheme}://", f"{scheme}+bogus://"), "bogus"),
        ],
        "clash": [],
    }


def mysql(scheme: str) -> Wrong:
    server = f"{scheme}://me:hunter2@127.0.0.1:{{port}}/shop"
    common = sql(scheme, server)
    return {
        "type": [
            *common["type"],
            (f"{scheme}://me:hunter2@127.0.0.1:port/shop", "percent-encoded"),
            (f"{server}?connect_timeout=abc", "connect_timeout"),
            (f"{server}?client_flag=abc", "client_flag"),
            (f"{server}?local_infile=perhaps", "local_infile"),
            (f"{server}?ssl_check_hostname=perhaps", "ssl_check_hostname"),
            (f"{server}?ssl_disabled=perhaps", "ssl_disabled"),
            (f"{server}?ssl_verify_identity=perhaps", "ssl_verify_identity"),
        ],
        "value": [
            *common["value"],
            (f"{scheme}://me:hunter2@127.0.0.1:99999/shop", "port"),
            (f"{scheme}://me:hunter2@127.0.0.1:{{port}}", "database"),
            (f"{scheme}://me:hunter2@{'a' * 70}/shop", "host"),
            (f"{scheme}://me:hunter2%E2%82%AC@127.0.0.1:{{port}}/shop", "password"),
            (f"{scheme}://me:hunter2%00@127.0.0.1:{{port}}/shop", "percent-encoded"),
            (f"{server}?charset=bogus", "charset"),
            (f"{server}?connect_timeout=0", "connect_timeout"),
            (f"{server}?read_timeout=-1", "read_timeout"),
            (f"{server}?compress=true", "compress"),
            (f"{server}?ssl_ca={{directory}}/none.pem", "ssl_ca"),
            (f"{server}?ssl_cert={{directory}}/none.pem", "ssl_cert"),
            (f"{server}?ssl_cipher=bogus", "ssl_cipher"),
            (f"{server}?ssl_verify_cert=perhaps", "ssl_verify_cert"),
            (f"{server}?charset=utf8mb4&charset=latin1", "charset"),
        ],
        "unknown": [
            *common["unknown"],
            (f"{server}?chraset=utf8mb4", "'charset'"),
            (f"{server}?sslmode=require", "'sslmode'"),
            (f"{server}?cursorclass=Cursor", "'cursorclass'"),
            (f"{server}?max_allowed_packet=10", "'max_allowed_packet'"),
        ],
        "clash": [
            (f"{server}?synchronous=full", "synchronous"),
            (f"{server}?through_pooler=true", "through_pooler"),
            (f"{server}?ssl_ca=/ca.pem&ssl_verify_cert=true", "ssl_verify_cert"),
        ],
    }


POSTGRESQL = "postgresql://me:hunter2@127.0.0.1:{port}/shop"
SQLITE = "sqlite:///{directory}/locks.db"

WRONG_URLS: dict[str, Wrong] = {
    "memory": {
        "type": [],
        "value": [("memory://foo", "memory://"), ("memory:///", "memory://")],
        "unknown": [("memory://?x=1", "memory://"), ("memory+bogus://", "memory://")],
        "clash": [],
    },
    "redis": redis("redis"),
    "rediss": with_tls(redis("rediss"), "rediss://me:hunter2@127.0.0.1:{port}"),
    "valkey": redis("valkey"),
    "valkeys": with_tls(redis("valkeys"), "valkeys://me:hunter2@127.0.0.1:{port}"),
    "redis+cluster": cluster("redis+cluster"),
    "rediss+cluster": with_tls(
        cluster("rediss+cluster"), "rediss+cluster://me:hunter2@127.0.0.1:{port}"
    ),
    "sentinel": {
        "type": [
            ("sentinel://127.0.0.1:port/0?sentinel_master=main", "the port"),
            ("sentinel://127.0.0.1:{port}/word?sentinel_master=main", "the number of a database"),
            (f"{SENTINEL}?sentinel_master=main&ssl=perhaps", "'ssl'"),
            (f"{SENTINEL}?sentinel_master=main&socket_keepalive=perhaps", "'socket_keepalive'"),
            (f"{SENTINEL}?sentinel_master=main&min_other_sentinels=two", "min_other_sentinels"),
        ],
        "value": [
            (SENTINEL, "sentinel_master"),
            (f"{SENTINEL}?sentinel_master=", "sentinel_master"),
            ("sentinel://127.0.0.1:99999/0?sentinel_master=main", "the port"),
            (f"sentinel://{'a' * 70}/0?sentinel_master=main", "the host"),
            (f"{SENTINEL}?sentinel_master=main&ssl_cert_reqs=perhaps", "perhaps"),
            (f"{SENTINEL}?sentinel_master=main&ssl_ca_certs={{directory}}/a.pem", "ssl_ca_certs"),
            (f"{SENTINEL}?sentinel_master=main&min_other_sentinels=-1", "min_other_sentinels"),
        ],
        "unknown": [
            (f"{SENTINEL}?sentinel_master=main&bogus=1", "'bogus'"),
            (f"{SENTINEL}?sentinel_mastre=main", "sentinel_master"),
            (f"{SENTINEL}?sentinel_master=main&sentinel_pasword=hunter2", "'sentinel_password'"),
        ],
        "clash": [
            (f"{SENTINEL}?sentinel_master=main&master_name=other", "master_name"),
            (f"{SENTINEL}?sentinel_master=main&db=2", "'db'"),
            (f"{SENTINEL}?sentinel_master=main&host=elsewhere", "'host'"),
        ],
    },
    "sqlite": {
        **sql("sqlite", SQLITE),
        "value": [
            *sql("sqlite", SQLITE)["value"],
            ("sqlite://", "memory://"),
            ("sqlite:///:memory:", "memory://"),
            ("sqlite:///file:locks?mode=memory&uri=true", "memory://"),
            (f"{SQLITE}?synchronous=off", "synchronous"),
            (f"{SQLITE}\0", "percent-encoded"),
        ],
        "unknown": [
            *sql("sqlite", SQLITE)["unknown"],
            (f"{SQLITE}?timeout=abc", "'timeout'"),
            (f"{SQLITE}?timeout=5", "'timeout'"),
            (f"{SQLITE}?uri=true", "'uri'"),
            (f"{SQLITE}?sychronous=full", "'synchronous'"),
        ],
        "clash": [
            ("sqlite://host/{directory}/locks.db", "host"),
            ("sqlite://me:hunter2@host/{directory}/locks.db", "host"),
            (f"{SQLITE}?through_pooler=true", "through_pooler"),
        ],
    },
    "postgresql": {
        "type": [
            *sql("postgresql", POSTGRESQL)["type"],
            ("postgresql://me:hunter2@127.0.0.1:port/shop", "percent-encoded"),
            (f"{POSTGRESQL}?through_pooler=maybe", "through_pooler"),
            (f"{POSTGRESQL}?connect_timeout=abc", "connect_timeout"),
            (f"{POSTGRESQL}?keepalives_idle=abc", "keepalives_idle"),
            (f"{POSTGRESQL}?tcp_user_timeout=abc", "tcp_user_timeout"),
            ("postgresql:///shop?host=127.0.0.1&port=word", "port"),
        ],
        "value": [
            *sql("postgresql", POSTGRESQL)["value"],
            ("postgresql://me:hunter2@127.0.0.1:99999/shop", "port"),
            ("postgresql:///shop?host=127.0.0.1:99999", "port"),
            (f"postgresql://me:hunter2@{'a' * 70}/shop", "host"),
            (f"postgresql:///shop?host={'a' * 70}", "host"),
            ("postgresql://me:hunter2%00@127.0.0.1:{port}/shop", "percent-encoded"),
            (f"{POSTGRESQL}?sslmode=bogus", "sslmode"),
            (f"{POSTGRESQL}?sslmode=require&sslmode=prefer", "sslmode"),
            (f"{POSTGRESQL}?target_session_attrs=bogus", "target_session_attrs"),
            (f"{POSTGRESQL}?ssl_min_protocol_version=bogus", "ssl_min_protocol_version"),
            (f"{POSTGRESQL}?hostaddr=bogus", "hostaddr"),
        ],
        "unknown": [
            *sql("postgresql", POSTGRESQL)["unknown"],
            (f"{POSTGRESQL}?ssl_mode=require", "'sslmode'"),
            (f"{POSTGRESQL}?ssl_ca=/ca.pem", "'ssl_ca'"),
            (f"{POSTGRESQL}?prepare_threshold=5", "'prepare_threshold'"),
            (f"{POSTGRESQL}?autocommit=true", "'autocommit'"),
        ],
        "clash": [
            (f"{POSTGRESQL}?synchronous=full", "synchronous"),
            (f"{POSTGRESQL}?host=elsewhere", "host"),
        ],
    },
    "mysql": mysql("mysql"),
    "mariadb": mysql("mariadb"),
    "django-cache": {
        "type": [("django-cache://port-is-a-word", "port")],
        "value": [
            ("django-cache://", "LocMemCache"),
            ("django-cache://redis/1", "only the alias"),
            ("django-cache://[redis", "'[redis'"),
            ("django-cache://me:hunter2@redis", "only the alias"),
            ("django-cache://port-out-of-range", "port"),
            ("django-cache://unknown-option", "'bogus'"),
            ("django-cache://no-such-backend", "no-such-backend"),
        ],
        "unknown": [
            ("django-cache://rediss", "'redis'"),
            ("django-cache://nothing-alike", "'redis'"),
            ("django-cache://redis?bogus=1", "'bogus'"),
            ("django-cache+bogus://redis", "django-cache://"),
        ],
        "clash": [],
    },
    "django-db": {
        "type": [
            ("django-db://?pool_size=many", "pool_size"),
            ("django-db://port-is-a-word", "PORT"),
            ("django-db://timeout-is-a-word", "connect_timeout"),
        ],
        "value": [
            ("django-db://?pool_size=0", "pool_size"),
            ("django-db://default/1", "only the alias"),
            ("django-db://me:hunter2@default", "only the alias"),
            ("django-db://in-memory", "memory://"),
            ("django-db://port-out-of-range", "port"),
            ("django-db://unknown-option", "'bogus'"),
            ("django-db://no-such-engine", "no-such-engine"),
        ],
        "unknown": [
            ("django-db://defualt", "'default'"),
            ("django-db://?bogus=1", "'bogus'"),
            ("django-db://?timeout=5", "'timeout'"),
            ("django-db+bogus://default", "django-db://"),
        ],
        "clash": [
            ("django-db://?through_pooler=true", "through_pooler"),
            ("django-db://postgresql?synchronous=full", "synchronous"),
        ],
    },
}  # fmt: skip

#: Kinds that a scheme cannot have, and why.
CANNOT_BE_WRONG = {
    ("memory", "type"): "nothing may follow memory://, so nothing can be of a wrong type",
    ("memory", "clash"): "nothing may follow memory://, so no two parts can clash",
    ("django-cache", "clash"): "the alias is its only part",
}


def django_settings(directory: str, port: int) -> dict[str, Any]:
    """Settings of a project, right and wrong, that the URLs above lead to."""
    cache = {"BACKEND": "django.core.cache.backends.redis.RedisCache"}
    database = {"ENGINE": "django.db.backends.postgresql", "HOST": "127.0.0.1", "NAME": "shop",
                "PASSWORD": "hunter2", "PORT": port}  # fmt: skip
    sqlite = {"ENGINE": "django.db.backends.sqlite3"}
    return {
        "CACHES": {
            "default": {"BACKEND": "django.core.cache.backends.locmem.LocMemCache"},
            "redis": {**cache, "LOCATION": f"redis://:hunter2@127.0.0.1:{port}/0"},
            "port-is-a-word": {**cache, "LOCATION": "redis://:hunter2@127.0.0.1:port/0"},
            "port-out-of-range": {**cache, "LOCATION": "redis://:hunter2@127.0.0.1:99999/0"},
            "unknown-option": {**cache, "LOCATION": f"redis://:hunter2@127.0.0.1:{port}?bogus=1"},
            "no-such-backend": {"BACKEND": "shop.no_such.Backend"},
        },
        "DATABASES": {
            "default": {**sqlite, "NAME": f"{directory}/shop.db"},
            "in-memory": {**sqlite, "NAME": ":memory:"},
            "postgresql": database,
            "port-is-a-word": {**database, "PORT": "word"},
            "port-out-of-range": {**database, "PORT": 99999},
            "timeout-is-a-word": {**database, "OPTIONS": {"connect_timeout": "abc"}},
            "unknown-option": {**database, "OPTIONS": {"bogus": "hunter2"}},
            "no-such-engine": {"ENGINE": "shop.no_such_engine", "NAME": "shop"},
        },
    }
