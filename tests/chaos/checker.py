"""Judges a run from its journal alone: ``python -m tests.chaos.checker DIRECTORY``.

What must not happen is counted strictly, and everything that looks like it needs a reason that is
written in the journal: a fault that hit this very worker, producer or store at the right time and
for long enough. What such a reason explains is counted as well, in columns of its own.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import pairwise

from tests.chaos.journal import Event, read
from tests.chaos.reasons import AFTERMATH_S, Reasons, hits
from tests.chaos.report import Finding, Report
from tests.chaos.story import DUPLICATE, Call, Fault, Run, Story

#: From the last line of a body to the lock given back, on a busy machine.
FINISH_S = 0.75


class Checker:
    def __init__(self, events: Iterable[Event]) -> None:
        self.story = Story(events)
        self.reasons = Reasons(self.story)

    def findings(self) -> list[Finding]:
        return [
            *self._lost(),
            *self._swallowed(),
            *self._overlaps(),
            *self._lapses(),
            *self._twice(),
            *self._unended(),
            *self._left(),
        ]

    # -- lost tasks ----------------------------------------------------------------

    def _lost(self) -> Iterator[Finding]:
        complete = {run.id for run in self.story.runs if run.complete}
        told: dict[str, Call] = {}
        for call in self.story.calls:
            if call.returned is not None and call.id not in complete:
                told.setdefault(call.id, call)
        for task_id, call in told.items():
            what, why = self._why_lost(task_id, late="late" in call.key)
            says = f"task {task_id} was accepted ({call.outcome}) and never ran to its end"
            yield Finding(what, call.key, call.began, says, why)

    def _why_lost(self, task_id: str, late: bool) -> tuple[str, str]:
        story = self.story
        if not late:
            if any(run.killed for run in story.runs_of[task_id]):
                return "lost", "acknowledged early, killed in its body"
            for ack in story.of_id("ack", task_id):
                if next(story.kills(ack["pid"], ack["t"] - 0.5), None) and not any(
                    run.start >= ack["t"] - 0.5 and run.pid == ack["pid"]
                    for run in story.runs_of[task_id]
                ):
                    return "lost", "acknowledged early, killed before its body began"
        return self._lost_by_broker(task_id) or ("lost", "")

    def _lost_by_broker(self, task_id: str) -> tuple[str, str] | None:
        """kombu takes a message out of Redis before it notes that it has it: a worker that dies
        or is cut off in between loses it, whoever published it."""
        story = self.story
        if story.settings["broker"] == "rabbitmq":
            return None
        for put_at, how in self._put_into_redis(task_id):
            for fault in story.faults:
                restarted = fault.kind == "store restarted" and story.has_one_server
                hit = restarted or fault.kind == "worker killed"
                if fault.link in ("broker", "both") and fault.target != "producers":
                    hit = True
                if hit and fault.touches(put_at - 0.5, put_at + 1.5):
                    return "lost by broker", f"{how}, received by nobody ({fault})"
        return None

    def _put_into_redis(self, task_id: str) -> Iterator[tuple[float, str]]:
        """When the message was last put into its list, and was not seen since: it was published,
        or its worker was killed and it came back after the visibility timeout."""
        story = self.story
        published = [event["t"] for event in story.of_id("published", task_id)]
        received = story.of_id("received", task_id)
        if published and len(received) < len(published):
            yield max(published), "published"
        elif received and any(story.kills(received[-1]["pid"], received[-1]["t"])):
            yield received[-1]["t"] + story.settings["visibility"] + 0.5, "delivered again"

    # -- calls that a task answered which was over -----------------------------------

    def _swallowed(self) -> Iterator[Finding]:
        for call in self.story.calls:
            if call.outcome != DUPLICATE:
                continue
            ends = [run.over for run in self.story.runs_of[call.id] if run.complete]
            if not ends or max(ends) >= call.began - FINISH_S:
                continue
            last = max(self.story.runs_of[call.id], key=lambda run: run.over)
            says = (
                f"told that it is a duplicate of {call.id}, which had ended "
                f"{call.began - max(ends):.1f} s before"
            )
            why = self._why_held_on(last, call.began)
            yield Finding("swallowed", call.key, call.began, says, why)

    def _why_held_on(self, run: Run, until: float) -> str:
        """Why the key was not free soon after the body's end. No fault explains it for longer
        than the run lease and the pause between two attempts to give it back."""

        def kept_from_finishing(fault: Fault) -> bool:
            if until > max(run.over, fault.until) + self.story.run_lease + AFTERMATH_S:
                return False
            return fault.kind in ("store restarted", "machine stalled") or (
                hits(run.worker, fault) and fault.link != "broker"
            )

        since, before = run.over - 2, min(until, run.over + self.story.run_lease)
        why = self.reasons.find(since, before, kept_from_finishing, "could not give it back")
        if not why and until < run.over + 2 * self.story.run_lease:
            # It never had the lock: a dead delivery's lease had to lapse first.
            why = self.reasons.blind_gate(run)
        return why

    # -- two runs at once ------------------------------------------------------------

    def _overlaps(self) -> Iterator[Finding]:
        by_key: dict[str, list[Run]] = defaultdict(list)
        for run in self.story.runs:
            by_key[run.key].append(run)
        for key, runs in by_key.items():
            for number, first in enumerate(runs):
                for second in runs[number + 1 :]:
                    if second.start < first.over:
                        yield self._overlap(key, first, second)

    def _overlap(self, key: str, first: Run, second: Run) -> Finding:
        same = "the same task" if first.id == second.id else "two tasks"
        says = (
            f"{same} at once: {first.id} on {first.worker} and {second.id} on {second.worker}, "
            f"for {min(first.over, second.over) - second.start:.3f} s"
        )
        return Finding("overlap", key, second.start, says, self._why_at_once(first, second))

    def _why_at_once(self, first: Run, second: Run) -> str:
        reasons = self.reasons
        lived = min(self.story.born(first.id), self.story.born(second.id))
        why = (
            reasons.blind_gate(first)
            or reasons.blind_gate(second)
            or reasons.lapse(*self._in_order_of_gate(first, second))
            or reasons.store_restarted(lived, second.start)
        )
        if why or first.id == second.id:
            return why
        return (
            reasons.delivered_again(second)
            or reasons.delivered_again(first)
            or reasons.lapsed_elsewhere(second)
            or reasons.lapsed_elsewhere(first)
            or reasons.unconfirmed(first.id)
            or reasons.unconfirmed(second.id)
            or reasons.published_twice(first.id)
            or reasons.published_twice(second.id)
            or reasons.waited_too_long(first)
            or reasons.waited_too_long(second)
        )

    @staticmethod
    def _in_order_of_gate(first: Run, second: Run) -> tuple[Run, float]:
        """The run whose lease must have lapsed, and when. A body can wait in its pool for so long
        that the other, which was let in later, begins before it: tokens tell who came first."""
        if first.token and second.token and second.token < first.token:
            return second, first.start
        return first, second.start

    # -- leases that lapsed --------------------------------------------------------------

    def _lapses(self) -> Iterator[Finding]:
        for event in self.story.by_what["lost"]:
            run = self._run_at(event) or self._let_in(event)
            key = self.story.key_of.get(event["id"], "")
            says = f"task {event['id']} on {event['worker']}: {event['reason']}"
            why = self._why_lapsed(run, event["t"]) if run else ""
            yield Finding("lapsed", key, event["t"], says, why)
        for run in self.story.runs:
            if run.still_mine is False and run.end is not None:
                says = f"task {run.id} on {run.worker} ended and its lock was not its own"
                yield Finding("lapsed", run.key, run.end, says, self._why_lapsed(run, run.end))

    def _run_at(self, event: Event) -> Run | None:
        """The run that a signal is about; the signal may come before the body and after it."""
        runs = [run for run in self.story.runs_of[event["id"]] if run.worker == event["worker"]]
        near = [run for run in runs if self.story.received(run) - 0.05 <= event["t"]]
        return max(near, key=lambda run: run.start, default=None)

    def _let_in(self, event: Event) -> Run | None:
        """As if it had run: past the gate of a worker that died before the body began."""
        received = [
            other
            for other in self.story.of_id("received", event["id"])
            if other["worker"] == event["worker"] and other["t"] <= event["t"]
        ]
        if not received:
            return None
        last = received[-1]
        blind = any(
            error["act"] == "start" and error["worker"] == event["worker"]
            for error in self.story.of_id("store_error", event["id"])
            if last["t"] <= error["t"] <= event["t"]
        )
        return Run(
            id=event["id"],
            key=self.story.key_of.get(event["id"], ""),
            worker=event["worker"],
            pid=last["pid"],
            delivery=last["delivery"],
            token=0 if blind else None,
            start=event["t"],
        )

    def _why_lapsed(self, run: Run, t: float) -> str:
        reasons = self.reasons
        return (
            reasons.blind_gate(run)
            or reasons.lapse(run, t)
            or reasons.delivered_again(run)
            or reasons.lapsed_elsewhere(run)
            or reasons.unconfirmed(run.id)
            or reasons.published_twice(run.id)
            or reasons.waited_too_long(run)
        )

    # -- ids that ran to their end twice ---------------------------------------------------

    def _twice(self) -> Iterator[Finding]:
        for task_id, runs in self.story.runs_of.items():
            ended = sorted((run for run in runs if run.complete), key=lambda run: run.start)
            for first, second in pairwise(ended):
                says = f"task {task_id} ran to its end on {first.worker} and on {second.worker}"
                why = (
                    self.reasons.blind_gate(first)
                    or self.reasons.blind_gate(second)
                    or self.reasons.lapse(*self._in_order_of_gate(first, second))
                    or self.reasons.delivered_again(second)
                    or self.reasons.store_restarted(self.story.received(first), second.start)
                    or self.reasons.published_twice(task_id)
                )
                yield Finding("twice", second.key, second.start, says, why)

    # -- the end ----------------------------------------------------------------------------

    def _unended(self) -> Iterator[Finding]:
        for run in self.story.runs:
            if run.end is None and run.killed is None:
                says = f"the body of {run.id} on {run.worker} never ended, and nobody killed it"
                yield Finding("unended", run.key, run.start, says)

    def _left(self) -> Iterator[Finding]:
        offset = self.story.settings["clock_offset"]
        for event in self.story.by_what["left"]:
            for lock in event["locks"]:
                key = self.story.key_of.get(lock["id"], lock["task"])
                says = f"the lock of {lock['id']} is still there: {lock}"
                yield Finding("left", key, lock["created"] / 1000 - offset, says)
        for event in self.story.by_what["stuck"]:
            says = f"worker {event['worker']} did not end when it was asked to"
            yield Finding("stuck", "", event["t"], says)
        for event in self.story.by_what["ended"]:
            if event["waiting"]:
                says = f"{event['waiting']} messages were never handled"
                yield Finding("unhandled", "", event["t"], says)


def check(events: Iterable[Event]) -> Report:
    checker = Checker(events)
    return Report(checker.story, sorted(checker.findings(), key=lambda finding: finding.t))


if __name__ == "__main__":
    report = check(read(sys.argv[1]))
    print(report.text())
    sys.exit(0 if report.passed else 1)
