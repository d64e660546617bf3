"""One call on its way to the broker as plain values: what it asks for, and what became of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

import celery
from celery import states
from celery.app.task import Context
from celery.utils import uuid

from celery_unique import reporting
from celery_unique.config.app_state import AppState
from celery_unique.config.leases import Leases, delay_ms, expires_ms, publish_retry_ms
from celery_unique.exceptions import (
    CeleryUniqueError,
    DuplicateTask,
    InvalidPolicy,
    StoreUnavailable,
)
from celery_unique.followers.call import FollowerCall
from celery_unique.followers.complete import Outcome, complete, stored_outcome
from celery_unique.followers.continuations import continues
from celery_unique.header import HEADER, LockHeader
from celery_unique.keys.call import Call
from celery_unique.keys.identity import Identity, identify, policy_for, with_key
from celery_unique.policy.durations import milliseconds
from celery_unique.policy.option_names import LEFT_OVER
from celery_unique.policy.policy import UniquePolicy, warn_of_short_window
from celery_unique.policy.task_options import warn_of_left_over
from celery_unique.stores.base import Acquired, Claim, Confirmed
from celery_unique.stores.record import QUEUE_NAMED, letters, terminal_letters

from .conflicts import mark_superseded
from .overlapped_acquire import Admit, AwaitedHeader
from .results import CallOutcome, with_facts


def never(_holder_id: str) -> bool:
    return False


def always(_holder_id: str) -> bool:
    return True


@dataclass(slots=True)
class Attempt:
    """One call on its way to the broker, with its key."""

    task_name: str
    task_id: str
    key: str
    policy: UniquePolicy
    grace_ms: int
    lease_ms: int  # from the ETA, once the message is published
    delay_ms: int = 0
    #: Of a call that brings its own key, and of no other.
    arguments: str = ""
    keep_ms: int = 0
    #: The task in whose body the call is made.
    parent_id: str | None = None
    #: The call as text, to be kept with the lock: a duplicate then follows the holder under
    #: its own id, which somebody waits for (a canvas, a callback), instead of getting another's.
    join: str = ""
    #: A canvas or a callback waits for its id: whatever takes its place before it runs is followed.
    canvas: bool = False
    #: Somebody waits for this very id, or for a reply to it: its message is no other task's.
    own_life: bool = False
    #: Told who holds its key: whether the call is carried out all the same, without a lock.
    bypasses: Callable[[str], bool] = never
    #: Carried out on the spot, and not published.
    eager: bool = False
    #: The call said itself where its message goes, and not its task or the routes.
    queue_named: bool = False
    #: Sent while Celery finishes a task: an error here would turn that task into FAILURE.
    continues: bool = False


#: Publishes the message under this id, with this header and this delay in ms (None: as the
#: call asked), and returns Celery's result.
Send = Callable[[str, LockHeader | None, int | None], Any]

#: As Send, for a message that is made while the store is asked for its lock: waits for the
#: header before anything is sent, and lets through what is raised in its place.
SendWhen = Callable[[str, Callable[[], LockHeader]], Any]

#: ``begin_acquire`` of a store.
Begin = Callable[[str, Claim], Callable[[], Acquired]]

#: ``begin_acquire_many`` of a store.
BeginMany = Callable[
    [list[tuple[str, Claim]], list[Confirmed]], Callable[[], list[Acquired | StoreUnavailable]]
]


@dataclass(slots=True)
class PublishOutcome:
    """What became of a call: the id to ask for, the facts, and Celery's result if published."""

    task_id: str
    facts: CallOutcome
    result: Any = None
    #: Tasks whose place this one took, and whose id nobody else waits for: they have ended.
    superseded: tuple[str, ...] = ()
    #: The task that the call follows: it keeps its own id, and gets that task's outcome.
    follows: str = ""
    #: That task has ended: nobody but the caller will complete the call.
    ended: bool = False


def claim_of(attempt: Attempt) -> Claim:
    """What the store is asked for."""
    policy = attempt.policy
    states = letters(policy.states)
    return Claim(
        task_id=attempt.task_id,
        task_name=attempt.task_name,
        states=states,
        grace_ms=attempt.grace_ms,
        on_conflict=policy.on_conflict,
        parent=attempt.parent_id or "",
        max_wait_ms=milliseconds(policy.max_wait) if policy.max_wait else 0,
        window_ms=window_ms(policy),
        delay_ms=attempt.delay_ms,
        keep=terminal_letters(states) + QUEUE_NAMED * attempt.queue_named,
        keep_ms=attempt.keep_ms,
        arguments=attempt.arguments,
        join=attempt.join,
        canvas=attempt.canvas,
    )


def confirmed_of(attempts: list[Attempt]) -> list[Confirmed]:
    """What the store is told once their messages are out."""
    return [(attempt.key, attempt.task_id, attempt.lease_ms) for attempt in attempts]


def window_ms(policy: UniquePolicy) -> int:
    return milliseconds(policy.period) if policy.period else 0


def changed_delay(attempt: Attempt, acquired: Acquired) -> int | None:
    """The delay that the store has decided on, where it is not the call's own: that of
    the task it replaces, or one that no longer postpones it."""
    delay_ms = max(0, acquired.eta - acquired.now) if acquired.eta else 0
    return delay_ms if delay_ms != attempt.delay_ms else None


#: Where calls are collected instead of sent, to be sent together, each with its result. It is
#: only ever set in a copied context: see ``batches``.
collected: ContextVar[list[tuple[Outgoing, Any]] | None] = ContextVar("collected", default=None)


@dataclass(slots=True)
class Outgoing:
    app_state: AppState
    original: SendTask
    name: str
    args: Any
    kwargs: Any
    options: Mapping[str, Any]
    #: None: the call is not unique.
    attempt: Attempt | None = None
    #: The call as others could send or complete it, where somebody may wait for its id.
    follower: FollowerCall | None = None
    has_own_life: bool = False

    def send(self, task_id: str, header: LockHeader | None, delay: int | None, **more: Any) -> Any:
        """``more``: options that this call was not made with."""
        options = {**self.options, **more, "task_id": task_id}
        if delay is not None:
            options.update(eta=None, countdown=delay / 1000 if delay else None)
        if header is not None:
            options["headers"] = {**(options.get("headers") or {}), HEADER: header.as_message()}
        return self.original(self.name, self.args, self.kwargs, **options)

    def send_when(self, task_id: str, admit: Admit) -> Any:
        """Have Celery make the message, and send it once it is admitted."""
        headers = {**(self.options.get("headers") or {}), HEADER: AwaitedHeader(admit)}
        options = {**self.options, "task_id": task_id, "headers": headers}
        return self.original(self.name, self.args, self.kwargs, **options)

    def conclude(self, published: PublishOutcome) -> Any:
        """The result for the caller, once it is known what became of the call."""
        for superseded in published.superseded:
            key = published.facts.unique_key or ""
            mark_superseded(self.app_state.app, superseded, published.task_id, self.options, key)
        if published.result is None:
            published = self._share_outcome(published)
        result = published.result
        if result is None:
            result = self._result_of(published.task_id)
        return with_facts(result, published.facts)

    def _share_outcome(self, published: PublishOutcome) -> PublishOutcome:
        """A duplicate: somebody completes it if it follows, and only the caller can if the
        task that does its work has ended."""
        assert self.attempt is not None
        if published.follows and not published.ended:
            self.app_state.joined_here(published.follows)
            return published
        holder_id = published.follows or published.task_id
        if self.follower is None or holder_id == self.attempt.task_id:
            return published
        outcome = stored_outcome(self.app_state.app, self.name, holder_id)
        if outcome is None and not self.has_own_life:
            return self._as_duplicate(published, holder_id)
        complete(self.app_state.app, self.follower, outcome or self._unknown(holder_id, published))
        facts = replace(published.facts, outcome="joined")
        return PublishOutcome(self.attempt.task_id, facts)

    def _as_duplicate(self, published: PublishOutcome, holder_id: str) -> PublishOutcome:
        """Only a result that is gone, as messages are, kept it from being a plain duplicate."""
        reporting.result_goes_to_another(self.name, holder_id)
        facts = replace(published.facts, outcome="deduplicated")
        return PublishOutcome(holder_id, facts)

    def _unknown(self, holder_id: str, published: PublishOutcome) -> Outcome:
        """Nobody knows the result that the rest of the canvas waits for: said, not guessed."""
        facts: CallOutcome = published.facts
        reason = "it has ended and its result is not stored, so that this call cannot share it"
        by_key = self.attempt is not None and bool(self.attempt.arguments)
        error = DuplicateTask(
            self.name, holder_id, facts.holder_state, reason, by_key, key=facts.unique_key
        )
        return Outcome(states.FAILURE, error)

    def _result_of(self, task_id: str) -> Any:
        app, options = self.app_state.app, self.options
        make = options.get("result_cls") or app.AsyncResult
        result = make(task_id)
        result.ignored = options.get("ignore_result")
        if options.get("add_to_parent", True):
            parent = app.current_worker_task
            if parent:
                parent.add_trail(result)
        return result


def collect(together: list[tuple[Outgoing, Any]], outgoing: Outgoing) -> Any:
    """Send it later, and return the result that will tell what became of it."""
    options = outgoing.options
    if outgoing.attempt is not None:
        task_id = outgoing.attempt.task_id
    else:
        task_id = options.get("task_id") or uuid()
        outgoing = replace(outgoing, options={**options, "task_id": task_id})
    result = (options.get("result_cls") or outgoing.app_state.app.AsyncResult)(task_id)
    together.append((outgoing, result))
    return result


SendTask = Callable[..., Any]


def current_request(app_state: AppState) -> Any:
    task = app_state.app.current_worker_task
    return task.request if task is not None else None


#: Attributes of a request that are no headers of the user's.
_NAMES_OF_CELERY = {*vars(Context), "argsrepr", "compression", "kwargsrepr", "lang", "task"}


def inherited_headers(request: Any) -> Mapping[str, Any]:
    """The headers of the message that the running task came with.

    Celery's ``request.headers`` has only what is in a header named ``headers``, where a tracing
    library has added one: the message's own headers are attributes of the request.
    """
    own = {name: value for name, value in vars(request).items() if name not in _NAMES_OF_CELERY}
    return {**(request.headers or {}), **own}


#: Since then a call by name goes out with the queue and the expiry of the task.
BY_NAME_AS_BY_TASK = celery.VERSION[:2] >= (5, 7)


def registered(app: Any, name: str) -> Any:
    """The task of this name, or None where this process has no code of it.

    Tasks come to be with the first use of one of them, so a call by name may be the
    first thing that happens to an app: without its task it would not be unique. It may
    also come while another thread makes them: finalizing again waits for that.
    """
    task = app._tasks.get(name)
    if task is None and (app.finalized or app.autofinalize):
        # A task that is refused was logged, and raises at its own calls.
        with suppress(CeleryUniqueError):
            app.finalize(auto=True)
        task = app._tasks.get(name)
    return task


def policy_of(
    app_state: AppState, name: str, task: Any, ours: Mapping[str, Any]
) -> tuple[UniquePolicy | None, Any]:
    if name.startswith("celery."):
        if ours:
            raise InvalidPolicy(
                f"{name} is one of Celery's own tasks, which are never unique: "
                f"call it without {', '.join(ours)}.",
                field=next(iter(ours)),
            )
        return None, None
    return app_state.policies.of(name, task, with_key(ours), app_state.settings.app_defaults)


# -- the call as the coordinator wants it -------------------------------------------


def prepare(
    app_state: AppState,
    name: str,
    task: Any,
    args: Any,
    kwargs: Any,
    ours: Mapping[str, Any],
    options: dict[str, Any],
) -> Attempt | None:
    """The call with its key; None where it is not unique."""
    policy, signature = policy_of(app_state, name, task, ours)
    policy = policy_for(policy, name, ours)
    if policy is None:
        return None
    call = Call(
        task_name=name,
        args=tuple(args or ()),
        kwargs=kwargs or {},
        signature=signature,
        queue=queue_of(app_state, name, args, kwargs, task, as_sent(task, options))
        if "queue" in policy.keys
        else "",
        meta=_meta(app_state, policy.meta_keys, options) if policy.meta_keys else {},
        idempotency_key=ours.get("idempotency_key"),
    )
    if not LEFT_OVER.keys().isdisjoint(options):
        warn_of_left_over(name, task, [option for option in LEFT_OVER if option in options])
    settings = app_state.settings
    identity = identify(
        call, policy, settings.key_secret, settings.idempotency_scope, ours.get("idempotency_ttl")
    )
    return _attempt(app_state, app_state.leases, name, task, identity, options)


def _attempt(
    app_state: AppState,
    leases: Leases,
    name: str,
    task: Any,
    identity: Identity,
    options: dict[str, Any],
) -> Attempt:
    app = app_state.app
    delay = delay_ms(app, options)
    period = identity.policy.period
    if delay and period is not None and delay > milliseconds(period):
        warn_of_short_window(name, period, delay)
    request = current_request(app_state)
    goes_on = continues(request)
    explicit_id = options.get("task_id")
    retry_policy = options.get("retry_policy")
    grace = leases.grace_ms
    if retry_policy:
        grace = max(grace, publish_retry_ms(retry_policy, app.conf))
    return Attempt(
        task_name=name,
        task_id=explicit_id or uuid(),
        key=identity.key,
        policy=identity.policy,
        grace_ms=grace,
        lease_ms=leases.waiting_ms(delay, expires_ms(app, as_sent(task, options))),
        delay_ms=delay,
        arguments=identity.arguments,
        keep_ms=identity.keep_ms,
        parent_id=request.id if request is not None else None,
        # The retry of a task that runs without a lock: it goes on as it began.
        bypasses=always
        if request is not None and request.id == explicit_id and "retries" in options
        else never,
        continues=goes_on,
        queue_named=_names_queue(task, options),
    )


def _names_queue(task: Any, options: Mapping[str, Any]) -> bool:
    """Whether the call says where its message goes. The options of a call of the task have what
    the task itself says in them."""
    for name in ("queue", "exchange", "routing_key"):
        given = options.get(name)
        if given is not None and given != getattr(task, name, None):
            return True
    return "router" in options and options["router"] is not None


def as_sent(task: Any, options: Mapping[str, Any]) -> Mapping[str, Any]:
    """The options that the message gets: the call's, then those of the task itself.

    A call of the task has them in it already; a call by name gets them in Celery, if at all.
    """
    if task is None or "task_type" in options or not BY_NAME_AS_BY_TASK:
        return options
    said = {name: value for name, value in task._get_exec_options().items() if value is not None}
    return {**said, **options}


def queue_of(
    app_state: AppState, name: str, args: Any, kwargs: Any, task: Any, options: Mapping[str, Any]
) -> str:
    """The queue that the router really chooses."""
    router = options.get("router") or app_state.app.amqp.router
    route = router.route(dict(options), options.get("route_name") or name, args, kwargs, task)
    queue = route.get("queue")
    if queue is not None:
        return str(getattr(queue, "name", queue))
    return f"{_name_of(route.get('exchange'))}/{route.get('routing_key') or ''}"


def _name_of(exchange: Any) -> str:
    return str(getattr(exchange, "name", exchange) or "")


def _meta(
    app_state: AppState, names: tuple[str, ...], options: Mapping[str, Any]
) -> dict[str, Any]:
    """The named headers: the call's, its stamps, then those of the current request."""
    headers = options.get("headers") or {}
    stamped = set(options.get("stamped_headers") or ())
    request = current_request(app_state)
    inherited = inherited_headers(request) if request is not None else {}
    stamps = (request.stamps if request is not None else None) or {}
    found: dict[str, Any] = {}
    for name in names:
        if name in headers:
            found[name] = headers[name]
        elif name in stamped and name in options:
            found[name] = options[name]
        elif name in inherited:
            found[name] = inherited[name]
        elif name in stamps:
            found[name] = stamps[name]
    return found
