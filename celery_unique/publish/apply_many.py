"""``apply_many``: many calls, with their locks taken in batches."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextvars import copy_context
from dataclasses import dataclass
from typing import Any

from celery import group
from celery.canvas import Signature, _chain, _chord, maybe_signature

from celery_unique.config.app_state import AppState, state_of
from celery_unique.exceptions import BatchInterrupted, CeleryUniqueError, StoreUnavailable, shown
from celery_unique.header import LockHeader
from celery_unique.stores.base import Acquired

from .coordinator import UniqueTaskCoordinator
from .request import Attempt, Outgoing, PublishOutcome, collected
from .results import CallOutcome, with_facts

#: How many calls are made before the duplicates among them are told of their holders. A store
#: that answers at once is asked for all their locks before the first of their messages is sent:
#: a lock waits for its message no longer than the publish grace, and these take well under a
#: second.
BATCH = 200

#: How many locks are asked for together where the store decides while other messages are sent,
#: and how many messages are sent before the store hears of it: until then a duplicate of one of
#: them, from elsewhere, would send it once more.
TOGETHER = 20

_CANVAS = (group, _chain, _chord)


def apply_many(signatures: Iterable[Any]) -> list[Any]:
    """Apply every signature, and return what became of each, in order.

    A call gets the result that its ``apply_async`` would have returned, duplicates of each
    other included. Where ``apply_async`` would have raised since the key is held, the error
    stands in the place of the result. A canvas is applied as it is. Wrong arguments or options
    raise before anything is published. A broker or a lock store that fails raises its error
    where no call was made, and half-way :class:`BatchInterrupted`, whose ``results`` tell which
    calls were.
    """
    items = [_prepare(signature) for signature in signatures]
    try:
        for part in _parts(items):
            _apply(part)
    except Exception as error:
        if not any(item.done for item in items):
            raise  # as for one call: nothing was made
        results = [item.result if item.done else None for item in items]
        raise BatchInterrupted(_said(items, error), results=results) from error
    return [item.result for item in items]


def _said(items: list[_Item], error: Exception) -> str:
    made = sum(item.done for item in items)
    return (
        f"{made} of {len(items)} calls were made, and then: {error}. The results of this error "
        "are those calls', with None for the others, of which none holds a lock: call them again"
    )


@dataclass(slots=True)
class _Item:
    """One signature, what it sends, and what became of it."""

    canvas: Any = None
    calls: list[tuple[Outgoing, Any]] | None = None
    result: Any = None
    done: bool = False


def _prepare(signature: Any) -> _Item:
    """Everything that can be wrong with the call shows here."""
    if not isinstance(signature, dict):
        raise TypeError(
            f"apply_many takes signatures, such as task.s(7), and not {shown(signature)}"
        )
    signature = maybe_signature(signature, app=getattr(signature, "app", None))
    state_of(_app_of(signature))
    if isinstance(signature, _CANVAS):
        return _Item(canvas=signature)
    calls: list[tuple[Outgoing, Any]] = []
    # In a context of its own, which is gone when the call returns, however it does: were the
    # variable set in the caller's and reset afterwards, a signal in between could leave it set,
    # and every later call of the thread would be collected and never sent.
    result = copy_context().run(_collect, signature, calls)
    return _Item(calls=calls, result=result)


def _collect(signature: Signature, calls: list[tuple[Outgoing, Any]]) -> Any:
    collected.set(calls)
    return signature.apply_async()


def _app_of(signature: Signature) -> Any:
    app = signature.app
    return getattr(app, "_get_current_object", lambda: app)()


def _parts(items: list[_Item]) -> Iterator[list[_Item]]:
    """Canvases one by one, and all between them in batches."""
    batch: list[_Item] = []
    for item in items:
        if item.canvas is not None or len(batch) >= BATCH:
            yield batch
            batch = []
        if item.canvas is not None:
            yield [item]
        else:
            batch.append(item)
    yield batch


def _apply(part: list[_Item]) -> None:
    if part and part[0].canvas is not None:
        part[0].result, part[0].done = part[0].canvas.apply_async(), True
        return
    by_app: dict[int, list[_Item]] = {}
    for item in part:
        item.done = not item.calls  # an eager call has been carried out
        for outgoing, _ in item.calls or ():
            by_app.setdefault(id(outgoing.app_state), []).append(item)
            break
    for items in by_app.values():
        calls = [_Call(item, *call) for item in items for call in item.calls or ()]
        _Batch(calls[0].outgoing.app_state, calls).publish()


@dataclass(slots=True)
class _Call:
    item: _Item
    outgoing: Outgoing
    result: Any
    #: The one of its batch, unless the call brings its own.
    producer: Any = None
    acquired: Acquired | None = None
    #: In place of an answer, where the store has answered others.
    error: StoreUnavailable | None = None
    done: bool = False

    def send(self, task_id: str, header: LockHeader | None, delay: int | None) -> Any:
        """As ``Send``, with the result that the caller has, or will have."""
        producer = self.outgoing.options.get("producer") or self.producer
        return self.outgoing.send(
            task_id, header, delay, producer=producer, result_cls=self._result_of
        )

    def _result_of(self, task_id: str) -> Any:
        return self.result

    def conclude(self, published: PublishOutcome) -> None:
        made = self.outgoing.conclude(published)
        self.tell(made.id, getattr(made, "_facts", published.facts))

    def tell(self, task_id: str, facts: CallOutcome) -> None:
        self.result.id = task_id
        self.result.ignored = self.outgoing.options.get("ignore_result")
        with_facts(self.result, facts)
        self.finish()

    def refuse(self, error: CeleryUniqueError) -> None:
        if self.item.result is self.result:
            self.item.result = error
        self.finish()

    def finish(self) -> None:
        self.done = self.item.done = True


class _PendingAcquire:
    """Some calls whose locks have been asked for together."""

    def __init__(
        self, coordinator: UniqueTaskCoordinator, calls: list[_Call], published: list[Attempt]
    ) -> None:
        self.calls = calls
        self.began = time.monotonic()
        attempts = [call.outgoing.attempt for call in calls if call.outgoing.attempt is not None]
        self._wait = coordinator.ask_many(attempts, published)
        self.is_heard = False

    def hear(self) -> None:
        """What the store has said, to each call."""
        self.is_heard = True
        asking = [call for call in self.calls if call.outgoing.attempt is not None]
        for call, answer in zip(asking, self._wait(), strict=True):
            if isinstance(answer, StoreUnavailable):
                call.error = answer
            else:
                call.acquired = answer


class _Batch:
    """Some calls of one app, whose locks are taken together."""

    def __init__(self, app_state: AppState, calls: list[_Call]) -> None:
        self._app_state = app_state
        self._coordinator = app_state.part(UniqueTaskCoordinator)
        self._calls = calls
        self._unconfirmed: list[Attempt] = []
        self._asked: _PendingAcquire | None = None

    def publish(self) -> None:
        with self._app_state.app.producer_or_acquire() as producer:
            for call in self._calls:
                call.producer = producer
            try:
                # First all that were admitted: a duplicate of one of them names a task that
                # is published by then.
                self._send_admitted()
                for call in self._calls:
                    if not call.done and call.error is None:
                        self._settle_conflict(call)
                self._raise_what_was_refused()
            except BaseException:
                self._confirm()
                self._give_back_the_rest()
                raise

    def _send_admitted(self) -> None:
        """Locks are asked for, and confirmed, while other messages are sent."""
        parts = self._parts()
        asked = self._asked = self._ask(parts)
        while asked is not None:
            try:
                asked.hear()
            except StoreUnavailable as error:
                self._without_store(error)
                break
            self._asked = self._ask(parts)
            for call in asked.calls:
                if call.error is None:
                    self._send(call, asked.began)
                elif self._publishes_anyway:
                    self._send_without_lock(call, call.error)
            asked = self._asked
        self._confirm()

    def _parts(self) -> Iterator[list[_Call]]:
        size = TOGETHER if hasattr(self._coordinator.store, "begin_acquire_many") else BATCH
        for first in range(0, len(self._calls), size):
            yield self._calls[first : first + size]

    def _ask(self, parts: Iterator[list[_Call]]) -> _PendingAcquire | None:
        """The next ones, if any; the store is told on the way of what is published."""
        part = next(parts, None)
        if part is None:
            return None
        asked = _PendingAcquire(self._coordinator, part, self._unconfirmed)
        self._unconfirmed = []
        return asked

    def _without_store(self, error: StoreUnavailable) -> None:
        """It did not answer: those that it has not spoken of are sent without their locks."""
        left = [call for call in self._calls if not call.done and call.acquired is None]
        if not self._publishes_anyway:
            self._give_back_later(left, error)
            raise error
        for call in left:
            self._send_without_lock(call, error)

    @property
    def _publishes_anyway(self) -> bool:
        return self._app_state.settings.on_store_error == "publish"

    def _send_without_lock(self, call: _Call, error: StoreUnavailable) -> None:
        attempt = call.outgoing.attempt
        if attempt is None:
            self._send(call, 0.0)
        else:
            call.conclude(self._coordinator.without_store(attempt, call.send, error))

    def _give_back_later(self, calls: Iterable[_Call], error: StoreUnavailable) -> None:
        for call in calls:
            if call.outgoing.attempt is not None:
                self._coordinator.give_back_later(call.outgoing.attempt, call.error or error)

    def _raise_what_was_refused(self) -> None:
        """A part of the store did not answer: the calls of the others are made by now."""
        refused = [call for call in self._calls if not call.done and call.error is not None]
        if refused and refused[0].error is not None:
            self._give_back_later(refused, refused[0].error)
            raise refused[0].error

    def _send(self, call: _Call, began: float) -> None:
        attempt = call.outgoing.attempt
        if attempt is None:
            made = call.send(call.result.id, None, None)
            call.tell(made.id, CallOutcome())
        elif call.acquired is not None and call.acquired.outcome == "created":
            call.conclude(
                self._coordinator.publish_created(
                    attempt, call.acquired, call.send, began, self._confirm_soon
                )
            )

    def _confirm_soon(self, attempt: Attempt, task_id: str) -> None:
        self._coordinator.remember(task_id, attempt.key)
        self._unconfirmed.append(attempt)
        # Up to as many are told with the next question, where that follows them.
        if len(self._unconfirmed) > TOGETHER:
            self._confirm()

    def _confirm(self) -> None:
        unconfirmed, self._unconfirmed = self._unconfirmed, []
        self._coordinator.confirm_many(unconfirmed)

    def _settle_conflict(self, call: _Call) -> None:
        attempt = call.outgoing.attempt
        assert attempt is not None
        assert call.acquired is not None
        try:
            published = self._coordinator.settle_conflict(attempt, call.acquired, call.send)
            call.conclude(published or self._coordinator.publish(attempt, call.send))
        except CeleryUniqueError as error:
            if isinstance(error, StoreUnavailable):
                raise
            call.refuse(error)

    def _give_back_the_rest(self) -> None:
        """Nobody sends these any more: their locks would keep other calls from it."""
        if self._asked is not None and not self._asked.is_heard:
            try:
                self._asked.hear()
            except StoreUnavailable as error:
                self._give_back_later(self._asked.calls, error)
        for call in self._calls:
            attempt, acquired = call.outgoing.attempt, call.acquired
            if not call.done and attempt is not None and acquired is not None:
                self._coordinator.withdraw(attempt, acquired)
