"""Explains why a call was dropped: the text of its key, the holder, and what frees the key."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any

from celery import uuid

from celery_unique.config.app_state import AppState
from celery_unique.keys.call import Call
from celery_unique.keys.digest import guarded_by, key_of
from celery_unique.keys.identity import identify, policy_for, with_key
from celery_unique.locks import text_of_call, text_of_idempotency_key
from celery_unique.policy.durations import milliseconds
from celery_unique.policy.policy import UniquePolicy
from celery_unique.publish.stale_holders.lock_view import LockView, locks_of, parked_ids
from celery_unique.publish.stale_holders.lost_messages import missing_messages
from celery_unique.publish.stale_holders.workers import NoAnswer, process_of
from celery_unique.stores import acts
from celery_unique.stores.base import Acquired, Claim
from celery_unique.stores.record import Mark, Record, letters


@dataclass(frozen=True, slots=True)
class Verdict:
    """The outcome of a call that is made now."""

    outcome: str  # as of a result, or ``rejected``, ``conflict``
    task_id: str | None  # the holder, or the task that it replaces or comes after
    text: str


@dataclass(frozen=True, slots=True)
class Explanation:
    key: str
    locks: tuple[LockView, ...]
    marks: Mapping[str, Mark]
    now: int
    made_from: str | None = None  # None: unknown, the key is a digest
    verdict: Verdict | None = None  # None: no call was given
    policy: Mapping[str, Any] = field(default_factory=dict)
    more_marks: int = 0  # beside those
    parked: tuple[str, ...] = ()  # calls that wait for their turn, the next one first


def explain_record(app_state: AppState, key: str, record: Record, now: int) -> Explanation:
    return Explanation(
        key,
        tuple(locks_of(key, record, now)),
        dict(record.marks),
        now,
        made_from=_guard_text(key, record),
        more_marks=record.more_marks,
        parked=tuple(parked_ids(app_state, key, record)),
    )


def _guard_text(key: str, record: Record) -> str | None:
    """Only the key of a guard can be computed from its record: it is made of the task id."""
    texts = (guarded_by(key, task_id) for task_id in (*record.tasks, *record.marks))
    return next((text for text in texts if text is not None), None)


def explain_call(
    app_state: AppState, task: str, args: Any = None, kwargs: Mapping[str, Any] | None = None
) -> Explanation:
    """Explain a call with these arguments, as if it were made now."""
    text = text_of_call(app_state, task, args or (), kwargs)
    policy = _policy(app_state, task, {})
    return _explain(app_state, task, text, policy, arguments="")


def explain_idempotency_key(
    app_state: AppState,
    task: str | None,
    idempotency_key: str,
    args: Any = None,
    kwargs: Mapping[str, Any] | None = None,
) -> Explanation:
    """Explain a call with this key. Without arguments: those of the first call with it."""
    text = text_of_idempotency_key(app_state, task, idempotency_key)
    policy = _policy(app_state, task or "", {"idempotency_key": idempotency_key})
    arguments = None
    if task is not None and (args is not None or kwargs is not None):
        _, signature = app_state.policies.of(
            task, app_state.app.tasks.get(task), {}, app_state.settings.app_defaults
        )
        call = Call(task, tuple(args or ()), kwargs or {}, signature, "", {}, idempotency_key)
        settings = app_state.settings
        arguments = identify(
            call, policy, settings.key_secret, settings.idempotency_scope
        ).arguments
    return _explain(app_state, task or "", text, policy, arguments)


def _policy(app_state: AppState, task: str, options: Mapping[str, Any]) -> UniquePolicy:
    known = app_state.app.tasks.get(task)
    found, _ = app_state.policies.of(
        task, known, with_key(options), app_state.settings.app_defaults
    )
    policy = policy_for(found, task, options)
    assert policy is not None  # or its text could not have been made
    return policy


def _explain(
    app_state: AppState, task: str, text: str, policy: UniquePolicy, arguments: str | None
) -> Explanation:
    key = key_of(text, app_state.settings.key_secret)
    record, now = app_state.store.read(key)
    claim = _claim(task, policy, _or_same(arguments, record))
    # The act itself, on a copy: no second set of rules that could differ.
    verdict = _verdict(acts.acquire(deepcopy(record), claim, now), record, claim)
    return Explanation(
        key,
        tuple(locks_of(key, record, now)),
        dict(record.marks),
        now,
        text,
        verdict,
        _shown_policy(policy),
        record.more_marks,
        tuple(parked_ids(app_state, key, record)),
    )


def _or_same(arguments: str | None, record: Record) -> str:
    if arguments is not None:
        return arguments
    return next((task.arguments for task in record.tasks.values()), "")


def _claim(task: str, policy: UniquePolicy, arguments: str) -> Claim:
    return Claim(
        task_id=uuid(),
        task_name=task,
        states=letters(policy.states),
        grace_ms=1000,
        on_conflict=policy.on_conflict,
        max_wait_ms=milliseconds(policy.max_wait) if policy.max_wait else 0,
        window_ms=milliseconds(policy.period) if policy.period else 0,
        arguments=arguments,
        join="its message" if policy.on_conflict == "queue" else "",
        limit=policy.limit,
        max_queue=policy.max_queue or 0,
        merge="{}" if policy.merge else "",
        merge_max_bytes=policy.merge_max_bytes,
    )


def _shown_policy(policy: UniquePolicy) -> dict[str, Any]:
    """The fields that decide on a conflict; those that make the key are in its text."""
    shown: dict[str, Any] = {"on_conflict": policy.on_conflict, "states": list(policy.states)}
    if policy.period:
        shown["unique_for_s"] = policy.period.total_seconds()
    if policy.limit > 1:
        shown["limit"] = policy.limit
    if policy.max_queue is not None:
        shown["max_queue"] = policy.max_queue
    if policy.merge is not None:
        shown["merge"] = list(policy.merge)
    return shown


def _verdict(acquired: Acquired, record: Record, claim: Claim) -> Verdict:
    holder = acquired.holder
    if acquired.outcome in ("queued", "full"):
        blocked_by = holder.task_id if holder is not None else None
        if acquired.outcome == "full":
            text = f"raises DuplicateTask: its lane is full, with {acquired.position} parked calls"
            return Verdict("rejected", blocked_by, text)
        text = f"is parked at position {acquired.position}, and runs when its turn comes"
        return Verdict("queued", blocked_by, text)
    if holder is not None:
        if holder.arguments != claim.arguments:
            text = "raises IdempotencyKeyConflict: the key was used for other work"
            return Verdict("conflict", holder.task_id, text)
        if acquired.outcome == "rejected":
            return Verdict("rejected", holder.task_id, "raises DuplicateTask")
        if acquired.outcome == "merged":
            text = "is not published: its values are merged into the task that waits"
            return Verdict("merged", holder.task_id, text)
        text = "is not published: it gets the id and the result of the task that holds its key"
        return Verdict("deduplicated", holder.task_id, text)
    if acquired.after:
        text = "is published, and held back until the running task has finished"
        return Verdict("rerun", acquired.after, text)
    if acquired.replaced:
        text = "is published and replaces the task that waits"
        return Verdict("replaced", acquired.replaced[0], text)
    if any(not task.released for task in record.tasks.values()):
        text = "is published: no task of this key is in one of its states and within its window"
        return Verdict("created", None, text)
    return Verdict("created", None, "is published: its key is free")


def running_processes(app_state: AppState, locks: Iterable[LockView]) -> dict[str, int]:
    """Task id -> the process that runs it, of workers that reply within a second.

    A delivery is named after the worker's main process; only the worker knows the process of its
    pool.
    """
    found: dict[str, int] = {}
    for lock in locks:
        if lock.state == "active" and lock.entry.delivery_lease > lock.now:
            process = process_of(app_state.app, lock.worker, lock.task_id)
            if process is not None:
                found[lock.task_id] = process
    return found


_STALE = "yes"


def why_stale(app_state: AppState, locks: Iterable[LockView]) -> dict[str, str]:
    """Task id -> why its lock is stale, or why that is not known, by the rule that a duplicate
    applies. Only of tasks that have waited for so long."""
    check_after_ms = milliseconds(app_state.settings.check_after)
    waiting = [
        lock
        for lock in locks
        if lock.state in ("available", "retryable")
        and lock.now - max(lock.entry.created_at, lock.entry.eta) > check_after_ms
    ]
    if not waiting:
        return {}
    found = {}
    try:
        for missing in missing_messages(app_state, waiting, timeout_s=1.0):
            text = missing.unless and f"its message was not found, but {missing.unless}"
            proven = f"{_STALE}: {missing.why}. The next call releases it"
            found[missing.lock.task_id] = text or proven
    except NoAnswer as error:
        return {lock.task_id: f"unknown: {error}" for lock in waiting}
    return found


def beside_stale(explanation: Explanation, stale: Mapping[str, str]) -> Explanation:
    """The same, where a call that is made now releases the key of a stale holder.
    ``stale``: of ``why_stale``."""
    verdict = explanation.verdict
    if verdict is None or verdict.outcome not in ("deduplicated", "rejected"):
        return explanation
    if not stale.get(verdict.task_id or "", "").startswith(_STALE):
        return explanation
    text = "releases the key of a stale holder, and is published"
    return replace(explanation, verdict=Verdict("created", verdict.task_id, text))


# -- in words ----------------------------------------------------------------------------

_MEANS = {
    "pending": "its caller holds the lock and has not yet confirmed the publish",
    "scheduled": "published, and waits for its ETA",
    "available": "published, and waits for a worker",
    "active": "running",
    "retryable": "waits for its retry",
    "completed": "has succeeded, and is remembered",
    "discarded": "has failed, and is remembered",
    "cancelled": "was revoked, and is remembered",
    "released": "its key was released manually: it blocks no call",
}

_MARKS = {
    "superseded": "another call replaced it before it started; it never runs",
    "withdrawn": "its publish failed and was withdrawn; if its message exists, it is dropped",
    "revoked": "it was revoked before it started; it does not run",
    "done": "it has finished; a second message of it is dropped",
}


def meaning(lock: LockView) -> str:
    """The state in words."""
    entry = lock.entry
    if entry.by:
        return "in limbo: another call is about to replace it"
    if entry.after and lock.state in ("pending", "available", "scheduled"):
        return "published, and held back until the task that it comes after has finished"
    if entry.ending:
        return f"its body has finished ({lock.state}), and its result is being stored"
    if is_abandoned(lock):
        return "started, but its worker has not renewed its delivery lease"
    guards = "; a second delivery of this task waits" if lock.guards else ""
    return _MEANS[lock.state] + guards


def mark_meaning(kind: str) -> str:
    return _MARKS.get(kind, kind)


def is_abandoned(lock: LockView) -> bool:
    """Whether the delivery that runs it is believed dead."""
    entry = lock.entry
    return bool(entry.delivery) and 0 < entry.delivery_lease <= lock.now and not entry.released


def freed_by(lock: LockView) -> list[str]:
    """The events that free the key of this task, in words without times."""
    state = lock.state
    if state == "released":
        return ["nothing to free: the next call is admitted"]
    if lock.entry.terminal and not lock.entry.ending:
        return ["the end of its window or retention, which is the end of its lease"]
    if state == "pending":
        return [
            "the end of the task, once it is published",
            "the end of its lease (the publish grace), if its caller has died",
        ]
    if is_abandoned(lock):
        return ["the end of its lease, unless its message is delivered again: then it runs again"]
    if state == "active" or lock.entry.ending:
        return [
            "the end of the task, however it ends",
            "the end of its lease, if its worker dies and its message is not delivered again",
        ]
    return [
        "the end of the task, however it ends",
        "revoking it",
        "the end of its lease, if its message is lost (a purged queue)",
    ]
