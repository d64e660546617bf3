"""One call between the hook and the broker: what is sent for it, and what the caller gets."""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import replace
from typing import Any

from celery import states
from celery.utils import uuid

from . import reports
from .attempts import Attempt, Published
from .completing import Outcome, complete, stored_outcome
from .exceptions import DuplicateTask
from .facts import CallFacts
from .followers import FollowerCall
from .going_on import SendTask
from .header import HEADER, LockHeader
from .policy_fields import REPLACING
from .preparing import Admit, AwaitedHeader, is_watched
from .results import with_facts
from .runtime import Runtime
from .superseding import end_superseded
from .values import value

#: Options by which somebody waits for the very id of a call.
CANVAS = ("chord", "group_id", "chain")

#: How a duplicate may follow: under the others it is an error, or takes the holder's place.
FOLLOWING = ("ignore", "rerun")

#: Where calls are collected instead of sent, to be sent together, each with its result. It is
#: only ever set in a copied context: see ``batches``.
collected: ContextVar[list[tuple[Outgoing, Any]] | None] = ContextVar("collected", default=None)


@value
class Outgoing:
    runtime: Runtime
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

    def publish(self) -> Any:
        """Take its lock and send it, or find out who does its work."""
        if self.attempt is None:
            return self.original(self.name, self.args, self.kwargs, **self.options)
        # What a replacement is sent with depends on what it replaces, and Celery asks the
        # broker about messages that are to be delayed.
        alone = self.attempt.policy.on_conflict in REPLACING or self.attempt.delay_ms
        alone = alone or self.runtime.tells_what_is_sent or not is_watched(self.runtime.app.amqp)
        send_when = None if alone else self.send_when
        return self.conclude(self.runtime.coordinator.publish(self.attempt, self.send, send_when))

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

    def conclude(self, published: Published) -> Any:
        """The result for the caller, once it is known what became of the call."""
        for superseded in published.superseded:
            key = published.facts.unique_key or ""
            end_superseded(self.runtime.app, superseded, published.task_id, self.options, key)
        if published.result is None:
            published = self._share_outcome(published)
        result = published.result
        if result is None:
            result = self._result_of(published.task_id)
        return with_facts(result, published.facts)

    def _share_outcome(self, published: Published) -> Published:
        """A duplicate: somebody completes it if it follows, and only the caller can if the
        task that does its work has ended."""
        assert self.attempt is not None
        if published.follows and not published.ended:
            self.runtime.holding.joined_here(published.follows)
            return published
        holder_id = published.follows or published.task_id
        if self.follower is None or holder_id == self.attempt.task_id:
            return published
        outcome = stored_outcome(self.runtime.app, self.name, holder_id)
        if outcome is None and not self.has_own_life:
            return self._as_duplicate(published, holder_id)
        complete(self.runtime.app, self.follower, outcome or self._unknown(holder_id, published))
        facts = replace(published.facts, outcome="joined")
        return Published(self.attempt.task_id, facts)

    def _as_duplicate(self, published: Published, holder_id: str) -> Published:
        """Only a result that is gone, as messages are, kept it from being a plain duplicate."""
        reports.result_goes_to_another(self.name, holder_id)
        facts = replace(published.facts, outcome="deduplicated")
        return Published(holder_id, facts)

    def _unknown(self, holder_id: str, published: Published) -> Outcome:
        """Nobody knows the result that the rest of the canvas waits for: said, not guessed."""
        facts: CallFacts = published.facts
        reason = "it has ended and its result is not stored, so that this call cannot share it"
        by_key = self.attempt is not None and bool(self.attempt.arguments)
        error = DuplicateTask(
            self.name, holder_id, facts.holder_state, reason, by_key, key=facts.unique_key
        )
        return Outcome(states.FAILURE, error)

    def _result_of(self, task_id: str) -> Any:
        app, options = self.runtime.app, self.options
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
    result = (options.get("result_cls") or outgoing.runtime.app.AsyncResult)(task_id)
    together.append((outgoing, result))
    return result


# -- calls with a life of their own -----------------------------------------------------


def has_own_life(options: Mapping[str, Any]) -> bool:
    """Whether somebody waits for this very id: a canvas, callbacks, or who chose the id."""
    given = options.get
    return given("task_id") is not None or is_in_canvas(options)


def is_in_canvas(options: Mapping[str, Any]) -> bool:
    """Whether something goes on, or fails, with this very id: the rest of a canvas, callbacks."""
    return any(map(options.get, (*CANVAS, "link", "link_error")))


def may_follow(runtime: Runtime, outgoing: Outgoing) -> Outgoing:
    """The call with what it takes to follow the task that holds its key, if it may have to."""
    attempt, options = outgoing.attempt, outgoing.options
    if attempt is None:
        return outgoing
    by_message = _gets_result_by_message(runtime, options)
    if by_message:
        _await_reply(runtime, attempt.task_id, options)
    own_life = has_own_life(options)
    if not (by_message or own_life):
        return outgoing
    follower = FollowerCall.of(
        runtime.app,
        outgoing.name,
        outgoing.args,
        outgoing.kwargs,
        options,
        runtime.coordinator.header(attempt, attempt.task_id),
        grace_ms=attempt.grace_ms,
        lease_ms=attempt.lease_ms,
    )
    # A caller who may not learn who holds a key may not get its result either.
    joins = attempt.policy.on_conflict in FOLLOWING and not runtime.settings.conceal_holder
    join = follower.dumps(runtime.settings.follower_codec) if joins else ""
    attempt = replace(attempt, join=join, canvas=is_in_canvas(options), own_life=True)
    return replace(outgoing, attempt=attempt, follower=follower, has_own_life=own_life)


def _gets_result_by_message(runtime: Runtime, options: Mapping[str, Any]) -> bool:
    """With rpc:// a result reaches only the caller that its message names: each duplicate
    needs one of its own."""
    if options.get("ignore_result"):
        return False
    return runtime.results_by_message


def _await_reply(runtime: Runtime, task_id: str, options: Mapping[str, Any]) -> None:
    """The queue for replies must be there before the holder can end: Celery declares it
    when it publishes, and a follower is not published."""
    app = runtime.app
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
