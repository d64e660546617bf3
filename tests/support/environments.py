"""The built wheel in environments of its own: what a user gets, and not this checkout."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MAKE_VENV = ROOT / "scripts" / "make-venv"
#: What would let a program see the checkout, or the environment that runs the tests.
_OURS = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "PYTHONDONTWRITEBYTECODE")


class Environment:
    """A virtual environment, empty at first. It is made and filled as ``make`` fills ours."""

    def __init__(self, directory: Path, made_from: str = "") -> None:
        self.directory = directory
        self._made_from = made_from or outer_python()
        self.python = directory / "bin" / "python"

    def install(self, *arguments: str) -> Environment:
        """What ``pip install ARGUMENTS`` would do inside of it."""
        env = {**clean_env(), "PYTHON": self._made_from}
        done = _run([str(MAKE_VENV), str(self.directory), *arguments], env=env, timeout=300)
        assert done.returncode == 0, done.stdout + done.stderr
        return self

    def run_command(self, command: str) -> None:
        """Follow the advice of a message, to the letter: ``pip install "..."``."""
        program, verb, *arguments = shlex.split(command)
        assert (program, verb) == ("pip", "install"), command
        self.install(*arguments)

    def run(
        self, *arguments: str, cwd: Path, env: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """``python ARGUMENTS``, which sees the environment and the directory it runs in."""
        command = [str(self.python), *arguments]
        return _run(command, cwd=cwd, env={**clean_env(), **(env or {})}, timeout=300)

    def script(self, text: str, *, cwd: Path, env: Mapping[str, str] | None = None) -> str:
        """What the script prints; it must succeed."""
        path = cwd / "session.py"
        path.write_text(text, encoding="utf-8")
        done = self.run(str(path), cwd=cwd, env=env)
        assert done.returncode == 0, done.stderr
        return done.stdout


def clean_env() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in _OURS}


def build_wheel(directory: Path) -> Path:
    """The wheel from the source distribution, as an index would have both."""
    requires = "hatchling>=1.26"
    assert requires in (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    building = Environment(directory / "building").install(requires)
    made = building.run("-m", "hatchling", "build", "-t", "sdist", "-d", str(directory), cwd=ROOT)
    assert made.returncode == 0, made.stderr
    (source,) = directory.glob("*.tar.gz")
    unpacked = directory / "source"
    unpacked.mkdir()
    subprocess.run(["tar", "xf", source, "-C", unpacked, "--strip-components=1"], check=True)
    built = building.run(
        "-m", "hatchling", "build", "-t", "wheel", "-d", str(directory), cwd=unpacked
    )
    assert built.returncode == 0, built.stderr
    (wheel,) = directory.glob("*.whl")
    return wheel


def outer_python() -> str:
    """The interpreter that this environment was made from: scripts/make-venv asks it for pip."""
    return getattr(sys, "_base_executable", sys.executable)


def _run(
    command: list[str], *, env: Mapping[str, str], timeout: float, cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, cwd=cwd, env=dict(env), capture_output=True, text=True, timeout=timeout
    )
