"""The protocol on the cache and the database of a Django project: the schedules that go wrong
without one of its rules, and histories against the plain model."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from functools import partial
from types import ModuleType
from typing import Any

import pytest

from celery_unique.stores.base import LockStore
from tests.stores import (
    test_following_counterexamples,
    test_protocol_counterexamples,
    test_replacing_counterexamples,
)
from tests.stores.test_following_state_machine import FollowersAgainstModel
from tests.stores.test_state_machine import TIME_LIMIT, StoreAgainstModel, budget, check, told

pytestmark = TIME_LIMIT


def schedules(module: ModuleType) -> Iterator[Any]:
    """Those of its tests that are played on every store."""
    for name, schedule in vars(module).items():
        if name.startswith("test_") and "store" in inspect.signature(schedule).parameters:
            for kind, played in _kinds(schedule).items():
                yield pytest.param(played, id=name + kind)


def _kinds(schedule: Callable[..., None]) -> dict[str, Callable[..., None]]:
    if "acquired" not in inspect.signature(schedule).parameters:
        return {"": schedule}
    return {f"-{acquired}": partial(schedule, acquired=acquired) for acquired in (True, False)}


@pytest.mark.parametrize(
    "schedule",
    [
        *schedules(test_protocol_counterexamples),
        *schedules(test_replacing_counterexamples),
        *schedules(test_following_counterexamples),
    ],
)
def test_the_schedule_goes_right(
    schedule: Callable[..., None], django_store: LockStore, key: str
) -> None:
    schedule(django_store, key)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("machine", "share"), [(StoreAgainstModel, 1.0), (FollowersAgainstModel, 0.5)]
)
def test_the_store_answers_as_the_model_does(
    machine: type[StoreAgainstModel],
    share: float,
    django_store: LockStore,
    request: pytest.FixtureRequest,
    report: Callable[[str], None],
) -> None:
    kind = request.node.callspec.params["django_store"]

    figures = check(django_store, kind, budget(kind, share), machine)

    report(told(figures, f"{kind}, {machine.__name__}"))
