"""Types of Celery's objects in an app where the library is installed, for type checkers.

At run time these are Celery's own objects: ``UniqueApp`` is ``Celery``, and ``shared_task`` is
Celery's decorator. The stubs of Celery have no room for options that Celery itself does not read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import celery

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import (
        Any,
        Concatenate,
        Generic,
        Literal,
        ParamSpec,
        Protocol,
        TypeVar,
        Unpack,
        overload,
    )

    from celery.app.task import Context
    from celery.canvas import Signature

    from celery_unique.policy.option_types import CallOptions, TaskOptions
    from celery_unique.publish.results import R_co, UniqueResult
    from celery_unique.worker.body import HeldLock

    from .task import UniqueTask

    P = ParamSpec("P")
    R = TypeVar("R")
    T = TypeVar("T")

    class UniqueContext(Context):
        """``self.request``."""

        unique: HeldLock | None

    class UniqueSignature(Signature, Generic[R_co]):
        """A signature of a task, whose calls accept the options of this library."""

        def __call__(self, *args: Any, **kwargs: Any) -> R_co: ...
        def delay(self, *args: Any, **kwargs: Any) -> UniqueResult[R_co]: ...
        def apply_async(
            self,
            args: tuple[Any, ...] | list[Any] | None = None,
            kwargs: Mapping[str, Any] | None = None,
            route_name: str | None = None,
            **options: Unpack[CallOptions],
        ) -> UniqueResult[R_co]: ...
        def set(
            self, immutable: bool | None = None, **options: Unpack[CallOptions]
        ) -> UniqueSignature[R_co]: ...
        def clone(
            self,
            args: tuple[Any, ...] | list[Any] | None = None,
            kwargs: Mapping[str, Any] | None = None,
            **options: Unpack[CallOptions],
        ) -> UniqueSignature[R_co]: ...

    class TaskDecorator(Protocol):
        """``@app.task`` and ``@shared_task``."""

        @overload
        def __call__(self, fun: Callable[P, R], /) -> UniqueTask[P, R]: ...
        @overload
        def __call__(
            self, *, bind: bool = ..., base: type[T], **options: Unpack[TaskOptions]
        ) -> Callable[[Callable[..., Any]], T]: ...
        @overload
        def __call__(
            self, *, bind: Literal[True], base: None = None, **options: Unpack[TaskOptions]
        ) -> Callable[[Callable[Concatenate[Any, P], R]], UniqueTask[P, R]]: ...
        @overload
        def __call__(
            self,
            *,
            bind: Literal[False] = False,
            base: None = None,
            **options: Unpack[TaskOptions],
        ) -> Callable[[Callable[P, R]], UniqueTask[P, R]]: ...

    class UniqueApp(celery.Celery):
        """An app that ``install`` returned."""

        task: TaskDecorator

        def send_task(
            self,
            name: str,
            args: tuple[Any, ...] | list[Any] | None = None,
            kwargs: Mapping[str, Any] | None = None,
            **options: Unpack[CallOptions],
        ) -> UniqueResult[Any]: ...

    shared_task: TaskDecorator
else:
    UniqueApp = celery.Celery
    shared_task = celery.shared_task
