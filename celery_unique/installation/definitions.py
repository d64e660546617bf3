"""What happens while the tasks of an app are defined: their policies are checked.

Celery makes most tasks late, and all of them together (``finalize``) with the first use of one.
What the decorator tells alone is checked there, and the rest when the task is made.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Any

from celery import Celery, Task, _state
from celery.app.annotations import resolve_all

from celery_unique.config.app_state import AppState
from celery_unique.exceptions import CeleryUniqueError
from celery_unique.policy.task_options import (
    OWN_OPTIONS,
    check_decorator,
    check_definition,
    class_of,
    is_wrong_by_itself,
    leave_alone,
    options_among,
    recover_options,
    remember_options,
)

from .wrap_task import wrap_task

logger = logging.getLogger("celery_unique")


class Definitions:
    """Sees the options of an app's tasks before Celery writes annotations over them, and
    refuses wrong ones."""

    def __init__(self, app_state: AppState, app: Any) -> None:
        self._app_state = app_state
        self._app = app
        self._task = app.task
        self._task_from_fun = app._task_from_fun
        self._register_task = app.register_task
        self._finalize = app.finalize
        #: Whether errors wait until all tasks are made.
        self._making_all = False
        self._refused: dict[str, CeleryUniqueError] = {}
        #: Of this app itself, and not shared by another one.
        self._own_names: set[str] = set()
        self._own_functions: list[Any] = []

    def watch(self) -> None:
        app = self._app
        app.task = self.task
        app._task_from_fun = self.task_from_fun
        app.register_task = self.register_task
        app.finalize = self.finalize
        # Tasks that are defined and not made yet remember how they would have been made.
        for promise in app._pending:
            object.__setattr__(promise, "_Proxy__local", self.task_from_fun)
        for name, task in list(app._tasks.items()):
            if not name.startswith("celery."):
                self._learn_late(task)
                wrap_task(self._app_state, task)
        # The base class installs when it is bound: that may be while Celery makes all tasks.
        if app.finalized and app._finalize_mutex._is_owned():
            self._begin_making_all()
            app.on_after_finalize.connect(self._end_making_all)

    def _learn_late(self, task: Any) -> None:
        """What a task says that was made before the app was installed."""
        cls = class_of(task)
        if OWN_OPTIONS in cls.__dict__:
            return
        if not cls.__dict__.get("__bound__"):
            remember_options(cls)
            return
        annotated = {name for each in resolve_all(self._app.annotations, cls) for name in each}
        lost = recover_options(cls, annotated, _decorator_options(_function_behind(cls)))
        if lost:
            logger.warning(
                "%s was used before install(app): whether it says %s itself is not known any more, "
                "and what task_annotations say counts",
                task.name,
                ", ".join(lost),
            )

    # -- in place of the app's methods -----------------------------------------------------

    def task(self, *args: Any, **options: Any) -> Any:
        """``@app.task`` and ``@app.task(...)``, as Celery has them."""
        if args:
            if callable(args[0]):
                self._check_decorator(args[0], options)
            return self._task(*args, **options)
        decorate = self._task(**options)

        def checked(fun: Any) -> Any:
            self._check_decorator(fun, options)
            return decorate(fun)

        return checked

    def task_from_fun(self, fun: Any, *args: Any, **options: Any) -> Any:
        options = {**options, OWN_OPTIONS: options_among(options)}
        return self._checked(self._task_from_fun(fun, *args, **options), fun)

    def register_task(self, task: Any, **options: Any) -> Any:
        cls = task if isinstance(task, type) else type(task)
        if not cls.__dict__.get("__bound__"):
            remember_options(cls)
        return self._checked(self._register_task(task, **options))

    def finalize(self, auto: bool = False) -> None:
        """Make every task, also those after one that is refused, and then raise.

        Raised by itself, the error would stop Celery half-way in an app that counts as
        finalized: calls by name would find no task, and with it no policy. Whoever asks for
        it (a worker, beat) hears of a refused task each time, others once.
        """
        with self._app._finalize_mutex:
            if self._making_all:
                return
            first = not self._app.finalized
            if first:
                self._make_all(auto)
        if self._refused and (first or not auto):
            raise next(iter(self._refused.values())).with_traceback(None)

    # -- making all tasks -------------------------------------------------------------------

    def _make_all(self, auto: bool) -> None:
        app = self._app
        pending = list(app._pending)
        self._begin_making_all()
        try:
            self._finalize(auto)
        except BaseException:
            self._undo(pending)
            raise
        finally:
            self._end_making_all()

    def _undo(self, pending: list[Any]) -> None:
        """Not finalized, then: the next use tries again, and does not go on with as many tasks
        as were made."""
        app = self._app
        app.finalized = False
        app._pending.clear()
        app._pending.extend(pending)
        # Celery would find its own, which it makes anew, to be others of the same names.
        for name in [name for name in app._tasks if name.startswith("celery.")]:
            del app._tasks[name]

    def _begin_making_all(self) -> None:
        self._making_all = True
        self._own_names = set(self._app._tasks)
        self._own_functions = [_function_of(promise) for promise in self._app._pending]

    def _end_making_all(self, **_: Any) -> None:
        self._making_all = False
        self._own_names, self._own_functions = set(), []

    # -- at the decorator -------------------------------------------------------------------

    def _check_decorator(self, fun: Any, options: Mapping[str, Any]) -> None:
        name = options.get("name") or self._app.gen_task_name(fun.__name__, fun.__module__)
        if not name.startswith("celery."):
            check_decorator(name, fun, options, options.get("base") or self._base_class())

    def _base_class(self) -> type:
        """What tasks of the app are based on, as far as that is settled: asking the app for it
        would import it now, and settle it."""
        base = self._app.__dict__.get("Task", self._app.task_cls)
        return base if isinstance(base, type) else Task

    # -- one task -------------------------------------------------------------------------------

    def _checked(self, task: Any, fun: Any = None) -> Any:
        if not task.name.startswith("celery."):
            try:
                check_definition(task, self._defaults())
            except CeleryUniqueError as error:
                self._refuse(task, fun, error)
            wrap_task(self._app_state, task)
        return task

    def _defaults(self) -> Mapping[str, Any]:
        try:
            return self._app_state.settings.app_defaults
        except CeleryUniqueError:  # a wrong setting is told by the first call, or by a worker
            return {}

    def _refuse(self, task: Any, fun: Any, error: CeleryUniqueError) -> None:
        if not self._making_all:
            self._app._tasks.pop(task.name, None)  # a task that cannot be called is not there
            raise error
        if self._is_of_another_app(task, fun) and is_wrong_by_itself(task):
            leave_alone(task)
            logger.warning(
                "%s is not unique in this app, since another app defines it with: %s",
                task.name,
                _without_name(task, error),
            )
            return
        # It stays among the tasks: its calls raise, where without it they would not be unique.
        self._refused[task.name] = error
        logger.error("%s cannot be called: %s", task.name, _without_name(task, error))

    def _is_of_another_app(self, task: Any, fun: Any) -> bool:
        if task.name in self._own_names or any(fun is own for own in self._own_functions):
            return False
        return _is_shared_by_an_app(fun)


def _without_name(task: Any, error: CeleryUniqueError) -> str:
    return str(error).removeprefix(f"{task.name}: ")


def _function_of(promise: Any) -> Any:
    """What a task that is not made yet will be made of; None if it is made."""
    try:
        return object.__getattribute__(promise, "_Proxy__args")[0]
    except AttributeError:
        return None


def _function_behind(cls: type) -> Any:
    """What the class of a task was made of; None for one that its author has written."""
    made_of = cls.__dict__.get("_decorated_fun", cls.__dict__.get("__wrapped__"))
    return made_of.__func__ if isinstance(made_of, staticmethod) else made_of


def _is_shared_by_an_app(fun: Any) -> bool:
    """Whether an app's decorator made ``fun`` a task, and not ``shared_task``."""
    return any(maker.__module__ == Celery.__module__ for maker, _ in _makers_of(fun))


def _decorator_options(fun: Any) -> Mapping[str, Any] | None:
    """What the decorator of ``fun`` was given; None where Celery has forgotten it."""
    for _, kept in _makers_of(fun):
        return next((each for each in kept if isinstance(each, dict)), None)
    return None


def _makers_of(fun: Any) -> Iterator[tuple[Any, list[Any]]]:
    """The functions that make ``fun`` a task in every app, and what each of them holds.

    Celery keeps one for every task that is shared: those of ``shared_task``, and those of an
    app's decorator, unless it says ``shared=False``. Its module tells which of the two it is.
    """
    for maker in list(_state._on_app_finalizers):
        kept = [cell.cell_contents for cell in getattr(maker, "__closure__", None) or ()]
        if fun is not None and any(each is fun for each in kept):
            yield maker, kept
