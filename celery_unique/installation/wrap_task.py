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
# AttributeError. (A new name: Celery's own attributes are left alone.)
Context.unique = None

_ADOPTED = "_celery_unique_adopted"


def wrap_task(app_state: AppState, task: Any) -> None:
    """Put uniqueness around one task: its eager calls and its body.

    On the instance, so that users' own base classes are left as they are.
    """
    if task.name is None or task.name.startswith("celery.") or _ADOPTED in task.__dict__:
        return
    task.__dict__[_ADOPTED] = True
    # Retrying by itself belongs to the body, or the lock would be given back before the
    # retry. Celery adds it last and only once: here, if this task is just being made.
    add_autoretry_behaviour(task)
    task.apply = around_apply(app_state, task, task.apply)
    if _has_own_call(task):
        _wrap_call(app_state, task)
    else:
        task.run = around_body(app_state, task, task.run)


def _has_own_call(task: Any) -> bool:
    """Whether the task's class has a ``__call__`` of its own. (Celery's own way to tell
    says yes for every task in a worker, where Celery has changed ``Task.__call__``.)"""
    classes = type(task).__mro__
    return any("__call__" in vars(cls) for cls in classes[: classes.index(Task)])


def _wrap_call(app_state: AppState, task: Any) -> None:
    """Celery runs a task with a ``__call__`` of its own through it: that is the body.

    Python looks ``__call__`` up on the class, so the instance gets a class of its own.
    """
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
