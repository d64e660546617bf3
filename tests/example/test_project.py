"""The example project as a Django project: its checks, its migrations, its own tests."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.example.conftest import EXAMPLE


def manage(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error::UserWarning", "manage.py", *arguments],
        cwd=EXAMPLE,
        env={**os.environ, "SHOP_DATA": str(tmp_path), "SHOP_REDIS_URL": ""},
        capture_output=True,
        text=True,
        timeout=110,
    )


@pytest.mark.slow
def test_the_projects_own_tests_pass(tmp_path):
    done = manage(tmp_path, "test", "--noinput", "--settings", "config.test_settings")

    assert done.returncode == 0, done.stderr
    assert "System check identified no issues" in done.stdout + done.stderr
    ran = re.search(r"Ran (\d+) tests", done.stderr)
    assert ran
    assert int(ran[1]) > 15


@pytest.mark.slow
def test_checks_and_migrations_are_clean(tmp_path):
    checked = manage(tmp_path, "check", "--fail-level", "WARNING")
    migrated = manage(tmp_path, "makemigrations", "--check", "--dry-run")

    assert checked.returncode == 0, checked.stderr
    assert migrated.returncode == 0, migrated.stdout + migrated.stderr


def test_nothing_on_the_page_is_from_another_host():
    for folder in ("templates", "static"):
        for path in (EXAMPLE / "shop" / folder).rglob("*.*"):
            hosts = set(re.findall(r"https?://[\w.]+", path.read_text(encoding="utf-8")))
            assert hosts <= {"http://www.w3.org"}, path  # the name of SVG, which nobody fetches


def test_nothing_on_the_page_is_inline():
    for path in (EXAMPLE / "shop" / "templates").rglob("*.html"):
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"<script(?![^>]*src=)|<style|\sstyle=|\son[a-z]+=", text), path
