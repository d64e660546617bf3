"""The tutorial, followed to the letter: its file, its worker, its session."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.documentation.pages import DOCS, ROOT, blocks, python_script
from tests.kit.waiting import eventually

TUTORIAL = DOCS / "tutorial.md"

pytestmark = pytest.mark.slow


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """The reader's directory, with the files that the page tells to write."""
    for block in blocks(TUTORIAL):
        if "caption" in block.options:
            (tmp_path / block.options["caption"]).write_text(block.text)
    return tmp_path


@pytest.fixture
def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT)}


@pytest.fixture
def worker(directory: Path, environment: dict[str, str]) -> Iterator[Path]:
    """The worker, started by the command on the page. Gives its log."""
    command = shlex.split(worker_command())
    assert command[0] == ".venv/bin/celery"
    log = directory / "worker.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "celery", *command[1:]],
            cwd=directory,
            env=environment,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    try:
        eventually(lambda: " ready." in log.read_text(), timeout=30)
        yield log
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def worker_command() -> str:
    commands = [b.text.strip() for b in blocks(TUTORIAL) if b.language == "bash"]
    return next(command for command in commands if " worker" in command)


def test_the_tutorial_works_as_it_says(
    directory: Path, environment: dict[str, str], worker: Path
) -> None:
    (directory / "session.py").write_text(python_script(TUTORIAL))

    done = subprocess.run(
        [sys.executable, "session.py"],
        cwd=directory,
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
    )

    assert done.returncode == 0, done.stderr + worker.read_text()
    received = re.findall(r"Task tasks\.(\w+)\[\S+\] received", worker.read_text())
    assert received == ["rebuild_index", "rebuild_index", "rebuild_index", "charge"]
