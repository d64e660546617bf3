"""Which fault, if any, explains what looks wrong."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from tests.chaos.journal import Event
from tests.chaos.story import Fault, Run, Story

#: How long after a fault its effects may begin: a circuit breaker leaves a store alone for 5 s.
AFTERMATH_S = 7.0


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
            if fault.kind in ("store restarted", "machine stalled"):
                return True
            if fault.target != run.worker:
                return False
            return fault.kind == "worker stopped" or fault.link in ("store", "both")

        since = self._story.received(run)
        return self.find(since, until, stopped_renewing, "its lease could not be renewed")

    def blind_gate(self, run: Run) -> str:
        """Why the store could not be asked before the body began."""
        if run.token != 0:
            return ""

        def no_store(fault: Fault) -> bool:
            if fault.kind in ("store restarted", "machine stalled"):
                return True
            return fault.target == run.worker and fault.link in ("store", "both")

        since = self._story.received(run) - AFTERMATH_S
        return self.find(since, run.start, no_store, "the gate could not ask the store")

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
            if before.pid in fault.pids or fault.kind == "store restarted":
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
        return self.find(since, run.start, kept_from_acknowledging, says)

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
                if fault.kind == "store restarted":
                    return True
                return fault.link in ("store", "both") and fault.target == "producers"

            reason = self.find(event["t"] - grace, event["t"] + 1, no_store, "not confirmed")
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
        if published and received - max(published) > self._story.settings["queue_lease"]:
            return "waited longer than the queue lease"
        return ""
