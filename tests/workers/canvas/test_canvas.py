"""Every shape of canvas, with a duplicate in it, comes to what it does without uniqueness.

The unique body runs once, and nothing hangs: on every pool and result backend.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.support.stage import Stage
from tests.workers.canvas.player import Player
from tests.workers.canvas.shapes import HANGS_IN_CELERY, RUNS, SHAPES, shapes_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

BACKENDS = ("redis", "database", "file", "rpc", "django-db")

POOLS = [
    pytest.param("prefork", marks=pytest.mark.versions),
    "threads",
    "gevent",
    "solo",
]


@pytest.fixture(scope="module", params=POOLS)
def stages(
    request: pytest.FixtureRequest, make_canvas_stage: Callable[..., Stage]
) -> dict[str, Stage]:
    """A worker of one pool for each result backend, all of them at work at once."""
    made = {}
    for backend in BACKENDS:
        made[backend] = make_canvas_stage(request.param, backend)
        made[backend].start_worker(wait=False)
    return made


@pytest.fixture(scope="module")
def told(stages: dict[str, Stage]) -> Iterator[dict[str, dict[str, Any]]]:
    players = {}
    for backend, stage in stages.items():
        stage.wait_until_ready(stage.worker)
        players[backend] = Player(stage, backend)
    yield {backend: player.told() for backend, player in players.items()}
    for player in players.values():
        player.kill()


CASES = [(backend, shape) for backend in BACKENDS for shape in shapes_for(backend)]


@pytest.mark.parametrize(("backend", "shape"), CASES)
def test_shape_comes_to_what_it_does_without_uniqueness(stages, told, backend, shape):
    unique, plain = told[backend][shape]["unique"], told[backend][shape]["plain"]

    log = stages[backend].log()
    for hung in ("no result", "not seen", "not applied"):
        assert hung not in repr(unique), log[-8000:]
    expected = HANGS_IN_CELERY.get((backend, shape)) or [plain["result"], plain["seen"]]
    assert [unique["result"], unique["seen"]] == expected, log[-8000:]
    assert unique["runs"] == RUNS[shape]


def test_every_shape_is_played_somewhere():
    assert {shape for _, shape in CASES} == set(SHAPES)
