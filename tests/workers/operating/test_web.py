"""``celery unique web``: pages of locks on a real store, over HTTP and in Chromium."""

from __future__ import annotations

import http.client
import json
import re
import signal
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

import pytest
from redis import Redis
from selenium.webdriver.common.by import By

from celery_unique.cli.web import server as web_server
from celery_unique.stores.base import LockStore
from celery_unique.testing.store_contract.factories import (
    MINUTE,
    QUEUE_LEASE,
    claim,
    finish,
    fresh_key,
    start,
)
from tests.support import eventually
from tests.support.browser import keep_screenshot
from tests.support.process import LocalProcess
from tests.support.server import HOST, free_port
from tests.workers.operating.desk import Desk

pytestmark = [pytest.mark.slow, pytest.mark.server]

HTML = '<img src=x onerror="window.hacked = 1"><script>window.hacked = 1</script>'
TOKEN = "a-token-for-the-tests"


@dataclass
class Reply:
    status: int
    headers: dict[str, str]
    text: str

    def ids(self) -> list[str]:
        """The task ids of the list's rows."""
        return re.findall(
            r"</a>(?:<small[^>]*label[^>]*>[^<]*</small>)?<small>([^<]+) ·", self.text
        )

    def links(self) -> list[str]:
        return re.findall(r'href="([^"]*)"', self.text.replace("&amp;", "&"))

    def link(self, text: str) -> str:
        [url] = re.findall(rf'href="([^"]*)"[^>]*>{text}<', self.text.replace("&amp;", "&"))
        return str(url)


@dataclass
class Site:
    process: LocalProcess
    port: int
    token: str = TOKEN
    headers: dict[str, str] = field(default_factory=dict)

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}/"

    def ask(
        self,
        path: str = "/",
        *,
        method: str = "GET",
        body: str = "",
        known: bool = True,
        **also: str,
    ) -> Reply:
        connection = http.client.HTTPConnection(HOST, self.port, timeout=60)
        headers = {"Authorization": f"Bearer {self.token}"} if known else {}
        connection.request(method, path, body or None, {**headers, **also})
        reply = connection.getresponse()
        text = reply.read().decode()
        connection.close()
        return Reply(reply.status, dict(reply.getheaders()), text)

    def get(self, path: str = "", **query: str) -> Reply:
        return self.ask(f"/{path}?{urlencode(query)}")


def serve(desk: Desk, directory: Path, *options: str, **env: str) -> Site:
    port = free_port()
    process = LocalProcess(
        desk.command("unique", "web", "--port", str(port), *options),
        log_path=directory / f"web{port}.log",
        cwd=directory,
        env={**desk.environment(), **env},
    )
    process.start()
    process.wait_for_log(r"Press Ctrl-C to stop\.", timeout=60)
    return Site(process, port)


@pytest.fixture(scope="module")
def site(desk: Desk, directory: Path) -> Iterator[Site]:
    site = serve(desk, directory, CELERY_UNIQUE_WEB_TOKEN=TOKEN)
    yield site
    site.process.kill()


@pytest.fixture
def store(desk: Desk) -> LockStore:
    """Empty: tests share it."""
    Redis.from_url(desk.store_url).flushdb()
    return desk.store


def hold(
    store: LockStore,
    name: str,
    task_id: str,
    *,
    active: str = "",
    duplicates: int = 0,
    **fields: Any,
) -> str:
    key = fresh_key()
    mine = replace(claim(task_id, grace_ms=30 * MINUTE, **fields), task_name=name)
    store.acquire(key, mine)
    store.confirm(key, task_id, QUEUE_LEASE)
    store.flush()
    for number in range(duplicates):
        store.acquire(key, replace(mine, task_id=f"duplicate{number}"))
    if active:
        store.start(key, replace(start(task_id, f"{active}/1/2/3"), task_name=name))
    created = store.read(key)[0].tasks[task_id].created_at
    while store.read(key)[1] == created:  # the next one is younger: lists are sorted by age
        pass
    return key


def hold_ended(store: LockStore, name: str, task_id: str) -> str:
    key = hold(store, name, task_id, active="celery@box", window_ms=60 * MINUTE, keep="c")
    store.finish(key, finish(task_id, "celery@box/1/2/3"))
    return key


# -- who may see -----------------------------------------------------------------------


def test_nothing_is_shown_without_the_token(site, store):
    hold(store, "shop.secret_task", "secret-id")

    for path in ("/", "/?q=x", "/lock?key=1:00", "/why?task=shop.pay", "/stats", "/nothing"):
        for reply in (
            site.ask(path, known=False),
            site.ask(path, known=False, Authorization="Bearer wrong"),
            site.ask(path, known=False, Authorization=f"Basic {TOKEN}"),
            site.ask(path, known=False, Cookie=f"celery_unique_{site.port}={TOKEN}"),
            site.ask(path, known=False, Cookie="celery_unique=;;;=,\x01"),
        ):
            assert reply.status == 401
            assert "secret" not in reply.text
            assert "Set-Cookie" not in reply.headers
    assert "shop.secret_task" in site.get().text


def test_the_token_of_an_address_moves_into_a_cookie_of_this_run(site, store):
    hold(store, "shop.rebuild", "first")

    refused = site.ask("/?token=wrong", known=False)
    sent = site.ask(f"/?q=first&token={TOKEN}", known=False)
    cookie = sent.headers["Set-Cookie"]
    shown = site.ask(sent.headers["Location"].removeprefix("."), known=False, Cookie=cookie)

    assert (refused.status, sent.status, shown.status) == (401, 303, 200)
    assert sent.headers["Location"] == "./?q=first"
    assert {"HttpOnly", "SameSite=Strict", "Path=/"} < set(cookie.split("; "))
    assert TOKEN not in cookie
    assert shown.ids() == ["first"]


def test_the_form_takes_the_token(site):
    def sent(token: str) -> Reply:
        return site.ask("/login", method="POST", body=urlencode({"token": token}), known=False)

    assert sent("wrong").status == 401
    assert "This is not the token." in sent("wrong").text
    assert sent(TOKEN).status == 303
    assert sent("x" * 100_000).status == 413
    assert sent("x" * 100_000).headers["Content-Type"].startswith("text/html")


def test_no_redirect_leaves_the_site(site):
    for path in ("//example.org/", "/\\example.org", "/%2f%2fexample.org/a", "//example.org//b"):
        reply = site.ask(f"{path}?token={TOKEN}", known=False)

        assert re.fullmatch(r"\./[^/\\]*", reply.headers["Location"]), reply.headers


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "BREW"])
def test_no_method_changes_anything(method, site, store):
    key = hold(store, "shop.rebuild", "first")

    reply = site.ask(f"/lock?key={key}", method=method)

    assert reply.status == 405
    assert reply.headers["Allow"] == "GET, HEAD"
    assert not store.read(key)[0].tasks["first"].released


def test_reading_leaves_the_store_as_it_was(site, store):
    key = hold(store, "shop.rebuild", "first", duplicates=2)
    before = store.read(key)[0]

    for path in ("/", f"/lock?key={key}", "/stats", "/why?task=shop.rebuild_index&args=[7]"):
        assert site.ask(path).status == 200

    assert store.read(key)[0] == before
    assert [found for found, _ in store.walk()] == [key]


def test_every_reply_has_the_headers_that_keep_a_browser_from_harm(site):
    replies = [
        site.ask(path, method=method, known=known)
        for path in ("/", "/web.css", "/icon.svg", "/nothing", "/favicon.ico")
        for method in ("GET", "HEAD", "POST", "BREW")
        for known in (True, False)
    ]

    for reply in replies:
        for name, value in web_server.HEADERS.items():
            assert reply.headers[name] == value
        assert "Python" not in reply.headers["Server"]
    policy = web_server.HEADERS["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "script-src" not in policy


def test_what_is_not_http_gets_a_short_reply_and_a_slow_visitor_blocks_nobody(site, store):
    hold(store, "shop.rebuild", "first")
    slow = [socket.create_connection((HOST, site.port)) for _ in range(20)]
    for connection in slow:
        connection.sendall(b"GET / HTTP/1.0\r\nCookie: ")

    began = time.monotonic()
    assert site.get().ids() == ["first"]
    assert time.monotonic() - began < web_server.PATIENCE_S / 2

    for sent in (b"\x16\x03\x01\x02\x00\r\n\r\n", b"GET\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n"):
        with socket.create_connection((HOST, site.port), timeout=20) as odd:
            odd.sendall(sent)
            assert b"Traceback" not in odd.recv(65536)
    assert site.ask("/?q=" + "x" * 20_000).status == 414
    for connection in slow:
        connection.close()


# -- what is shown ---------------------------------------------------------------------


def test_search_filters_and_order(site, store):
    key = hold(store, "shop.rebuild", "a-first-id", active="celery@north", duplicates=3)
    hold(store, "shop.digest", "b-second-id")
    hold(store, "shop.rebuild", "c-third-id")

    def found(**query: str) -> list[str]:
        return site.get(**query).ids()

    assert found() == ["a-first-id", "b-second-id", "c-third-id"]
    assert found(q="REBUILD") == ["a-first-id", "c-third-id"]
    assert found(q="north") == found(q=key) == found(q=key[:20]) == ["a-first-id"]
    assert found(state="active") == found(task="shop.rebuild", state="active") == ["a-first-id"]
    assert found(age="1h") == []
    assert found(o="-created") == ["c-third-id", "b-second-id", "a-first-id"]
    assert found(o="-duplicates")[0] == "a-first-id"
    assert found(o="task") == ["b-second-id", "a-first-id", "c-third-id"]
    assert found(state="nonsense", age="never", o="no", at="[1]", p="x") == found()


def test_finished_tasks_that_keep_their_key_are_apart(site, store):
    hold(store, "shop.rebuild", "runs")
    key = hold_ended(store, "shop.digest", "ended")

    page = site.get()

    assert page.ids() == ["runs"]
    assert "1 finished task keeps its key" in page.text
    assert site.get(state="ended").ids() == ["ended"]
    assert site.get(state="all").ids() == ["runs", "ended"]
    assert site.get(q=key).ids() == ["ended"]
    assert "1 finished task keeps its key" in site.get(q="digest").text


def test_pages_follow_a_cursor_both_ways_and_lose_no_lock(site, store):
    made = [(fresh_key(), claim(f"id{n:03}", grace_ms=600_000)) for n in range(250)]
    store.acquire_many(made)

    for order in ("created", "-created", "task", "expires"):
        pages = [site.get(o=order)]
        for _ in range(2):
            pages.append(site.ask(pages[-1].link("Next").removeprefix(".")))
        back = site.ask(pages[-1].link("Previous").removeprefix("."))
        first = site.ask(back.link("Previous").removeprefix("."))

        assert [len(page.ids()) for page in pages] == [100, 100, 50]
        assert len({task_id for page in pages for task_id in page.ids()}) == 250
        assert back.ids() == pages[1].ids()
        assert first.ids() == pages[0].ids()
        assert ">Next<" not in pages[-1].text
        assert ">Previous<" not in first.text
        assert "250 locks" in pages[1].text


@pytest.mark.parametrize(
    "at", ["[", "[]", "null", "[true]", '[false,"x","y"]', "[false,1]", "[" * 1500, '[0,1,"y"]']
)
def test_a_wrong_cursor_shows_the_first_page(at, site, store):
    hold(store, "shop.rebuild", "first")

    assert site.get(at=at).ids() == ["first"]


def test_the_page_of_a_key_says_what_why_says(site, store, desk):
    key = hold(store, "shop.rebuild", "first", active="celery@box", duplicates=2)
    [told] = [json.loads(line) for line in desk.unique("why", key, "--json").out.splitlines()]

    text = site.get("lock", key=key).text

    for part in (key, "first", "celery@box", "2, the last", *told["tasks"][0]["freed_by"]):
        assert part in text
    assert f"unique release --key {key}" in text


def test_a_key_that_is_free_and_one_that_is_none(site, store):
    for key in (f"1:{'0' * 64}", "nonsense", HTML, ""):
        reply = site.get("lock", key=key)

        assert reply.status == 200
        assert "it is free" in reply.text


def test_why_explains_a_call_and_says_what_is_wrong_with_its_arguments(site, store, desk):
    free = site.get("why", task="shop.rebuild_index", args="[7]").text
    result = desk.app.send_task("shop.rebuild_index", kwargs={"shop_id": 7}, unique=True)
    held = site.get("why", task="shop.rebuild_index", args="[7]").text

    assert "its key is free" in free
    assert "is not published" in held
    assert result.id in held
    assert "is not JSON of the right kind" in site.get("why", task="shop.pay", args="7").text
    for wrong in ({"task": "no.such.task"}, {"task": "shop.rebuild_index", "kwargs": '{"x": 1}'}):
        reply = site.get("why", **wrong)
        assert reply.status == 200
        assert 'role="alert"' in reply.text


def test_calls_that_wait_for_their_turn_are_shown(site, store, desk):
    calls = [
        desk.app.send_task(
            "shop.pay",
            kwargs={"amount": amount},
            unique=True,
            unique_group="payments",
            unique_on_conflict="queue",
        )
        for amount in (1, 2, 3)
    ]

    assert "2 parked" in site.get().text
    assert "the call at position 2" in site.get(q=calls[2].id).text
    page = site.get("lock", key=calls[0].unique_key).text
    assert "Parked calls (2)" in page
    assert page.index(calls[1].id) < page.index(calls[2].id)

    store.release(calls[0].unique_key)

    assert "2 parked" in site.get().text
    page = site.get("lock", key=calls[0].unique_key).text
    assert "The key is free" not in page
    assert "No task holds the key" in page


def test_counts(site, store):
    hold(store, "shop.rebuild", "first", duplicates=4)
    hold(store, "shop.rebuild", "second", active="celery@box")
    hold_ended(store, "shop.digest", "ended")

    text = re.sub(r"<[^>]+>", " ", site.get("stats").text)

    assert re.search(r"shop\.rebuild\s+2\s+4\s", text)
    assert re.search(r"locks\s+3\s", text)


def test_an_unavailable_store_is_a_page_with_status_503(redis_server_of_one, directory):
    server = redis_server_of_one
    desk = Desk(server.fresh_url(), server.fresh_url(), directory)
    site = serve(desk, directory, CELERY_UNIQUE_WEB_TOKEN=TOKEN)
    assert site.get().status == 200

    server.stop()
    for path in ("", "stats"):
        reply = site.get(path)
        assert reply.status == 503
        assert "cannot be reached" in reply.text
    site.process.kill()


@pytest.fixture
def redis_server_of_one() -> Iterator[Any]:
    from tests.support import RedisServer

    server = RedisServer().start()
    yield server
    server.stop()


# -- the command -----------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_it_ends_when_it_is_asked_to(number, desk, directory):
    site = serve(desk, directory)
    token = site.process.wait_for_log(r"http://127\.0\.0\.1:\d+/\?token=(\S+)")[1]
    visitor = socket.create_connection((HOST, site.port))  # who sends nothing
    assert replace(site, token=token).get().status == 200
    assert replace(site, token=f"{token}x").get().status == 401

    code = site.process.stop(number, timeout=10)

    visitor.close()
    assert code == 0
    assert "Traceback" not in site.process.log()


def test_a_given_token_is_not_printed(site):
    assert f"http://{HOST}:{site.port}/\n" in site.process.log()
    assert TOKEN not in site.process.log()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--host", "0.0.0.0"], "--allow-remote"),
        (["--host", "::"], "--allow-remote"),
        (["--host", "example.org"], "--allow-remote"),
        (["--token", "short"], "fewer than 16 characters"),
        (["--port", "{taken}"], "Choose another one with --port"),
        (["--host", "no such host", "--allow-remote"], "Could not listen"),
    ],
)
def test_a_wrong_option_is_met_with_the_cure(options, text, desk, site):
    options = [each.replace("{taken}", str(site.port)) for each in options]

    done = desk.unique("web", *options)

    assert done.code == 2
    assert text in " ".join(done.err.split())


def test_other_machines_are_served_only_where_that_is_asked_for(desk, directory):
    site = serve(desk, directory, "--host", "0.0.0.0", "--allow-remote", "--token", TOKEN)

    assert site.get().status == 200
    site.process.kill()


# -- in a browser ----------------------------------------------------------------------


@pytest.fixture
def of_size(browser: Any) -> Iterator[Any]:
    """Others use the same window, and rely on its size."""
    before = browser.get_window_size()
    yield lambda width, height: browser.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride",
        {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600},
    )
    browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    browser.set_window_size(before["width"], before["height"])


#: The elements that reach beyond the window, by their texts.
BEYOND = """
    return [...document.querySelectorAll('body *')]
        .filter((each) => each.getBoundingClientRect().right > innerWidth + 1)
        .map((each) => each.textContent.trim());
"""


def hold_what_a_shop_has(store: LockStore) -> str:
    ids = (f"5f0c1e7a-92b4-4d1c-8a3e-{number:012x}" for number in range(100))
    first = hold(store, "shop.tasks.rebuild_index", next(ids), active="celery@web1", duplicates=9)
    hold(store, "shop.tasks.send_digest", next(ids), duplicates=3, window_ms=10 * MINUTE)
    hold(store, "shop.tasks.confirm_order", next(ids), active="celery@web2", duplicates=1)
    hold(store, "shop.tasks.sync_stock", next(ids), delay_ms=5 * MINUTE)
    hold(
        store,
        "warehouse.replenishment.tasks.recalculate_reorder_points_for_supplier",
        next(ids),
        active="celery@prod-eu-central-1-worker-high-priority-7d9f8b6c5-x2x4z",
        window_ms=24 * 60 * MINUTE,
    )
    hold_ended(store, "shop.tasks.nightly_report", next(ids))
    return first


def test_the_pages_fit_a_desktop_and_a_phone(site, store, browser, of_size):
    key = hold_what_a_shop_has(store)
    browser.get(f"{site.url}login")
    browser.find_element(By.NAME, "token").send_keys(f"{TOKEN}\n")
    eventually(lambda: len(browser.find_elements(By.CSS_SELECTOR, "tbody tr")) == 5, timeout=30)

    for device, width, height in (("desktop", 1280, 800), ("phone", 390, 844)):
        of_size(width, height)
        for name, path in (
            ("list", ""),
            ("lock", f"lock?key={key}"),
            ("why", "why?task=shop.rebuild_index&args=[7]"),
            ("stats", "stats"),
        ):
            browser.get(f"{site.url}{path}")
            keep_screenshot(browser, f"web-{name}-{device}")
            assert browser.execute_script(BEYOND) == [], f"{name} on a {device}"
    logged = [entry["message"] for entry in browser.get_log("browser")]
    assert [text for text in logged if str(site.port) in text and "401" not in text] == []


def test_a_visitor_goes_from_the_list_to_a_key_and_back(site, store, browser):
    hold_what_a_shop_has(store)
    browser.get(f"{site.url}?token={TOKEN}")
    assert "token" not in browser.current_url

    browser.find_element(By.NAME, "q").send_keys("digest\n")
    eventually(lambda: len(browser.find_elements(By.CSS_SELECTOR, "tbody tr")) == 1, timeout=30)
    browser.find_element(By.CSS_SELECTOR, "tbody th a").click()
    eventually(lambda: urlsplit(browser.current_url).path == "/lock", timeout=30)
    assert "shop.tasks.send_digest" in browser.find_element(By.TAG_NAME, "h1").text

    browser.find_element(By.CSS_SELECTOR, "header nav a").click()
    eventually(lambda: len(browser.find_elements(By.CSS_SELECTOR, "tbody tr")) == 5, timeout=30)


def test_html_in_names_and_ids_is_text(site, store, browser):
    key = hold(store, HTML, f"id {HTML}", active=f"celery@{HTML.replace('/', '')}")
    browser.get(f"{site.url}?token={TOKEN}")

    for path in (
        f"?q={quote(HTML)}&task={quote(HTML)}&at={quote(HTML)}",
        f"lock?key={key}",
        f"lock?key={quote(HTML)}",
        f"why?task={quote(HTML)}&args={quote(HTML)}&kwargs={quote(HTML)}",
        "stats",
    ):
        browser.get(f"{site.url}{path}")

        assert browser.execute_script("return window.hacked") is None
        assert browser.find_elements(By.CSS_SELECTOR, "img, script") == []
    browser.get(site.url)
    assert HTML in browser.find_element(By.CSS_SELECTOR, "tbody th a").text
