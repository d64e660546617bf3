"""The pages of docs/start, typed into an empty directory with the built wheel, and nothing else.

Each is typed twice: block after block, and by a person who reads for minutes before each of them,
which the clock of the server counts. ``make test`` types the page of Flask; ``make test-start``
types all of them, and Django's on the oldest and the newest Django.
"""

from __future__ import annotations

import os
import re
import shlex
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.pages import DOCS, Block, blocks
from tests.support import RedisServer, ServerClock, ValkeyServer, eventually
from tests.support.environments import Environment, build_wheel, clean_env
from tests.support.process import LocalProcess
from tests.support.server import free_port

pytestmark = [pytest.mark.slow, pytest.mark.server, pytest.mark.timeout(900)]

START = DOCS / "start"
#: Page -> what besides its packages is installed, and where it is typed: "" is this Python.
FLAVOURS = {
    "flask": ("", ""),
    "plain": ("", ""),
    "fastapi": ("", ""),
    "django": ("Django==5.2.*", ""),
    "django-newest": ("", os.environ.get("CELERY_UNIQUE_NEWEST_PYTHON", "")),
}
TYPED = list(FLAVOURS) if os.environ.get("CELERY_UNIQUE_START") == "all" else ["flask"]
#: How long a person would look again for what a page promises.
PATIENCE_S = 90
#: How long a slow person reads before a block: longer than each default of minutes.
READS_FOR_S = 150


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(tmp_path_factory.mktemp("dist"))


@pytest.fixture(params=["without a pause", "slowly"])
def redis(request) -> Iterator[RedisServer]:
    """With a clock that can be set where the page is read slowly."""
    if request.param == "without a pause":
        with RedisServer() as server:
            yield server
        return
    server = ValkeyServer()
    server.clock = ServerClock()
    with server:
        yield server
        pid = server.pid
    server.clock.forget(pid)
    server.clock.remove()


@pytest.fixture(scope="module")
def made() -> dict[str, Environment]:
    """The environments, by flavour."""
    return {}


class Typist:
    """Types the blocks of a page, in order. Only addresses and the source of the package differ.

    A slow one lets the clock of the server go ahead before each block, until a worker runs: that
    renews its leases by a clock of its own.
    """

    def __init__(
        self,
        directory: Path,
        wheel: Path,
        also: str,
        environment: Environment,
        server: str,
        clock: ServerClock | None = None,
    ) -> None:
        self._directory = directory
        self._wheel, self._also = wheel, also
        self._environment = environment
        self._clock = clock
        self._ports = [str(free_port()), str(free_port())]
        self._addresses = {
            "localhost:6379": server,
            **dict(zip(("8000", "5555"), self._ports, strict=True)),
        }
        self.terminals: list[LocalProcess] = []

    def type(self, page: Path) -> None:
        found = blocks(page)
        for number, block in enumerate(found):
            after = found[number + 1] if number + 1 < len(found) else None
            self._read()
            if block.language == "python":
                self._write(block)
            elif block.language == "bash" and "caption" in block.options:
                self._open_terminal(block)
            elif block.language == "bash":
                self._run(block, after if after and after.language == "text" else None)
            else:
                assert block.language == "text", block

    def _read(self) -> None:
        runs = any(" worker" in terminal.command[-1] for terminal in self.terminals)
        if self._clock is not None and not runs:
            self._clock.shift(self._clock.ahead + READS_FOR_S)

    def _write(self, block: Block) -> None:
        name, _, at_its_end = block.options["caption"].partition(", ")
        path = self._directory / name
        path.parent.mkdir(exist_ok=True)
        before = path.read_text() if at_its_end == "at its end" else ""
        path.write_text(before + self._here(block.text))

    def _open_terminal(self, block: Block) -> None:
        process = LocalProcess(
            ["bash", "-c", f"exec env {self._here(block.text).strip()}"],
            log_path=self._directory / f"terminal{len(self.terminals)}.log",
            cwd=self._directory,
            env=self._env(),
        )
        self.terminals.append(process)
        process.start()
        # A person waits until a server says that it listens.
        for port in self._ports:
            if port in process.command[-1]:
                eventually(
                    lambda port=port: (
                        socket.create_connection(("127.0.0.1", int(port))).close() is None
                    ),
                    timeout=PATIENCE_S,
                    ignoring=OSError,
                    message=f"{process.command}\n{process.log_tail()}",
                )

    def _run(self, block: Block, promised: Block | None) -> None:
        lines = [line for line in block.text.splitlines() if not self._is_preparation(line)]
        if not lines:
            return
        command = self._here("\n".join(lines))
        deadline = time.monotonic() + PATIENCE_S
        while True:
            done = subprocess.run(
                ["bash", "-c", command],
                cwd=self._directory,
                env=self._env(),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=PATIENCE_S,
            )
            if promised is None:
                assert done.returncode == 0, f"{command}\n{done.stdout}"
                return
            if _matches(done.stdout, promised.text):
                return
            shown = f"{command}\nprinted:\n{done.stdout}\npromised:\n{promised.text}{self._logs()}"
            assert time.monotonic() < deadline, shown
            # A worker that has not ended its task, or not reported it: look again.
            assert "POST" not in command, shown
            assert "curl" in command or "unique list" in command, shown
            time.sleep(1)

    def _is_preparation(self, line: str) -> bool:
        """What makes the environment; it is made as ``make`` makes ours."""
        if line.startswith("pip install "):
            packages = shlex.split(line)[2:]
            named = [each.replace("celery-unique-tasks", str(self._wheel)) for each in packages]
            assert named != packages
            self._environment.install(*named, *([self._also] if self._also else []))
            return True
        return line.startswith(("mkdir ", "python3 -m venv ", ". .venv/"))

    def _here(self, text: str) -> str:
        for name, address in self._addresses.items():
            text = text.replace(name, address)
        return text

    def _env(self) -> dict[str, str]:
        path = f"{self._environment.directory / 'bin'}{os.pathsep}{os.environ['PATH']}"
        return {**clean_env(), "PATH": path}

    def _logs(self) -> str:
        return "".join(f"\n{each.command}\n{each.log_tail()}" for each in self.terminals)


def _matches(printed: str, promised: str) -> bool:
    """Three dots stand for any text, and alone in a line for any lines."""
    pattern = "".join(
        r"(?:.*\n)*" if line == "..." else ".*".join(map(re.escape, line.split("..."))) + r"\n"
        for line in promised.strip().splitlines()
    )
    return re.fullmatch(pattern, printed.strip() + "\n") is not None


@pytest.mark.parametrize("flavour", TYPED)
def test_a_page_can_be_typed(flavour, wheel, redis, made, tmp_path, tmp_path_factory):
    also, python = FLAVOURS[flavour]
    if flavour == "django-newest":
        assert python, "CELERY_UNIQUE_NEWEST_PYTHON names none: Django 6 needs Python 3.12"
    if flavour not in made:
        made[flavour] = Environment(tmp_path_factory.mktemp(flavour) / ".venv", python)
    directory = tmp_path / "shop-project"
    directory.mkdir()
    server = redis.fresh_url().removeprefix("redis://").partition("/")[0]
    redis.client().flushall()
    typist = Typist(directory, wheel, also, made[flavour], server, redis.clock)

    try:
        typist.type(START / f"{flavour.partition('-')[0]}.md")
    finally:
        for terminal in typist.terminals:
            terminal.kill()


def test_what_is_not_promised_is_noticed():
    assert _matches("a\nb 1 c\nd\n", "...\nb ... c\n...\n")
    assert _matches("b 1 c", "...\nb ... c\n...")
    assert not _matches("a\nb 1\n", "...\nb ... c\n...\n")
    assert not _matches("created\ncreated\n", "...created...\n...deduplicated...\n")


def test_every_page_of_the_start_is_typed():
    pages = {page.stem for page in START.glob("*.md")} - {"index"}

    assert pages == {flavour.partition("-")[0] for flavour in FLAVOURS}
    for page in pages:
        text = (START / f"{page}.md").read_text(encoding="utf-8")
        # A unique task, a duplicate that is seen, a stuck key that is found and freed.
        for part in ("unique=True", "unique why", "unique release --lost"):
            assert part in text
        assert "conflicts_total" in text or "DUPLICATE" in text
