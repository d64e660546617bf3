"""Which fault, if any, explains what looks wrong."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from tests.chaos.journal import Event
from tests.chaos.stage import WORKERS
from tests.chaos.story import Fault, Revoke, Run, Story

#: What keeps everybody from the store: it replies to nobody, or refuses what it is asked to write.
UNAVAILABLE = ("store restarted", "out of memory", "disk full")
#: A server sees a jump of its clock so much later at most: Valkey looks ten times a second.
LOOKS_S = 0.2
#: How long after a fault its effects may begin: a circuit breaker leaves a store alone for 5 s.
AFTERMATH_S = 7.0

#: In the stack of a worker that waits for the processes of its pool to end.
JOINS_ITS_POOL = "billiard/pool.py join"


def hits(worker: str, fault: Fault) -> bool:
    # A shutdown is in order: it explains nothing.
    return fault.target == worker and fault.kind != "worker shut down"


class Reasons:
    """Which fault, if any, explains what is found. Every rule here is an exception that the
    protocol names; there is none for "it happens"."""

    def __init__(self, story: Story) -> None:
        self._story = story

    def find(self, since: float, until: float, applies: Callable[[Fault], bool], says: str) -> str:
        for fault in self._story.faults:
            if fault.touches(since, until) and applies(fault):
                return f"{says} ({fault})"
        return ""

    # -- leases that lapse -----------------------------------------------------

    def lapse(self, run: Run, until: float) -> str:
        """Why the lease of a running task may have lapsed: nobody could renew it for long."""
        enough = self._story.run_lease / 2

        def stopped_renewing(fault: Fault) -> bool:
            if fault.kind == "worker killed":
                return fault.target == run.worker  # its pool may live a little longer
            if fault.seconds < enough:
                return False
            if fault.kind in (*UNAVAILABLE, "machine stalled"):
                return True
            if fault.target != run.worker:
                return False
            return fault.kind == "worker stopped" or fault.link in ("store", "both")

        since = self._story.received(run)
        return (
            self.find(since, until, stopped_renewing, "its lease could not be renewed")
            or self._jumped_over(self._held_since(run), until, enough)
            or self.evicted(run.key, self._story.admitted(run.id), until)
        )

    def _held_since(self, run: Run) -> float:
        """A retry goes on with the lock of the run before it, or without one if it had none."""
        before = (
            self._story.received(other)
            for other in self._story.runs_of[run.id]
            if other.outcome == "retry" and other.over < run.start
        )
        return min([*before, self._story.received(run)])

    def _jumped_over(self, since: float, until: float, lease: float) -> str:
        """Why a lease that was held all the time lapsed: the store's clock was set ahead by more
        than was left of it. Set back, it makes leases longer, and none of them lapse."""

        def jumped(fault: Fault) -> bool:
            return fault.ahead >= lease and since - LOOKS_S <= fault.t <= until

        return self.find(since, until, jumped, "its lease was over at once")

    def set_back(self, run: Run, until: float) -> str:
        """Why a lock is there that had lapsed when its task ended, and was not removed: the clock
        was set back, to before the end of its lease."""

        def was_back(fault: Fault) -> bool:
            lapsed = self._story.received(run) - LOOKS_S <= fault.t <= run.over
            in_lease = fault.until <= until <= fault.t + self._story.run_lease
            return lapsed and in_lease and fault.ahead > 0

        return (
            self.find(run.start, until, was_back, "lapsed, and there again")
            if run.still_mine is False
            else ""
        )

    def evicted(self, key: str, since: float, until: float) -> str:
        """Whether the store dropped this very record."""
        of_record = self._story.key_of_record

        def dropped(fault: Fault) -> bool:
            return any(of_record.get(record) == key for record in fault.evicted)

        return self.find(since, until, dropped, "its record was dropped")

    def blind_gate(self, run: Run) -> str:
        """Why the store could not be asked before the body began."""
        if run.token != 0:
            return ""

        def no_store(fault: Fault) -> bool:
            if fault.kind in (*UNAVAILABLE, "machine stalled"):
                return True
            return fault.target == run.worker and fault.link in ("store", "both")

        since = self._story.received(run) - AFTERMATH_S
        return self.find(since, run.start, no_store, "the gate could not ask the store")

    def circuit_open(self, run: Run) -> str:
        """Why the store was not used at the end of the body, although it could be reached."""

        def no_store(fault: Fault) -> bool:
            if fault.kind in UNAVAILABLE:
                return True
            return fault.target == run.worker and fault.link in ("store", "both")

        return self.find(run.over - AFTERMATH_S, run.over, no_store, "the circuit was open")

    def not_cancelled(self, revoke: Revoke) -> str:
        """Why a revoke did not reach the store: it returns nevertheless, and the workers have it
        until they end."""
        if revoke.returned is None:
            return ""

        def no_store(fault: Fault) -> bool:
            if fault.kind in (*UNAVAILABLE, "machine stalled"):
                return True
            return fault.link in ("store", "both") and fault.target == "producers"

        since = revoke.began - AFTERMATH_S
        return self.find(since, revoke.returned, no_store, "its revoke did not reach the store")

    # -- messages that come back -------------------------------------------------

    def delivered_again(self, run: Run) -> str:
        """Why an id runs although an earlier run of it was over, or has no lock then."""
        for before in self._story.runs_of[run.id]:
            if before.start >= run.start or before.over > run.start:
                continue
            # A late message whose body was cut short still has its key.
            if before.end is None and before.late:
                continue
            if before.outcome == "retry":
                reason = self._retry_not_told(before)
            else:
                reason = self._not_acknowledged(before, run)
            if reason:
                return reason
        return ""

    def _retry_not_told(self, before: Run) -> str:
        """A retry is published, and then the store is told: a crash in between frees the key."""
        ended = before.end or 0.0

        def kept_from_telling(fault: Fault) -> bool:
            if before.pid in fault.pids or fault.kind in UNAVAILABLE:
                return True
            return fault.target == before.worker and (
                fault.link in ("store", "both") or fault.kind == "worker stopped"
            )

        return self.find(ended - 1, ended + 0.3, kept_from_telling, "the store not told of a retry")

    def _not_acknowledged(self, before: Run, run: Run) -> str:
        """The message was not acknowledged when its worker died or lost its connection."""

        def kept_from_acknowledging(fault: Fault) -> bool:
            if fault.kind == "machine stalled":
                return fault.seconds > self._story.run_lease / 2
            return hits(before.worker, fault)

        since = self._story.received(before)
        says = "delivered again: not acknowledged"
        return self.find(since, run.start, kept_from_acknowledging, says) or self._unread(before)

    def _unread(self, before: Run) -> str:
        """The body ended while its worker shut down, and the worker did not acknowledge it. With
        plain Celery, too: its prefork pool may end before it has read the last results."""
        if not before.late or WORKERS[before.worker][0] != "prefork":
            return ""
        if any(
            event["t"] > before.start
            for event in self._story.of_id("ack", before.id)
            if event["worker"] == before.worker
        ):
            return ""

        def ended_in_it(fault: Fault) -> bool:
            in_time = fault.t <= before.over <= fault.until
            return fault.kind == "worker shut down" and fault.target == before.worker and in_time

        return self.find(before.start, before.over, ended_in_it, "its result was not read")

    @staticmethod
    def waits_for_its_pool(waits_in: list[str]) -> str:
        """Why a worker does not end: Celery joins the processes of its pool, and each that is left
        still waits for a task. With plain Celery, too."""
        joins = JOINS_ITS_POOL in waits_in
        busy = any(where.startswith(("celery_unique/", "process ")) for where in waits_in)
        return "Celery waits for an idle process of its pool" if joins and not busy else ""

    def lapsed_elsewhere(self, run: Run) -> str:
        """Why the lock of a message may lapse after its gate and before its body, which waited
        in the pool of a worker that then was hit: the message comes back, the lock does not. The
        lease is short there only where the message is acknowledged before the body."""
        if run.late:
            return ""
        for event in self._story.of_id("received", run.id):
            if event["t"] >= self._story.received(run):
                continue
            since, worker = event["t"], event["worker"]
            says = "lapsed in the worker that had it before"
            reason = self.find(since, run.start, partial(hits, worker), says)
            if reason:
                return reason
        return ""

    def published_twice(self, task_id: str) -> str:
        """Why there may be two messages: a publisher that lost its connection sends again."""

        def lost_connection(fault: Fault) -> bool:
            if fault.kind == "store restarted":
                return self._story.has_one_server
            return fault.link in ("broker", "both") and fault.target in publishers

        for event in self._story.of_id("published", task_id):
            publishers = {"producers" if event["role"].startswith("p") else event["role"]}
            since, until = self._story.born(task_id), event["t"]
            reason = self.find(since, until, lost_connection, "published twice")
            if reason:
                return reason
        return ""

    # -- publishes that are not confirmed ------------------------------------------

    def unconfirmed(self, task_id: str) -> str:
        """Why the store may not have heard that the message is out."""
        story = self._story
        grace: float = story.settings["grace"]
        for event in story.of_id("published", task_id):
            if self._died_in_the_call(event):
                return "its producer died before it confirmed (producer killed)"

            def no_store(fault: Fault) -> bool:
                if fault.kind in UNAVAILABLE:
                    return True
                return fault.link in ("store", "both") and fault.target == "producers"

            until = event["t"] + 1
            reason = self.find(event["t"] - grace, until, no_store, "not confirmed")
            # The grace is over at once where the clock jumps before the confirm, as which a start
            # counts.
            started = min((run.start for run in story.runs_of[task_id]), default=until)
            since, until = story.admitted(task_id), min(until, started)
            reason = reason or self._jumped_over(since, until, grace / 2)
            if reason:
                return reason
        if any(
            call.id == task_id and call.returned and call.returned - call.began > grace / 2
            for call in story.calls
        ):
            return "its producer was slower than the grace"
        return ""

    def _died_in_the_call(self, published: Event) -> bool:
        story, pid, t = self._story, published["pid"], published["t"]
        if not any(story.kills(pid, t)):
            return False
        calls = [call for call in story.calls if call.pid == pid and call.began <= t]
        return bool(calls) and calls[-1].returned is None

    def store_restarted(self, since: float, until: float) -> str:
        return self.find(
            since, until, lambda fault: fault.kind == "store restarted", "acts may be lost"
        )

    def waited_too_long(self, run: Run) -> str:
        published = [e["t"] for e in self._story.of_id("published", run.id) if e["t"] < run.start]
        received = self._story.received(run)
        if not published:
            return ""
        waited = received - max(published)
        lease: float = self._story.settings["queue_lease"]
        if waited > lease:
            return "waited longer than the queue lease"
        if waited + self._story.store_ahead(max(published), received) > lease:
            return "waited longer than the queue lease (clock jumped)"
        return ""
