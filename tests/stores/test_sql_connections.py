"""SQL when the database is slow, gone, back again, or shared by threads and processes."""

from __future__ import annotations

import logging
import os
import signal
import socket
import sqlite3
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from celery.exceptions import SoftTimeLimitExceeded
from sqlalchemy import event, text

from celery_unique.exceptions import StoreUnavailable
from celery_unique.stores.sql import SqlStore, database
from celery_unique.testing.store_contract.factories import (
    QUEUE_LEASE,
    claim,
    confirm,
    finish,
    fresh_key,
    publish,
    run,
    start,
)
from tests.stores.timing import after_all, unavailable_within
from tests.support import PostgresServer, TcpProxy, eventually
from tests.support.interrupts import Interruption, named

TIMEOUT = 0.6
#: What a busy machine may add to a time-out.
SLACK = 0.7


@pytest.fixture
def proxy(postgres_server: PostgresServer, start_proxy: Callable[[int], TcpProxy]) -> TcpProxy:
    return start_proxy(postgres_server.port)


# -- down, refused, and gone without a word ----------------------------------------------


def test_a_server_that_is_not_there_is_told_at_once(opened):
    store = opened("postgresql+psycopg://shop:geheim@127.0.0.1:1/locks", timeout_s=TIMEOUT)

    message = str(unavailable_within(TIMEOUT + SLACK, store.ping))

    assert "127.0.0.1:1/locks" in message
    assert "geheim" not in message


def test_a_server_that_takes_the_connection_and_says_nothing(opened, proxy, postgres_url, key):
    store = opened(proxy.url_of(postgres_url), timeout_s=TIMEOUT)
    proxy.stall()

    unavailable_within(TIMEOUT + SLACK, lambda: store.acquire(key, claim("task")))
    proxy.restore()

    assert after_all(lambda: store.acquire(key, claim("task", again=True)).outcome) == "created"


@pytest.fixture
def unanswered_port() -> Iterator[int]:
    """A port at which connecting is not refused and does not end: its queue is full."""
    with ExitStack() as sockets:
        listener = sockets.enter_context(socket.socket())
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        for _ in range(4):
            waiting = sockets.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(listener.getsockname())
        yield listener.getsockname()[1]


def test_an_address_nobody_answers_at(opened, unanswered_port):
    with pytest.raises(TimeoutError):
        socket.create_connection(("127.0.0.1", unanswered_port), timeout=0.2)
    store = opened(
        f"postgresql+psycopg://shop@127.0.0.1:{unanswered_port}/locks", timeout_s=TIMEOUT
    )

    unavailable_within(TIMEOUT + SLACK, store.ping)


def test_a_server_that_falls_silent_in_the_middle(opened, proxy, postgres_url, key):
    store = opened(proxy.url_of(postgres_url), timeout_s=TIMEOUT)
    publish(opened(postgres_url), key, "task")
    after_all(store.ping)
    proxy.stall()

    for act in (
        lambda: store.acquire(key, claim("other")),
        lambda: store.start(key, start("task")),
        lambda: store.read(key),
    ):
        message = str(unavailable_within(TIMEOUT + SLACK, act))
        assert "did not answer in time" in message or "no connection within" in message
    proxy.restore()

    assert after_all(lambda: store.start(key, start("task")).verdict) == "run"


def test_an_answer_that_is_lost_means_maybe(opened, proxy, postgres_url, key):
    store = opened(proxy.url_of(postgres_url), timeout_s=TIMEOUT)
    after_all(store.ping)
    proxy.stall_replies()

    message = str(unavailable_within(TIMEOUT + SLACK, lambda: store.acquire(key, claim("task"))))
    proxy.restore()

    assert "the server did not answer in time" in message
    # It was applied; the same attempt may acquire again.
    assert after_all(lambda: store.acquire(key, claim("task", again=True)).outcome) == "created"
    assert after_all(lambda: list(store.read(key)[0].tasks)) == ["task"]


@pytest.fixture(params=["postgres", "mariadb"])
def hung_up(
    request: pytest.FixtureRequest, opened: Callable[..., SqlStore]
) -> tuple[SqlStore, Callable[[], None]]:
    """A store, and what makes its server close every connection of it."""
    server: Any = request.getfixturevalue(f"{request.param}_server")
    url: str = request.getfixturevalue(f"{request.param}_url")
    name = url.rpartition("/")[2]
    sessions = {
        "postgres": f"SELECT pid FROM pg_stat_activity WHERE datname = '{name}'",
        "mariadb": f"SELECT id FROM information_schema.processlist WHERE db = '{name}'",
    }[request.param]
    kill = {"postgres": "SELECT pg_terminate_backend({})", "mariadb": "KILL {}"}[request.param]

    def hang_up() -> None:
        for (session,) in server.execute(sessions):
            server.execute(kill.format(session))
        eventually(lambda: not server.execute(sessions))

    return opened(url), hang_up


@pytest.mark.server
def test_a_pooled_connection_that_died_is_replaced_without_an_error(hung_up, key):
    store, hang_up = hung_up
    publish(store, key, "task")

    for act in (
        lambda: store.acquire(key, claim("other")).outcome == "duplicate",
        lambda: store.start(key, start("task")).verdict == "run",
        lambda: list(store.read(key)[0].tasks) == ["task"],
        lambda: store.acquire(fresh_key(), claim("new")).outcome == "created",
        lambda: store.finish(key, finish("task")).verdict == "ended",
    ):
        hang_up()
        assert act()


@pytest.mark.server
def test_a_batch_goes_on_where_its_connection_died(hung_up):
    store, hang_up = hung_up
    keys = [fresh_key() for _ in range(6)]
    asked: list[int] = []

    def hang_up_before_the_fourth(*_: Any) -> None:
        asked.append(1)
        if len(asked) == 4:
            hang_up()

    store.ping()
    event.listen(store._database._engine, "before_cursor_execute", hang_up_before_the_fourth)

    replies = store.acquire_many([(each, claim(f"of {each}")) for each in keys])

    assert [reply.outcome for reply in replies] == ["created"] * 6


@pytest.mark.server
def test_a_connection_that_breaks_between_read_and_write_is_an_error(hung_up, key):
    """Whether the write was applied is not known, so it is not simply sent again."""
    store, hang_up = hung_up
    run(store, key, "task")
    sent: list[str] = []

    def hang_up_before_the_write(_connection: Any, _cursor: Any, sql: str, *_: Any) -> None:
        sent.append(sql.split(maxsplit=1)[0])
        if sent[-1] == "DELETE":
            hang_up()

    event.listen(store._database._engine, "before_cursor_execute", hang_up_before_the_write)

    with pytest.raises(StoreUnavailable):
        store.finish(key, finish("task"))

    assert sent == ["SELECT", "DELETE"]


def test_a_server_that_was_restarted_is_used_again(opened, start_server, key):
    server: PostgresServer = start_server(PostgresServer)
    url = server.fresh_url()
    store = opened(url, timeout_s=TIMEOUT)
    publish(opened(url), key, "task")
    after_all(store.ping)

    server.kill()
    unavailable_within(TIMEOUT + SLACK, lambda: store.start(key, start("task")))
    server.restart()

    assert after_all(lambda: store.start(key, start("task")).verdict) == "run"


def test_a_row_locked_by_somebody_else_is_not_waited_for_longer_than_the_time_out(
    opened, postgres_url, postgres_server, key
):
    import psycopg

    store = opened(postgres_url, timeout_s=TIMEOUT)
    publish(opened(postgres_url), key, "task")
    with psycopg.connect(postgres_url.replace("+psycopg", "")) as other:
        other.execute("UPDATE celery_unique_lock SET token = token")

        unavailable_within(TIMEOUT + SLACK, lambda: store.acquire(key, claim("other")))
        other.rollback()

    assert after_all(lambda: store.acquire(key, claim("other")).outcome) == "duplicate"


# -- SQLite's one writer -------------------------------------------------------------------


@pytest.fixture
def writer(sqlite_url: str) -> Iterator[sqlite3.Connection]:
    connection = sqlite3.connect(
        sqlite_url.removeprefix("sqlite:///"), isolation_level=None, check_same_thread=False
    )
    yield connection
    connection.close()


def test_a_database_locked_for_longer_than_the_time_out(opened, sqlite_url, writer, key):
    store = opened(sqlite_url, timeout_s=TIMEOUT)
    publish(opened(sqlite_url), key, "task")
    after_all(store.ping)
    writer.execute("BEGIN IMMEDIATE")

    message = str(unavailable_within(TIMEOUT + SLACK, lambda: store.acquire(key, claim("other"))))
    read = after_all(lambda: list(store.read(key)[0].tasks))
    writer.execute("ROLLBACK")

    assert "holds its write lock" in message
    assert read == ["task"]  # readers are not kept out
    assert after_all(lambda: store.acquire(key, claim("other")).outcome) == "duplicate"


def test_a_batch_does_not_wait_longer_for_a_locked_database(opened, sqlite_url, writer, key):
    store = opened(sqlite_url, timeout_s=TIMEOUT)
    publish(opened(sqlite_url), key, "task")
    after_all(store.ping)
    writer.execute("BEGIN IMMEDIATE")
    # Only so that a store that waits for ever fails this test, and does not stop it.
    rescue = threading.Timer(30, lambda: writer.execute("ROLLBACK"))
    rescue.start()

    claims = [(f"{key}-{number}", claim(f"task {number}")) for number in range(3)]
    message = str(unavailable_within(TIMEOUT + SLACK, lambda: store.acquire_many(claims)))
    rescue.cancel()

    assert "holds its write lock" in message


def test_a_database_locked_for_a_moment_is_waited_for(opened, sqlite_url, writer, key):
    store = opened(sqlite_url)
    publish(store, key, "task")
    writer.execute("BEGIN IMMEDIATE")
    began = time.time()
    threading.Timer(0.3, lambda: writer.execute("ROLLBACK")).start()

    reply = store.acquire(key, claim("other"))

    assert reply.outcome == "duplicate"
    assert reply.now >= (began + 0.2) * 1000  # the clock is not the one from before the wait


def test_the_file_is_in_wal_mode(opened, sqlite_url, writer):
    opened(sqlite_url).ping()

    assert writer.execute("PRAGMA journal_mode").fetchone() == ("wal",)


@pytest.mark.parametrize(("asked", "level"), [("normal", 1), ("full", 2)])
def test_how_often_sqlite_waits_for_the_disk_can_be_chosen(opened, sqlite_url, asked, level):
    from sqlalchemy import text

    store = opened(f"{sqlite_url}?synchronous={asked}")

    found = store._database.run(
        lambda session: session.execute(text("PRAGMA synchronous"), {}).scalar()
    )

    assert found == level


# -- threads, greenlets and processes --------------------------------------------------------


def test_more_threads_than_connections_take_turns(opened, sql_url, key):
    store = opened(sql_url, timeout_s=10, pool_size=3)
    connections: list[Any] = []
    event.listen(store._database._engine, "connect", lambda *args: connections.append(args))

    with ThreadPoolExecutor(24) as threads:
        replies = list(
            threads.map(lambda number: store.acquire(key, claim(f"{number}")), range(96))
        )

    assert [reply.outcome for reply in replies].count("created") == 1
    assert len(connections) <= 3
    assert [task.duplicates for task in store.read(key)[0].tasks.values()] == [95]


def test_a_thread_that_gets_no_turn_is_told_so(opened, sql_url):
    store = opened(sql_url, pool_size=1, timeout_s=TIMEOUT)
    after_all(store.ping)
    busy, over = threading.Event(), threading.Event()

    def keep_it(_session: Any) -> None:
        busy.set()
        over.wait(60)

    keeper = threading.Thread(target=store._database.run, args=(keep_it,))
    keeper.start()
    assert busy.wait(20)
    message = str(unavailable_within(TIMEOUT + SLACK, store.ping))
    over.set()
    keeper.join()

    assert "All 1 connections" in message


def taking_turns(frame: FrameType) -> bool:
    """Where a connection is taken and returned: here, and below in what does it."""
    parts = (database.__file__, "/sqlalchemy/pool/", "/sqlalchemy/util/queue", "/threading.py")
    return any(part in frame.f_code.co_filename for part in parts)


# An interruption inside SQLAlchemy's pool may leave a connection to the garbage collector: psycopg
# says so. That nobody waits for it is what this test asks.
@pytest.mark.filterwarnings("ignore:.*was deleted while still open:ResourceWarning")
def test_no_interrupted_act_keeps_its_turn_from_others(opened, sql_url, key):
    """A time limit raises anywhere: also while a lock or a connection is just taken."""
    store = opened(sql_url, timeout_s=5, pool_size=1)
    publish(store, key, "a")
    store.read(key)
    interruption = Interruption(taking_turns)
    points = interruption.points(lambda: store.read(key))
    failed = []

    for at, point in enumerate(points):
        interruption.interrupt(at, KeyboardInterrupt(), lambda: store.read(key))
        read: list[Any] = []
        other = threading.Thread(target=lambda read=read: read.append(store.read(key)), daemon=True)
        other.start()
        other.join(20)
        if not read:
            failed.append(named(point))
            break  # each would take as long

    assert len(points) > 20
    assert failed == []


def test_an_interrupted_act_leaves_the_file_free_while_its_traceback_is_kept(
    opened, sqlite_url, key
):
    store = opened(sqlite_url)
    publish(store, key, "a")

    def act(session: Any) -> None:
        written = session.execute(
            text("UPDATE celery_unique_lock SET conflicts = conflicts + 1 RETURNING record"), {}
        )
        assert written is not None  # and its result is not read
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as interrupted:
        store._database.run(act)

    with closing(sqlite3.connect(sqlite_url.removeprefix("sqlite:///"), timeout=5)) as other:
        other.execute("BEGIN IMMEDIATE")
        other.rollback()
    assert interrupted.value.__traceback__ is not None


def test_a_time_limit_is_not_taken_for_a_failing_store(opened, sqlite_url, key):
    """SQLAlchemy wraps what is raised while it prepares a statement."""
    store = opened(sqlite_url)
    publish(store, key, "a")
    interruption = Interruption(lambda frame: "/sqlalchemy/" in frame.f_code.co_filename)
    points = interruption.points(lambda: store.read(key))
    failing: list[str] = []

    def read() -> None:
        try:
            store.read(key)
        except StoreUnavailable as error:
            failing.append(str(error))

    for at in range(len(points)):
        interruption.interrupt(at, SoftTimeLimitExceeded(), read)

    assert len(points) > 50
    assert failing == []


def run_python(program: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
        timeout=60,
        **options,
    )


def test_a_wait_for_the_server_lets_other_greenlets_run(proxy, postgres_url):
    proxy.stall()

    done = run_python(
        f"""
        from gevent import monkey; monkey.patch_all()
        import gevent, time
        from celery_unique.exceptions import StoreUnavailable
        from celery_unique.stores import open_store
        store = open_store({proxy.url_of(postgres_url)!r}, timeout_s=1)
        ticks = []

        def tick():
            while True:
                ticks.append(time.monotonic())
                gevent.sleep(0.02)

        gevent.spawn(tick)
        for _ in range(4):  # a busy machine makes one pause of its own, now and then
            ticks.clear()
            try:
                store.ping()
            except StoreUnavailable:
                pass
            else:
                raise SystemExit("answered")
            pauses = [after - before for before, after in zip(ticks, ticks[1:])]
            if len(ticks) > 10 and max(pauses) < 0.5:
                break
        else:
            raise SystemExit(pauses)
        """
    )

    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_confirms_are_carried_out_before_the_program_ends(opened, sql_url):
    done = run_python(
        f"""
        from celery_unique.stores import open_store
        from celery_unique.testing.store_contract.factories import claim, QUEUE_LEASE
        store = open_store({sql_url!r}, timeout_s=20)
        for number in range(50):
            store.acquire(f"1:{{number}}", claim("task"))
        for number in range(50):
            store.confirm(f"1:{{number}}", "task", QUEUE_LEASE)
        """
    )

    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    states = [record.tasks["task"].state for _, record in opened(sql_url).walk()]
    assert states == ["w"] * 50


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_confirms_are_carried_out_before_a_child_process_ends(opened, sqlite_url, tmp_path, method):
    program = tmp_path / "calls.py"
    program.write_text(
        textwrap.dedent(
            f"""
            import multiprocessing
            from celery_unique.stores import open_store
            from celery_unique.testing.store_contract.factories import claim, QUEUE_LEASE

            def call():
                store = open_store({sqlite_url!r}, timeout_s=20)
                for number in range(50):
                    store.acquire(f"1:{{number}}", claim("task"))
                for number in range(50):
                    store.confirm(f"1:{{number}}", "task", QUEUE_LEASE)

            if __name__ == "__main__":
                child = multiprocessing.get_context({method!r}).Process(target=call)
                child.start()
                child.join()
            """
        )
    )

    done = subprocess.run(
        [sys.executable, str(program)],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": str(Path.cwd())},
    )

    assert (done.returncode, done.stderr) == (0, "")
    states = [record.tasks["task"].state for _, record in opened(sqlite_url).walk()]
    assert states == ["w"] * 50


def test_a_store_that_is_gone_does_not_hold_up_the_end_of_a_program(proxy, postgres_url):
    proxy.stall()

    began = time.monotonic()
    done = run_python(
        f"""
        from celery_unique.stores import open_store
        store = open_store({proxy.url_of(postgres_url)!r}, timeout_s=1)
        for number in range(50):
            store.confirm("1:secret", "task", 1000)
        """
    )

    assert done.returncode == 0
    assert time.monotonic() - began < 25  # fifty time-outs take twice that
    assert "fire-and-forget acts on the lock store did not finish" in done.stderr
    assert "secret" not in done.stderr


def test_a_confirm_that_failed_is_logged_without_its_key(opened, caplog):
    store = opened("postgresql+psycopg://shop:geheim@127.0.0.1:1/locks", timeout_s=TIMEOUT)

    with caplog.at_level(logging.WARNING):
        store.confirm("1:secret", "task", QUEUE_LEASE)
        store.flush()

    assert "Connection refused" in caplog.text
    assert "secret" not in caplog.text
    assert "geheim" not in caplog.text


def test_a_closed_store_is_used_again(opened, sql_url, key):
    store = opened(sql_url)
    store.acquire(key, claim("task"))
    store.confirm(key, "task", QUEUE_LEASE)

    store.close()

    assert store.read(key)[0].tasks["task"].state == "w"
    confirm(store, key, "task")


@pytest.mark.server
@pytest.mark.parametrize("sql_url", ["postgres_url", "mariadb_url"], indirect=True)
def test_a_process_stopped_in_a_transaction_does_not_keep_the_row(opened, sql_url, key):
    store = opened(sql_url)
    publish(store, key, "task")
    stopped = subprocess.Popen(
        [
            sys.executable,
            "-c",
            textwrap.dedent(
                f"""
                import os, signal
                from celery_unique.stores.sql import SqlStore, database
                store = SqlStore.from_url({sql_url!r}, timeout_s={TIMEOUT})

                def stop(session):
                    with store._alone(session, {key!r}):
                        print("locked", flush=True)
                        os.kill(os.getpid(), signal.SIGSTOP)

                store._database.run(stop)
                """
            ),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        assert stopped.stdout is not None
        assert stopped.stdout.readline() == "locked\n"

        eventually(
            lambda: store.acquire(key, claim("other")).outcome == "duplicate",
            ignoring=StoreUnavailable,
            timeout=20,
        )
    finally:
        stopped.send_signal(signal.SIGCONT)
        stopped.communicate(timeout=30)
