"""``lookup()`` and ``release()``: read or release the lock of a call or of a key."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any

from celery import current_app

from celery_unique.publish.coordinator import UniqueTaskCoordinator

from . import reporting
from .config.app_state import AppState, state_of
from .config.leases import moment_of
from .exceptions import (
    InvalidPolicy,
    StoreUnavailable,
    UniqueKeyError,
    UnreadableRecord,
    shown,
    suggestion,
)
from .header import DeliveryName
from .keys.call import Call
from .keys.digest import key_of
from .keys.identity import canonical_text, idempotency_identity, identity, with_key
from .policy.policy import UniquePolicy
from .publish.request import current_request, queue_of, registered
from .publish.stale_holders.lock_view import StoreClock, lane_of, parked_ids
from .stores.record import Record, TaskEntry


@dataclass(frozen=True, slots=True)
class Lock:
    """One lock in the store. Times are aware datetimes in UTC."""

    key: str = field(repr=False)  # derived from arguments: not for logs
    task_name: str
    task_id: str
    state: str
    created_at: datetime
    expires_at: datetime
    window_ends_at: datetime | None = None
    eta: datetime | None = None
    duplicates: int = 0
    last_duplicate_at: datetime | None = None
    worker: str | None = None
    label: str = ""  # the text of unique_label
    parked: int = 0  # calls that wait for their turn under the key
    position: int = (
        0  # of the parked call whose id was looked up: 1 is the next; 0: of no such call
    )


def lookup(
    task: Any = None,
    args: Any = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    key: str | None = None,
    idempotency_key: str | None = None,
    headers: Mapping[str, Any] | None = None,
    task_id: str | None = None,
    app: Any = None,
) -> Lock | None:
    """Return the lock of a call, of a key or of a task's id; None if nothing is recorded.

    ``headers`` are those of the call, for a task with ``unique_meta``. An id that this process has
    not published is searched for among all locks. The id of a parked call returns the lock that it
    waits for, with the ``position`` of the call. Where calls are parked under a key that no task
    holds, the lock has no ``task_id`` and the state ``parked``. A lock whose window has passed
    while its task waits or runs is returned, too: the next call is admitted beside it.
    """
    app_state, key = _find(task, args, kwargs, key, idempotency_key, headers, task_id, app)
    if key is None:
        return None
    record, now = app_state.store.read(key)
    if _is_behind(app_state, key, record):
        with suppress(StoreUnavailable):  # then the first reading counts
            app_state.store.flush(app_state.settings.store_timeout.total_seconds())
            record, now = app_state.store.read(key)
    if task_id is not None:
        held = record.tasks.get(task_id)
        if held is not None and not held.released:
            return _lock(key, task_id, held, now, record.parked)
        parked = parked_ids(app_state, key, record) if held is None else []
        lock = lock_of(key, record, now) if task_id in parked else None
        return None if lock is None else replace(lock, position=parked.index(task_id) + 1)
    return lock_of(key, record, now)


def live_locks(app: Any = None) -> Iterator[Lock]:
    """Every lock whose task has not ended, in no order. Walks over the whole store, in batches."""
    app_state = state_of(_app_of(None, app))
    clock = StoreClock(app_state)
    for key, record in app_state.store.walk():
        for task_id, task in record.tasks.items():
            if not task.released and not task.terminal:
                yield _lock(key, task_id, task, clock.now(), record.parked)


def _is_behind(app_state: AppState, key: str, record: Record) -> bool:
    """Whether the store may not have received the confirmation of a call of this process, which
    is sent fire-and-forget."""
    published = app_state.part(UniqueTaskCoordinator).client.published.get
    return any(task.pending and published(i) == key for i, task in record.tasks.items())


def release(
    task: Any = None,
    args: Any = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    key: str | None = None,
    idempotency_key: str | None = None,
    headers: Mapping[str, Any] | None = None,
    task_id: str | None = None,
    app: Any = None,
) -> bool:
    """Release the lock of a call, of a key or of a task's id, as in ``lookup``; return whether
    there was one.

    The holder is not stopped: it still runs, or will run, and the next call may run beside it.
    """
    only = task_id
    app_state, key = _find(task, args, kwargs, key, idempotency_key, headers, task_id, app)
    if key is None:
        return False
    try:
        record, _ = app_state.store.read(key)
    except UnreadableRecord:
        record = Record()  # released, it is deleted
    if not app_state.store.release(key, only):
        return False
    for task_id, held in record.tasks.items():
        if not held.released and only in (None, task_id):
            reporting.released(
                held.task_name, task_id, app=app_state.app, key=key, reason=reporting.MANUAL
            )
    return True


def lock_of(key: str, record: Record, now: int) -> Lock | None:
    """The lock to show: an active task first, then the newest. Released ones hold nothing."""
    tasks = [(i, t) for i, t in record.tasks.items() if not t.released]
    if not tasks:
        return _lane_lock(key, record, now)
    task_id, task = max(tasks, key=lambda item: (item[1].running, item[1].created_at))
    return _lock(key, task_id, task, now, record.parked)


def _lane_lock(key: str, record: Record, now: int) -> Lock | None:
    lane = lane_of(key, record, now)
    if lane is None:
        return None
    entry = lane.entry
    since, until = moment_of(entry.created_at), moment_of(entry.lease)
    return Lock(key, entry.task_name, "", lane.state, since, until, parked=lane.parked)


def _lock(key: str, task_id: str, task: TaskEntry, now: int, parked: int) -> Lock:
    return Lock(
        key=key,
        task_name=task.task_name,
        task_id=task_id,
        state=str(task.shown_state(now)),
        created_at=moment_of(task.created_at),
        expires_at=moment_of(task.lease),
        window_ends_at=moment_of(task.window_ends) if task.window_ends else None,
        eta=moment_of(task.eta) if task.eta else None,
        duplicates=task.duplicates,
        last_duplicate_at=moment_of(task.last_duplicate_at) if task.last_duplicate_at else None,
        worker=DeliveryName.parse(task.delivery).worker or None,
        label=task.label,
        parked=parked,
    )


def _find(
    task: Any,
    args: Any,
    kwargs: Mapping[str, Any] | None,
    key: str | None,
    idempotency_key: str | None,
    headers: Mapping[str, Any] | None,
    task_id: str | None,
    app: Any,
) -> tuple[AppState, str | None]:
    """The key; None: no lock has the id."""
    by_call = task is not None or idempotency_key is not None
    given = by_call + (key is not None) + (task_id is not None)
    if given != 1:
        raise InvalidPolicy(
            "Name a lock by its task (with args and kwargs), by its idempotency_key, by its key, "
            f"or by its task_id: {'more than one was' if given else 'none was'} given.",
            field="key",
        )
    app_state = state_of(_app_of(task, app))
    if key is not None:
        return app_state, _checked_key(key)
    if task_id is not None:
        return app_state, _key_of_id(app_state, task_id)
    if idempotency_key is not None:
        return app_state, key_of_idempotency_key(app_state, task, idempotency_key, headers)
    return app_state, key_of_call(app_state, task, args, kwargs, headers)


def _app_of(task: Any, app: Any) -> Any:
    if app is None:
        app = task.app if hasattr(task, "app") else current_app
    return getattr(app, "_get_current_object", lambda: app)()


def _key_of_id(app_state: AppState, task_id: str) -> str | None:
    """The key of an id that this process has published, or that any lock has."""
    known = app_state.part(UniqueTaskCoordinator).client.published.get(task_id)
    if known is not None:
        return known
    for key, record in app_state.store.walk():
        if task_id in record.tasks or task_id in parked_ids(app_state, key, record):
            return key
    return None


def key_of_idempotency_key(
    app_state: AppState, task: Any, idempotency_key: str, headers: Mapping[str, Any] | None = None
) -> str:
    """The key behind an idempotency key: of one task, or of the app by its scope."""
    text = text_of_idempotency_key(app_state, task, idempotency_key, headers)
    return key_of(text, app_state.settings.key_secret)


def text_of_idempotency_key(
    app_state: AppState, task: Any, idempotency_key: str, headers: Mapping[str, Any] | None = None
) -> str:
    """The canonical text whose digest is the key."""
    scope, parent = app_state.settings.idempotency_scope, current_request(app_state)
    if task is None and scope != "app":
        raise InvalidPolicy(
            f"An idempotency_key belongs to its task (unique_idempotency_scope={scope!r}): "
            "give the task as well.",
            field="task",
        )
    if scope == "run" and parent is None:
        raise InvalidPolicy(
            "An idempotency_key belongs to the run of the task that made the call "
            "(unique_idempotency_scope='run'), and no task is running here: give task_id= or key= "
            "of the result instead.",
            field="idempotency_key",
        )
    name = "" if task is None else _name_of(task)
    options = with_key({"idempotency_key": idempotency_key})
    policy = _policy_of(app_state, name, options)[0]
    _require_headers(name or "a task", policy, headers)
    call = Call(
        task_name=name,
        idempotency_key=idempotency_key,
        meta=headers or {},
        run_id=parent.id if parent is not None else None,
    )
    meta_keys = policy.meta_keys if policy is not None else None
    return canonical_text(idempotency_identity(call, scope=scope, meta_keys=meta_keys))


def _checked_key(key: object) -> str:
    if isinstance(key, str) and re.fullmatch(r"\d+:[0-9a-f]{64}", key):
        return key
    raise InvalidPolicy(
        "key is not one of this library's: give the whole unique_key of a result, "
        "or the key of a lock.",
        field="key",
    )


def key_of_call(
    app_state: AppState,
    task: Any,
    args: Any,
    kwargs: Mapping[str, Any] | None,
    headers: Mapping[str, Any] | None = None,
) -> str:
    """The key that a call with these arguments has."""
    text = text_of_call(app_state, task, args, kwargs, headers)
    return key_of(text, app_state.settings.key_secret)


def text_of_call(
    app_state: AppState,
    task: Any,
    args: Any,
    kwargs: Mapping[str, Any] | None,
    headers: Mapping[str, Any] | None = None,
) -> str:
    """The canonical text whose digest is the key."""
    name = _name_of(task)
    _check_arguments(args, kwargs)
    task = registered(app_state.app, name)  # a module holds a proxy of it
    policy, signature = _policy_of(app_state, name, {})
    if policy is None and task is None:
        raise InvalidPolicy(
            f"{name} is not a task of this app.{suggestion(name, app_state.app.tasks)} "
            "Look up the lock of a task that is not known here by key=.",
            field="task",
        )
    if policy is None:
        raise InvalidPolicy(
            f"{name} is not unique, so its calls have no lock: look up a lock by key=.",
            field="unique",
        )
    if policy.identity_strategy != "strict":
        raise InvalidPolicy(
            f"{name} has identity_strategy={policy.identity_strategy!r}, so its arguments make no "
            "key: look up its locks by idempotency_key=.",
            field="identity_strategy",
        )
    _require_headers(name, policy, headers)
    call = Call(
        task_name=name,
        args=tuple(args or ()),
        kwargs=kwargs or {},
        signature=signature,
        queue=_queue(app_state, name, args, kwargs, task) if "queue" in policy.keys else "",
        meta=headers or {},
    )
    return canonical_text(identity(call, policy), name)


def _policy_of(
    app_state: AppState, name: str, options: Mapping[str, Any]
) -> tuple[UniquePolicy | None, Any]:
    task = registered(app_state.app, name)
    return app_state.policies.of(name, task, options, app_state.settings.app_defaults)


def _require_headers(
    name: str, policy: UniquePolicy | None, headers: Mapping[str, Any] | None
) -> None:
    """Without the headers it would be another key, and an existing lock would seem free."""
    if policy is not None and policy.meta_keys and headers is None:
        raise UniqueKeyError(
            f"The key of {name} has the headers of each call in it (unique_meta): give them as "
            "headers=, or look up its locks by key=, the unique_key of a result.",
            argument=policy.meta_keys[0],
        )


def _name_of(task: Any) -> str:
    name = task if isinstance(task, str) else getattr(task, "name", None)
    if isinstance(name, str):
        return name
    raise InvalidPolicy(
        f"task: {shown(task)} is not a task: give one of the app's tasks, or its name.",
        field="task",
    )


def _check_arguments(args: Any, kwargs: Any) -> None:
    if args is not None and not isinstance(args, (list, tuple)):
        raise InvalidPolicy(
            f"args: {shown(args)} is not a list or tuple: give the positional arguments as in "
            "apply_async, (7,) for one.",
            field="args",
        )
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise InvalidPolicy(
            f"kwargs: {shown(kwargs)} is not a mapping: give the keyword arguments as a dict.",
            field="kwargs",
        )


def _queue(app_state: AppState, name: str, args: Any, kwargs: Any, task: Any) -> str:
    """The queue of a call that names none."""
    options = task._get_exec_options() if task is not None else {}
    return queue_of(app_state, name, args, kwargs, task, options)
