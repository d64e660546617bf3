"""Stages on which something fails."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from celery_unique.config import leases
from celery_unique.stores import circuit_breaker as breaker
from tests.support import RedisServer
from tests.workers.conftest import MakeStage


@pytest.fixture(scope="module", autouse=True)
def _constants_stay_as_they_are() -> Iterator[None]:
    """The apps of these tests shorten them, in the test's own process too."""
    patience, margin = breaker.OPEN_FOR_S, leases.RESTORE_MARGIN_S
    yield
    breaker.OPEN_FOR_S, leases.RESTORE_MARGIN_S = patience, margin


@pytest.fixture(scope="module")
def make_stage(
    redis_server: RedisServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[MakeStage]:
    """``make_stage(pool="threads", unique_run_lease=1)``: an empty Redis database, no worker."""
    # The test's own way to the store is there all the time. A short time-out is for workers.
    own = {"unique_store_timeout": 20}
    make = MakeStage(redis_server, tmp_path_factory, tasks="faults", app_settings=own)
    yield make
    make.close()


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """At how many points producers were killed: their tests run in several processes."""
    for report in terminalreporter.stats.get("passed", ()):
        for name, text in report.user_properties if report.when == "call" else ():
            if name == "producers":
                terminalreporter.write_line(text)
