"""How the renewing of leases has gone in one worker process, for whoever asks."""

from __future__ import annotations

import dataclasses
import logging
import random
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from celery.bootsteps import RUN

from celery_unique import reporting
from celery_unique.config.app_state import AppState
from celery_unique.exceptions import StoreUnavailable, UnreadableRecord
from celery_unique.stores.base import Held
from celery_unique.stores.record import STATE_OF

from .follower_copies import KnownFollowers
from .held_requests import held_requests
from .lock_client import WorkerLockClient

logger = logging.getLogger("celery_unique")


@dataclass(slots=True)
class RenewalHealth:
    """Written by the renewing thread, read by another: single assignments only."""

    every_s: float
    began_at: float = field(default_factory=time.monotonic)
    round_at: float | None = None  # the last round that went well, with locks to renew or none
    renewed_at: float | None = None  # the last renewal that the store answered
    renewed: int = 0  # leases asked for in it
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


#: A request whose message is here, and what the store is asked for it.
_Renewed = tuple[Any, Held]

#: A lease is renewed three times in its life, so that two renewals can fail.
RENEWALS_PER_LEASE = 3
#: Renewed at once, at most: a key that the store cannot change in time fails its batch.
BATCH = 100
#: A message that waits in a worker for longer than this is told to the store.
REGISTER_AFTER_S = 1.0
REMEMBERED = 10_000
#: Stores that do not expire by themselves are swept by workers now and then.
SWEEP_EVERY_S = 60.0
SWEEP_BATCH = 500
#: How long a stopping worker waits for its last look at followers.
LAST_LOOK_S = 5.0
#: Leases wait while a worker sweeps.
SWEEP_AT_MOST_S = 1.0


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
        #: Received, and not yet known to be held: by their deliveries.
        self._received: deque[Any] = deque(maxlen=REMEMBERED)
        #: The messages of which the store knows that this worker has them.
        self._known: dict[str, _Renewed] = {}

    def start(self) -> None:
        self._thread = threading.Thread(
            target=self._work, name="celery_unique.renewal", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._wake.set()
        if self._thread is not None:
            self._thread.join(LAST_LOOK_S)

    def received(self, request: Any) -> None:
        """A message that waits here: the store is to know soon that it is in a worker, which may
        be killed. Most have started by then."""
        self._received.append(request)
        if len(self._received) == 1:
            self._wake.set()

    def returned(self) -> None:
        """The worker has ended as it should: what it had not begun is in the broker again."""
        returned = [
            dataclasses.replace(held, held_ms=0, returned=True)
            for request, held in self._known.values()
            if not request.unique_started
        ]
        self._known.clear()
        for n in range(0, len(returned), BATCH):
            try:
                self._app_state.part(WorkerLockClient).store.renew(returned[n : n + BATCH])
            except StoreUnavailable as error:
                reporting.store_error(self._app_state.app, "renew", error, "", "", "")
                return

    def hurry(self) -> None:
        """The worker begins to stop: what its pool is just taking must be told before it ends.
        By this thread, since it may be a signal's handler that says so."""
        self._is_stopping = True
        self._wake.set()

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
                self._look_at_ends()
                self._known_followers.look(self._held_deliveries())
                self._maybe_sweep()
                health.round_ended(renewed)
            except StoreUnavailable as error:
                health.round_failed(error)
                self._app_state.part(WorkerLockClient).renewal_failed()
                reporting.store_error(self._app_state.app, "renew", error, "", "", "")
            except Exception as error:
                health.round_failed(error)
                # One bad round must not end the renewals: every lock here would lapse.
                logger.exception("renewing leases failed; it is tried again")

        self._look_a_last_time()

    def _look_a_last_time(self) -> None:
        """The pool is gone: what the store has lost of its tasks' followers nobody else knows."""
        try:
            self._known_followers.look(())
        except StoreUnavailable as error:
            reporting.store_error(self._app_state.app, "followers", error, "", "", "")
        except Exception:
            logger.exception("looking after followers failed; it is tried again")

    def _register(self) -> None:
        """Tell the store of the messages that have come and wait here."""
        self._wake.wait(REGISTER_AFTER_S)
        if self._stop.is_set():
            return
        received = [self._received.popleft() for _ in range(len(self._received))]
        waiting = [
            (request, held)
            for request in received
            if not request.unique_started and (held := self._held(request)) is not None
        ]
        try:
            problem = self._renew_all([pair for pair in waiting if pair[1].held_ms])
            if problem is not None:  # the next round tells it
                reporting.store_error(self._app_state.app, "renew", problem, "", "", "")
        except Exception:
            logger.exception("telling which messages wait here failed; it is tried again")

    def _pause_s(self) -> float:
        return self._app_state.leases.run_ms / 1000 / RENEWALS_PER_LEASE

    def renew_once(self) -> int:
        """One round. How many leases were asked for."""
        requests = held_requests(self._worker)
        pairs = [(r, held) for r in requests if (held := self._held(r)) is not None]
        # Celery forgets what waits when a worker begins to stop, and returns it in the end.
        found = {held.waits_as for _, held in pairs}
        for delivery, (request, held) in list(self._known.items()):
            if request.unique_started or (delivery not in found and not self._stops()):
                del self._known[delivery]
            elif delivery not in found:
                pairs.append((request, held))
        problem = self._renew_all(pairs)
        for request in requests:
            # Each for itself: one that the store does not answer for keeps none from the others.
            try:
                if getattr(request, "unique_blind", False):
                    self._catch_up(request)
                if hasattr(request, "is_forgotten") and request.is_forgotten():
                    self._settle_forgotten(request)
            except StoreUnavailable as error:
                problem = problem or error
        if problem is not None:
            raise problem
        return len(pairs)

    def _renew_all(self, pairs: list[_Renewed]) -> StoreUnavailable | None:
        """What runs comes first: its lease is the short one.

        A batch that fails is tried again in halves, behind the others, until a single lease is
        left. So one key keeps no other from being renewed, and a store that is away is asked
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
        asked_at = time.monotonic()
        problem: StoreUnavailable | None = None
        replies = self._app_state.part(WorkerLockClient).store.renew([held for _, held in pairs])
        for (request, held), still_ours in zip(pairs, replies, strict=True):
            if held.held_ms:
                self._known[held.waits_as] = (request, held)
            if isinstance(still_ours, UnreadableRecord):
                lock = request.unique_lock
                reporting.store_error(
                    self._app_state.app, "renew", still_ours, request.name, lock.task_id, lock.key
                )
                continue
            if isinstance(still_ours, StoreUnavailable):
                problem = problem or still_ours
                continue
            if still_ours:
                self._known_followers.see(request.unique_lock, still_ours - 1)
            else:
                self._known_followers.lost(request.unique_lock)
            if held.delivery and still_ours:
                request.unique_alive_at = asked_at
            elif held.delivery:
                self._is_over(request, asked_at)
        return problem

    def _held(self, request: Any) -> Held | None:
        lock = getattr(request, "unique_lock", None)
        holding = self._app_state.part(WorkerLockClient)
        if lock is None or holding.has_ended_here(lock.delivery):
            return None
        if getattr(request, "unique_blind", False):
            return None  # the store does not know yet that this delivery runs it
        leases = holding.leases
        if not request.unique_started:
            # As far as this thread can see: the worker's main one may just be starting it.
            held_ms = 0 if request.has_continuations() else leases.run_ms
            return Held(
                lock.key,
                lock.task_id,
                "",
                leases.queue_ms,
                waits_as=lock.delivery,
                held_ms=held_ms,
            )
        # Once a message is acknowledged, only its worker keeps the key: the short lease.
        lease_ms = leases.queue_ms if request.task.acks_late else leases.run_ms
        return Held(lock.key, lock.task_id, lock.delivery, lease_ms, leases.run_ms)

    def _renew_forgotten(self) -> None:
        """Messages that this worker still has, and Celery does not count any more.

        Those of ended tasks, whose acknowledgement waits for the event loop. In a stopping
        worker also those that its pool has not taken; only then, since after a lost
        connection they are another's to run.
        """
        holding = self._app_state.part(WorkerLockClient)
        forgotten = holding.unacknowledged()
        if self._stops():
            forgotten += holding.on_the_way()
        if forgotten:
            holding.store.renew(forgotten)

    def _stops(self) -> bool:
        return bool(self._is_stopping or self._worker.blueprint.state != RUN)

    def _look_at_ends(self) -> None:
        holding = self._app_state.part(WorkerLockClient)
        holding.ends.look(holding, self._held_deliveries())

    def _held_deliveries(self) -> set[str]:
        locks = [getattr(request, "unique_lock", None) for request in held_requests(self._worker)]
        return {lock.delivery for lock in locks if lock is not None}

    def _catch_up(self, request: Any) -> None:
        """It started while the store was away: from here on it is as any other."""
        holding, lock = self._app_state.part(WorkerLockClient), request.unique_lock
        asked_at = time.monotonic()
        has_its_lock = holding.catch_up(lock, request.name, bool(request.task.acks_late))
        request.unique_blind = False
        if has_its_lock:
            request.unique_alive_at = asked_at
        else:
            holding.ended_here(lock.delivery)

    def _settle_forgotten(self, request: Any) -> None:
        """Nobody will settle it after its end. Seen ending in two rounds, its result is stored;
        its message cannot be acknowledged, and its second delivery is to be dropped."""
        holding, lock = self._app_state.part(WorkerLockClient), request.unique_lock
        record, _ = holding.store.read(lock.key)
        task = record.tasks.get(lock.task_id)
        if task is None or task.delivery != lock.delivery or not task.ending:
            return
        if request.unique_seen_ending:
            state = STATE_OF[task.state]
            holding.settle(dataclasses.replace(lock, again=True), request.name, state)
        request.unique_seen_ending = True

    def _is_over(self, request: Any, now: float) -> None:
        holding, lock = self._app_state.part(WorkerLockClient), request.unique_lock
        holding.ended_here(lock.delivery)
        # A lease that was alive a moment ago has not lapsed: the body has ended and given
        # it back, and Celery is still busy with the result.
        if now - request.unique_alive_at > holding.leases.run_ms / 1000:
            holding.lost(lock, request.name, "its lock lapsed while it was running")

    def _maybe_sweep(self) -> None:
        self._since_sweep_s += self._pause_s()
        if self._since_sweep_s >= SWEEP_EVERY_S:
            self._since_sweep_s = 0.0
            self._sweep()

    def _sweep(self) -> None:
        """Batch after batch while they are full: where locks are kept for a window, more than
        one batch can lapse between two sweeps."""
        store, ends_at = (
            self._app_state.part(WorkerLockClient).store,
            time.monotonic() + SWEEP_AT_MOST_S,
        )
        while store.sweep(SWEEP_BATCH) >= SWEEP_BATCH and time.monotonic() < ends_at:
            pass
