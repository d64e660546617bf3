"""Wraps one task: its eager calls and its body."""

from __future__ import annotations

from typing import Any

from celery import Task
from celery.app.autoretry import add_autoretry_behaviour
from celery.app.task import Context

from celery_unique.config.app_state import AppState
from celery_unique.policy.task_options import IN_FRONT
from celery_unique.publish.eager import around_apply
from celery_unique.worker.body import around_body

# ``self.request.unique`` is None in a body that holds no lock, instead of an
# AttributeError. (A new name: no attribute of Celery is changed.)
Context.unique = None

_WRAPPED = "_celery_unique_wrapped"


def wrap_task(app_state: AppState, task: Any) -> None:
    """Wrap the task's ``apply`` and its body: on the instance, so that base classes of users
    stay as they are."""
    if task.name is None or task.name.startswith("celery.") or _WRAPPED in task.__dict__:
        return
    task.__dict__[_WRAPPED] = True
    # Automatic retries belong to the body, or the key would be released before the retry.
    # Celery adds them last and only once: here, if this task is just being made.
    add_autoretry_behaviour(task)
    task.apply = around_apply(app_state, task, task.apply)
    if _has_own_call(task):
        _wrap_call(app_state, task)
    else:
        task.run = around_body(app_state, task, task.run)


def _has_own_call(task: Any) -> bool:
    """Whether a class below ``Task`` defines ``__call__``. (In a worker, Celery's own check is
    true for every task, since Celery has replaced ``Task.__call__``.)"""
    classes = type(task).__mro__
    return any("__call__" in vars(cls) for cls in classes[: classes.index(Task)])


def _wrap_call(app_state: AppState, task: Any) -> None:
    """Wrap a task's own ``__call__``, which Celery runs as the body. Python looks it up on the
    class, so the instance gets a class of its own."""
    cls = type(task)

    def bound(*args: Any, **kwargs: Any) -> Any:
        return cls.__call__(task, *args, **kwargs)

    body = around_body(app_state, task, bound)

    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N807
        return body(*args, **kwargs)

    namespace = {
        "__call__": __call__,
        "__module__": cls.__module__,
        "__doc__": cls.__doc__,
        IN_FRONT: True,
    }
    task.__class__ = type(cls.__name__, (cls,), namespace)
