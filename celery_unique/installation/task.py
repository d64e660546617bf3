"""``UniqueTask``, the base class of unique tasks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar, Generic

from celery import Task

from celery_unique.policy.task_options import remember_options
from celery_unique.publish.results import R_co

if TYPE_CHECKING:
    from typing import Unpack

    from typing_extensions import ParamSpec

    from celery_unique.policy.fields import Dimension, IdentityStrategy, OnConflict
    from celery_unique.policy.option_types import CallOptions
    from celery_unique.policy.policy import UniquePolicy
    from celery_unique.policy.states import StateGroup, StateName
    from celery_unique.publish.results import UniqueEagerResult, UniqueResult

    from .types import UniqueContext, UniqueSignature

    P = ParamSpec("P", default=...)
else:
    from typing import ParamSpec

    P = ParamSpec("P")


class UniqueTask(Task, Generic[P, R_co]):
    """Base class for apps that do not call ``install``.

    ``@app.task(base=UniqueTask, unique=True)``, or ``task_cls`` for all tasks of an app. Binding
    the first of them installs the library in its app: calls by name before that are plain Celery,
    and need ``install``.

    It is also the type of every task of an installed app: ``UniqueTask[[int], str]`` takes a number
    and returns a string.
    """

    abstract = True

    unique: ClassVar[bool | UniquePolicy | Mapping[str, Any] | None] = None
    unique_for: ClassVar[float | timedelta | str | None] = None
    unique_on: ClassVar[Iterable[str] | str | None] = None
    unique_by: ClassVar[Iterable[Dimension] | Dimension | None] = None
    unique_meta: ClassVar[Iterable[str] | str | None] = None
    unique_key: ClassVar[Callable[..., Any] | str | None] = None
    unique_states: ClassVar[Iterable[StateName] | StateGroup | None] = None
    unique_on_conflict: ClassVar[OnConflict | None] = None
    unique_max_wait: ClassVar[float | timedelta | str | None] = None
    unique_limit: ClassVar[int | None] = None
    unique_max_queue: ClassVar[int | None] = None
    unique_group: ClassVar[str | None] = None
    identity_strategy: ClassVar[IdentityStrategy | None] = None
    unique_label: ClassVar[str | None] = None
    unique_guard: ClassVar[bool | None] = None
    unique_merge: ClassVar[Iterable[str] | str | None] = None
    unique_merge_max_bytes: ClassVar[int | None] = None

    @classmethod
    def annotate(cls) -> None:
        remember_options(cls)
        super().annotate()

    @classmethod
    def on_bound(cls, app: Any) -> None:
        from . import install

        super().on_bound(app)
        install(app)

    if TYPE_CHECKING:  # Celery's methods, with the options and results of this library

        def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R_co: ...
        def delay(self, *args: P.args, **kwargs: P.kwargs) -> UniqueResult[R_co]: ...
        def apply_async(
            self,
            args: tuple[Any, ...] | list[Any] | None = None,
            kwargs: Mapping[str, Any] | None = None,
            **options: Unpack[CallOptions],
        ) -> UniqueResult[R_co]: ...
        def apply(
            self,
            args: tuple[Any, ...] | list[Any] | None = None,
            kwargs: Mapping[str, Any] | None = None,
            **options: Any,
        ) -> UniqueEagerResult[R_co]: ...
        def AsyncResult(self, task_id: str, **options: Any) -> UniqueResult[R_co]: ...  # noqa: N802
        def s(self, *args: Any, **kwargs: Any) -> UniqueSignature[R_co]: ...
        def si(self, *args: P.args, **kwargs: P.kwargs) -> UniqueSignature[R_co]: ...
        def signature(
            self,
            args: tuple[Any, ...] | list[Any] | None = None,
            kwargs: Mapping[str, Any] | None = None,
            *,
            immutable: bool = False,
            **options: Unpack[CallOptions],
        ) -> UniqueSignature[R_co]: ...
        @property
        def request(self) -> UniqueContext: ...
