"""Metrics scraped over HTTP from a real worker, against what its tasks have counted themselves."""

from __future__ import annotations

import gc
import socket
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from celery import Celery
from prometheus_client.parser import text_string_to_metric_families

from tests.acceptance.apps.watched import make_app, sign
from tests.kit import RedisServer, Worker, eventually
from tests.kit.server import HOST, free_port

pytestmark = [pytest.mark.slow]

WAIT_S = 60
Labels = frozenset[tuple[str, str]]


@dataclass
class Watched:
    app: Celery
    worker: Worker
    port: int

    def scrape(self) -> dict[tuple[str, Labels], float]:
        with urllib.request.urlopen(f"http://{HOST}:{self.port}/metrics", timeout=20) as reply:
            text = reply.read().decode()
        return {
            (sample.name, frozenset(sample.labels.items())): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name.startswith("celery_unique")
        }

    def value(self, name: str, **labels: str) -> float:
        return self.scrape().get(figure(name, **labels), 0.0)

    def ran(self, task: str) -> int:
        """The independent count, which the bodies keep in Redis."""
        return int(self.app.signs.get(f"ran {task}") or 0)


def figure(name: str, **labels: str) -> tuple[str, Labels]:
    return f"celery_unique_{name}", frozenset(labels.items())


def differences(
    expected: dict[tuple[str, Labels], float], scraped: dict[tuple[str, Labels], float]
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
    url, port = redis_server.fresh_url(), free_port()
    env = {"WATCHED_REDIS": url, "WATCHED_METRICS": str(port)}
    if request.param.endswith("files"):
        (directory / "files").mkdir()
        env["PROMETHEUS_MULTIPROC_DIR"] = str(directory / "files")
    worker = Worker(
        "tests.acceptance.apps.watched",
        log_path=directory / "worker.log",
        pool=request.param.partition(" ")[0],
        concurrency=3,
        env=env,
        name="shop",
    )
    app = make_app(url)
    worker.start(timeout=WAIT_S)
    try:
        yield Watched(app, worker, port)
    finally:
        worker.kill()
        gc.collect()
        app.close()


def test_the_figures_agree_with_an_independent_count(watched: Watched) -> None:
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
    # What a pool's process counts arrives a moment later.
    eventually(
        lambda: not differences(expected, watched.scrape()),
        timeout=WAIT_S,
        interval=0.2,
        message=f"the figures do not agree: {differences(expected, watched.scrape())}",
    )
    assert not any(name == "celery_unique_lost_total" for name, _ in watched.scrape())


def test_a_worker_whose_port_is_taken_works_and_says_that_nobody_sees_it(
    redis_url: str, start_worker: Callable[..., Worker]
) -> None:
    with socket.socket() as taken:
        taken.bind((HOST, 0))
        taken.listen()
        port = taken.getsockname()[1]

        worker = start_worker(
            "tests.acceptance.apps.watched",
            env={"WATCHED_REDIS": redis_url, "WATCHED_METRICS": str(port)},
        )

        worker.wait_for_log(rf"no metrics are served on {HOST}:{port}", WAIT_S)
