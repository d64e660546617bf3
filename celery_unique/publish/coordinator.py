"""The order of acts around one lock: acquire, publish, confirm; or release.

Each order that matters is named where it is kept.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from celery.utils.dispatch import Signal

from celery_unique import reporting
from celery_unique.config.app_state import AppState
from celery_unique.config.leases import Leases
from celery_unique.config.settings import UniqueSettings
from celery_unique.exceptions import IdempotencyKeyConflict, StoreUnavailable
from celery_unique.followers.continuations import continues
from celery_unique.header import LockHeader
from celery_unique.policy.durations import milliseconds
from celery_unique.policy.states import TERMINAL
from celery_unique.stores.base import Acquired, Held, Holder, LockStore, holder_of
from celery_unique.stores.record import State

from . import conflicts
from .atomic import AtomicPublisher
from .overlapped_acquire import OverlappedPublisher
from .request import PublishOutcome, PublishRequest, SentEvent, address_of
from .results import CallOutcome
from .store_client import AcquireFailed, CallerStoreClient

if TYPE_CHECKING:
    from .stale_holders.healing import StaleHolders

#: How long a duplicate of an unconfirmed holder waits before it reads the record again.
READ_AGAIN_AFTER_S = (0.002, 0.005, 0.010, 0.020, 0.050)
ONE_MS = 0.001
#: How often a call acquires again when the holder that it found has vanished.
ROUNDS = 5
#: A holder that has waited this long may have lost its message to a purge.
LONG_WAIT_MS = 3_600_000


class UniqueTaskCoordinator:
    """What this library does for the callers of one app."""

    def __init__(
        self, app: Any, settings: UniqueSettings, store: LockStore, leases: Leases
    ) -> None:
        self.app = app
        self.settings = settings
        self.leases = leases
        self.store = store
        self.client = CallerStoreClient(app, store, settings.store_timeout.total_seconds())
        #: Two other ways for calls that allow them; None where no call of this app does.
        self.atomic = AtomicPublisher.of(app, settings, self.client)
        self.overlapped = (
            OverlappedPublisher(app, self.client) if hasattr(store, "begin_acquire") else None
        )
        self._check_after_ms = milliseconds(settings.check_after)
        self._stale_holders: StaleHolders | None = None

    @classmethod
    def of(cls, app_state: AppState) -> UniqueTaskCoordinator:
        return cls(app_state.app, app_state.settings, app_state.store, app_state.leases)

    def flush(self) -> None:
        """Nothing waits here: fire-and-forget acts are the store's."""

    @cached_property
    def fingerprint(self) -> str:
        return self.store.fingerprint()

    @cached_property
    def broker(self) -> tuple[Any, ...]:
        """The broker that the app publishes to."""
        return address_of(self.app.connection_for_write())

    def before_batch(self, requests: Sequence[PublishRequest]) -> None:
        """Called for calls of ``apply_many``, which are not published one by one: an integration
        can add to them here, and to others in ``publish``."""

    # -- acquire, publish, confirm ------------------------------------------------------

    def publish(self, request: PublishRequest) -> PublishOutcome:
        """Acquire the lock, publish the message and confirm; or return what a call gets whose key
        is held."""
        other_way, error = self._other_way(request), None
        for _ in range(ROUNDS):
            try:
                if other_way is not None:
                    acquired, result = other_way.publish(request)
                    if acquired is None:
                        return self.passed_by(request, result, other_way)
                else:
                    request.identify()
                    began, result = time.monotonic(), None
                    acquired = self.client.acquire(request)
                    if acquired.outcome == "created":
                        result = self.send(request, acquired, began)
                        self.client.confirm(request, request.task_id)
            except AcquireFailed as failed:
                error = failed.error  # raised from here, it would be in a cycle with this one
                break
            if acquired.outcome == "created":
                return self.created(request, acquired, result)
            outcome = self.settle_conflict(request, acquired)
            if outcome is not None:
                return outcome
        if error is not None:
            try:
                return self.publish_without_store(request, error)
            finally:
                del error  # its traceback has this frame
        # The holders vanished as fast as they came, or one in a canvas, of which no copy may be
        # published, stays unconfirmed: publish rather than lose the call.
        if request.may_be_merged:
            self.client.unmerge(request)
        return self._publish_unlocked(request, "its holder vanished or is not published yet")

    def _other_way(self, request: PublishRequest) -> AtomicPublisher | OverlappedPublisher | None:
        """None: acquire, publish and confirm, one after the other."""
        atomic, overlapped = self.atomic, self.overlapped  # another thread may disable them
        if atomic is not None and atomic.publishes(request):
            return atomic
        if overlapped is not None and overlapped.publishes(request):
            return overlapped
        return None

    def send(self, request: PublishRequest, acquired: Acquired, began: float) -> Any:
        """The lock was requested at ``began`` and acquired: send the message, or release it."""
        try:
            self.client.keep_grace(request, began)
            outcome = conflicts.admitted(request, acquired).outcome
            header = request.header(request.task_id, acquired.now, outcome)
            return request.send(request.task_id, header, request.changed_delay(acquired))
        except BaseException:
            self.client.withdraw(request)
            raise

    def created(self, request: PublishRequest, acquired: Acquired, result: Any) -> PublishOutcome:
        """The call is published: report it."""
        facts = CallOutcome("created", False, request.key)
        if acquired.after or acquired.replaced:
            facts = conflicts.admitted(request, acquired)
        name, task_id, key = request.task_name, request.task_id, request.key
        if _is_heard(reporting.acquired, reporting.unique_acquired):
            reporting.acquired(name, task_id, outcome=facts.outcome, app=self.app, key=key)
        for replaced in acquired.replaced:
            reporting.superseded(name, replaced, app=self.app, key=key, by=task_id)
        # The others share this task's outcome.
        ended = tuple(i for i in acquired.replaced if i not in acquired.followers)
        return PublishOutcome(task_id, facts, result, ended)

    def passed_by(
        self,
        request: PublishRequest,
        result: Any,
        way: AtomicPublisher | OverlappedPublisher,
    ) -> PublishOutcome:
        """The message is published without its header, so that nothing would release its lock: it
        was routed to no queue, or code of the user's own has built or pushed it. The call has no
        lock. The next ones acquire theirs before they are published."""
        if way is self.atomic:
            self.atomic = None
        elif way is self.overlapped:
            self.overlapped = None
        why = way.why_passed_by
        reporting.publishing_unlocked(request.task_name, request.task_id, reason=why)
        facts = CallOutcome("bypassed", False, request.key)
        return PublishOutcome(request.task_id, facts, result)

    # -- without a lock -------------------------------------------------------------------

    @property
    def publishes_anyway(self) -> bool:
        """Whether calls are published if the store does not reply."""
        return self.settings.on_store_error == "publish" or self.settings.dry_run

    def publish_without_store(
        self, request: PublishRequest, error: StoreUnavailable
    ) -> PublishOutcome:
        """The store did not reply, and may have acquired the lock. What follows is sent to it in
        the background: the caller has waited long enough."""
        if not self.publishes_anyway and not continues(request.parent):
            self.client.withdraw_later(request, error)
            try:
                raise error
            finally:
                del error  # no cycle with this frame: collecting it takes as long as a call
        outcome = self._publish_unlocked(request, "the lock store did not answer")
        self.client.confirm_later(request, error)
        return outcome

    def _publish_unlocked(self, request: PublishRequest, why: str) -> PublishOutcome:
        """Publish although the lock is uncertain, or not held."""
        header = request.header(request.identify(), 0, "bypassed")
        outcome = self._bypass(request, header, why)
        self.client.published.remember(request.task_id, request.key)
        return outcome

    def _bypass(
        self, request: PublishRequest, header: LockHeader | None, why: str
    ) -> PublishOutcome:
        request.identify()
        event = reporting.running_unlocked if request.run else reporting.publishing_unlocked
        event(request.task_name, request.task_id, reason=why)
        result = request.send(request.task_id, header, None)
        return PublishOutcome(request.task_id, CallOutcome("bypassed", False, request.key), result)

    # -- conflicts --------------------------------------------------------------------------

    def settle_conflict(self, request: PublishRequest, acquired: Acquired) -> PublishOutcome | None:
        """What a call gets whose key is held, or None: acquire again."""
        holder, now = acquired.holder, acquired.now
        waited = holder is not None and now - holder.created_at > self._check_after_ms
        if waited and self._heals(request, acquired):
            return None
        if acquired.outcome in ("queued", "full"):
            return self._parked(request, acquired)
        assert holder is not None
        if holder.state is State.PENDING and holder.task_id in self.client.published:
            holder = _published(holder, now)  # the confirmation has not reached the store yet
        if request.dry_run:
            return self._publish_duplicate(request, holder, now)
        if holder.arguments != request.arguments:
            raise IdempotencyKeyConflict(request.task_name, key=request.key)
        if _is_made_by(holder, request):
            self.client.withdraw_acquired(request, acquired)
            return self._publish_unlocked(request, "its caller holds the key, and has no lock yet")
        if acquired.outcome in ("joined", "ended"):
            # A pending holder needs no help, other than for a plain duplicate: the whole message
            # of the call is in the store. If the holder is never published, its grace lapses or it
            # is withdrawn, and the first of its followers is published instead.
            self._report_conflict(request, holder, now)
            reporting.joined(request.task_name, request.task_id, by=holder.task_id)
            facts = conflicts.joined(request.key, holder)
            ended = acquired.outcome == "ended"
            return PublishOutcome(request.task_id, facts, follows=holder.task_id, ended=ended)
        if request.bypasses is not None and request.bypasses(holder.task_id):
            if request.merge:
                self.client.unmerge(request)  # it runs with its own values
            # The very id of the call is awaited, so that another's cannot be returned.
            why = f"task {holder.task_id} holds its key, but this very call is awaited"
            return self._bypass(request, None, why)
        # A duplicate may only name a task that is surely published, or a publish that then fails
        # would take this call with it. A rejection promises nothing.
        merged = acquired.outcome == "merged"
        if acquired.outcome == "duplicate" or holder.abandoned or merged:
            request.may_be_merged = merged
            try:
                published = self._surely_published(request, holder, now)
            except BaseException:
                if merged:
                    self.client.unmerge(request)
                raise
            if published is None:
                return None
            holder = published
        self._report_conflict(request, holder, now)
        conflict = conflicts.Conflict(
            request.task_name,
            request.key,
            holder,
            self.settings.conceal_holder,
            by_idempotency_key=bool(request.arguments),
        )
        if merged:
            return PublishOutcome(holder.task_id, conflicts.merge(conflict))
        return PublishOutcome(
            holder.task_id, conflicts.resolve(request.policy.on_conflict, conflict)
        )

    def _heals(self, request: PublishRequest, acquired: Acquired) -> bool:
        """Whether the holder was stale, and its key is released: acquire again. One that values of
        other calls were merged into is published again instead."""
        holder, now = acquired.holder, acquired.now
        assert holder is not None
        if holder.state not in (State.AVAILABLE, State.RETRYABLE):
            return False
        if now - holder.eta <= self._check_after_ms or request.run or continues(request.parent):
            return False
        if self._stale_holders is None:
            from .stale_holders.healing import StaleHolders  # rarely needed

            self._stale_holders = StaleHolders(request.app_state)
        healed = self._stale_holders.heal(request.key, holder.task_id)
        if healed is None:
            return False
        lost = healed.lost
        if lost is None:
            if acquired.outcome == "merged" and not healed.ended:
                return not self._has_started(request, holder)
            self.client.withdraw_acquired(request, acquired)  # if it has joined
            return True
        if request.follower is None:  # else the call has no message that could replace the holder's
            try:
                self._publish_again(request, lost, now)
            except StoreUnavailable as error:
                self.client.report_error("help", error, request)
            except BaseException:
                self.client.withdraw_acquired(request, acquired)
                raise
        return False

    def _has_started(self, request: PublishRequest, holder: Holder) -> bool:
        """Whether the holder has started since the call was merged into it, so that its run has the
        values: acquired again, they would run twice. Else they are removed."""
        if self.client.unmerge(request) is not False:
            return False
        try:
            _, now = self.store.read(request.key)
        except StoreUnavailable as error:
            self.client.report_error("read", error, request)
            return True
        return now < holder.lease  # before that, what takes values goes only by its end

    def _parked(self, request: PublishRequest, acquired: Acquired) -> PublishOutcome:
        """The call is in the store with its whole message: a worker publishes it when its turn
        comes. Or its lane is full."""
        name, task_id, key = request.task_name, request.task_id, request.key
        if acquired.outcome == "full":
            reporting.parked(self.app, name, "", acquired, key)
            conceal = self.settings.conceal_holder
            raise conflicts.lane_is_full(name, key, acquired, conceal=conceal)
        self.client.published.remember(task_id, key)  # a revoke finds its key
        reporting.parked(self.app, name, task_id, acquired, key)
        if request.app_state.sends_sent_events and request.follower is not None:
            SentEvent(self.app, key).publish_parked(request.follower, acquired.position)
        holder = None if self.settings.conceal_holder else acquired.holder
        return PublishOutcome(task_id, conflicts.queued(key, holder))

    def _publish_duplicate(
        self, request: PublishRequest, holder: Holder, now: int
    ) -> PublishOutcome:
        """In a dry run. Without a header it runs as any plain task, and leaves the lock alone."""
        request.identify()
        if holder.arguments != request.arguments:
            error = IdempotencyKeyConflict(request.task_name, key=request.key)
            reporting.would_raise(request.task_name, request.task_id, reason=str(error))
        if request.parent_id != request.task_id:  # the retry of such a task was reported
            self._report_conflict(request, holder, now)
        result = request.send(request.task_id, None, None)
        facts = CallOutcome("would_deduplicate", False, request.key, str(holder.state))
        return PublishOutcome(request.task_id, facts, result)

    def _report_conflict(self, request: PublishRequest, holder: Holder, now: int) -> None:
        waited = 0  # in the queue: one that runs, or waits for its ETA, is where it belongs
        if holder.state is State.AVAILABLE:
            waited = max(0, now - max(holder.created_at, holder.eta))
        dry_run, on_conflict = bool(request.dry_run), request.dry_run or request.policy.on_conflict
        if dry_run or _is_heard(reporting.skipped_publish, reporting.unique_conflict):
            reporting.conflict(
                self.app, request.task_name, holder, request.key, on_conflict, waited, dry_run
            )
        if waited > LONG_WAIT_MS:
            reporting.long_wait(request.task_name, holder.task_id, minutes=waited // 60_000)
        if holder.task_id == request.task_id:
            reporting.held_by_itself(request.task_name, holder.task_id)

    def _surely_published(self, request: PublishRequest, holder: Holder, now: int) -> Holder | None:
        """The holder once its message is surely published, or None: acquire again."""
        if holder.abandoned and (request.follower is not None or request.run is not None):
            return holder  # the call has no message that could replace the holder's
        if holder.state is not State.PENDING and not holder.abandoned:
            return holder
        try:
            if holder.abandoned:
                return self._publish_again(request, holder, now)
            return self._wait_or_help(request, holder, now)
        except StoreUnavailable as error:
            self.client.report_error("help", error, request)
            return holder if holder.abandoned else None

    def _publish_again(self, request: PublishRequest, holder: Holder, now: int) -> Holder | None:
        """The worker that had the holder's message is dead. The broker may deliver that again much
        later, so the message of this call is published under the holder's id: one of them runs."""
        verdict = self.store.help(request.key, holder.task_id, request.grace_ms)
        if verdict == "go":
            reporting.republished(request.task_name, holder.task_id)
            published = Held(request.key, holder.task_id, "", request.lease_ms, returned=True)
            header = request.header(holder.task_id)
            try:
                request.send(holder.task_id, header, max(0, holder.eta - now) if holder.eta else 0)
            except BaseException:
                # Nothing was published: the next call is to try it immediately.
                self._renew_holder(request, replace(published, lease_ms=0, held_ms=1))
                time.sleep(2 * ONE_MS)  # the next one may come within that, by the store's clock
                raise
            self._renew_holder(request, published)
        return None if verdict == "again" else holder

    def _renew_holder(self, request: PublishRequest, held: Held) -> None:
        try:
            self.store.renew([held])
        except StoreUnavailable as error:  # it counts as dead once the grace has passed
            self.client.report_error("help", error, request)

    def _wait_or_help(self, request: PublishRequest, holder: Holder, now: int) -> Holder | None:
        for pause in READ_AGAIN_AFTER_S:
            time.sleep(pause)
            record, now = self.store.read(request.key)
            task = record.tasks.get(holder.task_id)
            if task is None:
                return self._after_its_run(request, holder, now)
            if not task.pending:
                return holder_of(holder.task_id, task, now)
        verdict = self.store.help(request.key, holder.task_id)
        if verdict == "go":
            # The message of this call under the holder's id: the gate and the done mark make a
            # second copy harmless, while taking over would revoke a slow first caller.
            request.send(holder.task_id, request.header(holder.task_id), None)
            self.client.confirm(request, holder.task_id)
        if verdict == "again" and request.may_be_merged:
            record, now = self.store.read(request.key)
            if holder.task_id not in record.tasks:
                return self._after_its_run(request, holder, now)
        return None if verdict == "again" else _published(holder, now)

    def _after_its_run(self, request: PublishRequest, holder: Holder, now: int) -> Holder | None:
        """The pending holder is gone, so a plain call acquires again. The values of a merged one
        went with it: before its lease a task into which calls were merged goes only by its end, or
        is revoked or superseded with all of them. Acquired again, they would run twice."""
        if not request.may_be_merged or now >= holder.lease:
            return None
        return _published(holder, now)


def _is_heard(event: reporting.Event, signal: Signal) -> bool:
    """Asked before what every call reports: to state the facts takes longer."""
    return bool(signal.receivers) or reporting.logger.isEnabledFor(event.level)


def _is_made_by(holder: Holder, request: PublishRequest) -> bool:
    """Whether the body of the holder makes this call, although the holder waits by its record: the
    store did not answer when it started. The call would be lost as its duplicate."""
    if request.parent is None or holder.task_id != request.parent.id:
        return False
    waits = holder.state not in (State.ACTIVE, *TERMINAL)
    return waits and holder.task_id != request.task_id


def _published(holder: Holder, now: int) -> Holder:
    """A pending holder in the state that it has now that its message is published."""
    waits = State.SCHEDULED if holder.eta > now else State.AVAILABLE
    return replace(holder, state=waits)
