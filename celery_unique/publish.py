"""The before-publish hook: ``app.send_task``, which every way of enqueueing passes."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import celery
from celery.utils import uuid

from .attempts import Attempt, always, never
from .calls import Call
from .continuations import continues, fail_link
from .exceptions import CeleryUniqueError, InvalidPolicy
from .going_on import (
    SendTask,
    current_request,
    inherited_headers,
    is_handed_over,
    is_sent_again,
    send_on,
)
from .identities import Identity, identify, policy_for, with_key
from .leases import Leases, milliseconds, publish_retry_ms
from .option_names import LEFT_OVER
from .options import take_call_options
from .outgoing import Outgoing, collect, collected, fails_under_its_id, may_follow
from .policy import UniquePolicy, warn_of_short_window
from .runtime import Runtime
from .task_policies import warn_of_left_over
from .timing import delay_ms, expires_ms

#: The parameters of ``Celery.send_task`` after the first three, for callers that
#: give them by position.
_PARAMETERS = (
    "countdown",
    "eta",
    "task_id",
    "producer",
    "connection",
    "router",
    "result_cls",
    "expires",
    "publisher",
    "link",
    "link_error",
    "add_to_parent",
    "group_id",
    "group_index",
    "retries",
    "chord",
    "reply_to",
    "time_limit",
    "soft_time_limit",
    "root_id",
    "parent_id",
    "route_name",
    "shadow",
    "chain",
    "task_type",
    "replaced_task_nesting",
)

#: Since then a call by name goes out with the queue and the expiry of the task.
BY_NAME_AS_BY_TASK = celery.VERSION[:2] >= (5, 7)


def hook(runtime: Runtime, original: SendTask) -> SendTask:
    """``app.send_task`` with uniqueness in front."""

    def send_task(
        name: str, args: Any = None, kwargs: Any = None, *positional: Any, **options: Any
    ) -> Any:
        if positional:
            options.update(zip(_PARAMETERS, positional, strict=False))
        try:
            return _send(runtime, original, name, args, kwargs, options)
        except CeleryUniqueError as error:
            goes_on = continues(current_request(runtime))
            if not goes_on and not fails_under_its_id(error, options):
                raise
            return fail_link(runtime.app, name, options, error)

    return send_task


def _send(
    runtime: Runtime,
    original: SendTask,
    name: str,
    args: Any,
    kwargs: Any,
    options: dict[str, Any],
) -> Any:
    ours = take_call_options(options)
    if is_sent_again(runtime, name, options):
        return send_on(runtime, original, name, args, kwargs, options)
    task = options.get("task_type") or registered(runtime.app, name)
    attempt = prepare(runtime, name, task, args, kwargs, ours, options)
    if is_handed_over(runtime, name, attempt.key if attempt else None, options):
        return send_on(runtime, original, name, args, kwargs, options)
    outgoing = Outgoing(runtime, original, name, args, kwargs, options, attempt)
    outgoing = may_follow(runtime, outgoing)
    together = collected.get()
    if together is not None:
        return collect(together, outgoing)
    return outgoing.publish()


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
    runtime: Runtime, name: str, task: Any, ours: Mapping[str, Any]
) -> tuple[UniquePolicy | None, Any]:
    if name.startswith("celery."):
        if ours:
            raise InvalidPolicy(
                f"{name} is one of Celery's own tasks, which are never unique: "
                f"call it without {', '.join(ours)}.",
                field=next(iter(ours)),
            )
        return None, None
    return runtime.policies.of(name, task, with_key(ours), runtime.settings.app_defaults)


# -- the call as the coordinator wants it -------------------------------------------


def prepare(
    runtime: Runtime,
    name: str,
    task: Any,
    args: Any,
    kwargs: Any,
    ours: Mapping[str, Any],
    options: dict[str, Any],
) -> Attempt | None:
    """The call with its key; None where it is not unique."""
    policy, signature = policy_of(runtime, name, task, ours)
    policy = policy_for(policy, name, ours)
    if policy is None:
        return None
    call = Call(
        task_name=name,
        args=tuple(args or ()),
        kwargs=kwargs or {},
        signature=signature,
        queue=queue_of(runtime, name, args, kwargs, task, as_sent(task, options))
        if "queue" in policy.keys
        else "",
        meta=_meta(runtime, policy.meta_keys, options) if policy.meta_keys else {},
        idempotency_key=ours.get("idempotency_key"),
    )
    if not LEFT_OVER.keys().isdisjoint(options):
        warn_of_left_over(name, task, [option for option in LEFT_OVER if option in options])
    coordinator = runtime.coordinator
    identity = identify(call, policy, coordinator.settings, ours.get("idempotency_ttl"))
    return _attempt(runtime, coordinator.leases, name, task, identity, options)


def _attempt(
    runtime: Runtime,
    leases: Leases,
    name: str,
    task: Any,
    identity: Identity,
    options: dict[str, Any],
) -> Attempt:
    app = runtime.app
    delay = delay_ms(app, options)
    period = identity.policy.period
    if delay and period is not None and delay > milliseconds(period):
        warn_of_short_window(name, period, delay)
    request = current_request(runtime)
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
    runtime: Runtime, name: str, args: Any, kwargs: Any, task: Any, options: Mapping[str, Any]
) -> str:
    """The queue that the router really chooses."""
    router = options.get("router") or runtime.app.amqp.router
    route = router.route(dict(options), options.get("route_name") or name, args, kwargs, task)
    queue = route.get("queue")
    if queue is not None:
        return str(getattr(queue, "name", queue))
    return f"{_name_of(route.get('exchange'))}/{route.get('routing_key') or ''}"


def _name_of(exchange: Any) -> str:
    return str(getattr(exchange, "name", exchange) or "")


def _meta(runtime: Runtime, names: tuple[str, ...], options: Mapping[str, Any]) -> dict[str, Any]:
    """The named headers: the call's, its stamps, then those of the current request."""
    headers = options.get("headers") or {}
    stamped = set(options.get("stamped_headers") or ())
    request = current_request(runtime)
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
