"""Duplicates that join the holder: they keep their own id and share the holder's outcome."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from celery import states

from celery_unique import reporting
from celery_unique.config.settings import UniqueSettings
from celery_unique.exceptions import DuplicateTask
from celery_unique.followers.call import FollowerCall
from celery_unique.followers.complete import Outcome, complete, stored_outcome

from .request import CANVAS, PublishOutcome, PublishRequest, is_in_canvas, queue_of

#: Strategies under which a duplicate joins: under the others it raises or replaces the holder.
JOINING = ("ignore", "rerun", "merge")


def prepare_to_join(request: PublishRequest, settings: UniqueSettings) -> None:
    """Add to the request what it needs to follow the holder of its key, or to be parked behind
    it."""
    app_state, options = request.app_state, request.options
    # With rpc:// a result reaches only the caller that its message names, so that each
    # duplicate needs a message of its own.
    by_message = app_state.results_by_message and not options.get("ignore_result")
    parks = request.policy.on_conflict == "queue"
    if by_message:
        _declare_reply_queue(app_state.app, request.identify(), options)
    elif not request.awaited and not parks:
        return
    # A worker publishes or promotes it later: a queue that does not exist is an error here.
    queue_of(
        *(app_state, request.task_name, request.args, request.kwargs),
        app_state.app._tasks.get(request.task_name),
        options,
    )
    request.follower = FollowerCall.of(
        app_state.app,
        request.task_name,
        request.args,
        request.kwargs,
        options,
        request.header(request.identify(), 0, "queued" if parks else "created"),
        grace_ms=request.grace_ms,
        lease_ms=request.lease_ms,
    )
    # A caller that may not learn who holds a key may not get its result either.
    if parks or (request.policy.on_conflict in JOINING and not settings.conceal_holder):
        request.join = request.follower.dumps(settings.follower_codec)
    request.canvas = is_in_canvas(options)


def _declare_reply_queue(app: Any, task_id: str, options: Mapping[str, Any]) -> None:
    """The queue for replies must exist before the holder ends: Celery declares it when it
    publishes, and a follower is not published."""
    given = options.get("producer") or options.get("publisher")
    with (
        app.producer_or_acquire(given) as producer,
        producer.connection._reraise_as_library_errors(),  # as where Celery declares it
    ):
        app.backend.on_task_call(producer, task_id)


def share_outcome(request: PublishRequest, outcome: PublishOutcome) -> PublishOutcome:
    """Complete a duplicate whose holder has ended: only the caller can. A follower of a live
    holder is completed by that holder's worker."""
    if outcome.follows and not outcome.ended:
        request.app_state.remember_joined(outcome.follows)
        return outcome
    holder_id = outcome.follows or outcome.task_id
    if request.follower is None or holder_id == request.task_id:
        return outcome
    app, facts = request.app_state.app, outcome.facts
    shared = stored_outcome(app, request.task_name, holder_id)
    if shared is None and not request.awaited:
        # Only a result that is gone, as messages are, kept it from being a plain duplicate.
        reporting.result_elsewhere(request.task_name, holder_id)
        return PublishOutcome(holder_id, replace(facts, outcome="deduplicated"))
    if shared is None:  # the rest of the canvas waits for a result: raised, not guessed
        reason = "it has ended and its result is not stored, so that this call cannot share it"
        error = DuplicateTask(
            request.task_name,
            holder_id,
            facts.holder_state,
            reason,
            bool(request.arguments),
            key=facts.unique_key,
        )
        shared = Outcome(states.FAILURE, error)
    complete(app, request.follower, shared)
    return PublishOutcome(request.task_id, replace(facts, outcome="joined"))


def fails_under_its_id(error: Exception, options: Mapping[str, Any]) -> bool:
    """Whether a refused call ends as a failure under its own id: the other members of its
    canvas are or will be published, and wait for it."""
    return isinstance(error, DuplicateTask) and any(options.get(name) for name in CANVAS)
