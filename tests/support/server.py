"""What all servers have in common: a temporary directory, free ports, a start and an end."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import tempfile
import time
from abc import ABC, abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Self

from tests.support.process import LocalProcess

if TYPE_CHECKING:
    from tests.support.clock import ServerClock
    from tests.support.disk import SmallDisk

HOST = "127.0.0.1"


class ServerNotInstalled(RuntimeError):
    """A server's program is missing; the message names the command that installs it."""

    def __init__(self, program: str, install_command: str) -> None:
        super().__init__(
            f"{program} is not installed. Install it with: {install_command}\n"
            "(make test does this by itself, through scripts/install-services)"
        )


class Server(ABC):
    """A server process of the test run, alone in a temporary directory.

    Usable as a context manager. ``start`` returns once the server has answered in its own
    protocol and the answering process is known to be ours.
    """

    start_timeout_s: ClassVar[float] = 40.0
    stop_signal: ClassVar[signal.Signals] = signal.SIGTERM

    def __init__(self) -> None:
        self.port = 0
        self.directory: Path | None = None
        #: Given before the start: a clock that can be set, and a disk that can be filled.
        self.clock: ServerClock | None = None
        self.disk: SmallDisk | None = None
        self._process: LocalProcess | None = None

    @property
    @abstractmethod
    def url(self) -> str: ...

    @abstractmethod
    def _command(self) -> list[str]: ...

    @abstractmethod
    def _answers(self) -> bool:
        """Ask the server something in its own protocol; an exception means not yet."""

    def _prepare(self) -> None:
        """What must exist in the directory before the first start."""

    def _environment(self) -> dict[str, str] | None:
        return None

    def _user(self) -> str | None:
        return None

    def start(self) -> Self:
        self._command()  # a missing program is reported before anything is made
        self.directory = Path(tempfile.mkdtemp(prefix=f"{type(self).__name__.lower()}-"))
        try:
            if self.disk is not None:
                self.disk.mount(self.directory)
            self._choose_ports()
            self._prepare()
            self._launch()
        except BaseException:
            self.stop()
            raise
        return self

    def _choose_ports(self) -> None:
        self.port = free_port()

    def _launch(self) -> None:
        for attempts_left in (2, 1, 0):
            process = LocalProcess(
                self._command(),
                log_path=self._home / "server.log",
                cwd=self._home,
                env=self._whole_environment(),
                user=self._user(),
            )
            process.start()
            self._process = process
            if self._comes_up(process):
                return
            # Another process can take a free port between the choice and the start.
            port_was_taken = "in use" in process.log() or "eaddrinuse" in process.log()
            if not (port_was_taken and attempts_left):
                raise process.failure("ended before it answered")
            process.log_path.unlink()
            self._choose_ports()
            self._prepare_ports()

    def _whole_environment(self) -> dict[str, str] | None:
        environment = self._environment()
        if self.clock is None:
            return environment
        return {**(os.environ if environment is None else environment), **self.clock.environment()}

    def _prepare_ports(self) -> None:
        """What must be written again when the ports were chosen anew."""

    def _comes_up(self, process: LocalProcess) -> bool:
        deadline = time.monotonic() + self.start_timeout_s
        while process.is_running():
            try:
                # The second look tells our server from another one that has taken the port.
                if self._answers() and process.is_running():
                    return True
            except Exception as error:
                last_error = error
            else:
                last_error = None
            if time.monotonic() >= deadline:
                process.kill()
                raise process.failure(
                    f"did not answer within {self.start_timeout_s:g} s: {last_error!r}"
                )
            time.sleep(0.03)
        return False

    def stop(self) -> None:
        """End the server and remove its directory; without effect when it never started."""
        try:
            if self._process is not None:
                self._process.stop(self.stop_signal)
        finally:
            if self.disk is not None:
                self.disk.unmount()
            if self.directory is not None:
                shutil.rmtree(self.directory, ignore_errors=True)

    def kill(self) -> None:
        """SIGKILL; the directory stays, so that ``restart`` finds what was written."""
        self._running.kill()

    def restart(self) -> None:
        """Start again on the same port and directory; a running server is ended first."""
        if self._running.is_running():
            self._running.stop(self.stop_signal)
        self._running.start()
        if not self._comes_up(self._running):
            raise self._running.failure("did not come up again")

    def send_signal(self, number: signal.Signals) -> None:
        """Signal the main process alone."""
        self._running.send_signal(number)

    def sigstop(self) -> None:
        """Freeze the server: connections stay open and nothing is answered."""
        self._running.signal_group(signal.SIGSTOP)

    def sigcont(self) -> None:
        self._running.signal_group(signal.SIGCONT)

    @property
    def pid(self) -> int:
        return self._running.pid

    def is_running(self) -> bool:
        return self._process is not None and self._process.is_running()

    def log(self) -> str:
        return self._running.log()

    @property
    def _running(self) -> LocalProcess:
        if self._process is None:
            raise RuntimeError(f"{type(self).__name__} has not been started")
        return self._process

    @property
    def _home(self) -> Path:
        if self.directory is None:
            raise RuntimeError(f"{type(self).__name__} has not been started")
        return self.directory

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *exc_info: object) -> None:
        self.stop()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        return port


def find_program(name: str, *, install_command: str, also_in: str | None = None) -> str:
    """The path of a program on PATH or, by a glob such as ``/usr/lib/x/*/bin``, elsewhere."""
    found = shutil.which(name)
    if found is None and also_in is not None:
        places = sorted(Path("/").glob(f"{also_in.lstrip('/')}/{name}"))
        found = str(places[-1]) if places else None
    if found is None:
        raise ServerNotInstalled(name, install_command)
    return found
