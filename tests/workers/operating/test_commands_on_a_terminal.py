"""What a person sees on a terminal: commands to copy, and who runs a task."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import termios
from collections.abc import Iterator
from pathlib import Path

import pytest

from celery_unique import lookup
from celery_unique.stores.base import Claim
from tests.support import RedisServer, eventually
from tests.workers.operating.desk import APP, Desk

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

ESCAPES = re.compile(r"\x1b\[[0-9;]*m")


@pytest.fixture
def fresh_desk(redis_server: RedisServer, directory: Path) -> Iterator[Desk]:
    url = redis_server.fresh_url()
    desk = Desk(url, url, directory)
    yield desk
    desk.close()


def on_terminal(desk: Desk, columns: int, *arguments: str) -> list[str]:
    """The lines that ``celery -A app unique ARGUMENTS`` writes to a terminal of that width."""
    ours, its = pty.openpty()
    fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
    process = subprocess.Popen(
        desk.command("unique", *arguments), env=desk.environment(), cwd=desk.directory, stdout=its
    )
    os.close(its)
    written = b""
    while True:
        try:
            chunk = os.read(ours, 10_000)
        except OSError:  # Linux: the other end is closed
            break
        if not chunk:
            break
        written += chunk
    process.wait(60)
    os.close(ours)
    return ESCAPES.sub("", written.decode()).splitlines()


@pytest.mark.parametrize("columns", [80, 40])
def test_a_command_is_never_broken(fresh_desk, columns):
    desk = fresh_desk
    result = desk.app.send_task("shop.rebuild_index", kwargs={"shop_id": 1}, unique=True)

    lines = on_terminal(desk, columns, "why", result.id)

    command = f"celery -A {APP} unique release --key {result.unique_key}"
    [line] = [line for line in lines if "celery -A" in line]
    assert line.endswith(command)
    assert max(len(each) for each in lines if each != line) <= max(columns, 80)
    assert desk.unique(*command.split(" unique ")[1].split(), "--yes").code == 0


@pytest.mark.parametrize("columns", [80, 40])
def test_the_doctors_commands_are_not_broken(fresh_desk, columns):
    desk = fresh_desk
    # Recorded as running, by a worker whose lease has ended.
    key = "1:" + "ef" * 32
    desk.store.acquire(key, Claim("t", "shop.rebuild_index", "pw", grace_ms=3_600_000))
    abandon(desk, key)

    lines = on_terminal(desk, columns, "doctor", "--timeout", "0.5")

    commands = [line.strip() for line in lines if "celery -A" in line]
    assert commands == [f"celery -A {APP} unique release --task-id ID"]


def abandon(desk: Desk, key: str) -> None:
    from celery_unique.stores.base import Start

    start = Start("t", "gone@host/1/boot/1", "shop.rebuild_index", 3_600_000, 1)
    assert desk.store.start(key, start).verdict == "run"


def test_why_names_the_process_that_runs_the_task(fresh_desk):
    desk = fresh_desk
    worker = desk.start_worker("forks", pool="prefork")
    running = desk.app.send_task("shop.import_all", kwargs={"name": "seen"}, unique=True)

    def is_running() -> bool:
        lock = lookup(key=running.unique_key, app=desk.app)
        return lock is not None and lock.state == "active"

    eventually(is_running, timeout=30, message="not started")
    children = worker.children()

    done = desk.unique("why", running.id)
    told = desk.unique("why", running.id, "--json").json()

    named = re.search(r"run by +(\S+), process (\d+) of main process (\d+);", done.out)
    assert named is not None, done.out
    assert named[1] == worker.hostname
    assert int(named[2]) in children
    assert int(named[3]) == worker.pid
    assert told["tasks"][0]["process"] == int(named[2])

    worker.sigstop()  # it cannot tell now
    silent = desk.unique("why", running.id)

    assert f"run by      {worker.hostname}, main process {worker.pid};" in silent.out
