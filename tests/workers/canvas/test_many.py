"""Thousands of unique calls, half of them duplicates, as a group and through ``apply_many``.

CELERY_UNIQUE_MANY says how many: ``make test-many`` makes 10,000.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import pytest
from celery import group

import celery_unique
from tests.support.stage import Stage
from tests.workers.canvas.shapes import HELD, Cast

MANY = int(os.environ.get("CELERY_UNIQUE_MANY", "400"))
#: For the results of all of them: ten times what a machine with two cores needs.
PATIENCE_S = 60 + MANY * 0.06

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2 * PATIENCE_S)]


@pytest.fixture(scope="module")
def stage(make_canvas_stage: Callable[..., Stage]) -> Stage:
    return make_canvas_stage("prefork")


def signatures(c: Cast) -> list[Any]:
    """Each twice, the second half after the first."""
    half = MANY // 2
    return [c.work.s(f"{c.tag}-{n % half}", n % half).set(queue=HELD) for n in range(MANY)]


def expected() -> list[int]:
    return [n % (MANY // 2) for n in range(MANY)]


def runs(c: Cast) -> int:
    return sum(c.app.props.runs(f"unique-{c.tag}-{n}") for n in range(MANY // 2))


def test_many_members_of_a_group(stage, report):
    c = Cast(stage.app, "unique")
    began = time.monotonic()
    result = group(signatures(c)).apply_async()
    called = time.monotonic()

    stage.start_worker(queues=("celery", HELD))

    assert result.get(timeout=PATIENCE_S) == expected()
    assert runs(c) == MANY // 2
    stage.workers[-1].stop()
    took = time.monotonic() - called
    report(f"group of {MANY}: {called - began:.1f} s to call, {took:.1f} s to all results")


def test_many_calls_through_apply_many(stage, report):
    c = Cast(stage.app, "unique")
    began = time.monotonic()
    results = celery_unique.apply_many(signatures(c))
    called = time.monotonic()

    stage.start_worker(queues=("celery", HELD))

    assert [result.get(timeout=PATIENCE_S) for result in results] == expected()
    assert [r.outcome for r in results] == ["created"] * (MANY // 2) + ["deduplicated"] * (
        MANY // 2
    )
    assert runs(c) == MANY // 2
    took = time.monotonic() - called
    report(f"apply_many of {MANY}: {called - began:.1f} s to call, {took:.1f} s to all results")
