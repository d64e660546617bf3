"""The alerts of the how-to, tried by promtool on the figures of an app whose clock is moved."""

from __future__ import annotations

import re
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from celery_unique.config.app_state import state_of
from celery_unique.contrib import prometheus
from celery_unique.contrib._metrics import locks_in_store
from celery_unique.contrib.prometheus import families
from celery_unique.exceptions import StoreUnavailable
from celery_unique.stores.memory import MemoryStore
from tests.docs.pages import DOCS, blocks
from tests.support import eventually
from tests.support.alerts import RULES, Scrape, check_alerts, promtool, read_exposition
from tests.support.app import advance, make_app, take_messages, value_of, working

pytestmark = pytest.mark.slow

PAGE = DOCS / "howto" / "watch-with-prometheus.md"
#: Beat calls every five minutes.
EVERY = 5


class Watched:
    """An app with one task, and what Prometheus would have seen of it."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        # A worker of a test does not live by the store's clock: its lease must outlast the hours.
        self.app = make_app("memory://", unique_run_lease="PT12H", unique_queue_lease="PT24H")
        prometheus.install(self.app, registry=self.registry)
        # As a worker has them.
        self.registry.register(prometheus.Collector(lambda: families(locks_in_store(self.app))))
        self.goes_on = threading.Event()

        @self.app.task(name="rebuild", unique=True, shared=False)
        def rebuild(shop_id: int) -> int:
            assert self.goes_on.wait(100)
            return shop_id

        @self.app.task(
            name="report", unique=True, unique_for="PT6H", unique_states="window", shared=False
        )
        def report(day: int) -> int:
            return day

        self.rebuild, self.report = rebuild, report
        _ = self.app.tasks
        self.scrapes: list[Scrape] = []
        self.scrape()

    def scrape(self) -> None:
        self.scrapes.append(read_exposition(generate_latest(self.registry).decode()))

    def call_for(self, hours: float, call: Callable[[], object]) -> None:
        for _ in range(round(hours * 60 / EVERY)):
            advance(self.app, EVERY * 60)
            call()
            self.scrape()


@pytest.fixture
def watched() -> Watched:
    return Watched()


@contextmanager
def running(watched: Watched) -> Iterator[None]:
    """The task of shop 7 runs."""
    with working(watched.app, pool="threads"):
        result = watched.rebuild.delay(7)
        eventually(lambda: result.holder_state == "active" or _active(watched), timeout=30)
        yield
        watched.goes_on.set()
        value_of(result)


def _active(watched: Watched) -> bool:
    from celery_unique import lookup

    lock = lookup("rebuild", (7,), app=watched.app)
    return lock is not None and lock.state == "active"


def quiet_until(minutes: int) -> dict[int, list[object]]:
    return {minute: [] for minute in range(EVERY, minutes + 1, EVERY)}


def test_a_long_job_that_is_called_again_and_again_is_no_alert(watched, tmp_path):
    with running(watched):
        watched.call_for(3, lambda: watched.rebuild.delay(7))

    assert _value(watched, "conflicts_total", on_conflict="ignore", task="rebuild") == 36
    check_alerts(watched.scrapes, quiet_until(180), tmp_path, every=EVERY)


def test_calls_for_a_task_whose_message_is_gone_are_an_alert_after_an_hour(watched, tmp_path):
    watched.rebuild.delay(7)
    take_messages(watched.app)

    watched.call_for(2, lambda: (watched.rebuild.delay(7), other(watched)))

    swallowed = ("CallsAreSwallowed", {"task": "rebuild"})
    stale = ("UniqueTasksDoNotStart", {"job": "celery"})
    expected = {**quiet_until(55), 75: [swallowed, stale], 115: [swallowed, stale]}
    check_alerts(watched.scrapes, expected, tmp_path, every=EVERY)


def test_a_task_that_does_not_start_is_an_alert_without_another_call(watched, tmp_path):
    watched.rebuild.delay(7)

    watched.call_for(1.5, lambda: None)

    assert watched.scrapes[-1]["celery_unique_stale_locks", frozenset()] == 1
    alert = ("UniqueTasksDoNotStart", {"job": "celery"})
    expected = {**quiet_until(60), 75: [alert], 90: [alert]}
    check_alerts(watched.scrapes, expected, tmp_path, every=EVERY)


def other(watched: Watched) -> None:
    """The same task for other shops goes on, and must not hide it."""
    watched.rebuild.delay(len(watched.scrapes) + 100)


@pytest.mark.parametrize("holder", ["window", "countdown", "nobody"])
def test_calls_that_are_dropped_as_they_should_be_are_no_alert(holder, watched, tmp_path):
    call = {
        "window": lambda: watched.report.delay(1),
        "countdown": lambda: watched.rebuild.apply_async((7,), countdown=4 * 3600),
        "nobody": lambda: None,
    }[holder]
    if holder == "window":
        with working(watched.app):
            value_of(watched.report.delay(1))

    watched.call_for(3, call)

    check_alerts(watched.scrapes, quiet_until(180), tmp_path, every=EVERY)


def test_a_countdown_longer_than_an_hour_is_not_waited_for_in_the_queue(watched, caplog):
    watched.rebuild.apply_async((7,), countdown=2 * 3600)
    advance(watched.app, 2 * 3600 + 60)

    again = watched.rebuild.delay(7)

    assert again.holder_state == "available"
    assert "has waited" not in caplog.text
    watched.scrape()
    assert _value(watched, "long_waits_total", task="rebuild") == 0


def test_the_first_lost_lock_is_an_alert(watched, tmp_path):
    watched.scrape()
    watched.goes_on.set()
    lapsed = watched.rebuild.delay(7)
    advance(watched.app, 10 * 86_400)
    with working(watched.app):
        value_of(lapsed)
    watched.scrape()
    watched.scrapes += watched.scrapes[-1:] * 6

    expected = {
        5: [],
        14: [("UniqueTasksWithoutTheirLock", {"task": "rebuild"})],
        35: [],  # it is not one for ever
    }
    check_alerts(watched.scrapes, expected, tmp_path, every=EVERY)


def test_the_first_burst_of_store_errors_is_an_alert(watched, tmp_path):
    class Silent(MemoryStore):
        def acquire(self, *_: object) -> None:
            raise StoreUnavailable("no answer")

    watched.scrape()
    state_of(watched.app).use_store(Silent())
    for _ in range(3):
        with pytest.raises(StoreUnavailable):
            watched.rebuild.delay(7)
    watched.scrape()
    watched.scrapes += watched.scrapes[-1:] * 3

    labels = {"job": "celery", "instance": "shop:9808"}
    expected = {9: [], 13: [("LockStoreDoesNotAnswer", labels)], 20: []}
    check_alerts(watched.scrapes, expected, tmp_path, every=EVERY)


@pytest.mark.parametrize(("seconds", "fires"), [(0.4, True), (0.004, False)])
def test_a_slow_store_is_an_alert(seconds, fires, watched, tmp_path):
    metrics = prometheus._installed[watched.registry]
    for _ in range(6):
        for _ in range(50):
            metrics.count("store_seconds", ["acquire"], seconds)
        watched.scrape()

    expected = {8: [], 29: [("LockStoreIsSlow", {})] if fires else []}
    check_alerts(watched.scrapes, expected, tmp_path, every=EVERY)


def _value(watched: Watched, name: str, **labels: str) -> float:
    return watched.scrapes[-1][f"celery_unique_{name}", frozenset(labels.items())]


def test_the_page_shows_the_rules_of_the_file():
    (shown,) = [block.text for block in blocks(PAGE) if block.language == "yaml"]

    assert shown == RULES.read_text()
    assert "(alerts.yml)" in PAGE.read_text(encoding="utf-8")


def test_the_rules_are_valid_for_prometheus():
    done = subprocess.run([promtool(), "check", "rules", RULES], capture_output=True, text=True)

    assert done.returncode == 0, done.stderr
    assert "5 rules found" in done.stdout


def test_every_act_that_an_error_can_name_has_a_series_from_the_beginning():
    package = Path(prometheus.__file__).parents[1]
    called = re.compile(
        r'(?:store_error|report_error|_apply|_run_or_retry|_retry_later|_retry)\(\s*(?:[\w.]+,\s*)?"([\w-]+)"'
        r'|[( ]act="([\w-]+)"'
    )
    named = {
        act
        for path in package.rglob("*.py")
        for found in called.findall(path.read_text(encoding="utf-8"))
        for act in found
        if act
    }

    assert named == set(prometheus.ERROR_ACTS)
