"""On what, under what load and with which versions a run was made."""

from __future__ import annotations

import os
import platform
import re
import sqlite3
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

from tests.support.server import ServerNotInstalled, find_program

PACKAGES = (
    *("celery-unique-tasks", "celery", "kombu", "redis", "hiredis"),
    *("SQLAlchemy", "psycopg", "PyMySQL"),
    *("celery-once", "celery-singleton", "celery-heimdall"),
)
#: Database -> its program, and where that is besides PATH.
DATABASES: dict[str, tuple[str, str | None]] = {
    "PostgreSQL": ("postgres", "/usr/lib/postgresql/*/bin"),
    "MariaDB": ("mariadbd", "/usr/sbin"),
    "SQLite": ("", None),
}


def described() -> dict[str, Any]:
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count(),
        "memory_gib": _memory_gib(),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "redis_server": _said_version("redis-server") or "unknown",
        "databases": {name: found for name in DATABASES if (found := _database_version(name))},
        "packages": {name: found for name in PACKAGES if (found := _version(name))},
    }


def load() -> list[float]:
    return [round(value, 2) for value in os.getloadavg()]


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _memory_gib() -> float:
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    except (OSError, ValueError):
        return 0.0


def _database_version(name: str) -> str | None:
    program, also_in = DATABASES[name]
    return _said_version(program, also_in) if program else sqlite3.sqlite_version


def _said_version(program: str, also_in: str | None = None) -> str | None:
    """The first version number in what a server's program says of itself."""
    try:
        path = find_program(program, install_command="scripts/install-services", also_in=also_in)
        said = subprocess.run(
            [path, "--version"], capture_output=True, text=True, check=True, timeout=10
        ).stdout
    except (ServerNotInstalled, OSError, subprocess.SubprocessError):
        return None
    found = re.search(r"\d+(\.\d+)+", said)
    return found[0] if found else said.strip()


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


if __name__ == "__main__":
    print(described(), load(), file=sys.stdout)
