"""``apply_many``: many calls, whose locks are acquired in batches."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextvars import copy_context
from dataclasses import dataclass
from typing import Any

from celery import group
from celery.canvas import Signature, _chain, _chord, maybe_signature

from celery_unique.config.app_state import AppState, state_of
from celery_unique.exceptions import (
    BatchInterrupted,
    CeleryUniqueError,
    StoreUnavailable,
    shown,
)
from celery_unique.stores.base import Acquired

from .atomic import AtomicHeader, AtomicPublisher, add_to_trail
from .before_publish import conclude
from .coordinator import UniqueTaskCoordinator
from .request import PublishOutcome, PublishRequest, collected
from .results import CallFacts, CallOutcome

#: How many calls are made before the duplicates among them get their holders. The locks of a
#: store that replies immediately are acquired before the first of their messages is sent: a lock
#: waits for its message no longer than the publish grace, and these take well under a second.
BATCH = 200

#: How many locks are requested together where the store decides while other messages are sent,
#: and how many messages are sent before they are confirmed: until then a duplicate of one of
#: them, from another process, would publish it once more.
TOGETHER = 20

_CANVAS = (group, _chain, _chord)


def apply_many(signatures: Iterable[Any]) -> list[Any]:
    """Apply every signature, and return the result of each, in order.

    A call gets the result that its ``apply_async`` would have returned, duplicates of each
    other included. Where ``apply_async`` would have raised since the key is held, the error
    is in the place of the result. A canvas is applied as it is. Wrong arguments or options
    raise before anything is published. A broker or a lock store that fails raises its error
    where no call was made, and half-way :class:`BatchInterrupted`, whose ``results`` show which
    calls were.
    """
    installed: set[Any] = set()
    items = [_prepare(signature, installed) for signature in signatures]
    try:
        for part in _parts(items):
            _apply(part)
    except Exception as error:
        made = sum(item.done for item in items)
        if not made:
            raise  # as for one call: nothing was made
        raise BatchInterrupted(
            f"{made} of {len(items)} calls were made, and then: {error}. The results of this error "
            "are those calls', with None for the others, of which none holds a lock: call them "
            "again",
            results=[item.result if item.done else None for item in items],
        ) from error
    return [item.result for item in items]


@dataclass(slots=True)
class _Item:
    """One signature, the calls it makes, and its result."""

    canvas: Any = None
    calls: list[_Call] | None = None
    result: Any = None
    done: bool = False


@dataclass(slots=True)
class _Call:
    item: _Item
    request: PublishRequest
    result: Any
    acquired: Acquired | None = None
    #: In place of a reply, where the store has replied to others.
    error: StoreUnavailable | None = None
    done: bool = False

    def conclude(self, outcome: PublishOutcome) -> None:
        if outcome.result is not None and not outcome.superseded:
            self.finish(outcome.result.id, outcome.facts)
            return
        made = conclude(self.request, outcome)
        self.finish(made.id, getattr(made, "call_facts", outcome.facts))

    def finish(self, task_id: str, facts: CallOutcome) -> None:
        self.result.id = task_id
        self.result.ignored = self.request.options.get("ignore_result")
        if isinstance(self.result, CallFacts):
            self.result.call_facts = facts
        self.done = self.item.done = True

    def refuse(self, error: CeleryUniqueError) -> None:
        if self.item.result is self.result:
            self.item.result = error
        self.done = self.item.done = True


def _prepare(signature: Any, installed: set[Any]) -> _Item:
    """Collect the calls of a signature: everything that can be wrong with them raises here."""
    if not isinstance(signature, dict):
        raise TypeError(
            f"apply_many takes signatures, such as task.s(7), and not {shown(signature)}"
        )
    signature = maybe_signature(signature, app=getattr(signature, "app", None))
    app = getattr(signature.app, "_get_current_object", lambda: signature.app)()
    if app not in installed:
        state_of(app)  # raises for an app that is not installed
        installed.add(app)
    if isinstance(signature, _CANVAS):
        return _Item(canvas=signature)
    calls: list[tuple[PublishRequest, Any]] = []
    # In a context of its own, which is gone when the call returns, however it does: were the
    # variable set in the caller's and reset afterwards, a signal in between could leave it set,
    # and every later call of the thread would be collected and never sent.
    item = _Item(result=copy_context().run(_collect, signature, calls))
    item.calls = [_Call(item, *call) for call in calls]
    item.done = not calls  # an eager call has run
    return item


def _collect(signature: Signature, calls: list[tuple[PublishRequest, Any]]) -> Any:
    collected.set(calls)
    return signature.apply_async()


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
    by_app: dict[int, list[_Call]] = {}
    for item in part:
        for call in item.calls or ():
            by_app.setdefault(id(call.request.app_state), []).append(call)
    for calls in by_app.values():
        _Batch(calls[0].request.app_state, calls).publish()


class _PendingAcquire:
    """Some calls whose locks have been requested together."""

    def __init__(
        self,
        coordinator: UniqueTaskCoordinator,
        calls: list[_Call],
        published: list[PublishRequest],
    ) -> None:
        self.calls = calls
        self.began = time.monotonic()
        self._unique = [call for call in calls if call.request.key]
        requests = [call.request for call in self._unique]
        self._receive = coordinator.client.begin_acquire_many(requests, published)
        self.is_received = False

    def receive(self) -> None:
        self.is_received = True
        for call, reply in zip(self._unique, self._receive(), strict=True):
            if isinstance(reply, StoreUnavailable):
                call.error = reply
            else:
                call.acquired = reply


class _Batch:
    """Some calls of one app, whose locks are acquired together."""

    def __init__(self, app_state: AppState, calls: list[_Call]) -> None:
        self._app_state = app_state
        self._coordinator = app_state.part(UniqueTaskCoordinator)
        self._calls = calls
        self._unconfirmed: list[PublishRequest] = []
        self._pending: _PendingAcquire | None = None

    def publish(self) -> None:
        self._coordinator.before_batch([call.request for call in self._calls if call.request.key])
        with self._app_state.app.producer_or_acquire() as producer:
            for call in self._calls:
                call.request.batch_options = {
                    "producer": call.request.options.get("producer") or producer,
                    # Celery returns the result that the caller has, or will have.
                    "result_cls": lambda _, result=call.result: result,
                }
            try:
                # First all that were admitted: a duplicate of one of them names a task that
                # is published by then.
                atomic = self._publisher_of_all()
                if atomic is not None:
                    self._push_together(atomic)
                else:
                    self._send_admitted()
                for call in self._calls:
                    if not call.done and call.error is None:
                        self._settle(call)
                self._raise_first_error()
            except BaseException:
                self._confirm()
                self._withdraw_the_rest()
                raise

    def _publisher_of_all(self) -> AtomicPublisher | None:
        """None: not every call can be published in one act."""
        atomic = self._coordinator.atomic
        if atomic is None:
            return None
        calls = self._calls
        fits = all(call.request.key and atomic.publishes(call.request) for call in calls)
        return atomic if fits else None

    def _push_together(self, atomic: AtomicPublisher) -> None:
        """Build the messages, and let the store admit and push them in one exchange. One that takes
        two steps stays behind those in front of it: it may replace them, or be their duplicate."""
        built: list[tuple[_Call, AtomicHeader]] = []
        for call in self._calls:
            if call.done:
                continue
            header = AtomicHeader(atomic.client, call.request, collect=True)
            call.request.send(call.request.task_id, header, None, in_trail=False)
            if header.push is not None:
                built.append((call, header))
            elif header.takes_two_steps:
                self._push(built)
                built = []
                if not call.done:
                    self._settle(call)
            else:
                call.conclude(self._coordinator.passed_by(call.request, call.result, atomic))
        self._push(built)

    def _push(self, built: list[tuple[_Call, AtomicHeader]]) -> None:
        pushes = [
            (call.request, header.claim, header.push)
            for call, header in built
            if header.push is not None and header.claim is not None
        ]
        try:
            replies = self._coordinator.client.publish_many(pushes)
        except StoreUnavailable as error:
            self._send_without_store(error)
            return
        for (call, _), reply in zip(built, replies, strict=True):
            self._conclude_pushed(call, reply)

    def _conclude_pushed(self, call: _Call, reply: Acquired | StoreUnavailable) -> None:
        if isinstance(reply, StoreUnavailable):
            call.error = reply
            if self._coordinator.publishes_anyway:
                self._send_unlocked(call, reply)
            return
        call.acquired = reply
        if reply.outcome == "created":
            if call.request.parent is not None:
                add_to_trail(call.request, call.result)
            call.conclude(self._coordinator.created(call.request, reply, call.result))

    def _send_admitted(self) -> None:
        """Locks are acquired, and confirmed, while other messages are sent."""
        size = TOGETHER if hasattr(self._coordinator.store, "begin_acquire_many") else BATCH
        parts = (self._calls[n : n + size] for n in range(0, len(self._calls), size))
        pending = self._pending = self._acquire(next(parts, None))
        while pending is not None:
            try:
                pending.receive()
            except StoreUnavailable as error:
                self._send_without_store(error)
                break
            self._pending = self._acquire(next(parts, None))
            for call in pending.calls:
                if call.error is None:
                    self._send(call, pending.began)
                elif self._coordinator.publishes_anyway:
                    self._send_unlocked(call, call.error)
            pending = self._pending
        self._confirm()

    def _acquire(self, calls: list[_Call] | None) -> _PendingAcquire | None:
        """Request the next locks, if any; what is published is confirmed in the same exchange."""
        if calls is None:
            return None
        pending = _PendingAcquire(self._coordinator, calls, self._unconfirmed)
        self._unconfirmed = []
        return pending

    def _send(self, call: _Call, began: float) -> None:
        request, acquired = call.request, call.acquired
        if not request.key:
            made = request.send(request.task_id, None, None)
            call.finish(made.id, CallOutcome())
        elif acquired is not None and acquired.outcome == "created":
            result = self._coordinator.send(request, acquired, began)
            self._confirm_soon(request)
            call.conclude(self._coordinator.created(request, acquired, result))

    def _send_without_store(self, error: StoreUnavailable) -> None:
        """The store did not reply: calls without a reply are published without their locks."""
        left = [call for call in self._calls if not call.done and call.acquired is None]
        if not self._coordinator.publishes_anyway:
            self._withdraw_later(left, error)
            raise error
        for call in left:
            self._send_unlocked(call, error)

    def _send_unlocked(self, call: _Call, error: StoreUnavailable) -> None:
        if call.request.key:
            call.conclude(self._coordinator.publish_without_store(call.request, error))
        else:
            self._send(call, 0.0)

    def _settle(self, call: _Call) -> None:
        """A call whose key is held; or one that is published by itself."""
        outcome = None
        try:
            if call.acquired is not None:
                outcome = self._coordinator.settle_conflict(call.request, call.acquired)
            call.conclude(outcome or self._coordinator.publish(call.request))
        except StoreUnavailable:
            raise
        except CeleryUniqueError as error:
            call.refuse(error)

    def _raise_first_error(self) -> None:
        """A part of the store did not reply: the calls of the others are made by now."""
        for call in self._calls:
            if not call.done and call.error is not None:
                raise call.error

    def _confirm_soon(self, request: PublishRequest) -> None:
        self._unconfirmed.append(request)
        # Up to as many are confirmed with the next request for locks, where one follows.
        if len(self._unconfirmed) > TOGETHER:
            self._confirm()

    def _confirm(self) -> None:
        unconfirmed, self._unconfirmed = self._unconfirmed, []
        self._coordinator.client.confirm_many(unconfirmed)

    def _withdraw_later(self, calls: Iterable[_Call], error: StoreUnavailable) -> None:
        for call in calls:
            if call.request.key:
                self._coordinator.client.withdraw_later(call.request, call.error or error)

    def _withdraw_the_rest(self) -> None:
        """These are not sent any more: their locks would keep other calls from it."""
        if self._pending is not None and not self._pending.is_received:
            try:
                self._pending.receive()
            except StoreUnavailable as error:
                self._withdraw_later(self._pending.calls, error)
        for call in self._calls:
            if call.done or not call.request.key:
                continue
            if call.acquired is not None:
                self._coordinator.client.withdraw_acquired(call.request, call.acquired)
            elif call.error is not None:
                self._coordinator.client.withdraw_later(call.request, call.error)
