"""``make demo``: the script does what it says, ends by itself and leaves nothing."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.docs.pages import ROOT

pytestmark = pytest.mark.slow

DEMO = [sys.executable, str(ROOT / "demo" / "run.py")]


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}


def workers(environment: dict[str, str]) -> list[psutil.Process]:
    """Processes that were started with this test's environment."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("TMPDIR") == environment["TMPDIR"]:
                found.append(process)
        except (psutil.AccessDenied, psutil.NoSuchProcess, psutil.ZombieProcess):
            continue
    return found


def test_the_demo_ends_with_a_table_and_code_0(environment, tmp_path):
    began = time.monotonic()

    done = subprocess.run(DEMO, env=environment, capture_output=True, text=True, timeout=60)

    print(done.stdout, f"\n{time.monotonic() - began:.1f} s")
    assert done.returncode == 0, done.stdout + done.stderr
    for words in (
        "calls  published  runs  duplicates",
        "DuplicateTask",
        "All figures are as expected",
    ):
        assert words in done.stdout
    assert list(tmp_path.iterdir()) == []
    assert workers(environment) == []


def test_a_demo_that_is_ended_from_outside_cleans_up(environment, tmp_path):
    with subprocess.Popen(DEMO, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        seen = ""
        while "rebuild_index" not in seen:  # the worker is at work
            line = process.stdout.readline()
            assert line, seen
            seen += line
        process.terminate()
        process.stdout.read()
        code = process.wait(timeout=30)

    assert code == 1
    assert list(tmp_path.iterdir()) == []
    assert workers(environment) == []


def test_a_figure_that_is_wrong_is_shown_and_is_code_1():
    script = (
        "import sys; sys.path.insert(0, 'demo'); import run;"
        "scene = run.Scene('two calls', run.Figures(2, 1, 1, 1), lambda: (2, 1));"
        "sys.exit(run.report([(scene, run.Figures(2, 2, 2, 0))], 0.1))"
    )

    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)

    assert done.returncode == 1
    assert "Wrong: two calls" in done.stdout
    assert "published=2" in done.stdout
