"""Metrics scraped over HTTP from a real worker, against what its tasks have counted themselves."""

from __future__ import annotations

import gc
import json
import socket
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import redis
from celery import Celery

from celery_unique import Lock, lookup
from tests.support import RedisServer, Worker, eventually
from tests.support.alerts import Scrape, check_alerts, read_exposition
from tests.support.server import HOST, free_port
from tests.workers.apps.watched import sign, watched_app

pytestmark = [pytest.mark.slow]

WAIT_S = 60
Labels = frozenset[tuple[str, str]]


@dataclass
class Watched:
    app: Celery
    worker: Worker
    port: int

    def scrape(self) -> Scrape:
        with urllib.request.urlopen(f"http://{HOST}:{self.port}/metrics", timeout=20) as reply:
            return read_exposition(reply.read().decode())

    def value(self, name: str, **labels: str) -> float:
        return self.scrape().get(figure(name, **labels), 0.0)

    def ran(self, task: str) -> int:
        """The independent count, which the bodies keep in Redis."""
        return int(self.app.signs.get(f"ran {task}") or 0)


def figure(name: str, **labels: str) -> tuple[str, Labels]:
    return f"celery_unique_{name}", frozenset(labels.items())


def differences(
    expected: dict[tuple[str, Labels], float], scraped: Scrape
) -> dict[tuple[str, Labels], float | None]:
    return {key: scraped.get(key) for key, value in expected.items() if scraped.get(key) != value}


@pytest.fixture(
    scope="module", params=["prefork", "threads", "gevent", "prefork and multiprocess files"]
)
def watched(
    request: pytest.FixtureRequest,
    redis_server: RedisServer,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Watched]:
    directory: Path = tmp_path_factory.mktemp("metrics")
    env = {}
    if request.param.endswith("files"):
        (directory / "files").mkdir()
        env["PROMETHEUS_MULTIPROC_DIR"] = str(directory / "files")
    with watching(redis_server.fresh_url(), directory, request.param.partition(" ")[0], env) as one:
        yield one


@contextmanager
def watching(url: str, directory: Path, pool: str, env: dict[str, str]) -> Iterator[Watched]:
    port = free_port()
    worker = Worker(
        "tests.workers.apps.watched",
        log_path=directory / "worker.log",
        pool=pool,
        concurrency=3,
        env={"WATCHED_REDIS": url, "WATCHED_METRICS": str(port), **env},
        name="shop",
    )
    app = watched_app(url)
    worker.start(timeout=WAIT_S)
    try:
        yield Watched(app, worker, port)
    finally:
        worker.kill()
        gc.collect()
        app.close()


def test_a_worker_serves_the_series_of_its_tasks_before_anything_has_happened(watched):
    scraped = watched.scrape()
    tasks = ("shop.rebuild_index", "shop.charge_card", "shop.send_digest")

    for task in tasks:
        for name in ("acquired_total", "long_waits_total", "lost_total", "superseded_total"):
            assert figure(name, task=task) in scraped
        assert figure("conflicts_total", task=task, on_conflict="ignore") in scraped
        assert figure("released_total", task=task, reason="completed") in scraped
        assert scraped[figure("lost_total", task=task)] == 0
    assert figure("store_errors_total", act="acquire") in scraped
    assert figure("lost_total", task="shop.call") not in scraped, "it is not unique"


def test_the_figures_agree_with_an_independent_count(watched):
    tasks = watched.app.tasks
    callers = [tasks["shop.call_others"].delay(number, 4) for number in range(3)]
    # Only now do they call others: bodies that wait for a sign take up the pool, and a caller
    # behind them in the queue would wait until they give up.
    sign(watched.app, "calls", len(callers))
    outcomes = [outcome for caller in callers for outcome in caller.get(timeout=WAIT_S)]
    created, deduplicated = outcomes.count("created"), outcomes.count("deduplicated")
    assert (created, deduplicated) == (6, 18)
    refused = tasks["shop.charge_card"].delay("order 7")
    sign(watched.app, "order 7")

    # Three bodies run, and wait for a sign; the others wait for a place in the pool.
    eventually(
        lambda: (
            watched.value("held_locks", worker=watched.worker.hostname, state="active") > 0
            and watched.ran("shop.rebuild_index") == 0
        ),
        timeout=WAIT_S,
        message="no lock is held",
    )
    for number in range(3):
        for argument in range(2):
            sign(watched.app, f"called {number} {argument}")
    eventually(lambda: watched.ran("shop.rebuild_index") == created, timeout=WAIT_S)
    refused.get(timeout=WAIT_S, propagate=False)
    finished = watched.ran("shop.rebuild_index") + watched.ran("shop.charge_card")

    name, worker = "shop.rebuild_index", watched.worker.hostname
    expected = {
        figure("acquired_total", task=name): created,
        figure("conflicts_total", task=name, on_conflict="ignore"): deduplicated,
        figure("released_total", task=name, reason="completed"): watched.ran(name),
        figure("released_total", task="shop.charge_card", reason="discarded"): 1,
        figure("store_seconds_count", act="start"): finished,
        figure("store_seconds_count", act="finish"): finished,
        figure("store_seconds_count", act="acquire"): created + deduplicated,
        figure("held_locks", worker=worker, state="active"): 0,
        figure("held_locks", worker=worker, state="waiting"): 0,
    }
    wait_until_told(watched, expected)
    scraped = watched.scrape()
    assert not any(scraped[key] for key in scraped if key[0] == "celery_unique_lost_total")


def wait_until_told(watched: Watched, expected: dict[tuple[str, Labels], float]) -> None:
    """What a pool's process counts arrives a moment later."""
    with suppress(AssertionError):
        eventually(
            lambda: not differences(expected, watched.scrape()), timeout=WAIT_S, interval=0.2
        )
    assert differences(expected, watched.scrape()) == {}


class Tally:
    """The independent count of what became of the calls that a worker was told to make."""

    def __init__(self, watched: Watched) -> None:
        self._call = watched.app.tasks["shop.call"]
        self.told: Counter[tuple[str, str, str]] = Counter()

    def call(self, task: str, *args: str, on_conflict: str = "ignore", **options: Any) -> str:
        options["unique_on_conflict"] = on_conflict
        outcome: str = self._call.delay(task, args, options).get(timeout=WAIT_S)
        self.told[task, on_conflict, outcome] += 1
        return outcome

    def count(self, *outcomes: str, task: str | None = None, on_conflict: str | None = None) -> int:
        return sum(
            number
            for (called, strategy, outcome), number in self.told.items()
            if outcome in outcomes and task in (None, called) and on_conflict in (None, strategy)
        )


def test_conflicts_by_strategy_and_what_goes_wrong_agree_with_an_independent_count(
    redis_server, tmp_path, start_proxy
):
    url, proxy = redis_server.fresh_url(), start_proxy(redis_server.port)
    index, digest, card = "shop.rebuild_index", "shop.send_digest", "shop.charge_card"
    env = {"WATCHED": json.dumps({"unique_store_url": proxy.url_of(url)})}
    with watching(url, tmp_path, "prefork", env) as watched:
        tally, before = Tally(watched), watched.scrape()
        tally.call(index, "paris")
        held = eventually(lambda: running(watched, index, "paris"), timeout=WAIT_S)
        for _ in range(2):
            assert tally.call(index, "paris", on_conflict="reject") == "DuplicateTask"
        # One that runs is not replaced.
        assert tally.call(index, "paris", on_conflict="replace") == "DuplicateTask"
        tally.call(digest, "ann", "first", countdown=600)
        for _ in range(3):
            assert tally.call(digest, "ann", "again", on_conflict="rerun") == "deduplicated"
        assert tally.call(digest, "ann", "second", on_conflict="replace", countdown=600) == (
            "replaced"
        )
        tally.call(card, "7")
        eventually(lambda: running(watched, card, "7"), timeout=WAIT_S)
        assert tally.call(card, "7", on_conflict="queue") == "queued"
        sign(watched.app, "7", 2)  # the second is published by the end of the first
        # Somebody throws the lock of the running one away.
        with redis.Redis.from_url(url) as client:
            assert client.delete(*client.keys(f"cu:*{held.key}")) == 1
        sign(watched.app, "paris")
        watched.app.AsyncResult(held.task_id).get(timeout=WAIT_S)
        proxy.cut()
        for shop in ("rome", "oslo"):
            assert tally.call(index, shop) == "StoreUnavailable"
        proxy.restore()

        refused = ("DuplicateTask", "deduplicated")
        expected = {
            figure("conflicts_total", task=task, on_conflict=strategy): tally.count(
                *refused, task=task, on_conflict=strategy
            )
            for task, strategy in ((index, "reject"), (index, "replace"), (digest, "rerun"))
        }
        assert list(expected.values()) == [2, 1, 3]
        wait_until_told(
            watched,
            {
                **expected,
                figure("acquired_total", task=digest): tally.count(
                    "created", "replaced", task=digest
                ),
                figure("superseded_total", task=digest): tally.count("replaced", task=digest),
                figure("parked_total", task=card): tally.count("queued", task=card),
                figure("called_total", task=card): 1,
                figure("acquired_total", task=card): 2,
                figure("lost_total", task=index): 1,
                figure("store_errors_total", act="acquire"): tally.count("StoreUnavailable"),
            },
        )
        # What Prometheus makes of it: five minutes of the one, and five of the other.
        after = watched.scrape()
        lost = ("UniqueTasksWithoutTheirLock", {"task": index})
        errors = ("LockStoreDoesNotAnswer", {"job": "celery", "instance": "shop:9808"})
        check_alerts([before, after], {4: [], 8: [lost, errors]}, tmp_path, every=5)


def running(watched: Watched, task: str, *args: str) -> Lock | None:
    lock = lookup(task, args, app=watched.app)
    return lock if lock is not None and lock.state == "active" else None


def test_a_worker_whose_port_is_taken_works_and_says_that_nobody_sees_it(redis_url, start_worker):
    with socket.socket() as taken:
        taken.bind((HOST, 0))
        taken.listen()
        port = taken.getsockname()[1]

        worker = start_worker(
            "tests.workers.apps.watched",
            env={"WATCHED_REDIS": redis_url, "WATCHED_METRICS": str(port)},
        )

        worker.wait_for_log(rf"cannot serve metrics on {HOST}:{port}", WAIT_S)
