"""The options of tasks and calls, with their types: for type checkers alone.

Each mapping lists the options of this library and those of Celery, so that a checker refuses a
misspelled name. The library reads names and values in ``option_names`` and ``fields``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, Literal, TypedDict

from .fields import Dimension, IdentityStrategy, OnConflict
from .policy import UniquePolicy
from .states import StateGroup, StateName

__all__ = ["CallOptions", "TaskOptions"]


class UniqueOptions(TypedDict, total=False):
    """Options of this library for a task, or for one call."""

    unique: bool | UniquePolicy | Mapping[str, Any]
    unique_for: float | timedelta | str | None
    unique_on: Iterable[str] | str | None
    unique_by: Iterable[Dimension] | Dimension
    unique_meta: Iterable[str] | str | None
    unique_key: Callable[..., Any] | str | None
    unique_states: Iterable[StateName] | StateGroup
    unique_on_conflict: OnConflict
    unique_max_wait: float | timedelta | str | None
    unique_limit: int
    unique_max_queue: int | None
    unique_group: str | None
    identity_strategy: IdentityStrategy
    unique_label: str | None
    unique_merge: Iterable[str] | str | None
    unique_merge_max_bytes: int


class TaskOptions(UniqueOptions, total=False):
    """Options of ``@app.task`` and ``@shared_task``: this library's, and Celery's but ``bind``
    and ``base``, which change the type of the task."""

    unique_guard: bool | None

    name: str
    shared: bool
    lazy: bool
    filter: Callable[..., Any] | None
    typing: bool
    pydantic: bool
    pydantic_strict: bool
    pydantic_context: dict[str, Any] | None
    pydantic_dump_kwargs: dict[str, Any] | None
    autoretry_for: Sequence[type[BaseException]]
    dont_autoretry_for: Sequence[type[BaseException]]
    retry_kwargs: dict[str, Any]
    retry_backoff: bool | int
    retry_backoff_max: int
    retry_jitter: bool
    max_retries: int | None
    default_retry_delay: float
    acks_late: bool
    acks_on_failure_or_timeout: bool | None
    acks_on_failure: bool | None  # these and retry_on_worker_lost: Celery 5.7
    acks_on_timeout: bool | None
    reject_on_worker_lost: bool | None
    retry_on_worker_lost: bool | None
    ignore_result: bool
    store_errors_even_if_ignored: bool
    store_eager_result: bool
    track_started: bool
    trail: bool
    send_events: bool
    soft_time_limit: float | None
    time_limit: float | None
    rate_limit: int | str | None
    throws: tuple[type[Exception], ...]
    serializer: str
    compression: str | None
    expires: float | datetime | None
    priority: int | None
    queue: str | None
    exchange: str | None
    routing_key: str | None
    delivery_mode: int | str | None
    resultrepr_maxsize: int
    abstract: bool
    autoregister: bool
    Request: Any
    Strategy: Any
    request_stack: Any
    before_start: Callable[..., Any]
    on_success: Callable[..., Any]
    on_failure: Callable[..., Any]
    on_retry: Callable[..., Any]
    after_return: Callable[..., Any]
    shadow_name: Callable[..., Any]


class CallOptions(UniqueOptions, total=False):
    """Options of ``apply_async``: this library's, and Celery's."""

    idempotency_key: str | None
    idempotency_ttl: float | timedelta | str
    idempotency_scope: Literal["task", "app", "run"] | None

    task_id: str | None
    producer: Any
    publisher: Any
    connection: Any
    link: Any
    link_error: Any
    shadow: str | None
    countdown: float | None
    eta: datetime | None
    expires: float | datetime | None
    retry: bool | None
    retry_policy: Mapping[str, Any] | None
    queue: Any
    exchange: Any
    routing_key: str | None
    delivery_mode: int | str | None
    priority: int | None
    serializer: str | None
    compression: str | None
    add_to_parent: bool
    headers: Mapping[str, Any] | None
    ignore_result: bool
    time_limit: float | None
    soft_time_limit: float | None
    reply_to: str | None
    root_id: str | None
    parent_id: str | None
    group_id: str | None
    group_index: int | None
    chord: Any
    chain: Any
    argsrepr: str | None
    kwargsrepr: str | None
    stamped_headers: Iterable[str] | None
    expiration: float | None
    mandatory: bool
    timeout: float | None
    confirm_timeout: float | None
