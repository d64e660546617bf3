"""Tasks for tests in which something dies: each body tells what it sees, and waits for a word."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

from celery import Celery, Task
from kombu.asynchronous import Hub
from kombu.transport import redis as redis_transport

import celery_unique
from celery_unique.config import leases
from celery_unique.stores import circuit_breaker as breaker
from tests.support.props import Props

Define = Callable[..., Any]


CONF: dict[str, Any] = {
    "unique_run_lease": 2,
    "broker_connection_timeout": 1,
    "task_publish_retry_policy": {"max_retries": 0},
    "worker_prefetch_multiplier": 4,
}


def prepare(
    *, restore_margin_s: float | None = None, breaker_s: float | None = None, **settings: Any
) -> dict[str, Any]:
    """The settings alone. ``restore_margin_s`` allows a queue lease that is shorter than Redis'
    restoring of messages, so that a test can see it lapse; ``breaker_s`` is how long the circuit
    of an unavailable store stays open.
    """
    if breaker_s is not None:
        breaker.OPEN_FOR_S = breaker_s
    if restore_margin_s is not None:
        leases.RESTORE_MARGIN_S = restore_margin_s  # type: ignore[assignment]
    if "broker_transport_options" in settings:
        _look_often()
    return settings


def define(app: Celery, task: Define, props: Props) -> None:
    _holding(task, props)
    _others(task, props)
    _links(task, props)
    _parents(task, props)


def redis_broker_options(visibility_timeout_s: float) -> dict[str, Any]:
    """Redis as a broker that redelivers soon: kombu looks twice a second (`_look_often`)."""
    return {
        "visibility_timeout": visibility_timeout_s,
        "unacked_restore_interval": 0.5,
        "unacked_restore_throttle": 1,
        # A worker that is killed while it restores messages keeps others from that until then.
        "unacked_mutex_expire": 2,
    }


def _look_often() -> None:
    """The options above are new in kombu 5.7: before, it looks every hundred seconds."""
    if hasattr(redis_transport.Channel, "unacked_restore_interval"):
        return
    restore_visible = redis_transport.QoS.restore_visible
    call_repeatedly = Hub.call_repeatedly

    def restore_always(self: Any, start: int = 0, num: int = 10, interval: int = 10) -> Any:
        return restore_visible(self, start, num, 1)

    def repeat_often(self: Any, delay: float, callback: Any, *args: Any) -> Any:
        often = getattr(callback, "__name__", "") == "maybe_restore_messages"
        return call_repeatedly(self, 0.5 if often else delay, callback, *args)

    redis_transport.QoS.restore_visible = restore_always
    Hub.call_repeatedly = repeat_often


def _no_key(argument: Any) -> str:
    raise LookupError(argument)


def _begin(task: Task, props: Props, tag: str) -> None:
    unique = task.request.unique
    props.note(
        tag,
        "begin",
        id=task.request.id,
        retries=task.request.retries,
        worker=task.request.hostname,
        token=unique.token if unique else None,
    )
    props.enter(tag)


def _end(task: Task, props: Props, tag: str) -> None:
    unique = task.request.unique
    try:
        still_mine = unique.still_mine() if unique else None
    except celery_unique.StoreUnavailable:
        still_mine = None
    props.note(tag, "end", id=task.request.id, still_mine=still_mine)


def _holding(define: Define, props: Props) -> None:
    def hold(self: Task, tag: str) -> str:
        _begin(self, props, tag)
        props.wait_for_word(tag)
        _end(self, props, tag)
        return tag

    define(hold, name="hold", bind=True, unique=True)
    define(hold, name="hold_late", bind=True, unique=True, acks_late=True)
    define(hold, name="hold_plain", bind=True)
    define(hold, name="guarded", bind=True, unique_guard=True)
    define(hold, name="guarded_late", bind=True, unique_guard=True, acks_late=True)

    def quick(self: Task, tag: str) -> str:
        _begin(self, props, tag)
        return tag

    define(quick, name="quick", bind=True, unique=True)
    define(quick, name="quick_late", bind=True, unique=True, acks_late=True)
    define(quick, name="quick_plain", bind=True)
    define(quick, name="guarded_quick", bind=True, unique_guard=True)
    define(quick, name="limited", bind=True, unique=True, rate_limit="1/h")

    def hold_first(self: Task, tag: str) -> str:
        """Waits in its first run only: the second is for after a crash."""
        _begin(self, props, tag)
        if props.runs(tag) == 1:
            props.wait_for_word(tag)
        return tag

    define(hold_first, name="hold_first", bind=True, unique=True, acks_late=True)
    define(hold_first, name="guarded_first", bind=True, unique_guard=True, acks_late=True)


def _parents(define: Define, props: Props) -> None:
    @define(name="child", bind=True)
    def child(self: Task, tag: str, number: int) -> None:
        props.note(tag, "child", id=self.request.id)

    @define(name="parent", bind=True, acks_late=True)
    def parent(self: Task, tag: str, retries: int) -> None:
        """Calls two children. Its first run waits afterwards, unless it is to be retried."""
        for number in range(2):
            called = self.app.tasks["child"].apply_async(
                (tag, number), idempotency_key=f"part {number}", idempotency_scope="run"
            )
            props.note(tag, "called", id=called.id, outcome=called.outcome)
        _begin(self, props, tag)
        if self.request.retries < retries:
            raise self.retry(countdown=0)
        if not retries and props.runs(tag) == 1:
            props.wait_for_word(tag)


class WaitsAfterwards(Task):
    """The key is given back with the end of the body; Celery's request lives on."""

    abstract = True

    def on_success(self, retval: Any, task_id: str, args: Any, kwargs: Any) -> None:
        self.app.props.note(args[0], "afterwards", id=task_id)
        self.app.props.wait_for_word(args[0])


def _others(define: Define, props: Props) -> None:
    @define(name="retry_once", bind=True, unique=True)
    def retry_once(self: Task, tag: str, countdown: float) -> str:
        _begin(self, props, tag)
        if self.request.retries == 0:
            raise self.retry(countdown=countdown)
        return tag

    @define(name="retry_when_told", bind=True, unique=True)
    def retry_when_told(self: Task, tag: str, countdown: float) -> str:
        _begin(self, props, tag)
        if self.request.retries == 0:
            props.wait_for_word(tag)
            raise self.retry(countdown=countdown)
        return tag

    @define(name="call_itself", bind=True, unique=True)
    def call_itself(self: Task, tag: str) -> str:
        _begin(self, props, tag)
        if props.runs(tag) == 1:
            props.note(tag, "called", id=self.delay(tag).id)
            props.wait_for_word(tag)
        return tag

    @define(name="wait_afterwards", bind=True, unique=True, base=WaitsAfterwards)
    def wait_afterwards(self: Task, tag: str) -> str:
        _begin(self, props, tag)
        return tag

    @define(name="leave", bind=True, unique=True)
    def leave(self: Task, tag: str) -> None:
        _begin(self, props, tag)
        raise SystemExit(tag)


def _links(define: Define, props: Props) -> None:
    """The links of chains, callbacks and chords, and what hears of their failures."""

    @define(name="first")
    def first(tag: str) -> str:
        return tag

    @define(name="fails")
    def fails(tag: str) -> None:
        raise ValueError(tag)

    @define(name="is_killed")
    def is_killed(tag: str) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    @define(name="link", bind=True, unique=True, unique_on_conflict="reject")
    def link(self: Task, tag: str) -> str:
        _begin(self, props, tag)
        return tag

    @define(name="link_of_many", bind=True, unique=True, unique_on_conflict="reject")
    def link_of_many(self: Task, tags: list[str]) -> str:
        _begin(self, props, tags[0])
        return tags[0]

    @define(
        name="link_after_failure",
        bind=True,
        unique=True,
        unique_on="tag",
        unique_on_conflict="reject",
    )
    def link_after_failure(self: Task, failed_id: str, tag: str) -> str:
        _begin(self, props, tag)
        return tag

    for name in ("keyless", "keyless_of_many"):

        @define(name=name, unique=True, unique_key=_no_key)
        def keyless(argument: Any) -> Any:
            return argument

    @define(name="errback")
    def errback(failed_id: str) -> str:
        # One argument: with more, Celery would call it in place of publishing it.
        props.note("everybody", "errback", id=failed_id)
        return failed_id
