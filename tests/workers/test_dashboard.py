"""The Grafana dashboard of the how-to: against Grafana's schema, and in a real Prometheus that
scrapes a real worker."""

from __future__ import annotations

import copy
import json
import sys
import types
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from enum import Enum
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import pytest
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import Dashboard

from celery_unique.contrib import prometheus
from tests.docs.pages import DOCS
from tests.support import eventually
from tests.support.process import LocalProcess
from tests.support.server import HOST, find_program, free_port
from tests.workers.apps.watched import sign
from tests.workers.test_prometheus import WAIT_S, Watched, watching

pytestmark = pytest.mark.slow

PAGE = DOCS / "howto" / "watch-with-prometheus.md"
FILE = DOCS / "howto" / "dashboard.json"
DASHBOARD: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
#: What Grafana puts in place of its variables.
VARIABLES = {"$__rate_interval": "1m", "$job": ".*", "$task": ".*"}


def expressions() -> list[str]:
    found = [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]
    for name, value in VARIABLES.items():
        found = [expression.replace(name, value) for expression in found]
    return found


# -- the file ------------------------------------------------------------------------------


def problems(document: dict[str, Any]) -> list[str]:
    """What Grafana's schema does not know of the document, and values of another type."""
    dashboard = Dashboard.from_json(document)
    read = json.loads(JSONEncoder().encode(dashboard))
    return [*_differences(document, read, ""), *_misfits(dashboard, Dashboard, "")]


def _misfits(value: Any, kind: Any, place: str) -> Iterator[str]:
    """Values of another type than the schema's. It types what panels of one kind share."""
    origin, options = get_origin(kind), get_args(kind)
    if kind in (object, Any):
        return
    if origin in (Union, types.UnionType):
        found = [list(_misfits(value, option, place)) for option in options]
        if all(found):
            # Those of the type that fits best, which are the deepest.
            yield from max(found, key=lambda each: len(each[0].partition(":")[0]))
    elif origin is list and isinstance(value, list):
        for number, each in enumerate(value):
            yield from _misfits(each, options[0], f"{place}[{number}]")
    elif origin is dict and isinstance(value, dict):
        for name, each in value.items():
            yield from _misfits(each, options[1], f"{place}.{name}")
    elif origin is Literal:
        if value not in options:
            yield f"{place}: {value!r}"
    elif isinstance(kind, type) and issubclass(kind, Enum):
        if value not in [each.value for each in kind]:
            yield f"{place}: {value!r}"
    elif isinstance(kind, type) and isinstance(value, kind):
        module = sys.modules[kind.__module__]
        for name, hint in get_type_hints(kind, vars(module)).items():
            yield from _misfits(getattr(value, name), hint, f"{place}.{name}")
    elif not (kind is float and type(value) is int):
        yield f"{place}: {value!r}"


def _differences(given: Any, read: Any, place: str) -> Iterator[str]:
    if isinstance(given, dict):
        for name, value in given.items():
            if not isinstance(read, dict) or name not in read:
                yield f"{place}.{name}"
            else:
                yield from _differences(value, read[name], f"{place}.{name}")
    elif isinstance(given, list):
        if len(given) != len(read):
            yield place
        for number, (value, other) in enumerate(zip(given, read, strict=False)):
            yield from _differences(value, other, f"{place}[{number}]")
    elif given != read:
        yield f"{place}: {given!r} is read as {read!r}"


def test_the_dashboard_is_one_by_the_schema_of_grafana():
    assert problems(DASHBOARD) == []

    wrong = copy.deepcopy(DASHBOARD)
    wrong["panels"][0]["tittle"] = "Waiting"
    wrong["templating"]["list"][1]["refresh"] = 17
    wrong["time"]["from"] = 6
    wrong["panels"][1]["gridPos"]["w"] = "4"

    assert [problem.partition(": ")[0] for problem in problems(wrong)] == [
        ".panels[0].tittle",
        ".time.from_val",
        ".panels[1].grid_pos.w",
        ".templating.list_val[1].refresh",
    ]


def test_no_panel_covers_another_and_the_page_names_the_file():
    covered = [
        (x, y)
        for panel in DASHBOARD["panels"]
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]

    assert len(covered) == len(set(covered))
    assert max(x for x, _ in covered) == 23  # Grafana has 24 columns
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
    assert "(dashboard.json)" in PAGE.read_text(encoding="utf-8")


def test_every_counter_is_on_the_dashboard():
    shown = " ".join(expressions())

    assert [
        name for name in prometheus.COUNTERS if f"celery_unique_{name}_total" not in shown
    ] == []


# -- in a Prometheus -----------------------------------------------------------------------


class Prometheus(LocalProcess):
    """A server that scrapes one worker every second."""

    def __init__(self, directory: Path, target: int) -> None:
        self.port = free_port()
        config = {
            "global": {"scrape_interval": "1s"},
            "scrape_configs": [
                {"job_name": "celery", "static_configs": [{"targets": [f"{HOST}:{target}"]}]}
            ],
        }
        (directory / "prometheus.yml").write_text(json.dumps(config))
        super().__init__(
            [
                find_program("prometheus", install_command="apt-get install prometheus"),
                f"--config.file={directory / 'prometheus.yml'}",
                f"--storage.tsdb.path={directory / 'data'}",
                f"--web.listen-address={HOST}:{self.port}",
            ],
            log_path=directory / "prometheus.log",
            cwd=directory,
        )

    def query(self, expression: str) -> list[dict[str, Any]]:
        query = urllib.parse.urlencode({"query": expression})
        url = f"http://{HOST}:{self.port}/api/v1/query?{query}"
        with urllib.request.urlopen(url, timeout=20) as reply:
            answer = json.load(reply)
        assert answer["status"] == "success", answer
        return answer["data"]["result"]  # type: ignore[no-any-return]


@pytest.fixture
def watched(redis_server, tmp_path) -> Iterator[Watched]:
    with watching(redis_server.fresh_url(), tmp_path, "prefork", {}) as one:
        yield one


def test_every_panel_shows_what_a_worker_has_counted(watched, tmp_path):
    server = Prometheus(tmp_path, watched.port)
    server.start()
    try:
        server.wait_for_log("Server is ready to receive web requests", WAIT_S)
        eventually(lambda: server.query("celery_unique_acquired_total"), timeout=WAIT_S)
        charge = ["shop.charge_card", ["7"], {"unique_on_conflict": "queue"}]
        for outcome in ("created", "queued"):
            assert watched.app.tasks["shop.call"].delay(*charge).get(timeout=WAIT_S) == outcome
        sign(watched.app, "7", 2)
        callers = [watched.app.tasks["shop.call_others"].delay(n, 4) for n in range(2)]
        sign(watched.app, "calls", len(callers))
        for number, caller in enumerate(callers):
            caller.get(timeout=WAIT_S)
            for argument in range(2):
                sign(watched.app, f"called {number} {argument}")
        eventually(lambda: watched.ran("shop.rebuild_index") == 4, timeout=WAIT_S)
        released = 'sum(rate(celery_unique_released_total{reason="completed"}[1m])) > 0'
        eventually(lambda: server.query(released), timeout=WAIT_S)

        def empty() -> list[str]:
            return [expression for expression in expressions() if not server.query(expression)]

        with suppress(AssertionError):
            eventually(lambda: not empty(), timeout=20)  # a rate needs two scrapes
        assert empty() == []
        [calls] = server.query("sum(increase(celery_unique_conflicts_total[1m]))")
        assert float(calls["value"][1]) > 0
    finally:
        server.kill()
