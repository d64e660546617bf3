"""The caller's store operations: acquire, confirm and release, with circuit breaker and retries.

Where the store does not reply, the lock may have been acquired anyway: it is released, or
confirmed, in the background.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from time import monotonic
from typing import Any, NoReturn, TypeVar, cast

from celery_unique import reporting
from celery_unique.exceptions import StoreUnavailable, UnreadableRecord
from celery_unique.policy.fields import REPLACING
from celery_unique.stores.base import Acquired, BrokerStore, Claim, Held, LockStore, Push
from celery_unique.stores.bounded import BoundedDict
from celery_unique.stores.circuit_breaker import Breaker, Breakers, PushRefused, StoreSkipped
from celery_unique.stores.retry_queue import FIRST_PAUSE_S, RetryQueue

from .request import PublishRequest

#: How many ids published by this process are remembered: their confirmations may not have
#: reached the store yet, and consecutive calls must not wait for their own.
REMEMBERED = 512
#: How long the key of a new call is probably taken.
REPEATED_WITHIN_S = 1.0

Reply = TypeVar("Reply")
Replies = list[Acquired | StoreUnavailable]
Wait = Callable[[], Replies]


class AcquireFailed(Exception):
    """The store could not be reached for the lock, or did not reply.

    A class of its own: a ``StoreUnavailable`` may also be raised by other unique calls, made by
    receivers of Celery's signals while the message is published.
    """

    def __init__(self, error: StoreUnavailable) -> None:
        super().__init__(error)
        self.error = error


class CallerStoreClient:
    """What one app's callers do with the lock store."""

    def __init__(self, app: Any, store: LockStore, timeout_s: float) -> None:
        self.app = app
        self.store = store
        #: For calls that are published in one act: such a store is one.
        self._broker_store = cast(BrokerStore, store)
        self.retries = RetryQueue(store, timeout_s)
        self.published: BoundedDict[str, str] = BoundedDict(REMEMBERED)  # id -> key
        #: Keys that a call of this process has found held, or has just acquired, each with the
        #: time until which it is probably taken: a message that is built for such a key before
        #: the store has replied is mostly built for nothing.
        self.taken_until: BoundedDict[str, float] = BoundedDict(REMEMBERED)
        self._breakers = Breakers(store)

    # -- acquire -----------------------------------------------------------------------

    def acquire(self, request: PublishRequest) -> Acquired:
        """Raises AcquireFailed."""
        self._check_circuit(request)
        acquired = self._attempt(request, self.store.acquire, request.key, request.claim())
        return self._received(request, acquired)

    def begin_acquire(self, request: PublishRequest) -> Callable[[], Acquired]:
        """Send the request for the lock, to a store that can do the two apart; ``receive`` waits
        for the reply. Raises AcquireFailed."""
        self._check_circuit(request)
        begin: Callable[..., Callable[[], Acquired]]
        begin = self.store.begin_acquire  # type: ignore[attr-defined]
        return self._attempt(request, begin, request.key, request.claim())

    def receive(self, request: PublishRequest, wait: Callable[[], Acquired]) -> Acquired:
        """The reply to ``begin_acquire``. Raises AcquireFailed."""
        return self._received(request, self._attempt(request, wait))

    def begin_publish(self, request: PublishRequest, claim: Claim, push: Push) -> Wait:
        """Hand the call and its message to the store; ``receive_published`` waits for the reply.
        Raises AcquireFailed."""
        self._check_circuit(request)
        request.attempt = push.attempt
        begin = self._broker_store.begin_publish
        return self._attempt(request, begin, [(request.key, claim, push)])

    def receive_published(self, request: PublishRequest, wait: Wait) -> Acquired:
        """The reply to ``begin_publish``. Raises AcquireFailed."""
        [reply] = self._attempt(request, wait)
        if isinstance(reply, StoreUnavailable):
            self._fail(request, reply)
        self._note_published(request, reply)
        return self._received(request, reply)

    def probe(self, request: PublishRequest, claim: Claim) -> Acquired | None:
        """What a call gets that conflicts; None: it would be admitted, and is not yet. Raises
        AcquireFailed."""
        self._check_circuit(request)
        conflict = self._attempt(request, self._broker_store.probe, request.key, claim)
        return None if conflict is None else self._received(request, conflict)

    def keep_grace(self, request: PublishRequest, began: float) -> None:
        """The message of a lock that was requested at ``began`` is sent now: extend the grace, if
        it could end before that."""
        if (monotonic() - began) * 1000 > request.grace_ms / 2:
            self.store.acquire(request.key, replace(request.claim(), again=True))

    def publish_many(self, pushes: list[tuple[PublishRequest, Claim, Push]]) -> Replies:
        """Hand calls and their messages to the store in one exchange. Raises StoreUnavailable
        where none has a reply."""
        requests = [request for request, _, _ in pushes]
        if not requests:
            return []
        breaker = self._breakers.only or self._breakers.of(requests[0].key)
        error = breaker.skips() if breaker.failures else None
        if error is not None:
            self.report_error("acquire", error, requests[0])
            raise error
        for request, _, push in pushes:
            request.attempt = push.attempt
        sent = [(request.key, claim, push) for request, claim, push in pushes]

        def publish() -> Replies:
            return self._broker_store.begin_publish(sent)()

        replies = self._all_received(requests, publish)
        for request, reply in zip(requests, replies, strict=True):
            if isinstance(reply, PushRefused):
                request.attempt = ""
            elif not isinstance(reply, StoreUnavailable):
                self._note_published(request, reply)
        return replies

    def _note_published(self, request: PublishRequest, reply: Acquired) -> None:
        request.attempt = ""  # from here on it is known what has become of it
        if reply.outcome == "created":
            self.published[request.task_id] = request.key
            if len(self.published) > REMEMBERED:
                self.published.trim()

    def _received(self, request: PublishRequest, acquired: Acquired) -> Acquired:
        breaker = self._breakers.only or self._breakers.of(request.key)
        if breaker.failures:
            breaker.count(None)
        self._note_taken(request.key, acquired)
        return acquired

    def _note_taken(self, key: str, acquired: Acquired) -> None:
        # A call that is repeated soon, as by a double click, mostly finds its key held.
        is_created = acquired.outcome == "created"
        self.taken_until[key] = monotonic() + REPEATED_WITHIN_S if is_created else math.inf
        if len(self.taken_until) > REMEMBERED:
            self.taken_until.trim()

    def _check_circuit(self, request: PublishRequest) -> None:
        """Raises AcquireFailed while the circuit of the key is open."""
        breaker = self._breakers.only or self._breakers.of(request.key)
        if breaker.failures:
            error = breaker.skips()
            if error is not None:
                self.report_error("acquire", error, request)
                raise AcquireFailed(error)

    def _attempt(
        self, request: PublishRequest, act: Callable[..., Reply], *arguments: object
    ) -> Reply:
        try:
            return act(*arguments)
        except StoreUnavailable as error:
            self._fail(request, error)
        except BaseException:
            # A time limit of the caller, for example: the reply was not received, and the lock
            # may have been acquired.
            self.withdraw_later(request)
            raise

    def _fail(self, request: PublishRequest, error: StoreUnavailable) -> NoReturn:
        breaker = self._breakers.only or self._breakers.of(request.key)
        breaker.count(error)
        if isinstance(error, PushRefused):
            request.attempt = ""  # nothing is to be withdrawn
        self.report_error("acquire", error, request)
        raise AcquireFailed(error) from error

    def begin_acquire_many(
        self, requests: list[PublishRequest], published: list[PublishRequest]
    ) -> Callable[[], Replies]:
        """Request many locks together; the result of each is as if it was acquired alone.

        What is returned waits for the replies, once, or raises StoreUnavailable; where the store
        failed for some, the others have the error in place of a reply. A store that can do so
        decides meanwhile, and receives the confirmations of ``published`` in the same exchange.
        """
        for request in published:
            self.published.remember(request.task_id, request.key)
        # Parts of the store whose circuit is open do not keep the others from being used.
        skipped: dict[str, StoreUnavailable] = {}
        for request in requests:
            breaker = self._breakers.only or self._breakers.of(request.key)
            error = breaker.skips() if breaker.failures else None
            if error is not None:
                skipped[request.task_id] = error
                self.report_error("acquire", error, request)
        sent = [request for request in requests if request.task_id not in skipped]
        if not sent:
            self.confirm_many(published)
            return partial(_raise, next(iter(skipped.values()))) if skipped else list
        claims = [(request.key, request.claim()) for request in sent]
        begin = getattr(self.store, "begin_acquire_many", None)
        receive: Callable[[], Replies] = partial(self.store.acquire_many, claims)
        if begin is None:
            self.confirm_many(published)
        else:
            confirmed = _confirmed(published)
            try:
                receive = self._all_counted(sent, partial(begin, claims, confirmed))
            except StoreUnavailable as error:
                self.confirm_many(published)  # as soon as it replies
                return partial(_raise, error)

        def replies() -> Replies:
            received = iter(self._all_received(sent, receive))
            return [skipped.get(request.task_id) or next(received) for request in requests]

        return replies

    def _all_received(
        self, requests: list[PublishRequest], receive: Callable[[], Replies]
    ) -> Replies:
        """The replies; an error in place of a reply is counted and reported."""
        replies = self._all_counted(requests, receive)
        errors: dict[Breaker, StoreUnavailable | None] = {}
        for request, reply in zip(requests, replies, strict=True):
            breaker = self._breakers.only or self._breakers.of(request.key)
            if isinstance(reply, StoreUnavailable):
                if not isinstance(reply, (PushRefused, UnreadableRecord)):
                    errors[breaker] = reply
                self.report_error("acquire", reply, request)
            else:
                self._note_taken(request.key, reply)
            errors.setdefault(breaker, None)
        for breaker, error in errors.items():
            if error is not None or breaker.failures:
                breaker.count(error)
        return replies

    def _all_counted(self, requests: list[PublishRequest], act: Callable[[], Reply]) -> Reply:
        try:
            return act()
        except StoreUnavailable as error:
            self.report_error("acquire", error, requests[0])
            for breaker in {self._breakers.of(request.key) for request in requests}:
                breaker.count(error)
            raise
        except BaseException:
            for request in requests:
                self.withdraw_later(request)
            raise

    # -- confirm -----------------------------------------------------------------------

    def confirm(self, request: PublishRequest, task_id: str) -> None:
        # After the publish, never before: a confirmed lock without a message would
        # swallow calls for a whole queue lease.
        self.published.remember(task_id, request.key)
        try:
            self.store.confirm(request.key, task_id, request.lease_ms)
        except StoreUnavailable as error:
            # Unconfirmed, it lapses with its grace, and what it replaced would run.
            act = partial(self.store.confirm, request.key, task_id, request.lease_ms)
            what = f"confirm that {request.task_name}[{task_id}] is published"
            self._retry("confirm", error, act, what, request)

    def confirm_many(self, requests: list[PublishRequest]) -> None:
        """Confirm them together, after their messages are sent."""
        for request in requests:
            self.published.remember(request.task_id, request.key)
        if requests:
            self._apply(
                "confirm",
                partial(self.store.confirm_many, _confirmed(requests)),
                f"confirm that {len(requests)} tasks are published",
                min(requests, key=lambda request: request.grace_ms),
            )

    def confirm_later(self, request: PublishRequest, error: StoreUnavailable) -> None:
        """The message was published although the store did not reply: the lock, if it was
        acquired, is confirmed. Released, its mark would drop the very task that is published."""
        key, task_id, lease_ms = request.key, request.task_id, request.lease_ms
        confirm: Callable[[], object] = partial(self.store.confirm, key, task_id, lease_ms)
        if request.attempt:  # the store may have pushed a message of its own
            confirm = partial(self.store.renew, [Held(key, task_id, "", lease_ms, copies=True)])
        what = f"confirm that {request.task_name}[{task_id}] is published"
        self._apply_later(error, what, confirm, request)

    # -- release -----------------------------------------------------------------------

    def withdraw(self, request: PublishRequest) -> None:
        """Publishing failed: release the key, now or as soon as the store replies."""
        self._apply(
            "give_back",
            self._withdrawal(request),
            f"release the lock of {request.task_name}[{request.task_id}]",
            request,
        )

    def withdraw_acquired(self, request: PublishRequest, acquired: Acquired) -> None:
        """The call is not made after all: undo what it acquired."""
        if acquired.outcome == "created":
            self.withdraw(request)
        elif acquired.outcome in ("joined", "queued"):
            self.store.complete_follower(request.key, request.task_id)
        if request.merge and acquired.outcome in ("joined", "merged"):
            self.unmerge(request)

    def unmerge(self, request: PublishRequest) -> object:
        """The values of the call go another way, or its caller gets an error. Returns whether they
        were removed: a task that has started keeps them. None: the store did not reply."""
        request.may_be_merged = False
        return self._apply(
            "unmerge",
            partial(self.store.unmerge, request.key, request.task_id),
            f"remove the values that {request.task_name}[{request.task_id}] has merged",
            request,
        )

    def withdraw_later(
        self, request: PublishRequest, error: StoreUnavailable | None = None
    ) -> None:
        """The reply was not received, and the lock may have been acquired."""
        if not request.task_id:
            return  # it was only probed for
        self._apply_later(
            error,
            f"release the lock that {request.task_name}[{request.task_id}] may have acquired",
            self._withdrawal(request),
            request,
            pushed=bool(request.attempt),
        )

    def _withdrawal(self, request: PublishRequest) -> Callable[[], object]:
        mark_ms = request.delay_ms + request.lease_ms
        if request.attempt:
            return partial(self._withdraw_attempt, request, request.attempt, mark_ms)
        return partial(self.store.give_back, request.key, request.task_id, mark_ms)

    def _withdraw_attempt(self, request: PublishRequest, attempt: str, mark_ms: int) -> None:
        """The store may have pushed the message, too."""
        # What a replacement has replaced is gone: without it, none of them would run.
        if request.policy.on_conflict not in REPLACING:
            withdraw = self._broker_store.withdraw
            if withdraw(request.key, request.task_id, attempt, mark_ms) == "withdrawn":
                return
        reporting.not_withdrawn(request.task_name, request.task_id)

    # -- retries -----------------------------------------------------------------------

    def _apply(
        self, name: str, act: Callable[[], object], what: str, request: PublishRequest
    ) -> object:
        """What the act returns; None: it is repeated until the store replies."""
        try:
            return act()
        except StoreUnavailable as error:
            self._retry(name, error, act, what, request)
            return None

    def _retry(
        self,
        name: str,
        error: StoreUnavailable,
        act: Callable[[], object],
        what: str,
        request: PublishRequest,
    ) -> None:
        self.report_error(name, error, request)
        self.retries.retry(request.key, what, act, request.grace_ms / 1000)

    def _apply_later(
        self,
        error: StoreUnavailable | None,
        what: str,
        act: Callable[[], object],
        request: PublishRequest,
        *,
        pushed: bool = False,
    ) -> None:
        """``pushed``: the message may be in its queue, so that no lapse of the grace ends it."""

        def apply() -> None:
            act()
            if request.join:  # or it was attached to a holder, and would end with that
                self.store.complete_follower(request.key, request.task_id)
            if request.merge:
                self.store.unmerge(request.key, request.task_id)

        # Nothing can have happened in a store that was skipped or has refused, nor to an unreadable
        # record.
        if isinstance(error, (StoreSkipped, PushRefused, UnreadableRecord)):
            return
        retry = partial(self.retries.retry, request.key, what, apply)
        if pushed:
            within_ms = request.delay_ms + request.lease_ms
            retry(within_ms / 1000, otherwise="the task may run although its call raised")
        else:  # not sooner, or it could overtake the request that it undoes
            retry(request.grace_ms / 1000, after_s=FIRST_PAUSE_S)

    def report_error(self, act: str, error: StoreUnavailable, request: PublishRequest) -> None:
        task_id = request.identify()
        reporting.store_error(self.app, act, error, request.task_name, task_id, request.key)


def _confirmed(requests: list[PublishRequest]) -> list[tuple[str, str, int]]:
    return [(request.key, request.task_id, request.lease_ms) for request in requests]


def _raise(error: Exception) -> NoReturn:
    raise error
