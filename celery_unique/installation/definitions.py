"""Hooks around the definition of tasks: their policies are checked, and they are wrapped.

Celery makes most tasks late, and all of them together (``finalize``) with the first use of one.
Options that are wrong in any case are refused at the decorator, the others when the task is made.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
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
    ignore_options,
    is_wrong_by_itself,
    options_among,
    options_of_class,
    remember_options,
)

from .wrap_task import wrap_task

logger = logging.getLogger("celery_unique")


class Definitions:
    """Reads the options of an app's tasks before Celery writes annotations over them, and
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

    def patch(self) -> None:
        app = self._app
        app.task = self.task
        app._task_from_fun = self.task_from_fun
        app.register_task = self.register_task
        app.finalize = self.finalize
        # Tasks that are defined and not made yet hold a reference to the function that makes them.
        for promise in app._pending:
            object.__setattr__(promise, "_Proxy__local", self.task_from_fun)
        for name, task in list(app._tasks.items()):
            if not name.startswith("celery."):
                self._adopt_made(task)
        # The base class installs when it is bound: that may be while Celery makes all tasks.
        if app.finalized and app._finalize_mutex._is_owned():
            self._begin_making_all()
            app.on_after_finalize.connect(self._end_making_all)

    def _adopt_made(self, task: Any) -> None:
        """Wrap a task that was made before ``install(app)``. Its own options and those of
        annotations, which Celery has written over them, cannot be separated any more."""
        cls = class_of(task)
        if not cls.__dict__.get("__bound__"):
            remember_options(cls)
        elif OWN_OPTIONS not in cls.__dict__ and (options := options_of_class(cls)):
            annotated = {name for each in resolve_all(self._app.annotations, cls) for name in each}
            logger.warning(
                "%s was used before install(app): calls until now were not unique, and "
                "task_annotations replace its own options (%s). Call install(app) where the app "
                "is made, before the first use of a task",
                task.name,
                ", ".join(sorted(annotated.intersection(options))) or "none here",
            )
        wrap_task(self._app_state, task)

    # -- replacements of the app's methods ----------------------------------------------------

    def task(self, *args: Any, **options: Any) -> Any:
        """``@app.task`` and ``@app.task(...)``, as in Celery."""
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

        An error in between would leave Celery half-way in an app that counts as finalized:
        calls by name would find no task, and so no policy. An explicit ``finalize()`` (a worker,
        beat) raises each time, an implicit one once.
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
        pending = list(self._app._pending)
        self._begin_making_all()
        try:
            self._finalize(auto)
        except BaseException:
            self._undo(pending)
            raise
        finally:
            self._end_making_all()

    def _undo(self, pending: list[Any]) -> None:
        """Mark the app as not finalized, so that the next use makes all tasks again."""
        app = self._app
        app.finalized = False
        app._pending.clear()
        app._pending.extend(pending)
        # Celery makes its own tasks anew, and would refuse them as others of the same names.
        for name in [name for name in app._tasks if name.startswith("celery.")]:
            del app._tasks[name]

    def _begin_making_all(self) -> None:
        self._making_all = True
        self._own_names = set(self._app._tasks)
        self._own_functions = [_function_of(promise) for promise in self._app._pending]

    def _end_making_all(self, **_: Any) -> None:
        self._making_all = False
        self._own_names, self._own_functions = set(), []

    # -- checks -------------------------------------------------------------------------------

    def _check_decorator(self, fun: Any, options: Mapping[str, Any]) -> None:
        name = options.get("name") or self._app.gen_task_name(fun.__name__, fun.__module__)
        if not name.startswith("celery."):
            # Not app.Task: that would import the app's base class now, and fix it.
            base = options.get("base") or self._app.__dict__.get("Task", self._app.task_cls)
            check_decorator(name, fun, options, base if isinstance(base, type) else Task)

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
        except CeleryUniqueError:  # a wrong setting is raised by the first call, or by a worker
            return {}

    def _refuse(self, task: Any, fun: Any, error: CeleryUniqueError) -> None:
        if not self._making_all:
            self._app._tasks.pop(task.name, None)  # a task that cannot be called does not exist
            raise error
        why = str(error).removeprefix(f"{task.name}: ")
        if self._is_of_another_app(task, fun) and is_wrong_by_itself(task):
            ignore_options(task)
            logger.warning(
                "%s is not unique in this app, since another app defines it with: %s",
                task.name,
                why,
            )
            return
        # It stays registered: its calls raise, where without it they would not be unique.
        self._refused[task.name] = error
        logger.error("%s cannot be called: %s", task.name, why)

    def _is_of_another_app(self, task: Any, fun: Any) -> bool:
        """Whether the decorator of another app made ``fun`` a task, and not ``shared_task``.

        Celery keeps a function in ``_on_app_finalizers`` for every task that all apps share, and
        its module is the one of the decorator.
        """
        if task.name in self._own_names or any(fun is own for own in self._own_functions):
            return False
        return any(
            maker.__module__ == Celery.__module__
            and any(cell.cell_contents is fun for cell in maker.__closure__ or ())
            for maker in list(_state._on_app_finalizers)
        )


def _function_of(promise: Any) -> Any:
    """The function of a task that is not made yet; None if it is made."""
    try:
        return object.__getattribute__(promise, "_Proxy__args")[0]
    except AttributeError:
        return None
