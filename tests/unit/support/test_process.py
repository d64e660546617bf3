"""Processes of the tests, and only those, are ended."""

from __future__ import annotations

import subprocess

import pytest

from tests.support import LocalProcess, eventually
from tests.support.process import is_alive


@pytest.fixture
def started(tmp_path):
    """Starts a command; what still runs is ended."""
    processes = []

    def start(*command):
        process = LocalProcess(command, log_path=tmp_path / f"{len(processes)}.log", cwd=tmp_path)
        process.start()
        processes.append(process)
        return process

    yield start
    for process in processes:
        process.kill()


def test_a_process_that_has_ended_is_not_killed_under_a_pid_that_another_has_now(started):
    ended, other = started("true"), started("sleep", "60")
    eventually(lambda: not ended.is_running())

    ended._popen.pid = other.pid  # the kernel gives numbers again
    ended.stop()

    with pytest.raises(subprocess.TimeoutExpired):
        other._popen.wait(timeout=1)


def test_what_a_process_left_behind_in_its_group_is_killed(started):
    ended = started("sh", "-c", "sleep 60 & echo $!")
    left = int(ended.wait_for_log(r"(\d+)\n").group(1))
    eventually(lambda: not ended.is_running())

    ended.stop()

    eventually(lambda: not is_alive(left))
