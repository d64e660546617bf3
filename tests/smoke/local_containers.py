"""Local processes in the place of pytest-celery's containers.

pytest-celery wraps docker's Container object in classes of its own, and builds its nodes and
clusters on those. ``LocalContainer`` stands in for docker's object, so that everything above it
runs unchanged, on a process of this machine.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from pytest_celery import CeleryWorkerContainer, RabbitMQContainer, RedisContainer

from tests.support import LocalProcess, RabbitMQServer, RedisServer
from tests.support.server import HOST
from tests.support.worker import REPOSITORY


class Controllable(Protocol):
    """What a Server and a LocalProcess have in common."""

    def is_running(self) -> bool: ...
    def log(self) -> str: ...
    def kill(self) -> None: ...
    def restart(self) -> None: ...
    def send_signal(self, number: signal.Signals) -> None: ...


class LocalContainer:
    """The part of docker's Container that pytest-celery uses."""

    def __init__(
        self,
        name: str,
        process: Controllable,
        *,
        id: str | None = None,  # noqa: A002 - docker's name
        address: str = HOST,
        directory: Path | None = None,
    ) -> None:
        self.name = name
        self.id = id or uuid.uuid4().hex
        self.process = process
        self._directory = directory
        self.attrs: dict[str, Any] = {
            "Config": {"Hostname": address, "Env": []},
            "HostConfig": {"PortBindings": {}},
            "NetworkSettings": {"Networks": {}, "Ports": {}},
        }

    @property
    def status(self) -> str:
        return "running" if self.process.is_running() else "exited"

    def reload(self) -> None:
        """Nothing is cached here."""

    def logs(self) -> bytes:
        return self.process.log().encode()

    def kill(self, signal: str | int | None = None) -> None:
        number = as_signal(signal)
        if number == as_signal("SIGKILL"):
            # In a container the end of the first process is the end of all.
            self.process.kill()
        else:
            self.process.send_signal(number)

    def restart(self, timeout: int = 10) -> None:
        self.process.restart()

    def exec_run(self, command: str | Sequence[str], **_: Any) -> tuple[int, bytes]:
        arguments = shlex.split(command) if isinstance(command, str) else list(command)
        done = subprocess.run(
            arguments,
            cwd=self._directory,
            env={**os.environ, "PATH": path_with_this_python()},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        return done.returncode, done.stdout


def as_signal(value: str | int | None) -> signal.Signals:
    if isinstance(value, str):
        return signal.Signals[value]
    return signal.SIGKILL if value is None else signal.Signals(value)


def path_with_this_python() -> str:
    return os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])


class LocalRedisContainer(RedisContainer):
    def __init__(self, name: str, server: RedisServer) -> None:
        self._server = server
        super().__init__(LocalContainer(name, server, address=f"{HOST}:{server.port}"))

    @property
    def port(self) -> int:
        return self._server.port


class LocalRabbitMQContainer(RabbitMQContainer):
    """A virtual host of its own on the RabbitMQ server of the test run."""

    def __init__(self, name: str, server: RabbitMQServer) -> None:
        self._server = server
        self._vhost = server.fresh_url().rpartition("/")[2]
        super().__init__(LocalContainer(name, server, address=f"{HOST}:{server.port}"))

    @property
    def port(self) -> int:
        return self._server.port

    @property
    def vhost(self) -> str:
        return self._vhost

    def teardown(self) -> None:
        if not self._server.is_running():
            self._server.restart()


class LocalWorkerContainer(CeleryWorkerContainer):
    """The worker that pytest-celery describes by files, environment and command."""

    def __init__(
        self,
        directory: Path,
        *,
        content: Mapping[str, bytes],
        environment: Mapping[str, str],
        command: Sequence[str],
    ) -> None:
        for name, text in content.items():
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
            (directory / name).write_bytes(text)
        host = uuid.uuid4().hex
        process = LocalProcess(
            # A node calls its worker by the container's id, where the command has the host name.
            [sys.executable, "-m", *(part.replace("%h", host[:12]) for part in command)],
            log_path=directory / "worker.log",
            cwd=directory,
            env={
                **os.environ,
                **environment,
                "PYTHONPATH": os.pathsep.join([str(directory), str(REPOSITORY)]),
            },
        )
        process.start()
        # pytest-celery would wait two minutes for a worker that has already failed.
        process.wait_for_log(r"ready\.", timeout=30)
        super().__init__(LocalContainer("worker", process, id=host, directory=directory))

    def teardown(self) -> None:
        self._container.process.kill()
