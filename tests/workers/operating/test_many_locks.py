"""Every command with ten thousand locks in a real store."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import redis

from celery_unique import lookup, manifest
from celery_unique.config.app_state import state_of
from celery_unique.operations.count import count_all
from celery_unique.operations.doctor.report import MOST_INSPECTED
from tests.support import PostgresServer, RedisServer, TcpProxy
from tests.workers.operating.crowd import Member, gather
from tests.workers.operating.desk import Desk, Done

COUNT = 10_000
PART = 500

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def crowd(desk: Desk) -> list[Member]:
    return gather(desk.store, COUNT)


def client_of(desk: Desk) -> redis.Redis:
    parts = urlsplit(desk.store_url)
    return redis.Redis(host=parts.hostname or "", port=parts.port or 0, db=int(parts.path[1:]))


# -- list ----------------------------------------------------------------------------------


def test_list_names_every_lock_once_and_scans_in_batches(desk, crowd):
    with client_of(desk) as client:
        client.config_resetstat()

        done = desk.unique("list", "--json")

        calls = {name: stats["calls"] for name, stats in client.info("commandstats").items()}
    assert done.code == 0
    told = done.json_lines()
    assert {(row["key"], row["task_id"], row["task"], row["state"]) for row in told} == {
        (one.key, one.task_id, one.task, one.state) for one in crowd
    }
    assert len(told) == COUNT
    assert calls["cmdstat_scan"] >= COUNT // 1000
    assert "cmdstat_keys" not in calls


def test_list_prints_while_it_still_walks(desk, crowd):
    with TcpProxy(urlsplit(desk.store_url).port or 0) as proxy:
        through = {"unique_store_url": proxy.url_of(desk.store_url), "unique_store_timeout": 60}
        process = desk.start("unique", "list", conf=through)
        assert process.stdout is not None
        try:
            heading = process.stdout.readline()
            proxy.stall()
            first = process.stdout.readline()

            assert heading.split() == ["KEY", "STATE", "AGE", "ABSORBED", "ID", "TASK", "WORKER"]
            assert re.match(r"1:[0-9a-f]{12}  \w+ ", first)
            # It cannot end: the rest of the walk does not come through.
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(0.5)
            proxy.restore()
            rest = process.stdout.read().splitlines()
            assert process.wait(60) == 0
        finally:
            process.kill()
            process.wait()
            process.stdout.close()
    assert len(rest) + 1 == COUNT


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        (["--task", "shop.*", "--state", "active"],
         lambda m: m.task.startswith("shop.") and m.state == "active"),
        (["--state", "waiting", "--older-than", "PT24H"], lambda m: m.hours == 30),
        (["--worker", "*@crowd", "--older-than", "PT1H"],
         lambda m: m.state == "active" and m.hours == 3),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)  # fmt: skip
def test_list_by(desk, crowd, options, wanted):
    done = desk.unique("list", "--json", *options)

    assert done.code == 0
    assert sorted(row["task_id"] for row in done.json_lines()) == sorted(
        one.task_id
        for one in crowd
        if wanted(one)  # type: ignore[operator]
    )


def test_a_reader_that_has_seen_enough_ends_the_list(desk, crowd):
    process = desk.start("unique", "list")
    assert process.stdout is not None
    process.stdout.readline()
    process.stdout.close()

    assert process.wait(60) in (0, 1)


def on_a_terminal(desk: Desk, columns: int, *arguments: str) -> str:
    """What a terminal of so many columns is sent."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    process = subprocess.Popen(
        desk.command(*arguments), env=desk.environment(), cwd=desk.directory, stdout=theirs
    )
    os.close(theirs)
    sent = b""
    # The end of a terminal whose program has left is an error on Linux.
    with suppress(OSError):
        while chunk := os.read(ours, 65536):
            sent += chunk
    os.close(ours)
    assert process.wait(60) == 0
    return sent.decode()


def test_colours_are_for_terminals_and_rows_fit_them(desk, crowd):
    coloured = on_a_terminal(desk, 80, "unique", "list", "--limit", "50")
    plain = on_a_terminal(desk, 140, "--no-color", "unique", "list", "--limit", "50")
    piped = desk.unique("list", "--limit", "50")

    assert "\x1b[3" in coloured
    assert "\x1b" not in plain
    assert "\x1b" not in piped.out
    rows = re.sub(r"\x1b\[[0-9;]*m", "", coloured).splitlines()
    assert rows[0].split() == ["KEY", "STATE", "AGE", "ABSORBED", "TASK"]
    assert max(map(len, rows)) <= 80
    assert plain.split()[:7] == ["KEY", "STATE", "AGE", "ABSORBED", "ID", "TASK", "WORKER"]


# -- show, why -------------------------------------------------------------------------------


def test_show_finds_a_lock_by_its_shortened_key_among_many(desk, crowd):
    one = crowd[6]

    by_short_key = desk.unique("show", one.key[:14], "--json")
    by_id = desk.unique("show", one.task_id)

    assert by_short_key.code == by_id.code == 0
    assert [task["task_id"] for task in by_short_key.json()["tasks"]] == [one.task_id]
    assert one.key in by_id.out
    assert "busy@crowd" in by_id.out


def test_why_tells_of_a_key_who_holds_it_and_what_would_free_it(desk, crowd):
    one = next(member for member in crowd if member.state == "active" and member.hours == 3)

    done = desk.unique("why", one.key)

    assert done.code == 0
    assert "active: running" in done.out
    assert re.search(r"called +3h", done.out)
    assert re.search(r"run by +busy@crowd, main process 1", done.out)
    assert re.search(r"absorbed +0 calls", done.out)
    assert "the end of the task, however it ends" in done.out
    assert f"unique release --key {one.key}" in done.out


# -- stats -----------------------------------------------------------------------------------


#: Starts a command and tells at the end what memory it had at most. Linux counts for a process what
#: the one had that has started it: so that is a small one, and not the one that runs the tests.
MEASURER = """
import resource, subprocess, sys
code = subprocess.call(sys.argv[1:])
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss, file=sys.stderr)
sys.exit(code)
"""


def run_measured(desk: Desk, *arguments: str, timeout: float = 120) -> Done:
    """With the most memory that the process had."""
    done = desk.run(*arguments, before=[sys.executable, "-c", MEASURER], timeout=timeout)
    done.peak_kib = int(done.err.splitlines()[-1])
    return done


def test_stats_agree_with_an_independent_count_in_bounded_memory(
    desk, crowd, redis_server, directory
):
    url = redis_server.fresh_url()
    empty = run_measured(Desk(url, url, directory), "unique", "stats", "--json")

    done = run_measured(desk, "unique", "stats", "--json")

    told = done.json()
    assert told["locks"] == told["keys"] == COUNT
    assert told["states"] == dict(Counter(member.state for member in crowd))
    for task, count in Counter(member.task for member in crowd).items():
        assert told["tasks"][task]["locks"] == count
    assert empty.json()["locks"] == 0
    # A batch of 500 takes 2 MiB, with what is read of it; to keep them all would take some more.
    assert done.peak_kib - empty.peak_kib < 4 * 1024


def test_what_stats_keep_does_not_grow_with_the_locks(desk, crowd, monkeypatch):
    """A walk over millions remembers some of the keys that it has told of, not all."""
    import tracemalloc

    from celery_unique.stores.redis import store as redis_store

    monkeypatch.setattr(redis_store, "MOST_SEEN", 1000)
    runtime = state_of(desk.app)
    tracemalloc.start()
    try:
        counts = count_all(runtime)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert counts.total.locks == COUNT
    assert peak < 4 * 1024 * 1024


# -- doctor, manifest ------------------------------------------------------------------------


def test_doctor_looks_at_all_locks_and_into_some_of_them_in_bounded_memory(
    desk, crowd, redis_server, directory
):
    url = redis_server.fresh_url()
    empty = run_measured(Desk(url, url, directory), "unique", "doctor", "--json")
    # With workers to ask, a task that waits and that no queue has, has lost its message.
    worker = desk.start_worker("idle")
    with client_of(desk) as client:
        client.config_resetstat()

        done = run_measured(desk, "unique", "doctor", "--json", timeout=60)

        calls = {name: stats["calls"] for name, stats in client.info("commandstats").items()}
    worker.kill()
    told = done.json()
    waiting = sum(member.state in ("available", "scheduled") for member in crowd)
    assert done.code == 0
    assert told["passed"]["keys"] == f"all {COUNT} locks have keys of this version"
    assert told["passed"]["abandoned"] == "no task has lost its worker"
    [lost] = [finding for finding in told["findings"] if finding["check"] == "lost"]
    assert lost["message"].startswith(
        f"{MOST_INSPECTED} of {MOST_INSPECTED} tasks that were inspected, of {waiting} that "
        "wait, do so, and neither the broker nor a worker has their message"
    )
    assert calls["cmdstat_scan"] >= COUNT // 1000
    # Each once on the walk, and those that were looked into once more. Others use the server too.
    assert COUNT + MOST_INSPECTED <= calls["cmdstat_hgetall"] < COUNT + MOST_INSPECTED + 500
    assert empty.json()["passed"]["keys"] == "all 0 locks have keys of this version"
    # A batch takes 2 MiB, and the 2,000 that are looked into one; all of them would take five.
    assert done.peak_kib - empty.peak_kib < 5 * 1024


def test_manifest_is_the_apps_and_asks_the_store_nothing(desk, crowd):
    with client_of(desk) as client:
        client.config_resetstat()

        done = desk.unique("manifest", "--json")

        asked = client.info("commandstats").keys()
    assert done.code == 0
    assert done.json() == manifest(desk.app)
    assert not asked & {"cmdstat_evalsha", "cmdstat_hgetall", "cmdstat_scan", "cmdstat_ping"}


# -- release: these come last, since they change the crowd -----------------------------------


def still_held(desk: Desk, members: list[Member]) -> list[Member]:
    held = {
        task_id
        for _, record in desk.store.walk()
        for task_id, task in record.tasks.items()
        if not task.released
    }
    return [member for member in members if member.task_id in held]


def test_release_asks_first_and_leaves_all_alone_when_told_no(desk, crowd):
    before = len(still_held(desk, crowd))

    done = desk.unique("release", "--task", "shop.send_digest", stdin="n\n")

    assert done.code == 1
    assert "does not stop the tasks" in done.err
    assert "Release 3000 locks? [y/N]" in done.err
    assert desk.unique("release", "--task-id", crowd[0].task_id).code == 1  # nobody answers
    assert len(still_held(desk, crowd)) == before


def test_release_of_nothing_in_particular_is_refused(desk, crowd):
    done = desk.unique("release", "--yes")

    assert done.code == 2
    assert "--all" in done.err
    assert len(still_held(desk, crowd)) == COUNT


def test_dry_run_tells_and_releases_nothing(desk, crowd):
    done = desk.unique("release", "--state", "pending", "--dry-run", "--json")

    assert done.code == 0
    assert done.json() == {"matched": 1000, "released": 0, "dry_run": True}
    assert len(still_held(desk, crowd)) == COUNT


def test_release_by_task_id_and_by_key(desk, crowd):
    by_id, by_key = crowd[0], crowd[1]
    before = still_held(desk, crowd)

    assert desk.unique("release", "--task-id", by_id.task_id, "--yes").code == 0
    assert desk.unique("release", "--key", by_key.key, stdin="y\n").code == 0

    assert not still_held(desk, [by_id, by_key])
    assert len(still_held(desk, crowd)) == len(before) - 2
    again = desk.unique("release", "--key", by_key.key, "--yes")
    assert again.code == 1
    assert again.err.strip() == "No lock matches."
    assert lookup(key=by_key.key, app=desk.app) is None


def test_release_by_task_state_and_age_shows_its_progress(desk, crowd):
    before = still_held(desk, crowd)

    done = desk.unique(
        "release", "--task", "shop.*", "--state", "waiting", "--older-than", "PT2H", "--yes"
    )

    gone = [
        member
        for member in before
        if member.task.startswith("shop.") and member.hours and member.state == "available"
    ]
    assert done.code == 0
    assert f"Released {len(gone)} locks." in done.out
    assert f"1000 of {len(gone)}" in done.err
    assert not still_held(desk, gone)
    assert len(still_held(desk, crowd)) == len(before) - len(gone)


# -- the other stores --------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["sqlite", "postgresql"])
def sql_desk(
    request: pytest.FixtureRequest,
    redis_server: RedisServer,
    postgres_server: PostgresServer,
    directory: Path,
) -> Iterator[Desk]:
    sqlite = f"sqlite:///{directory / 'crowd.sqlite3'}"
    url = sqlite if request.param == "sqlite" else postgres_server.fresh_url()
    desk = Desk(redis_server.fresh_url(), url, directory)
    yield desk
    desk.close()
    if request.param == "postgresql":
        postgres_server.give_back(url)


def test_the_commands_on_sql(sql_desk):
    crowd = gather(sql_desk.store, PART)
    waiting_digests = [
        member
        for member in crowd
        if member.task == "shop.send_digest" and member.state == "available"
    ]

    listed = sql_desk.unique("list", "--json", "--task", "shop.send_digest", "--state", "waiting")
    stats = sql_desk.unique("stats", "--json")
    released = sql_desk.unique(
        "release", "--task", "shop.send_digest", "--state", "waiting", "--yes", "--json"
    )

    assert sorted(row["task_id"] for row in listed.json_lines()) == sorted(
        member.task_id for member in waiting_digests
    )
    assert stats.json()["states"] == dict(Counter(member.state for member in crowd))
    assert released.json() == {
        "matched": len(waiting_digests),
        "released": len(waiting_digests),
        "dry_run": False,
    }
    assert len(still_held(sql_desk, crowd)) == PART - len(waiting_digests)
