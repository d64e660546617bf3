"""Which tests ran with which versions: a file for each run, read by `tests.compatibility.page`.

``CELERY_UNIQUE_MATRIX_RESULTS`` names the file. `tests/conftest.py` registers the recorder.
"""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
from collections import Counter
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pytest

VARIABLE = "CELERY_UNIQUE_MATRIX_RESULTS"
MATRIX = "tests/workers/test_matrix.py"
#: The commit of a run that did not record it, or was no checkout.
UNKNOWN = "unknown"
#: What a run is told by.
PACKAGES = ("celery", "kombu", "redis", "SQLAlchemy", "Django")


def register(config: pytest.Config) -> None:
    """In the process that reports; those of xdist send it theirs."""
    path = os.environ.get(VARIABLE)
    if path and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Recorder(Path(path)))


class Recorder:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._outcomes: dict[str, str] = {}
        self._servers: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        # A test has passed when its body has, and neither set-up nor clean-up failed.
        if report.when == "call" or report.outcome != "passed":
            if self._outcomes.get(report.nodeid) != "failed":
                self._outcomes[report.nodeid] = report.outcome
            self._servers |= {name: str(value) for name, value in report.user_properties}

    def pytest_sessionfinish(self) -> None:
        if not self._outcomes:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        document = {
            "taken": f"{datetime.now(UTC):%Y-%m-%d}",
            "commit": commit(),
            "python": platform.python_version(),
            "packages": {name: _version(name) for name in PACKAGES},
            "servers": dict(sorted(self._servers.items())),
            **_summary(self._outcomes),
        }
        self._path.write_text(json.dumps(document, indent=1, sort_keys=True) + "\n")


def _summary(outcomes: dict[str, str]) -> dict[str, Any]:
    """The tests of the matrix by cell; of other files, how many."""
    cells: dict[str, dict[str, str]] = {}
    files: dict[str, Counter[str]] = {}
    for nodeid, outcome in sorted(outcomes.items()):
        file, _, name = nodeid.partition("::")
        if file == MATRIX:
            test, _, cell = name.rstrip("]").partition("[")
            cells.setdefault(cell, {})[test.removeprefix("test_")] = outcome
        else:
            files.setdefault(_suite(file, name), Counter())[outcome] += 1
    return {"cells": cells, "files": {name: dict(counts) for name, counts in files.items()}}


_STORES = "memory|sqlite|postgresql|redis|valkey|cluster|sentinel|tls|mariadb|mysql"


def _suite(file: str, name: str) -> str:
    """The contract of stores is told for each store, anything else for the directory."""
    store = re.search(rf"\[(?:.*-)?({_STORES})(?:-.*)?\]$", name)
    if file == "tests/stores/test_contract.py" and store:
        return f"{file}[{store[1]}]"
    return file if file.startswith("tests/stores/") else str(Path(file).parent)


def commit() -> str:
    """The commit whose code has run; with ``+`` if the working tree differs from it."""
    command = ["git", "describe", "--always", "--abbrev=8", "--exclude=*", "--dirty=+"]
    here = Path(__file__).parent
    try:
        reply = subprocess.run(command, cwd=here, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return UNKNOWN
    return reply.stdout.strip()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
