"""``UniqueTask``, and what is put around a task of an installed app."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from celery import Task
from celery.app.autoretry import add_autoretry_behaviour
from celery.app.task import Context

from .eager import around_apply
from .runtime import Runtime
from .task_policies import IN_FRONT, remember_options
from .worker.body import around_body

if TYPE_CHECKING:
    from .policy import UniquePolicy

# ``self.request.unique`` is None in a body that holds no lock, instead of an
# AttributeError. (A new name: Celery's own attributes are left alone.)
Context.unique = None

_ADOPTED = "_celery_unique_adopted"


class UniqueTask(Task):
    """The base class for apps that do not call ``install``.

    ``@app.task(base=UniqueTask, unique=True)``, or ``task_cls`` for all tasks of an
    app. Binding the first of them installs the extension in its app: calls by name that
    come before that are plain Celery, and need ``install``.
    """

    abstract = True

    unique: ClassVar[bool | UniquePolicy | Mapping[str, Any] | None] = None
    unique_for: ClassVar[Any] = None
    unique_on: ClassVar[Any] = None
    unique_by: ClassVar[Any] = None
    unique_meta: ClassVar[Any] = None
    unique_key: ClassVar[Any] = None
    unique_states: ClassVar[Any] = None
    unique_on_conflict: ClassVar[str | None] = None
    unique_max_wait: ClassVar[Any] = None
    identity_strategy: ClassVar[str | None] = None

    @classmethod
    def annotate(cls) -> None:
        remember_options(cls)
        super().annotate()

    @classmethod
    def on_bound(cls, app: Any) -> None:
        from .installation import install

        super().on_bound(app)
        install(app)


def adopt(runtime: Runtime, task: Any) -> None:
    """Put uniqueness around one task: its eager calls and its body.

    On the instance, so that users' own base classes are left as they are.
    """
    if task.name is None or task.name.startswith("celery.") or _ADOPTED in task.__dict__:
        return
    task.__dict__[_ADOPTED] = True
    # Retrying by itself belongs to the body, or the lock would be given back before the
    # retry. Celery adds it last and only once: here, if this task is just being made.
    add_autoretry_behaviour(task)
    task.apply = around_apply(runtime, task, task.apply)
    if _has_own_call(task):
        _wrap_call(runtime, task)
    else:
        task.run = around_body(runtime, task, task.run)


def _has_own_call(task: Any) -> bool:
    """Whether the task's class has a ``__call__`` of its own. (Celery's own way to tell
    says yes for every task in a worker, where Celery has changed ``Task.__call__``.)"""
    classes = type(task).__mro__
    return any("__call__" in vars(cls) for cls in classes[: classes.index(Task)])


def _wrap_call(runtime: Runtime, task: Any) -> None:
    """Celery runs a task with a ``__call__`` of its own through it: that is the body.

    Python looks ``__call__`` up on the class, so the instance gets a class of its own.
    """
    cls = type(task)

    def bound(*args: Any, **kwargs: Any) -> Any:
        return cls.__call__(task, *args, **kwargs)

    body = around_body(runtime, task, bound)

    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N807
        return body(*args, **kwargs)

    namespace = {
        "__call__": __call__,
        "__module__": cls.__module__,
        "__doc__": cls.__doc__,
        IN_FRONT: True,
    }
    task.__class__ = type(cls.__name__, (cls,), namespace)
