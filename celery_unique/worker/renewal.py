"""Renews the leases of the messages that a worker holds, in a thread of its own.

The same thread records what the worker has missed: tasks that started without the store, ends
that no process recorded, followers that the store has lost.
"""

from __future__ import annotations

import dataclasses
import logging
import random
import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from celery.bootsteps import RUN

from celery_unique import reporting
from celery_unique.config.app_state import AppState
from celery_unique.exceptions import StoreUnavailable, UnreadableRecord
from celery_unique.header import LockHeader
from celery_unique.stores.base import Held

from .deliveries import Deliveries
from .delivery import Delivery, DeliveryState
from .follower_copies import KnownFollowers
from .held_requests import held_requests
from .lock_client import WorkerLockClient

logger = logging.getLogger("celery_unique")


@dataclass(slots=True)
class RenewalHealth:
    """How the renewals have gone. Written by their thread, read by another: single assignments."""

    every_s: float
    began_at: float = field(default_factory=time.monotonic)
    round_at: float | None = None  # the last round that went well, with locks to renew or none
    renewed_at: float | None = None  # the last renewal that the store answered
    renewed: int = 0  # leases in it
    failures: int = 0  # rounds in a row that failed
    failed_at: float | None = None
    error: str = ""

    def round_ended(self, renewed: int) -> None:
        now = time.monotonic()
        if renewed:
            self.renewed_at = now
            self.renewed = renewed
        self.round_at = now
        self.failures = 0

    def round_failed(self, error: Exception) -> None:
        self.failed_at = time.monotonic()
        self.error = str(error) or type(error).__name__
        self.failures += 1

    def as_document(self) -> dict[str, Any]:
        """In seconds that have passed: the clocks of two machines may differ."""
        return {
            "every_s": self.every_s,
            "running_for_s": _since(self.began_at),
            "last_round_s_ago": _since(self.round_at),
            "last_renewal_s_ago": _since(self.renewed_at),
            "leases_renewed": self.renewed,
            "failures_in_a_row": self.failures,
            "last_failure_s_ago": _since(self.failed_at),
            "last_error": self.error or None,
        }


def _since(moment: float | None) -> float | None:
    return None if moment is None else round(time.monotonic() - moment, 1)


#: A request whose message is here, and the line of a renewal for it.
_Renewed = tuple[Any, Held]

#: A lease is renewed three times in its life, so that two renewals can fail.
RENEWALS_PER_LEASE = 3
#: Renewed at a time, at most: a key that the store cannot change in time fails its batch.
BATCH = 100
#: A message that waits in a worker for longer than this is recorded in the store.
REGISTER_AFTER_S = 1.0
REMEMBERED = 10_000
#: Workers sweep the stores that do not expire by themselves.
SWEEP_EVERY_S = 60.0
SWEEP_BATCH = 500
#: Leases wait while a worker sweeps.
SWEEP_AT_MOST_S = 1.0
#: How long a stopping worker waits for its last check of followers.
LAST_CHECK_S = 5.0


class Renewer:
    def __init__(self, app_state: AppState, worker: Any) -> None:
        self._app_state = app_state
        self._worker = worker
        self._stop = threading.Event()
        self._is_stopping = False
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None
        self._since_sweep_s = 0.0
        self._known_followers = KnownFollowers(app_state)
        self._next_round_at = 0.0
        #: Received, and not yet recorded as held.
        self._received: deque[Any] = deque(maxlen=REMEMBERED)
        #: The messages that the store has recorded as held by this worker, by delivery.
        self._known: dict[str, _Renewed] = {}

    @property
    def _client(self) -> WorkerLockClient:
        return self._app_state.part(WorkerLockClient)

    def start(self) -> None:
        self._thread = threading.Thread(
            target=self._work, name="celery_unique.renewal", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._wake.set()
        if self._thread is not None:
            self._thread.join(LAST_CHECK_S)

    def received(self, request: Any) -> None:
        """A message that waits here: the store is to know soon that it is in a worker, which may
        be killed. Most have started by then."""
        self._received.append(request)
        if len(self._received) == 1:
            self._wake.set()

    def return_unstarted(self) -> None:
        """The worker has ended as it should: what it had not begun is in the broker again."""
        returned = [
            dataclasses.replace(held, held_ms=0, returned=True)
            for request, held in self._known.values()
            if not request.unique_delivery.started
        ]
        self._known.clear()
        for n in range(0, len(returned), BATCH):
            try:
                self._client.store.renew(returned[n : n + BATCH])
            except StoreUnavailable as error:
                self._report(error)
                return

    def hurry(self) -> None:
        """The worker begins to stop: what its pool is just taking must be recorded before it
        ends. By this thread, since the caller may be a signal's handler."""
        self._is_stopping = True
        self._wake.set()

    def _report(self, error: StoreUnavailable, act: str = "renew") -> None:
        reporting.store_error(self._app_state.app, act, error, "", "", "")

    def _work(self) -> None:
        health = self._app_state.renewal = RenewalHealth(self._pause_s())
        self._next_round_at = time.monotonic() + self._pause_s()
        while not self._stop.is_set():
            self._wake.wait(max(0.0, self._next_round_at - time.monotonic()))
            self._wake.clear()
            if self._stop.is_set():
                break
            if self._received and not self._is_stopping:
                self._register()
                if time.monotonic() < self._next_round_at:
                    continue
            self._next_round_at = time.monotonic() + self._pause_s()
            try:
                try:
                    renewed = self.renew_once()
                finally:
                    self._renew_forgotten()
                self.record_ends()
                self._known_followers.check(self._held_names())
                self._maybe_sweep()
                health.round_ended(renewed)
            except StoreUnavailable as error:
                health.round_failed(error)
                self._client.renewal_failed()
                self._report(error)
            except Exception as error:
                health.round_failed(error)
                # One bad round must not end the renewals: every lock here would lapse.
                logger.exception("renewing leases failed; it is retried")
        # The pool is gone: what the store has lost of its tasks' followers only this worker has.
        try:
            self._known_followers.check(())
        except StoreUnavailable as error:
            self._report(error, "followers")
        except Exception:
            logger.exception("reaping followers failed; it is retried")

    def _register(self) -> None:
        """Record the messages that have come and wait here."""
        self._wake.wait(REGISTER_AFTER_S)
        if self._stop.is_set():
            return
        received = [self._received.popleft() for _ in range(len(self._received))]
        unstarted = [r for r in received if r.unique_delivery and not r.unique_delivery.started]
        waiting = [(r, held) for r in unstarted if (held := self._held(r)) and held.held_ms]
        try:
            problem = self._renew_all(waiting)
            if problem is not None:  # the next round records it
                self._report(problem)
        except Exception:
            logger.exception("recording which messages wait here failed; it is retried")

    def _pause_s(self) -> float:
        return self._app_state.leases.run_ms / 1000 / RENEWALS_PER_LEASE

    def renew_once(self) -> int:
        """One round. Returns how many leases were to be renewed."""
        requests = held_requests(self._worker)
        pairs = [(r, held) for r in requests if (held := self._held(r)) is not None]
        # Celery forgets what waits when a worker begins to stop, and returns it in the end.
        found = {held.waits_as for _, held in pairs}
        for name, (request, held) in list(self._known.items()):
            delivery = request.unique_delivery
            if delivery is None or delivery.started or (name not in found and not self._stops()):
                del self._known[name]
            elif name not in found:
                pairs.append((request, held))
        problem = self._renew_all(pairs)
        for request in requests:
            delivery = request.unique_delivery
            # Each for itself: one that the store does not answer for delays none of the others.
            try:
                if delivery.blind:
                    self._catch_up(delivery)
                if delivery.is_forgotten():
                    self._settle_forgotten(delivery)
            except StoreUnavailable as error:
                problem = problem or error
        if problem is not None:
            raise problem
        return len(pairs)

    def _renew_all(self, pairs: list[_Renewed]) -> StoreUnavailable | None:
        """What runs comes first: its lease is the short one.

        A batch that fails is retried in halves, behind the others, until a single lease is
        left. So one key keeps no other from being renewed, and an unavailable store is tried
        only for as long as one round may take. Returns the first error.
        """
        ends_at = time.monotonic() + self._pause_s()
        waiting = [pair for pair in pairs if not pair[1].delivery]
        random.shuffle(waiting)  # else a round that is cut short would always leave out the same
        problem: StoreUnavailable | None = None
        for part in ([pair for pair in pairs if pair[1].delivery], waiting):
            batches = deque(part[n : n + BATCH] for n in range(0, len(part), BATCH))
            while batches and (problem is None or time.monotonic() < ends_at):
                batch = batches.popleft()
                try:
                    problem = self._renew_batch(batch) or problem
                except StoreUnavailable as error:
                    problem = problem or error
                    half = len(batch) // 2
                    batches.extend([batch[:half], batch[half:]] if half else [])
        return problem

    def _renew_batch(self, pairs: list[_Renewed]) -> StoreUnavailable | None:
        """The first error, where a part of the store did not answer and others did."""
        sent_at = time.monotonic()
        problem: StoreUnavailable | None = None
        replies = self._client.store.renew([held for _, held in pairs])
        for (request, held), still_ours in zip(pairs, replies, strict=True):
            delivery = request.unique_delivery
            if held.held_ms:
                self._known[held.waits_as] = (request, held)
            if isinstance(still_ours, UnreadableRecord):
                reporting.store_error(
                    self._app_state.app, "renew", still_ours, request.name, held.task_id, held.key
                )
            elif isinstance(still_ours, StoreUnavailable):
                problem = problem or still_ours
            elif delivery is None:  # its record turned out to be unreadable at the gate
                continue
            elif still_ours:
                self._known_followers.renewed(delivery.header, still_ours - 1)
                if held.delivery:
                    delivery.alive_at = sent_at
            else:
                self._known_followers.lost(delivery.header)
                if held.delivery:
                    self._is_lost(delivery, sent_at)
        return problem

    def _held(self, request: Any) -> Held | None:
        """What is renewed for this message; None where there is nothing to renew."""
        delivery: Delivery | None = request.unique_delivery
        if delivery is None or delivery.blind:
            return None  # blind: the store does not know yet that this delivery runs it
        if delivery.state in (DeliveryState.FINISHED, DeliveryState.SETTLED):
            return None
        header, leases = delivery.header, delivery.client.leases
        if not delivery.started:
            if header.guard and not header.sent_by and not delivery.may_exist_twice():
                return None  # nothing is recorded of it before its start
            # As far as this thread can see: the worker's main one may just be starting it.
            if delivery.has_continuations is None:
                delivery.has_continuations = _has_continuations(self._app_state, request)
            held_ms, name = 0 if delivery.has_continuations else leases.run_ms, header.delivery
            return Held(
                header.key,
                header.task_id,
                "",
                leases.queue_ms,
                waits_as=name,
                held_ms=held_ms,
                merge=header.merge,
            )
        # Once a message is acknowledged, only its worker keeps the key: the short lease.
        lease_ms = leases.queue_ms if delivery.task.acks_late else leases.run_ms
        name, run_ms = header.delivery, leases.run_ms
        return Held(header.key, header.task_id, name, lease_ms, run_ms, merge=header.merge)

    def _renew_forgotten(self) -> None:
        """Messages that this worker still has, and Celery does not count any more.

        Those of ended tasks, whose acknowledgement waits for the event loop. In a stopping
        worker also those that its pool has not taken, as far as the worker knows: a child may
        have taken one without a notice, and its message goes back to the queue although it
        runs. Only then, since after a lost connection they are another worker's to run.
        """
        deliveries, leases = self._app_state.part(Deliveries), self._client.leases
        forgotten = [
            Held(header.key, header.task_id, header.delivery, leases.queue_ms, leases.run_ms)
            for header in _headers(deliveries.unacknowledged)
        ]
        if self._stops():
            run_ms = leases.run_ms
            forgotten += [
                Held(header.key, header.task_id, header.delivery, run_ms, run_ms, copies=True)
                for header in _headers(deliveries.on_the_way)
            ]
        if forgotten:
            self._client.store.renew(forgotten)

    def _stops(self) -> bool:
        return bool(self._is_stopping or self._worker.blueprint.state != RUN)

    def record_ends(self) -> None:
        """Release the locks of bodies whose processes are gone and could not."""
        deliveries, client = self._app_state.part(Deliveries), self._client
        for body in deliveries.unrecorded(client.failed_at, self._held_names()):
            header = body.header
            if client.end_for_another(header, body.task_name, rejected=body.rejected):
                reporting.released_for_pool(body.task_name, header.task_id)
            deliveries.bodies.pop(header.delivery, None)

    def _held_names(self) -> set[str]:
        return {request.unique_delivery.name for request in held_requests(self._worker)}

    def _catch_up(self, delivery: Delivery) -> None:
        """It started while the store was unavailable: from here on it is as any other."""
        sent_at = time.monotonic()
        acks_late = bool(delivery.task.acks_late)
        has_its_lock = self._client.catch_up(delivery.header, delivery.task.name, acks_late)
        delivery.blind = False
        if has_its_lock:
            delivery.alive_at = sent_at
        else:
            delivery.finished()

    def _settle_forgotten(self, delivery: Delivery) -> None:
        """Celery does not settle it after its end. Seen ending in two rounds, its result is
        stored; its message cannot be acknowledged, and its second delivery is to be dropped."""
        record, _ = self._client.store.read(delivery.header.key)
        task = record.tasks.get(delivery.header.task_id)
        if task is None or task.delivery != delivery.name or not task.ending:
            return
        if delivery.seen_ending:
            delivery.outcome = task.stored_state
            delivery.settle(again=True)
        delivery.seen_ending = True

    def _is_lost(self, delivery: Delivery, now: float) -> None:
        delivery.finished()
        # A lease that was alive a moment ago has not lapsed: the body has ended and released
        # it, and Celery is still busy with the result.
        if now - delivery.alive_at > self._client.leases.run_ms / 1000:
            self._client.lapsed(delivery.header, delivery.task.name)

    def _maybe_sweep(self) -> None:
        """Batch after batch while they are full: where locks are kept for a window, more than
        one batch can lapse between two sweeps."""
        self._since_sweep_s += self._pause_s()
        if self._since_sweep_s < SWEEP_EVERY_S:
            return
        self._since_sweep_s = 0.0
        store, ends_at = self._client.store, time.monotonic() + SWEEP_AT_MOST_S
        while store.sweep(SWEEP_BATCH) >= SWEEP_BATCH and time.monotonic() < ends_at:
            pass


def _headers(deliveries: Mapping[str, Delivery]) -> list[LockHeader]:
    return [delivery.header for delivery in list(deliveries.values())]


def _has_continuations(app_state: AppState, request: Any) -> bool:
    """Whether a canvas waits for what follows from this very message, or a caller for its reply:
    then no other message can replace it. Also where that cannot be read."""
    given = request.request_dict.get
    if app_state.results_by_message and not given("ignore_result"):
        return True
    try:
        _, _, embedded = request._payload
        continues = (embedded.get(name) for name in ("callbacks", "errbacks", "chain", "chord"))
        return bool(given("group") or any(continues))
    except (TypeError, ValueError, AttributeError):  # no message of Celery's own protocol
        return True
