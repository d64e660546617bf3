"""scripts/install-packages: what it says, whom it asks, and what it hands to apt-get.

The programs that it starts are stubs that write down how they were called: nothing is installed,
and no file of the system is touched, since all of that goes through the stub of sudo.
"""

from __future__ import annotations

import os
import pty
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "install-packages"
PACKAGES = ["redis-server", "postgresql"]
SAID = "These Debian packages are missing and will be installed: redis-server postgresql"
INSTALL = "apt-get -q -y install --no-install-recommends redis-server postgresql"
SIMULATE = "apt-get -q -y install --simulate redis-server postgresql"

STUBS = {
    "id": "echo 1000",
    "sudo": """
        case "$1" in
            env) "$@" ;;
            tee) cat >/dev/null; echo "$@" >>"$CALLS" ;;
            mktemp) echo /nowhere ;;
            *) echo "$@" >>"$CALLS" ;;
        esac
    """,
    "apt-get": """
        echo "apt-get $*" >>"$CALLS"
        case "$*" in *"$FAILS"*) exit 100 ;; esac
    """,
}


class Machine:
    """One that has apt-get and sudo, and a person who is no root."""

    def __init__(self, directory: Path) -> None:
        self._calls = directory / "calls"
        self._calls.touch()
        programs = directory / "bin"
        programs.mkdir()
        for name, body in STUBS.items():
            stub = programs / name
            stub.write_text(f"#!/bin/sh\n{body}\n")
            stub.chmod(0o755)
        self.environment = {
            "PATH": f"{programs}:/usr/bin:/bin",
            "CALLS": str(self._calls),
            "FAILS": "nothing that is ever asked for",
        }

    def run(self, *, answer: str | None = None) -> subprocess.CompletedProcess[str]:
        """At a terminal, where somebody types the answer; without one: not at a terminal."""
        ours, theirs = pty.openpty()
        if answer is not None:
            os.write(ours, answer.encode())
        try:
            return subprocess.run(
                [SCRIPT, *PACKAGES],
                stdin=subprocess.DEVNULL if answer is None else theirs,
                env=self.environment,
                capture_output=True,
                text=True,
                timeout=30,
            )
        finally:
            os.close(ours)
            os.close(theirs)

    def apt_calls(self) -> list[str]:
        return [call for call in self.calls() if call.startswith("apt-get")]

    def calls(self) -> list[str]:
        return self._calls.read_text().splitlines()


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_it_says_which_packages_and_installs_them_without_asking_where_nobody_sits(machine):
    done = machine.run()

    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0] == SAID
    assert "Go on?" not in done.stdout + done.stderr
    assert machine.apt_calls() == [SIMULATE, INSTALL]


@pytest.mark.parametrize("answer", ["\n", "y\n", "Yes\n"])
def test_it_asks_at_a_terminal_and_goes_on_when_told_to(machine, answer):
    done = machine.run(answer=answer)

    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0] == SAID
    assert "Go on? [Y/n]" in done.stderr
    assert machine.apt_calls() == [SIMULATE, INSTALL]


def test_a_refusal_installs_nothing_and_gives_the_command_to_run(machine):
    done = machine.run(answer="n\n")

    assert done.returncode == 1
    assert "Nothing was installed." in done.stderr
    assert "sudo apt-get install redis-server postgresql" in done.stderr
    assert machine.calls() == []


def test_in_continuous_integration_it_does_not_ask_at_a_terminal_either(machine):
    machine.environment["CI"] = "true"

    done = machine.run(answer="n\n")

    assert done.returncode == 0, done.stderr
    assert "Go on?" not in done.stderr
    assert machine.apt_calls() == [SIMULATE, INSTALL]


def test_it_fetches_the_package_lists_where_they_do_not_know_the_packages(machine):
    machine.environment["FAILS"] = "--simulate"

    done = machine.run()

    assert done.returncode == 0, done.stderr
    assert machine.apt_calls() == [SIMULATE, "apt-get -q -y update", INSTALL]


def test_debian_starts_no_server_meanwhile_and_may_again_afterwards(machine):
    machine.run()

    calls = machine.calls()
    forbidden, allowed = calls.index("tee /usr/sbin/policy-rc.d"), len(calls) - 1
    assert forbidden < calls.index(INSTALL) < allowed
    assert calls[allowed].endswith(" /usr/sbin/policy-rc.d")
    assert calls[allowed].startswith(("rm -f", "mv"))


def test_without_root_and_sudo_it_gives_the_command_to_run(machine):
    programs = Path(machine.environment["PATH"].partition(":")[0])
    (programs / "sudo").unlink()
    for name in ("env", "bash"):
        (programs / name).symlink_to(f"/usr/bin/{name}")
    machine.environment["PATH"] = str(programs)

    done = machine.run()

    assert done.returncode == 1
    assert "As root: apt-get install redis-server postgresql" in done.stderr
    assert machine.apt_calls() == []
