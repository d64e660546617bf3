"""``make docs``: Sphinx builds the pages without a warning, and their tables fit the screen."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.docs.pages import DOCS, ROOT
from tests.support import eventually
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


#: What an operator types -> a page that must be among the first results.
SEARCHES = {
    "release stuck key": "howto/free-a-key.html",
    "duplicate dropped": "howto/find-out-why-a-call-was-dropped.html",
    "idempotency key header": "howto/idempotency-keys.html",
    "flask": "start/flask.html",
}


def count(browser: Chrome, selector: str) -> int:
    return browser.execute_script(f"return document.querySelectorAll('{selector}').length")


def first_results(browser: Chrome) -> list[str]:
    found = browser.execute_script(
        "return [...document.querySelectorAll('#search-results li > a')].map(a => a.href)"
    )
    return [link.partition("?")[0].partition("#")[0] for link in found[:8]]


def test_the_search_finds_what_people_look_for_and_code_can_be_copied(built):
    _, html = built
    with chromium() as browser, served(html) as url:
        for words, page in SEARCHES.items():
            browser.get(f"{url}/search.html?q={words.replace(' ', '+')}")
            # The page adds the results one by one, the best first.
            eventually(
                lambda page=page: f"{url}/{page}" in first_results(browser),
                timeout=60,
                message=f"{words}: {page} is not among the first results",
            )
        browser.get(f"{url}/tutorial.html")
        # The buttons are added by a script of the page.
        eventually(
            lambda: count(browser, ".copybtn") == count(browser, ".highlight") > 5,
            timeout=60,
            message="not every block of code can be copied",
        )


@contextmanager
def served(directory: Path) -> Iterator[str]:
    """Search pages read their index over HTTP."""
    handler = partial(QuietHandler, directory=str(directory))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


class QuietHandler(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None: ...


def test_a_table_that_is_too_wide_is_found(tmp_path):
    page = tmp_path / "page.html"
    page.write_text(f"<table><tr><td><code>{'x' * 400}</code></td></tr></table>")

    with chromium() as browser:
        browser.set_window_size(1280, 800)
        assert len(wide_tables(browser, page)) == 1
