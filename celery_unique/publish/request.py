"""``PublishRequest``: one unique call, with its key, its leases and how it is sent."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from contextvars import ContextVar
from copy import copy
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import celery
from celery._state import _task_stack
from celery.app.task import Context
from celery.utils import uuid
from celery.utils.saferepr import saferepr
from kombu.exceptions import OperationalError

from celery_unique.config.app_state import AppState
from celery_unique.config.leases import delay_ms, expires_ms, publish_retry_ms
from celery_unique.exceptions import CeleryUniqueError, InvalidPolicy
from celery_unique.followers.call import FollowerCall, encoded
from celery_unique.header import HEADER, LockHeader
from celery_unique.keys.arguments import visible_arguments
from celery_unique.keys.call import Call
from celery_unique.keys.identity import identify, policy_for, with_key
from celery_unique.keys.merge import merged_values
from celery_unique.keys.unique_key import text_for_operators
from celery_unique.policy.durations import milliseconds
from celery_unique.policy.policy import UniquePolicy, warn_of_short_window
from celery_unique.stores.base import Acquired, Claim
from celery_unique.stores.record import (
    ID_GIVEN,
    OTHER_BROKER,
    QUEUE_NAMED,
    letters,
    packed_label,
    terminal_letters,
)

from .results import CallOutcome

if TYPE_CHECKING:
    from .coordinator import UniqueTaskCoordinator

logger = logging.getLogger("celery_unique")

#: Celery's ``send_task``, or what runs an eager call in its place.
SendTask = Callable[..., Any]

#: Since Celery 5.7 a call by name is published with the queue and the expiry of its task.
BY_NAME_AS_BY_TASK = celery.VERSION[:2] >= (5, 7)

#: The running tasks of each thread. It is empty in a process that runs none, where Celery takes two
#: exceptions to find that out.
_RUNNING: Any = getattr(getattr(_task_stack, "_local", None), "__storage__", True)

#: Options under which another task or process waits for the very id of the call.
CANVAS = ("chord", "group_id", "chain")
_AWAITED_BY = (*CANVAS, "link", "link_error")


@dataclass(slots=True)
class PublishRequest:
    """One call on its way to the broker."""

    app_state: AppState
    send_task: SendTask
    task_name: str
    args: Any
    kwargs: Any
    options: Mapping[str, Any]
    #: Empty until it is needed (``identify``): a duplicate mostly needs none.
    task_id: str
    #: Empty: the call is not unique, and is here for ``apply_many`` only.
    key: str = ""
    policy: UniquePolicy = None  # type: ignore[assignment]  # only where key is empty
    grace_ms: int = 0
    lease_ms: int = 0  # from the ETA, once the message is published
    delay_ms: int = 0
    #: Fingerprint of the arguments of a call with an idempotency key; empty for any other.
    arguments: str = ""
    keep_ms: int = 0
    #: The task in whose body the call is made.
    parent: Any = None
    #: Where the lock is, for the header of the message: the store's fingerprint.
    store: str = ""
    namespace: str = ""
    #: A canvas, callbacks or the caller wait for this very id.
    awaited: bool = False
    #: The call in a form that a worker can publish or complete, where its id is awaited.
    follower: FollowerCall | None = None
    #: ``follower`` as text, stored with the lock if the call joins the holder.
    join: str = ""
    #: A canvas or a callback waits for the id: the call follows what replaces it.
    canvas: bool = False
    #: A text for operators.
    label: str = ""
    #: The call itself names its queue, not its task or the routes.
    queue_named: bool = False
    #: The connection of kombu that the call itself names; None for one of the app's.
    connection: Any = None
    #: That leads to another broker than the app's.
    other_broker: bool = False
    #: The producer and the result that ``apply_many`` provides.
    batch_options: Mapping[str, Any] = field(default_factory=dict)
    #: Runs the task in this process instead of publishing it: an eager call.
    run: Callable[[str, LockHeader | None], Any] | None = None
    #: The publish that the store was handed and has not replied to: the call may be published.
    attempt: str = ""
    #: In a dry run: the strategy of the call, whose policy is then to reject, since that changes
    #: nothing in the store. Empty: it is none.
    dry_run: str = ""
    #: The values that the holder's run gets if the call is merged, as JSON.
    merge: str = ""
    #: They may have been merged: a claim that is repeated must not merge them twice.
    may_be_merged: bool = False
    #: Whether the call is made without a lock, given the id of the holder.
    bypasses: Callable[[str], bool] | None = None

    @property
    def parent_id(self) -> str | None:
        return None if self.parent is None else self.parent.id

    def identify(self) -> str:
        """The id of the call, which is made here unless the caller has chosen one."""
        if not self.task_id:
            self.task_id = uuid()
        return self.task_id

    def send(
        self,
        task_id: str,
        header: LockHeader | dict[str, Any] | None,
        delay: Any,
        *,
        in_trail: bool = True,
    ) -> Any:
        """Publish the message under this id and return Celery's result.

        ``delay`` in ms replaces the ETA of the call; None keeps it. ``in_trail``: Celery adds the
        result to the children of the running task.
        """
        if self.run is not None:
            assert not isinstance(header, dict)
            return self.run(task_id, header)
        options = {**self.options, **self.batch_options, "task_id": task_id}
        if not in_trail:
            options["add_to_parent"] = False
        if delay is not None:
            options.update(eta=None, countdown=delay / 1000 if delay else None)
        if header is not None:
            packed = header if isinstance(header, dict) else header.as_message()
            options["headers"] = {**(options.get("headers") or {}), HEADER: packed}
            if self.app_state.sends_sent_events:
                options.setdefault("event_dispatcher", SentEvent(self.app_state.app, self.key))
        return self.send_task(self.task_name, self.args, self.kwargs, **options)

    def claim(self) -> Claim:
        """The arguments of ``store.acquire``."""
        policy, parent = self.policy, self.parent
        terms = terms_of(policy)
        keep = terms.keep
        if self.awaited or self.queue_named or self.other_broker:
            keep += ID_GIVEN * self.awaited + QUEUE_NAMED * self.queue_named
            keep += OTHER_BROKER * self.other_broker
        if self.label:
            keep += packed_label(self.label)
        claim = Claim(
            self.task_id,
            self.task_name,
            terms.states,
            self.grace_ms,
            policy.on_conflict,
            "" if parent is None else parent.id or "",
            terms.max_wait_ms,
            terms.window_ms,
            self.delay_ms,
            keep,
            keep_ms=self.keep_ms,
            arguments=self.arguments,
            join=self.join,
            canvas=self.canvas,
            limit=policy.limit,
            max_queue=policy.max_queue or 0,
        )
        if self.merge:
            claim.merge, claim.merge_max_bytes = self.merge, policy.merge_max_bytes
            claim.again = self.may_be_merged
        return claim

    def header(self, task_id: str, created_at: int = 0, outcome: str = "created") -> LockHeader:
        """What the message records of its lock, for the worker."""
        terms = terms_of(self.policy)
        return LockHeader(
            task_id=task_id,
            key=self.key,
            namespace=self.namespace,
            store=self.store,
            created_at=created_at,
            window_ms=self.keep_ms or terms.window_ms,
            keep=terms.keep,
            arguments=self.arguments,
            outcome="" if outcome == "created" else outcome,
            copies=bool(self.attempt),
            merge=bool(self.merge),
        )

    def changed_delay(self, acquired: Acquired) -> int | None:
        """The delay that the store has decided on, where it is not the call's own: that of
        the task it replaces, or one that no longer postpones it."""
        delay_ms = max(0, acquired.eta - acquired.now) if acquired.eta else 0
        return delay_ms if delay_ms != self.delay_ms else None


@dataclass(slots=True)
class PublishOutcome:
    """What became of a call: the id to wait for, the facts, and Celery's result if published."""

    task_id: str
    facts: CallOutcome
    result: Any = None
    #: Tasks that this one replaced, and whose id nothing else waits for: they have ended.
    superseded: tuple[str, ...] = ()
    #: The holder that the call follows under its own id.
    follows: str = ""
    #: That holder has ended: only the caller can complete the call.
    ended: bool = False


def _always(_holder_id: str) -> bool:
    return True


class Terms(NamedTuple):
    """What a policy contributes to each claim and header."""

    states: str  # letters of those in which another task is in the way
    keep: str  # letters of those in which this one stays recorded after its end
    window_ms: int
    max_wait_ms: int


def terms_of(policy: UniquePolicy) -> Terms:
    """Derived once: a lookup by the policy would compute its hash for each call."""
    terms: Terms | None = getattr(policy, "terms", None)
    if terms is None:
        states = letters(policy.states)
        terms = Terms(
            states,
            terminal_letters(states),
            milliseconds(policy.period) if policy.period else 0,
            milliseconds(policy.max_wait) if policy.max_wait else 0,
        )
        object.__setattr__(policy, "terms", terms)
    return terms


@lru_cache(maxsize=1024)
def rejecting(policy: UniquePolicy) -> UniquePolicy:
    """The same policy, whose calls neither change nor add to what the store holds of others."""
    changed = copy(policy)
    for name in ("max_wait", "max_queue", "merge"):
        object.__setattr__(changed, name, None)
    object.__setattr__(changed, "on_conflict", "reject")
    return changed


class SentEvent:
    """Celery's dispatcher of ``task-sent`` events, adding the key of one unique message."""

    def __init__(self, app: Any, key: str) -> None:
        self._app = app
        self._key = key

    def publish(self, type_: str, fields: dict[str, Any], producer: Any, **options: Any) -> None:
        from celery_unique.worker.monitor_events import shown_as_unique

        fields = {"result": shown_as_unique(self._key), **fields}
        self._app.amqp._event_dispatcher.publish(type_, fields, producer, **options)

    def publish_parked(self, call: FollowerCall, position: int) -> None:
        """Monitors show a parked call before its turn, as they show one that waits in a queue."""
        from celery_unique.worker.monitor_events import shown_as_unique

        options = call.options
        fields = {name: options.get(name) for name in ("root_id", "parent_id", "eta", "expires")}
        fields |= {
            "uuid": call.task_id,
            "name": call.name,
            "args": options.get("argsrepr") or saferepr(call.args),
            "kwargs": options.get("kwargsrepr") or saferepr(call.kwargs),
            "retries": 0,
            "result": f"{shown_as_unique(self._key)}, parked at position {position}",
        }
        try:
            with (
                self._app.producer_or_acquire() as producer,
                producer.connection._reraise_as_library_errors(),
            ):
                self.publish("task-sent", fields, producer, retry=False)
        except (OperationalError, OSError) as error:  # the call is parked anyway
            logger.warning("monitors miss parked %s[%s]: %s", call.name, call.task_id, error)


# -- calls that apply_many publishes together -----------------------------------------

#: Set by ``apply_many``, and only ever in a copied context: the calls to publish later, each
#: with its result.
collected: ContextVar[list[tuple[PublishRequest, Any]] | None] = ContextVar(
    "collected", default=None
)


# -- from a call to its request ---------------------------------------------------------


def policy_of(
    app_state: AppState, name: str, task: Any, unique_options: Mapping[str, Any]
) -> tuple[UniquePolicy | None, Any]:
    """The policy of the call and the signature of its task; None: it is not unique, or no call
    is (``unique_enabled``)."""
    if name.startswith("celery."):
        if unique_options:
            raise InvalidPolicy(
                f"{name} is one of Celery's own tasks, which are never unique: "
                f"call it without {', '.join(unique_options)}.",
                field=next(iter(unique_options)),
            )
        return None, None
    settings = app_state.settings
    if not settings.enabled:
        return None, None
    defaults = settings.app_defaults
    if not unique_options:
        policy, signature = app_state.policies.of(name, task, unique_options, defaults)
        if policy is None or policy.identity_strategy == "strict":
            return policy, signature
    else:
        policy, signature = app_state.policies.of(name, task, with_key(unique_options), defaults)
    return policy_for(policy, name, unique_options), signature


def prepare(
    request: PublishRequest,
    task: Any,
    policy: UniquePolicy,
    signature: Any,
    unique_options: Mapping[str, Any],
    coordinator: UniqueTaskCoordinator,
) -> None:
    """Add leases and key to the request of a call that is unique by ``policy``."""
    app_state, name, options = request.app_state, request.task_name, request.options
    settings, leases = coordinator.settings, coordinator.leases
    sent_options = as_sent(task, options)
    request.namespace, request.store = settings.namespace, coordinator.fingerprint
    request.lease_ms, request.grace_ms = leases.queue_ms, leases.grace_ms
    if options.get("countdown") or options.get("eta"):
        request.delay_ms = delay_ms(app_state.app, options)
        if policy.period is not None and request.delay_ms > milliseconds(policy.period):
            warn_of_short_window(name, policy.period, request.delay_ms)
    if sent_options.get("expires") is not None:
        expires = expires_ms(app_state.app, sent_options)
        request.lease_ms = leases.waiting_ms(request.delay_ms, expires)
    if options.get("retry_policy"):
        retry_ms = publish_retry_ms(options["retry_policy"], app_state.app.conf)
        request.grace_ms = max(leases.grace_ms, retry_ms)
    request.parent = parent = current_request(app_state)
    if parent is not None and parent.id == request.task_id and "retries" in options:
        request.bypasses = _always  # the retry of a task that runs without a lock
    request.queue_named = _names_queue(task, options)
    request.connection = connection = _connection_of(options)
    request.other_broker = connection is not None and address_of(connection) != coordinator.broker
    request.awaited = options.get("task_id") is not None or is_in_canvas(options)
    request.policy = policy
    if settings.dry_run:
        request.dry_run, request.policy = policy.on_conflict, rejecting(policy)
    queue = ""
    if "queue" in policy.keys:
        queue = queue_of(app_state, name, request.args, request.kwargs, task, sent_options)
    call = Call(
        name,
        tuple(request.args or ()),
        request.kwargs or {},
        signature,
        queue,
        _meta(parent, policy.meta_keys, options) if policy.meta_keys else {},
        unique_options.get("idempotency_key"),
        parent.id if parent is not None else None,
    )
    ttl = unique_options.get("idempotency_ttl")
    scope = unique_options.get("idempotency_scope", settings.idempotency_scope)
    identity = identify(call, policy, settings.key_secret, scope, ttl)
    request.key, request.arguments = identity.key, identity.arguments
    request.keep_ms = identity.keep_ms
    if policy.label:
        request.label = text_for_operators(policy.label, visible_arguments(call))
    if request.policy.merge:
        if settings.conceal_holder:
            raise InvalidPolicy(
                f"{name}: unique_on_conflict='merge' returns the id of the task that runs with the "
                "values of the call, which unique_conceal_holder=True conceals: use only one of "
                "them",
                field="on_conflict",
            )
        request.merge = merged_values(call, request.policy.merge)
        if settings.follower_codec is not None:
            request.merge = json.dumps(encoded(settings.follower_codec, request.merge))
        request.identify()  # its values are stored under its id


def registered(app: Any, name: str) -> Any:
    """The task of this name, or None where this process has no code of it.

    Celery creates tasks on the first use of one of them, and a call by name may be the first
    use of an app: without its task the call would not be unique. Another thread may be
    creating them: finalizing again waits for that.
    """
    task = app._tasks.get(name)
    if task is None and (app.finalized or app.autofinalize):
        # A task that was refused has been logged, and raises at its own calls.
        with suppress(CeleryUniqueError):
            app.finalize(auto=True)
        task = app._tasks.get(name)
    return task


def current_request(app_state: AppState) -> Any:
    """Celery's request of the task that runs in this thread, or None."""
    if not _RUNNING:
        return None
    task = app_state.app.current_worker_task
    return task.request if task is not None else None


def is_in_canvas(options: Mapping[str, Any]) -> bool:
    """Whether the rest of a canvas, or callbacks, depend on this very id."""
    return any(map(options.get, _AWAITED_BY))


def _names_queue(task: Any, options: Mapping[str, Any]) -> bool:
    """Whether the call says where its message goes. The options of a call of the task include
    those of the task itself."""
    for name in ("queue", "exchange", "routing_key"):
        given = options.get(name)
        if given is not None and given != getattr(task, name, None):
            return True
    return "router" in options and options["router"] is not None


def _connection_of(options: Mapping[str, Any]) -> Any:
    """The connection of kombu that the call is published through; None for one of the app's."""
    given = options.get("producer") or options.get("publisher")
    return options.get("connection") if given is None else given.connection


def address_of(connection: Any) -> tuple[Any, ...]:
    """The broker that a connection of kombu leads to, or all that it may fail over to."""
    if connection.alt:
        return tuple(connection.alt)
    info = connection.info()
    return tuple(info[name] for name in ("transport", "hostname", "port", "virtual_host"))


def as_sent(task: Any, options: Mapping[str, Any]) -> Mapping[str, Any]:
    """The options of the message: the call's, then those of the task itself.

    A call of the task includes them already; Celery adds them to a call by name, if at all.
    """
    if task is None or "task_type" in options or not BY_NAME_AS_BY_TASK:
        return options
    own = {name: value for name, value in task._get_exec_options().items() if value is not None}
    return {**own, **options}


def queue_of(
    app_state: AppState, name: str, args: Any, kwargs: Any, task: Any, options: Mapping[str, Any]
) -> str:
    """The queue that the router chooses."""
    router = options.get("router") or app_state.app.amqp.router
    route = router.route(dict(options), options.get("route_name") or name, args, kwargs, task)
    queue = route.get("queue")
    if queue is not None:
        return str(getattr(queue, "name", queue))
    exchange = route.get("exchange")
    return f"{getattr(exchange, 'name', exchange) or ''}/{route.get('routing_key') or ''}"


#: Attributes of a request that are not headers of the user.
_NAMES_OF_CELERY = {*vars(Context), "argsrepr", "compression", "kwargsrepr", "lang", "task"}


def _meta(parent: Any, names: tuple[str, ...], options: Mapping[str, Any]) -> dict[str, Any]:
    """The named headers: from the call, its stamps, then the request of the running task."""
    given = options.get("stamped_headers") or ()
    layers = [
        options.get("headers") or {},
        {name: options[name] for name in given if name in options},
    ]
    if parent is not None:
        # Celery's ``request.headers`` has only what is in a header named ``headers``, where a
        # tracing library has added one: the others are attributes of the request.
        own = {n: value for n, value in vars(parent).items() if n not in _NAMES_OF_CELERY}
        layers += [{**(parent.headers or {}), **own}, parent.stamps or {}]
    found: dict[str, Any] = {}
    for name in names:
        for layer in layers:
            if name in layer:
                found[name] = layer[name]
                break
    return found
