"""What is put around a task's body, and on what."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from celery import Celery, Task
from celery.app.trace import reset_worker_optimizations, setup_worker_optimizations

import celery_unique


class OwnCall(Task):
    abstract = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return super().__call__(*args, **kwargs)


@pytest.fixture(params=["client", "worker"])
def app(request: pytest.FixtureRequest) -> Iterator[Celery]:
    app = Celery("bodies", broker="memory://", set_as_current=False)
    if request.param == "worker":
        setup_worker_optimizations(app)  # changes Task.__call__
    yield celery_unique.install(app)
    reset_worker_optimizations(app)
    app.close()


def test_a_task_is_wrapped_where_celery_calls_it(app):
    @app.task(unique=True, shared=False)
    def plain() -> None: ...

    @app.task(unique=True, base=OwnCall, shared=False)
    def own() -> None: ...

    assert "run" in vars(app.tasks[plain.name])
    assert "__call__" not in vars(type(app.tasks[plain.name]))
    assert "run" not in vars(app.tasks[own.name])
    assert "__call__" in vars(type(app.tasks[own.name]))
