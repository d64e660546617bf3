"""Tasks whose messages a worker does not take one by one: celery-batches, and its like."""

from __future__ import annotations

import warnings
from typing import Any

import celery
import pytest
from celery import Celery, Task
from celery.worker.strategy import default

from celery_unique import InvalidPolicy
from celery_unique.exceptions import UniquePolicyWarning
from celery_unique.policy import policy as policy_module
from tests.support.app import make_app, messages


class Collecting(Task):
    """As celery-batches has it, which is not there for the newest Celery."""

    abstract = True
    flush_every = 10

    def Strategy(self, task: Any, app: Any, consumer: Any) -> Any:  # noqa: N802
        raise NotImplementedError

    def flush(self, requests: Any) -> Any:
        raise NotImplementedError


class Counting(Task):
    """A strategy of its own that hands on to Celery's."""

    abstract = True

    def Strategy(self, task: Any, app: Any, consumer: Any) -> Any:  # noqa: N802
        return default(task, app, consumer)


def body(requests: Any) -> None: ...


def batches() -> type:
    from celery_batches import Batches

    return Batches  # type: ignore[no-any-return]


BASES = [
    pytest.param(lambda: Collecting, id="like celery-batches"),
    pytest.param(
        batches,
        id="celery-batches",
        marks=[
            pytest.mark.versions,
            pytest.mark.skipif(
                celery.VERSION[:2] >= (5, 7), reason="celery-batches wants Celery < 5.7"
            ),
        ],
    ),
]
REFUSED = r"^shop.index: .* collected .* would stay taken.* unique=False"


@pytest.fixture
def app() -> Celery:
    return make_app("memory://")


@pytest.mark.parametrize("base", BASES)
def test_a_unique_task_whose_messages_are_collected_is_refused_at_the_decorator(app, base):
    with pytest.raises(InvalidPolicy, match=REFUSED):
        app.task(name="shop.index", base=base(), unique=True, flush_every=2)(body)


@pytest.mark.parametrize("base", BASES)
def test_a_unique_task_whose_messages_are_collected_is_refused_as_a_class(app, base):
    cls = type("Index", (base(),), {"name": "shop.index", "run": body, "unique": True})

    with pytest.raises(InvalidPolicy, match=REFUSED):
        app.register_task(cls())


@pytest.mark.parametrize("options", [{"unique": True}, {"idempotency_key": "k"}])
@pytest.mark.parametrize("base", BASES)
def test_a_unique_call_of_a_task_whose_messages_are_collected_is_refused(app, base, options):
    task = app.task(name="shop.index", base=base())(body)

    with pytest.raises(InvalidPolicy, match=REFUSED):
        task.apply_async((7,), **options)

    assert messages(app) == []
    assert task.delay(7).outcome == "bypassed"
    assert len(messages(app)) == 1


def test_any_other_strategy_is_warned_about(app):
    policy_module._warned.clear()
    with pytest.warns(UniquePolicyWarning, match="shop.count has a Strategy of its own"):
        app.task(name="shop.count", base=Counting, unique=True)(body).delay(7)


def test_tasks_with_the_strategy_of_celery_are_not_warned_about(app):
    policy_module._warned.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error", UniquePolicyWarning)
        task = app.task(name="shop.rebuild", unique=True)(body)
        assert task.delay(7).outcome == "created"
