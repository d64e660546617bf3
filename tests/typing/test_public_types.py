"""The package carries its types: a user's checker sees them, and sees mistakes."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow  # mypy reads the whole package

HERE = Path(__file__).parent
ROOT = HERE.parent.parent


def mypy(file: str) -> str:
    command = [sys.executable, "-m", "mypy", "--no-incremental", str(HERE / file)]
    # Celery has no types of its own, which is not this package's mistake.
    run = subprocess.run(
        [*command, "--config-file", str(ROOT / "pyproject.toml")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    return run.stdout


def test_a_users_code_type_checks_in_strict_mode() -> None:
    assert "Success: no issues found" in mypy("sample_use.py")


def test_wrong_use_is_seen_by_the_type_checker() -> None:
    lines = (HERE / "wrong_use.py").read_text().splitlines()
    marked = {number for number, line in enumerate(lines, 1) if line.endswith("# wrong")}

    found = {
        int(number) for number in re.findall(r"wrong_use\.py:(\d+): error", mypy("wrong_use.py"))
    }

    assert found == marked
