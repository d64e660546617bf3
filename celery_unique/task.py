"""``UniqueTask``, the base class of unique tasks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from celery import Task

from .policy.task_options import remember_options

if TYPE_CHECKING:
    from .policy.policy import UniquePolicy


class UniqueTask(Task):
    """Base class for apps that do not call ``install``.

    ``@app.task(base=UniqueTask, unique=True)``, or ``task_cls`` for all tasks of an app. Binding
    the first of them installs the library in its app: calls by name before that are plain Celery,
    and need ``install``.
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
