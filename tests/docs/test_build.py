"""``make docs``: Sphinx builds the pages without a warning, and their tables fit the screen."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.docs.pages import DOCS, ROOT
from tests.support.browser import chromium, keep_screenshot

if TYPE_CHECKING:
    from selenium.webdriver import Chrome

pytestmark = pytest.mark.slow

#: Tables that are wider than the page or that need a scroll bar of their own.
WIDE_TABLES = """
const right = document.documentElement.clientWidth;
return Array.from(document.querySelectorAll('table')).filter(table => {
  const around = table.closest('.table-wrapper') || table.parentElement;
  return around.scrollWidth > around.clientWidth || table.getBoundingClientRect().right > right;
}).map(table => table.innerText.slice(0, 80));
"""
READABLE = ("guarantees", "failure-modes", "conformance")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[subprocess.CompletedProcess, Path]:
    to = tmp_path_factory.mktemp("documentation")
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html"]
    done = subprocess.run(
        [*command, DOCS, to / "html", "-d", to / "doctrees"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    return done, to / "html"


def test_the_documentation_builds_without_a_warning(built):
    done, html = built

    assert done.returncode == 0, done.stderr
    assert (html / "explanation" / "guarantees.html").exists()


def wide_tables(browser: Chrome, page: Path) -> list[str]:
    browser.get(page.as_uri())
    return browser.execute_script(WIDE_TABLES)


def test_no_table_is_wider_than_a_screen_of_1280_pixels(built):
    _, html = built
    wide, with_tables = {}, 0
    with chromium() as browser:
        browser.set_window_size(1280, 800)
        for page in sorted(html.rglob("*.html")):
            if found := wide_tables(browser, page):
                wide[str(page.relative_to(html))] = found
            with_tables += browser.execute_script("return document.querySelector('table') ? 1 : 0")
            if page.stem in READABLE:
                keep_screenshot(browser, f"docs-{page.stem}")

    assert wide == {}
    assert with_tables > 20


def test_a_table_that_is_too_wide_is_found(tmp_path):
    page = tmp_path / "page.html"
    page.write_text(f"<table><tr><td><code>{'x' * 400}</code></td></tr></table>")

    with chromium() as browser:
        browser.set_window_size(1280, 800)
        assert len(wide_tables(browser, page)) == 1
