"""Redis URLs, and what lies behind them: TLS, sockets, users."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import redis

from celery_unique.exceptions import ConfigurationError, StoreUnavailable
from celery_unique.stores import open_store
from celery_unique.stores.redis import RedisStore
from celery_unique.testing.store_contract.factories import (
    MINUTE,
    QUEUE_LEASE,
    claim,
    finish,
    fresh_key,
    publish,
    running,
    start,
)
from tests.stores.timing import PATIENCE_S
from tests.support import RedisServer
from tests.support.credentials import Passwords
from tests.support.server import HOST, free_port

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "stores-redis.md"


@pytest.mark.parametrize(
    "url",
    [
        "redis://host/word",
        "redis://host:port/0",
        "redis://host:99999/0",
        "redis://:pass/word@host/0",
        "redis://[::1/0",
        f"redis://{'a' * 70}/0",
        "redis://host/0?unknown_option=1",
        "redis://host/0?db=word",
        "rediss://host/0?ssl_cert_reqs=perhaps",
    ],
)
def test_a_bad_url_is_a_configuration_error(url):
    with pytest.raises(ConfigurationError, match="redis://HOST:6379/0") as caught:
        open_store(url)

    assert caught.value.setting == "unique_store_url"
    assert "word@" not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "label"),
    [
        ("redis://", "localhost:6379/0"),
        ("REDIS://Shop.example/3", "shop.example:6379/3"),
        ("redis://user:pw@host:7000//4", "host:7000/4"),
        ("rediss://host?db=5", "host:6379/5"),
        ("redis+socket:///run/redis.sock?virtual_host=6", "/run/redis.sock/6"),
        ("redis://host/0?socket_timeout=9&max_connections=3&retry_on_timeout=yes", "host:6379/0"),
    ],
)
def test_a_url_is_read_as_redis_py_and_celery_do(url, label):
    assert repr(open_store(url)) == f"<RedisStore {label}>"


def test_options_of_the_broker_are_understood():
    store = RedisStore.from_url(
        "redis://host/0",
        ssl={"cert_reqs": "CERT_NONE", "ssl_ca_certs": "/ca.pem"},
        password="pw",
        master_name="for sentinel:// only",
    )

    connection = store._connections.address.connection()

    assert isinstance(connection, redis.SSLConnection)
    assert (connection.cert_reqs, connection.ca_certs) == (0, "/ca.pem")
    assert connection.password == "pw"


@pytest.mark.server
def test_a_unix_socket_works(start_server, key):
    server = start_server(RedisServer, extra_args=("--unixsocket", "redis.sock"))
    store = open_store(
        f"redis+socket://{server.directory}/redis.sock?virtual_host=2", timeout_s=PATIENCE_S
    )

    publish(store, key, "a")

    with server.client(2) as client:
        assert client.dbsize() == 1


@pytest.mark.server
def test_the_documented_permissions_are_enough(start_server, key):
    server = start_server(RedisServer)
    [command] = re.findall(r"(?m)^ACL SETUSER locks .*$", PAGE.read_text())
    with server.client() as admin:
        admin.execute_command(*command.split())
    store = open_store(f"redis://locks:PASSWORD@{HOST}:{server.port}/1", timeout_s=PATIENCE_S)

    publish(store, key, "a")
    store.start(key, start("a"))
    store.renew([running(key, "a")])
    store.retry(key, "a", "d1", QUEUE_LEASE, False)
    store.flush()
    store.start(key, start("a", "d2"))
    store.finish(key, finish("a", "d2", settle_later=True))
    store.settle(key, finish("a", "d2"), True)
    store.flush()
    store.ping()

    assert [(found, list(record.marks)) for found, record in store.walk()] == [(key, ["a"])]
    store.cancel(key, "b", MINUTE)
    store.acquire(key, claim("c"))
    assert store.release(key) == 1


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    directory = tmp_path_factory.mktemp("tls")
    certificate, private_key = directory / "cert.pem", directory / "key.pem"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"),
            *("-subj", "/CN=localhost", "-addext", f"subjectAltName=IP:{HOST}"),
            *("-out", str(certificate), "-keyout", str(private_key)),
        ],
        check=True,
        capture_output=True,
    )
    return certificate, private_key


@pytest.mark.server
def test_tls_is_verified(start_server, certificate, key):
    port = free_port()
    start_server(
        RedisServer,
        extra_args=(
            *("--tls-port", str(port), "--tls-auth-clients", "no"),
            *("--tls-cert-file", str(certificate[0]), "--tls-key-file", str(certificate[1])),
            *("--tls-ca-cert-file", str(certificate[0])),
        ),
    )
    url = f"rediss://{HOST}:{port}/1"

    trusting = RedisStore.from_url(f"{url}?ssl_ca_certs={certificate[0]}", timeout_s=PATIENCE_S)
    publish(trusting, key, "a")
    for number in range(50):
        publish(trusting, fresh_key(), f"{number}")
    with pytest.raises(StoreUnavailable, match=r"(?i)certificate"):
        RedisStore.from_url(url, timeout_s=PATIENCE_S).acquire(key, claim("b"))
    careless = RedisStore.from_url(url, ssl={"ssl_cert_reqs": "none"}, timeout_s=PATIENCE_S)

    assert careless.acquire(key, claim("b")).outcome == "duplicate"
    assert len(trusting._connections._idle) == 1


def test_without_the_redis_package_the_error_names_the_command():
    program = "import sys; sys.modules['redis'] = None; import celery_unique.stores.redis"

    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)

    assert 'pip install "celery-unique-tasks[redis]"' in done.stderr


# -- other names and credentials ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("valkey", "same"),
    [("valkey://host:7000/2", "redis://host:7000/2"), ("valkeys://host/0", "rediss://host/0")],
)
def test_valkey_is_another_name_of_redis(valkey, same):
    stores = [open_store(url) for url in (valkey, same)]

    assert stores[0].fingerprint() == stores[1].fingerprint()
    assert stores[0].address == stores[1].address


def test_a_valkey_url_leads_to_its_server(valkey_url):
    store = open_store(valkey_url.replace("redis://", "valkey://"), timeout_s=PATIENCE_S)

    assert store.acquire(fresh_key(), claim("t-1")).outcome == "created"


def test_the_credentials_of_a_connection_are_those_of_the_moment(start_server, monkeypatch):
    server = start_server(RedisServer)
    admin = server.client()
    admin.execute_command("ACL", "SETUSER", "shop", "on", ">first", "~*", "+@all")
    passwords = Passwords()
    store = open_store(
        f"redis://ignored:ignored@{HOST}:{server.port}/0",
        timeout_s=PATIENCE_S,
        credential_provider=passwords,
    )
    key = fresh_key()

    assert store.acquire(key, claim("t-1")).outcome == "created"
    admin.execute_command("ACL", "SETUSER", "shop", ">second", "<first")
    admin.client_kill_filter(_type="normal", skipme=True)
    with pytest.raises(StoreUnavailable, match="refused: "):
        store.read(key)
    monkeypatch.setattr(Passwords, "password", "second")
    assert len(store.read(key)[0].tasks) == 1


def test_a_provider_that_fails_is_an_unavailable_store(redis_url):
    passwords = Passwords()
    passwords.error = LookupError("the token service does not answer")
    store = open_store(redis_url, credential_provider=passwords)

    with pytest.raises(StoreUnavailable, match="the token service does not answer"):
        store.read(fresh_key())


@pytest.mark.parametrize(
    ("query", "said"),
    [
        ("builtins.dict", "is not a redis.CredentialProvider"),
        ("tests.nowhere.Provider", "'tests.nowhere.Provider' cannot be made: No module named"),
    ],
)
def test_a_wrong_provider_is_a_configuration_error(query, said):
    with pytest.raises(ConfigurationError, match=said):
        open_store(f"redis://host/0?credential_provider={query}")
