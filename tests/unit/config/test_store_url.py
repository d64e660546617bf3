"""Which lock store an app uses when it does not say, and how it is reached."""

from __future__ import annotations

from typing import Any

import pytest
from celery import Celery

from celery_unique.config.settings import UniqueSettings, read_settings
from celery_unique.config.store_url import store_url
from celery_unique.exceptions import ConfigurationError


def url_of(**conf: Any) -> tuple[str, dict[str, Any]]:
    app = Celery("shop", set_as_current=False)
    app.conf.update(conf)
    return store_url(app, read_settings(app))


@pytest.fixture(autouse=True)
def no_broker_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("BROKER_URL", "BROKER_READ_URL", "BROKER_WRITE_URL", "RESULT_BACKEND"):
        monkeypatch.delenv(f"CELERY_{name}", raising=False)


REDIS = "redis://:pw@localhost:6379/1"

FOUND = [
    ({"unique_store_url": "sqlite:///a.db", "broker_url": REDIS}, "sqlite:///a.db", {}),
    ({"unique_store_url": "postgresql+psycopg://h/d"}, "postgresql+psycopg://h/d", {}),
    ({"broker_url": REDIS}, REDIS, {}),
    ({"broker_url": "amqp://", "broker_write_url": REDIS}, REDIS, {}),
    ({"broker_url": REDIS, "broker_read_url": "redis://replica"}, REDIS, {}),
    ({"broker_url": REDIS, "result_backend": "redis://results"}, REDIS, {}),
    ({"broker_url": "amqp://", "result_backend": REDIS}, REDIS, {}),
    ({"broker_url": "memory://"}, "memory://", {}),
    ({"broker_url": "memory://", "result_backend": REDIS}, REDIS, {}),
    ({"broker_url": "redis://a;redis://b"}, "redis://a", {}),
    ({"broker_url": ["redis://a", "redis://b"]}, "redis://a", {}),
    ({"broker_url": "REDIS://a"}, "REDIS://a", {}),
    ({"broker_url": "redis+socket:///r.sock"}, "redis+socket:///r.sock", {}),
    (
        {"broker_url": "rediss://h", "broker_use_ssl": {"ssl_cert_reqs": "none"}},
        "rediss://h",
        {"ssl": {"ssl_cert_reqs": "none"}},
    ),
    ({"broker_url": REDIS, "broker_use_ssl": True}, REDIS, {"ssl": True}),
    ({"broker_url": REDIS, "broker_use_ssl": False}, REDIS, {}),
    (
        {"broker_url": REDIS, "broker_transport_options": {"global_keyprefix": "a:", "x": 1}},
        REDIS,
        {"key_prefix": "a:"},
    ),
    (
        {
            "broker_url": "sentinel://a:26379;sentinel://b:26379",
            "broker_transport_options": {
                "master_name": "main",
                "sentinel_kwargs": {"password": "pw"},
                "min_other_sentinels": 1,
            },
        },
        "sentinel://a:26379;sentinel://b:26379",
        {"master_name": "main", "sentinel_kwargs": {"password": "pw"}, "min_other_sentinels": 1},
    ),
    (
        {
            "broker_url": "amqp://",
            "broker_use_ssl": {"ca_certs": "amqp.pem"},
            "broker_transport_options": {"global_keyprefix": "not this"},
            "result_backend": "rediss://h",
            "redis_backend_use_ssl": {"ssl_cert_reqs": "none"},
            "result_backend_transport_options": {"global_keyprefix": "r:"},
            "redis_username": "me",
            "redis_password": "pw",
        },
        "rediss://h",
        {
            "username": "me",
            "password": "pw",
            "ssl": {"ssl_cert_reqs": "none"},
            "key_prefix": "r:",
        },
    ),
    ({"broker_url": "amqp://", "result_backend": REDIS, "redis_password": "other"}, REDIS, {}),
    (
        {
            "broker_url": "amqp://",
            "result_backend": REDIS,
            "redis_password": "pw",
            "redis_backend_credential_provider": "shop.aws.IAM",
        },
        REDIS,
        {"credential_provider": "shop.aws.IAM"},
    ),
    (
        {
            "broker_url": REDIS,
            "broker_transport_options": {"credential_provider": "shop.aws.IAM"},
        },
        REDIS,
        {"credential_provider": "shop.aws.IAM"},
    ),
]


@pytest.mark.parametrize(("conf", "url", "options"), FOUND, ids=[str(c) for c, *_ in FOUND])
def test_it_is_found(conf, url, options):
    assert url_of(**conf) == (url, options)


def test_it_is_found_in_the_environment(monkeypatch):
    monkeypatch.setenv("CELERY_BROKER_WRITE_URL", REDIS)

    assert url_of(broker_url="amqp://") == (REDIS, {})


NOT_FOUND = [
    ({}, "the broker (not set) nor the result backend (not set)"),
    ({"broker_url": "amqp://u:hunter2@h"}, "the broker (amqp) nor"),
    (
        {"broker_url": "filesystem://", "result_backend": "db+sqlite:///r.db"},
        "the broker (filesystem) nor the result backend (db+sqlite)",
    ),
    ({"broker_url": "amqp://", "result_backend": "rpc"}, "nor the result backend (rpc)"),
    ({"broker_url": "amqp://", "result_backend": "django-db"}, "the result backend (django-db)"),
    (
        {"broker_url": "amqp://", "result_backend": "shop.results:Backend"},
        "the result backend (shop.results:Backend)",
    ),
    ({"broker_url": "amqp://", "result_backend": "user:secret@host"}, "backend (not a URL)"),
    ({"broker_url": 5, "result_backend": ["x", 3]}, "the broker (not a URL)"),
]


@pytest.mark.parametrize(("conf", "said"), NOT_FOUND, ids=[str(c) for c, _ in NOT_FOUND])
def test_where_there_is_none_it_says_what_to_set(conf, said):
    with pytest.raises(ConfigurationError, match=r"Set unique_store_url, for example") as raised:
        url_of(**conf)

    assert said in str(raised.value)
    assert raised.value.setting == "unique_store_url"
    assert "hunter2" not in repr(raised.value)


@pytest.mark.parametrize(
    ("scheme", "meant"),
    [
        ("reids", "redis"),
        ("redsis", "redis"),
        ("valky", "valkey"),
        ("postgres", "postgresql"),
        ("postgresq+psycopg", "postgresql"),
        ("sqlite3", "sqlite"),
        ("mem", "memory"),
    ],
)
def test_an_unknown_scheme_is_told_with_the_nearest(scheme, meant):
    with pytest.raises(ConfigurationError) as raised:
        url_of(unique_store_url=f"{scheme}://me:hunter2@host/0")

    assert f"no lock store for {scheme}://. Did you mean '{meant}://'?" in str(raised.value)
    assert raised.value.setting == "unique_store_url"
    assert "hunter2" not in repr(raised.value)


def test_a_scheme_near_to_none_is_told_with_all():
    with pytest.raises(
        ConfigurationError,
        match=r"no lock store for xyz://. Use 'django-cache://', 'django-db://', 'mariadb://', ",
    ):
        url_of(unique_store_url="xyz://host")


def test_ssl_options_of_another_kind_are_refused():
    with pytest.raises(ConfigurationError, match=r"broker_use_ssl: .* or set unique_store_url"):
        url_of(broker_url=REDIS, broker_use_ssl="yes")


def test_it_is_found_on_an_app_that_has_not_been_configured_yet():
    app = Celery("shop", broker=REDIS, set_as_current=False)

    assert store_url(app, UniqueSettings()) == (REDIS, {})
