"""Stages: real workers with Redis, shared by the tests of a module."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support import RedisServer
from tests.support.stage import Stage


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    """A failure is told with the end of the workers' logs."""
    report = yield
    if report.failed:
        for make in getattr(item, "funcargs", {}).values():
            if isinstance(make, MakeStage) and make.stages:
                report.sections.append(("worker log", make.stages[-1].log()[-8000:]))
    return report


@pytest.fixture
def tag(request: pytest.FixtureRequest) -> str:
    """An argument that no other call has."""
    return uuid.uuid4().hex[:12]


class MakeStage:
    """``make_stage(pool="threads")``: an empty Redis database, and no worker yet.

    ``options`` are those of every stage that it makes.
    """

    def __init__(
        self, redis_server: RedisServer, directories: pytest.TempPathFactory, **options: Any
    ) -> None:
        self._redis_server = redis_server
        self._directories = directories
        self._options = options
        self.stages: list[Stage] = []

    def __call__(self, *, broker: str | None = None, **options: Any) -> Stage:
        url = self._redis_server.fresh_url()
        options = {**self._options, "broker": broker or url, "redis_url": url, **options}
        options.setdefault("directory", self._directories.mktemp("stage"))
        stage = Stage(**options)
        self.stages.append(stage)
        return stage

    def close(self) -> None:
        for stage in self.stages:
            stage.close()


@pytest.fixture(scope="module")
def make_stage(
    redis_server: RedisServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[MakeStage]:
    """For a stage that the tests of a module share."""
    make = MakeStage(redis_server, tmp_path_factory, tasks="ends", concurrency=2)
    yield make
    make.close()


@pytest.fixture(scope="module")
def shared_stage(make_stage: MakeStage) -> Stage:
    return make_stage()


@pytest.fixture
def stage(shared_stage: Stage) -> Stage:
    """That of the module, with a worker."""
    shared_stage.ensure_worker()
    return shared_stage


@pytest.fixture
def own_stage(
    redis_server: RedisServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[MakeStage]:
    """For a stage of one test alone, whose workers end with it."""
    make = MakeStage(redis_server, tmp_path_factory, tasks="ends", concurrency=2)
    yield make
    make.close()
