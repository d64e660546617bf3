"""``make example``: the shop starts, serves, and stops with all that belongs to it."""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.example.conftest import EXAMPLE, Shop
from tests.support.process import LocalProcess, is_alive
from tests.support.server import free_port
from tests.support.waiting import eventually

ROOT = EXAMPLE.parent
pytestmark = pytest.mark.slow


def run(*options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(EXAMPLE / "run.py"), *options],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_help_says_what_it_does():
    done = run("--help")

    assert done.returncode == 0
    for words in ("--port", "--fresh", "SHOP_REDIS_URL", "Ctrl-C"):
        assert words in done.stdout


def test_make_example_starts_serves_and_stops_with_all_its_processes(tmp_path):
    shop = Shop(tmp_path)
    # What make would install is there: the tests' own environment.
    here = ["-o", ".venv/.installed-example", f"BIN={Path(sys.executable).parent}"]
    process = LocalProcess(
        ["make", *here, "example", f"ARGS=--port {shop.port}"],
        log_path=tmp_path / "make.log",
        cwd=ROOT,
        env={**os.environ, "SHOP_DATA": str(shop.data), "SHOP_REDIS_URL": "", "SHOP_WORK_S": "1"},
    )
    process.start()
    try:
        process.wait_for_log("Ctrl-C stops it", timeout=90)
        assert shop.url in process.log()
        children = [psutil.Process(pid).cmdline() for pid in process.children()]
        for part in ("worker", "beat", "runserver"):
            assert any(part in command for command in children), part
        assert shop.order("k").status == 202
        eventually(lambda: shop.mails() == 1, timeout=60)

        pids = process.children()
        process.signal_group(signal.SIGINT)  # what a terminal does on Ctrl-C
        eventually(lambda: not process.is_running(), timeout=60)

        assert "The shop is closed." in process.log()
        assert [pid for pid in pids if is_alive(pid)] == []
    finally:
        process.kill()


def test_two_shops_do_not_share_a_directory(tmp_path):
    (tmp_path / "shop.sqlite3").write_text("kept")
    directory = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(directory, fcntl.LOCK_EX)
    try:
        port = str(free_port())
        done = run("--port", port, "--fresh", SHOP_DATA=str(tmp_path), SHOP_REDIS_URL="")
    finally:
        os.close(directory)

    assert done.returncode == 1
    assert f"Another shop is running in {tmp_path}" in done.stderr
    assert (tmp_path / "shop.sqlite3").read_text() == "kept"


def test_a_port_that_is_taken_is_told_and_nothing_is_deleted(tmp_path):
    (tmp_path / "shop.sqlite3").write_text("kept")
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        done = run("--port", str(port), "--fresh", SHOP_DATA=str(tmp_path), SHOP_REDIS_URL="")

    assert done.returncode == 1
    assert f"Port {port} is taken" in done.stderr
    assert f"--port {port + 1}" in done.stderr
    assert (tmp_path / "shop.sqlite3").read_text() == "kept"
