"""Stages on which something fails."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from celery_unique.config import leases
from celery_unique.stores import circuit_breaker as breaker
from tests.support import RedisServer
from tests.workers.faults.stage import FaultStage


@pytest.fixture(scope="module", autouse=True)
def _constants_stay_as_they_are() -> Iterator[None]:
    """The apps of these tests shorten them, in the test's own process too."""
    patience, margin = breaker.OPEN_FOR_S, leases.RESTORE_MARGIN_S
    yield
    breaker.OPEN_FOR_S, leases.RESTORE_MARGIN_S = patience, margin


@pytest.fixture(scope="module")
def make_stage(
    redis_server: RedisServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[..., FaultStage]]:
    """``make_stage(pool="threads", unique_run_lease=1)``: an empty Redis database, no worker."""
    stages: list[FaultStage] = []

    def make(*, broker: str | None = None, **options: Any) -> FaultStage:
        url = redis_server.fresh_url()
        stage = FaultStage(broker or url, url, tmp_path_factory.mktemp("stage"), **options)
        stages.append(stage)
        return stage

    yield make
    for stage in stages:
        stage.close()
