"""Every shape of canvas, with a duplicate in it, comes to what it does without uniqueness.

The unique body runs once, and nothing hangs: on every pool and result backend.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.support import RedisServer
from tests.workers.canvas.shapes import HANGS_IN_CELERY, RUNS, SHAPES, shapes_for
from tests.workers.canvas.stage import BACKENDS, CanvasStage

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

POOLS = [
    pytest.param("prefork", marks=pytest.mark.versions),
    "threads",
    "gevent",
    "solo",
]


@pytest.fixture(scope="module", params=POOLS)
def stages(
    request: pytest.FixtureRequest,
    redis_server: RedisServer,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[dict[str, CanvasStage]]:
    """A worker of one pool for each result backend, all of them at work at once."""
    made = {}
    try:
        for backend in BACKENDS:
            directory = tmp_path_factory.mktemp(f"{request.param}-{backend}")
            made[backend] = CanvasStage(redis_server, directory, request.param, backend)
            made[backend].launch_worker()
        for stage in made.values():
            stage.wait_for_worker()
            stage.play()
        yield made
    finally:
        for stage in made.values():
            stage.close()


@pytest.fixture(scope="module")
def told(stages: dict[str, CanvasStage]) -> dict[str, dict[str, Any]]:
    return {backend: stage.told() for backend, stage in stages.items()}


CASES = [(backend, shape) for backend in BACKENDS for shape in shapes_for(backend)]


@pytest.mark.parametrize(("backend", "shape"), CASES)
def test_shape_comes_to_what_it_does_without_uniqueness(
    stages: dict[str, CanvasStage],
    told: dict[str, dict[str, Any]],
    backend: str,
    shape: str,
) -> None:
    unique, plain = told[backend][shape]["unique"], told[backend][shape]["plain"]

    log = stages[backend].log()
    for hung in ("no result", "not seen", "not applied"):
        assert hung not in repr(unique), log[-8000:]
    expected = HANGS_IN_CELERY.get((backend, shape)) or [plain["result"], plain["seen"]]
    assert [unique["result"], unique["seen"]] == expected, log[-8000:]
    assert unique["runs"] == RUNS[shape]


def test_every_shape_is_played_somewhere() -> None:
    assert {shape for _, shape in CASES} == set(SHAPES)
