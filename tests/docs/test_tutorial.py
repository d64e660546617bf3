"""The tutorial, followed to the letter: its file, its session, its worker."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.docs.pages import DOCS, ROOT, Block, blocks
from tests.support.waiting import eventually

TUTORIAL = DOCS / "tutorial.md"

#: Runs each line that it reads from its standard input as a block of the page, and says when it
#: is through. One namespace, as in a Python session.
SESSION = """
import json, sys
for line in sys.stdin:
    exec(compile(json.loads(line), "tutorial.md", "exec"), globals())
    print("<done>", flush=True)
"""

pytestmark = pytest.mark.slow


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """The reader's directory, with the files that the page has them write."""
    for block in blocks(TUTORIAL):
        if "caption" in block.options:
            (tmp_path / block.options["caption"]).write_text(block.text)
    return tmp_path


@pytest.fixture
def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT)}


@pytest.fixture
def start_worker(directory: Path, environment: dict[str, str]) -> Iterator[Callable[[str], Path]]:
    """``start_worker(command)``: run the page's command; its log."""
    started: list[subprocess.Popen[bytes]] = []
    log = directory / "worker.log"

    def start(command: str) -> Path:
        program, *arguments = shlex.split(command)
        assert program == ".venv/bin/celery"
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "celery", *arguments],
                cwd=directory,
                env=environment,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        started.append(process)
        eventually(lambda: " ready." in log.read_text(), timeout=60)
        return log

    yield start
    for process in started:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.fixture
def type_in(directory: Path, environment: dict[str, str]) -> Iterator[Callable[[str], None]]:
    """``type_in(block)``: run it in the reader's Python session."""
    with (directory / "session.log").open("wb") as errors:
        session = subprocess.Popen(
            [sys.executable, "-c", SESSION],
            cwd=directory,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
    assert session.stdin is not None
    assert session.stdout is not None

    def run(text: str) -> None:
        assert session.stdin is not None
        assert session.stdout is not None
        session.stdin.write(json.dumps(text) + "\n")
        session.stdin.flush()
        for line in session.stdout:
            if line == "<done>\n":
                return
        pytest.fail(f"{text}\nended with\n{(directory / 'session.log').read_text()}")

    yield run
    session.kill()
    session.wait()
    session.stdin.close()
    session.stdout.close()


def steps() -> list[Block]:
    """What the reader does, in the order of the page: blocks to type, and the worker's command."""
    return [
        block
        for block in blocks(TUTORIAL)
        if (block.language == "python" and "caption" not in block.options) or is_worker(block)
    ]


def is_worker(block: Block) -> bool:
    return block.language == "bash" and " worker" in block.text


@pytest.mark.timeout(300)
@pytest.mark.parametrize("pause_s", [0, 10], ids=["at once", "at a person's speed"])
def test_the_tutorial_works_as_it_says(type_in, start_worker, pause_s):
    log = Path()
    for step in steps():
        time.sleep(pause_s)  # the reader reads: nothing may depend on how long
        if is_worker(step):
            log = start_worker(step.text.strip())
        else:
            type_in(step.text)

    received = re.findall(r"Task tasks\.(\w+)\[\S+\] received", log.read_text())
    assert sorted(received)[:3] == ["charge", "rebuild_index", "rebuild_index"]
    assert len(received) in (3, 4)  # the last call of the page may not have arrived yet
