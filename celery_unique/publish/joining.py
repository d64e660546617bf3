from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from celery_unique.config.app_state import AppState
from celery_unique.exceptions import DuplicateTask
from celery_unique.followers.call import FollowerCall

from .coordinator import UniqueTaskCoordinator
from .request import Outgoing

#: Options by which somebody waits for the very id of a call.
CANVAS = ("chord", "group_id", "chain")

#: How a duplicate may follow: under the others it is an error, or takes the holder's place.
FOLLOWING = ("ignore", "rerun")


# -- calls with a life of their own -----------------------------------------------------


def has_own_life(options: Mapping[str, Any]) -> bool:
    """Whether somebody waits for this very id: a canvas, callbacks, or who chose the id."""
    given = options.get
    return given("task_id") is not None or is_in_canvas(options)


def is_in_canvas(options: Mapping[str, Any]) -> bool:
    """Whether something goes on, or fails, with this very id: the rest of a canvas, callbacks."""
    return any(map(options.get, (*CANVAS, "link", "link_error")))


def may_follow(app_state: AppState, outgoing: Outgoing) -> Outgoing:
    """The call with what it takes to follow the task that holds its key, if it may have to."""
    attempt, options = outgoing.attempt, outgoing.options
    if attempt is None:
        return outgoing
    by_message = _gets_result_by_message(app_state, options)
    if by_message:
        _await_reply(app_state, attempt.task_id, options)
    own_life = has_own_life(options)
    if not (by_message or own_life):
        return outgoing
    follower = FollowerCall.of(
        app_state.app,
        outgoing.name,
        outgoing.args,
        outgoing.kwargs,
        options,
        app_state.part(UniqueTaskCoordinator).header(attempt, attempt.task_id),
        grace_ms=attempt.grace_ms,
        lease_ms=attempt.lease_ms,
    )
    # A caller who may not learn who holds a key may not get its result either.
    joins = attempt.policy.on_conflict in FOLLOWING and not app_state.settings.conceal_holder
    join = follower.dumps(app_state.settings.follower_codec) if joins else ""
    attempt = replace(attempt, join=join, canvas=is_in_canvas(options), own_life=True)
    return replace(outgoing, attempt=attempt, follower=follower, has_own_life=own_life)


def _gets_result_by_message(app_state: AppState, options: Mapping[str, Any]) -> bool:
    """With rpc:// a result reaches only the caller that its message names: each duplicate
    needs one of its own."""
    if options.get("ignore_result"):
        return False
    return app_state.results_by_message


def _await_reply(app_state: AppState, task_id: str, options: Mapping[str, Any]) -> None:
    """The queue for replies must be there before the holder can end: Celery declares it
    when it publishes, and a follower is not published."""
    app = app_state.app
    given = options.get("producer") or options.get("publisher")
    with (
        app.producer_or_acquire(given) as producer,
        producer.connection._reraise_as_library_errors(),  # as where Celery declares it
    ):
        app.backend.on_task_call(producer, task_id)


def fails_under_its_id(error: Exception, options: Mapping[str, Any]) -> bool:
    """Whether a refused call ends as a failure under its own id: the other members of its
    canvas are sent or will be, and wait for it."""
    return isinstance(error, DuplicateTask) and any(options.get(name) for name in CANVAS)
