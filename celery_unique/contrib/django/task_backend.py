"""A backend of Django's Tasks framework: ``task.enqueue()`` becomes a call of a Celery task.

Each Django task is a Celery task of the same dotted name, so that workers, routes, metrics and
``celery unique`` see it as any other. With Django 5.2 the framework is the package django-tasks.

Not named ``tasks``: Celery imports the module of that name of every installed app.
"""

from __future__ import annotations

import functools
import inspect
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from celery import current_task, shared_task
from celery.backends.base import DisabledBackend
from django.apps import apps
from django.core.checks import CheckMessage, Error
from django.core.exceptions import ImproperlyConfigured
from django.utils import timezone
from django.utils.dateparse import parse_datetime
from django.utils.module_loading import import_string

from celery_unique.exceptions import CeleryUniqueError, StoreUnavailable, suggestion
from celery_unique.locks import lookup
from celery_unique.policy.option_names import TASK_ONLY, TASK_OPTIONS

from .celery_app import project_app

try:
    from django.tasks import base, exceptions, signals
    from django.tasks.backends.base import BaseTaskBackend
    from django.utils.json import normalize_json
except ImportError:
    try:
        from django_tasks import base, exceptions, signals
        from django_tasks.backends.base import BaseTaskBackend
        from django_tasks.utils import normalize_json
    except ImportError:
        raise ImproperlyConfigured(
            "The Tasks framework needs Django 6.0, or for Django 5.2 the package django-tasks: "
            "pip install django-tasks"
        ) from None

__all__ = ["CeleryBackend", "UniqueTaskResult", "unique"]

Status = base.TaskResultStatus

#: Celery's states; others that wait are READY.
STATUS = {
    "STARTED": Status.RUNNING,
    "SUCCESS": Status.SUCCESSFUL,
    "FAILURE": Status.FAILED,
    "REVOKED": Status.FAILED,
    "REJECTED": Status.FAILED,
    "IGNORED": Status.FAILED,
}
_OPTIONS = TASK_OPTIONS | TASK_ONLY
#: Where ``unique`` keeps its options, on the function.
_ATTRIBUTE = "celery_unique_options"
#: Many times what a worker needs from the release of a lock to the stored result.
_RESULT_AFTER_LOCK_S = 0.25
_REFRESHED = (
    *("status", "finished_at", "errors", "worker_ids", "_return_value"),
    *("started_at", "last_attempted_at"),
)


def unique(**options: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Make a task unique: ``@task`` above ``@unique(unique_for="PT10M")`` above the function.

    The options are those of ``@shared_task(unique=True, ...)``. With another backend, such as the
    one of tests, they have no effect.
    """
    _check(options, "@unique")

    def remember(function: Callable[..., Any]) -> Callable[..., Any]:
        setattr(function, _ATTRIBUTE, {"unique": True, **options})
        return function

    return remember


def _check(options: Mapping[str, Any], where: str) -> None:
    for name in options:
        if name not in _OPTIONS:
            raise ImproperlyConfigured(
                f"{where}: {name!r} is not an option of celery_unique."
                f"{suggestion(name, sorted(_OPTIONS))}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class UniqueTaskResult(base.TaskResult):
    """What ``enqueue`` returns: its ``id`` is that of the task that does the work."""

    outcome: str = "created"

    @property
    def deduplicated(self) -> bool:
        """Whether nothing was enqueued, since another task holds the key."""
        return self.outcome == "deduplicated"

    def refresh(self) -> None:
        """Unlike ``get_result``, it needs no name of the task in the result backend."""
        now = self.task.get_backend().result_of(self.task, self.id)
        for name in _REFRESHED:
            object.__setattr__(self, name, getattr(now, name))

    async def arefresh(self) -> None:
        from asgiref.sync import sync_to_async

        await sync_to_async(self.refresh, thread_sensitive=True)()


class CeleryBackend(BaseTaskBackend):
    """``TASKS = {"default": {"BACKEND": "...", "OPTIONS": {"unique": True}}}``: options for every
    task of this backend; those of a task itself come first."""

    supports_defer = True
    supports_async_task = True

    def __init__(self, alias: str, params: dict[str, Any]) -> None:
        super().__init__(alias, params)
        _check(self.options, f"TASKS[{alias!r}]['OPTIONS']")
        #: Dotted name -> the Celery task.
        self._tasks: dict[str, Any] = {}

    @property
    def supports_get_result(self) -> bool:
        return not isinstance(project_app().backend, DisabledBackend)

    def check(self, **_: Any) -> Iterator[CheckMessage]:
        if not apps.is_installed("celery_unique.contrib.django"):
            yield Error(
                f"TASKS[{self.alias!r}] is a backend of celery_unique, which is not in "
                "INSTALLED_APPS: its tasks would not be unique.",
                hint="Add 'celery_unique.contrib.django' to INSTALLED_APPS.",
                id="celery_unique.E005",
            )

    # -- definition ----------------------------------------------------------
    def task_class(self, *, func: Callable[..., Any], **fields: Any) -> Any:
        """``@task(unique=True, unique_for=60)``: from Django 6.1 on, ``@task`` takes options."""
        own = {name: fields.pop(name) for name in _OPTIONS & fields.keys()}
        if own:
            setattr(func, _ATTRIBUTE, {**getattr(func, _ATTRIBUTE, {}), **own})
        return base.Task(func=func, **fields)

    def validate_task(self, task: Any) -> None:
        """Also makes the Celery task, when its module is imported: a worker has it then."""
        super().validate_task(task)
        if task.module_path not in self._tasks:
            options = {**self.options, **getattr(task.func, _ATTRIBUTE, {})}
            make = shared_task(name=task.module_path, **options)
            self._tasks[task.module_path] = make(_body(task, self))

    # -- calls ---------------------------------------------------------------
    def enqueue(
        self, task: Any, args: Sequence[Any], kwargs: Mapping[str, Any], **options: Any
    ) -> UniqueTaskResult:
        """``options`` are those of a single call, such as ``idempotency_key``:
        ``task.get_backend().enqueue(task, (7,), {}, idempotency_key="order-7")``."""
        self.validate_task(task)
        result = self._result(task, args=args, kwargs=kwargs)
        # Django's name of its default queue is not one of Celery's: there, routes decide.
        if task.queue_name != base.DEFAULT_TASK_QUEUE_NAME:
            options.setdefault("queue", task.queue_name)
        if task.run_after is not None:
            options["eta"] = _aware(task.run_after)
        project_app()  # raises where there is none, and a call of the fallback app would be lost
        sent = self._tasks[task.module_path].apply_async(result.args, result.kwargs, **options)
        outcome = getattr(sent, "outcome", None) or "created"
        for name, value in (("id", sent.id), ("outcome", outcome), ("enqueued_at", timezone.now())):
            object.__setattr__(result, name, value)
        if not result.deduplicated:
            signals.task_enqueued.send(type(self), task_result=result)
        return result

    # -- results -------------------------------------------------------------
    def get_result(self, result_id: str) -> UniqueTaskResult:
        """By the name of its task, which is in the result (``CELERY_RESULT_EXTENDED``) or, until
        there is one, in its lock."""
        app = project_app()
        name = _name_in_result(app, result_id) or self._name_in_lock(app, result_id)
        if not name:
            # It may have ended between the two, and its lock is released before its result is
            # stored.
            time.sleep(_RESULT_AFTER_LOCK_S)
            name = _name_in_result(app, result_id)
        try:
            task = import_string(name or "")
        except ImportError:
            task = None
        if not isinstance(task, base.Task):
            raise exceptions.TaskResultDoesNotExist(result_id)
        return self.result_of(task, result_id)

    def _name_in_lock(self, app: Any, task_id: str) -> str | None:
        try:
            lock = lookup(task_id=task_id, app=app)
        except StoreUnavailable:
            raise
        except CeleryUniqueError:  # not an id that a task can have
            return None
        return None if lock is None else lock.task_name

    def result_of(self, task: Any, task_id: str) -> UniqueTaskResult:
        """The state of this task, by Celery's result backend."""
        meta = project_app().backend.get_task_meta(task_id)
        status, value = STATUS.get(meta["status"], Status.READY), meta.get("result")
        worker = meta.get("worker")
        if status == Status.RUNNING and isinstance(value, dict):
            worker = value.get("hostname")
        result = self._result(
            task,
            id=task_id,
            status=status,
            args=_sequence(meta.get("args")),
            kwargs=meta["kwargs"] if isinstance(meta.get("kwargs"), dict) else {},
            finished_at=_moment(meta.get("date_done")) if meta["status"] in STATUS else None,
            errors=[_error(value, meta.get("traceback"))] if status == Status.FAILED else [],
            worker_ids=[worker] if worker else [],
        )
        if status == Status.SUCCESSFUL:
            object.__setattr__(result, "_return_value", value)
        return result

    def _result(self, task: Any, **fields: Any) -> UniqueTaskResult:
        unknown = {"id": "", "status": Status.READY, "errors": [], "worker_ids": []}
        times = ("enqueued_at", "started_at", "finished_at", "last_attempted_at")
        return UniqueTaskResult(
            **{"task": task, "backend": self.alias, **unknown, **dict.fromkeys(times), **fields}
        )


def _body(task: Any, backend: CeleryBackend) -> Callable[..., Any]:
    """What the worker runs. It has the parameters of the task's function, since calls are compared
    by them: ``enqueue(7)`` is ``enqueue(shop_id=7)``."""

    @functools.wraps(task.func)
    def run(*args: Any, **kwargs: Any) -> Any:
        request = current_task.request
        began = timezone.now()
        result = backend._result(
            task,
            id=request.id,
            status=Status.RUNNING,
            args=args,
            kwargs=kwargs,
            started_at=began,
            last_attempted_at=began,
            worker_ids=[request.hostname or ""] * (request.retries + 1),
        )
        signals.task_started.send(type(backend), task_result=result)
        context = (base.TaskContext(task_result=result),) if task.takes_context else ()
        try:
            value = normalize_json(task.call(*context, *args, **kwargs))
        except Exception as error:
            result.errors.append(_error(error, None))
            _finish(backend, result, Status.FAILED)
            raise
        object.__setattr__(result, "_return_value", value)
        _finish(backend, result, Status.SUCCESSFUL)
        return value

    signature = inspect.signature(task.func)
    parameters = list(signature.parameters.values())[1 if task.takes_context else 0 :]
    run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return run


def _finish(backend: CeleryBackend, result: UniqueTaskResult, status: Any) -> None:
    object.__setattr__(result, "status", status)
    object.__setattr__(result, "finished_at", timezone.now())
    signals.task_finished.send(type(backend), task_result=result)


def _name_in_result(app: Any, task_id: str) -> str | None:
    meta = app.backend.get_task_meta(task_id)
    # django-celery-results has a name of its own for it.
    name: str | None = meta.get("name") or meta.get("task_name")
    return name


def _error(error: Any, traceback: str | None) -> Any:
    import traceback as module

    kind = type(error) if isinstance(error, BaseException) else RuntimeError
    text = traceback
    if text is None and isinstance(error, BaseException):
        text = "".join(module.format_exception(error))
    path = f"{kind.__module__}.{kind.__qualname__}"
    return base.TaskError(exception_class_path=path, traceback=text or str(error))


def _sequence(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else []


def _moment(value: Any) -> datetime | None:
    moment = parse_datetime(value) if isinstance(value, str) else value
    return _aware(moment) if isinstance(moment, datetime) else None


def _aware(moment: datetime) -> datetime:
    return moment if timezone.is_aware(moment) else timezone.make_aware(moment)
