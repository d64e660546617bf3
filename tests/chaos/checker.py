"""Judges a run from its journal alone: ``python -m tests.chaos.checker DIRECTORY``.

What must not happen is counted strictly, and everything that looks like it needs a reason that is
written in the journal: a fault that hit this very worker, producer or store at the right time and
for long enough. What such a reason explains is counted as well, in columns of its own.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import cached_property
from itertools import pairwise

from tests.chaos.journal import Event, read
from tests.chaos.reasons import AFTERMATH_S, UNAVAILABLE, Reasons, hits
from tests.chaos.report import Finding, Report
from tests.chaos.story import CONFLICT, SUPERSEDING, Call, Chord, Fault, Run, Story, is_late

#: As in the app, which cannot be imported without its settings.
KEYED, KEYED_S = "tests.chaos.app.keyed", 3.0
#: From the last line of a body to the lock given back, on a busy machine.
FINISH_S = 0.75
#: The same while the circuit is open: it is released in the background, at most a second later.
RELEASED_LATER_S = 1.0 + 2 * FINISH_S


class Checker:
    def __init__(self, events: Iterable[Event]) -> None:
        self.story = Story(events)
        self.reasons = Reasons(self.story)

    def findings(self) -> list[Finding]:
        return [
            *self._lost(),
            *self._swallowed(),
            *self._chords(),
            *self._merged(),
            *self._revoked(),
            *self._superseded(),
            *self._overlaps(),
            *self._lapses(),
            *self._twice(),
            *self._unended(),
            *self._left(),
        ]

    # -- lost tasks ----------------------------------------------------------------

    def _lost(self) -> Iterator[Finding]:
        complete = {run.id for run in self.story.runs if run.complete}
        told: dict[str, list[Call]] = defaultdict(list)
        for call in self.story.calls:
            # A rejection promises nothing.
            if call.returned is not None and call.id not in complete and call.outcome != "rejected":
                told[call.id].append(call)
        for task_id, calls in told.items():
            calls = [call for call in calls if not self._is_revoked(call)]
            if not calls or self._is_superseded(call := calls[0]):
                continue
            what, why = self._why_lost(call)
            says = f"task {task_id} was accepted ({call.outcome}) and never ran to its end"
            yield Finding(what, call.key, call.began, says, why)

    def _is_superseded(self, call: Call) -> bool:
        """Whether a later call took its place, for which the same holds as for any call. The first
        one that was admitted after it and took no place shows that it had none any more."""
        assert call.returned is not None
        for other in self.story.calls_of[call.key]:
            if other.id == call.id or (other.returned or other.began) < call.began:
                continue
            # Without an outcome: its process died in it.
            if other.outcome in (*SUPERSEDING, "") and _supersedes(other.key):
                return True
            if other.outcome == "created" and other.began > call.returned:
                return False
        return False

    def _is_revoked(self, call: Call) -> bool:
        """Whether its task was revoked after the call, or while it ran: then the call shares its
        end. A task that waited has no key when its revoke has returned."""
        story = self.story
        return any(
            revoke.returned is None
            or call.began < revoke.returned
            or any(story.asked(run) < revoke.returned for run in story.runs_of[call.id])
            or self._begun_in_the_store(call, revoke.returned)
            for revoke in story.revokes_of[call.id]
        )

    def _begun_in_the_store(self, call: Call, revoked: float) -> bool:
        """Whether its task was active there when it was revoked, although its body never began: its
        worker passed its gate, did not drop the message and was killed. Its lock then stays until
        that delivery's lease."""
        story = self.story

        def dropped(asked: Event, before: float) -> bool:
            return any(
                ack["worker"] == asked["worker"] and asked["t"] <= ack["t"] < before
                for ack in story.of_id("ack", call.id)
            )

        return any(
            asked["t"] < revoked
            and fault.kind in ("worker killed", "pool child killed")
            and fault.target == asked["worker"]
            and asked["t"] <= fault.until
            and not dropped(asked, fault.t)
            and call.began <= fault.until + story.run_lease + story.store_behind(0, call.began)
            for asked in story.of_id("asked", call.id)
            for fault in story.faults
        )

    def _why_lost(self, call: Call) -> tuple[str, str]:
        story, task_id = self.story, call.id
        for revoke in story.revokes_of[task_id]:
            why = self.reasons.not_cancelled(revoke)
            # Its mark was dropped with the record: a worker that has started since begins it anew,
            # and one that was there when it was revoked drops it in the end.
            why = why or self.reasons.evicted(call.key, revoke.began, call.began)
            if why := why or self._failed_over(revoke.began, call.began):
                return "swallowed", why
        if why := self._evicted_while_parked(call):
            return "lost with record", why
        if not is_late(call.key):
            if any(run.killed for run in story.runs_of[task_id]):
                return "lost", "acknowledged early, killed in its body"
            for ack in story.of_id("ack", task_id):
                if next(story.kills(ack["pid"], ack["t"] - 0.5), None) and not any(
                    run.start >= ack["t"] - 0.5 and run.pid == ack["pid"]
                    for run in story.runs_of[task_id]
                ):
                    return "lost", "acknowledged early, killed before its body began"
        return self._lost_by_broker(task_id) or ("lost", "")

    def _evicted_while_parked(self, call: Call) -> str:
        """The message of a parked call is in the record, and nowhere else."""
        if call.outcome != "queued" or self.story.of_id("published", call.id):
            return ""
        return self.reasons.evicted(call.key, call.began, self.story.events[-1]["t"])

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
                if hit and fault.touches(put_at - 0.5, self._taken_by(put_at)):
                    return "lost by broker", f"{how}, received by nobody ({fault})"
        return None

    def _taken_by(self, put_at: float) -> float:
        """When a message was taken at the latest that was put into its list then: a later one
        was received, and Redis hands them out in order."""
        later = (
            received["t"]
            for task_id, published in self._first_published.items()
            if published > put_at
            for received in self.story.of_id("received", task_id)[:1]
        )
        return max(put_at + 1.5, min(later, default=put_at))

    @cached_property
    def _first_published(self) -> dict[str, float]:
        found: dict[str, float] = {}
        for event in self.story.by_what["published"]:
            found.setdefault(event["id"], event["t"])
        return found

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

    # -- the bodies of chords ---------------------------------------------------------------

    def _chords(self) -> Iterator[Finding]:
        """Its members never fail and are not revoked: the body of a chord that was called runs."""
        ran = {event["chord"] for event in self.story.by_what["chord_ran"]}
        for chord in self.story.chords:
            if chord.chord in ran:
                continue
            says = f"the body of chord {chord.chord} with the members {chord.members} never ran"
            what, why = self._why_no_body(chord)
            yield Finding(what, chord.keys[0], chord.began, says, why)

    def _why_no_body(self, chord: Chord) -> tuple[str, str]:
        for task_id in (*chord.members, chord.body):
            if reason := self._lost_by_broker(task_id):
                return reason
        # Followers are in the record of their key, and nowhere else.
        ended = max(
            (run.over for run in self.story.runs if run.key in chord.keys and run.complete),
            default=chord.began,
        )
        for key in chord.keys:
            if why := self.reasons.evicted(key, chord.began, ended):
                return "lost with record", why
        if why := self._failed_over(chord.began, ended):
            return "lost with record", why
        return "lost", ""

    # -- values of calls that were merged ---------------------------------------------------

    def _merged(self) -> Iterator[Finding]:
        """Each value of an accepted call is in a run to its end, and in those of one task only. A
        call without its task is found by the others, and is not reported again."""
        ran: dict[str, set[str]] = defaultdict(set)
        ended = {run.id for run in self.story.runs if run.complete}
        for run in self.story.runs:
            for value in run.values if run.complete else ():
                ran[value].add(run.id)
        for call in self.story.calls:
            if not call.value:
                continue
            if call.returned is not None and call.id in ended and not ran[call.value]:
                says = f"its value is in no run of {call.id}, with which it was {call.outcome}"
                why = self._why_value_lost(call)
                yield Finding(
                    "lost with record" if why else "lost", call.key, call.began, says, why
                )
            if len(ran[call.value]) > 1:
                says = f"its value is in the runs of {len(ran[call.value])} tasks"
                why = self.reasons.store_restarted(call.began - 1, call.returned or call.began + 9)
                yield Finding("twice", call.key, call.began, says, why)

    def _why_value_lost(self, call: Call) -> str:
        """The values of merged calls are in the record, until its task starts."""
        runs = self.story.runs_of[call.id]
        first = min(run.start for run in runs)
        merged = call.outcome == "merged"
        return self.reasons.evicted(call.key, call.began, first) if merged else ""

    # -- revoked tasks that run nevertheless ------------------------------------------------

    def _revoked(self) -> Iterator[Finding]:
        for task_id, revokes in self.story.revokes_of.items():
            runs = self.story.runs_of[task_id]
            if not runs:
                continue
            first = min(runs, key=lambda run: run.start)
            for revoke in revokes:
                # Its worker asked the store afterwards: before, it may have passed its gate.
                if revoke.returned is not None and self.story.asked(first) > revoke.returned:
                    says = f"task {task_id} was revoked while it waited, and began afterwards"
                    why = self.reasons.not_cancelled(revoke) or self._why_began(first)
                    yield Finding("revoked", first.key, first.start, says, why)
                    break

    # -- superseded tasks that run nevertheless ---------------------------------------------

    def _superseded(self) -> Iterator[Finding]:
        admitted = {call.id: call for call in self.story.calls if call.outcome not in CONFLICT}
        for call in self.story.calls:
            if call.outcome != "replaced" or call.returned is None:
                continue
            for run in self._began_after(call):
                old = admitted.get(run.id)
                if old is None or old.returned is None or old.returned >= call.began:
                    continue
                says = f"task {run.id} was replaced by {call.id} and began afterwards"
                yield Finding("superseded", call.key, run.start, says, self._why_began(run))

    def _began_after(self, call: Call) -> Iterator[Run]:
        """The first runs of the other tasks of the key that began after the call."""
        assert call.returned is not None
        for task_id in {run.id for run in self._runs_of_key[call.key]} - {call.id}:
            first = min(self.story.runs_of[task_id], key=lambda run: run.start)
            if first.start > call.returned:
                yield first

    def _why_began(self, run: Run) -> str:
        return (
            self.reasons.blind_gate(run)
            or self.reasons.unconfirmed(run.id)
            or self.reasons.waited_too_long(run)
            or self.reasons.store_restarted(self.story.born(run.id), run.start)
            or self.reasons.evicted(run.key, self.story.admitted(run.id), run.start)
        )

    @cached_property
    def _runs_of_key(self) -> dict[str, list[Run]]:
        found: dict[str, list[Run]] = defaultdict(list)
        for run in self.story.runs:
            found[run.key].append(run)
        return found

    # -- calls that a task answered which was over -----------------------------------

    def _swallowed(self) -> Iterator[Finding]:
        for call in self.story.calls:
            if call.outcome not in CONFLICT or self._is_kept(call):
                continue
            runs = self.story.runs_of[call.id]
            ends = [run.over for run in runs if run.complete]
            # With two deliveries, one may have ended while the other continues, or is retried.
            if not ends or max(run.over for run in runs) >= call.began - FINISH_S:
                continue
            last = max(self.story.runs_of[call.id], key=lambda run: run.over)
            says = (
                f"told that it is a duplicate of {call.id}, which had ended "
                f"{call.began - max(ends):.1f} s before"
            )
            why = self._why_held_on(last, call.began)
            yield Finding("swallowed", call.key, call.began, says, why)

    def _is_kept(self, call: Call) -> bool:
        """Whether the task keeps its idempotency key although it has ended."""
        kept = call.key.startswith(KEYED)
        # Its birth may be noted up to a second too early.
        born = self.story.born(call.id)
        longest = KEYED_S + FINISH_S + self.story.store_behind(born, call.began)
        return kept and call.began < born + 1.0 + longest

    def _why_held_on(self, run: Run, until: float) -> str:
        """Why the key was not free soon after the body's end. No fault explains it for longer
        than the run lease and the pause between two attempts to give it back."""

        # An idempotency key outlives its time until the message is acknowledged: if it is not, the
        # task runs again.
        settled_by_broker = run.key.startswith(KEYED)

        def kept_from_finishing(fault: Fault) -> bool:
            longest = self.story.run_lease + AFTERMATH_S + self.story.store_behind(run.start, until)
            if until > max(run.over, fault.until) + longest:
                return False
            return fault.kind in (*UNAVAILABLE, "machine stalled") or (
                hits(run.worker, fault) and (settled_by_broker or fault.link != "broker")
            )

        since, before = run.over - 2, min(until, run.over + self.story.run_lease)
        why = self.reasons.find(since, before, kept_from_finishing, "could not give it back")
        why = why or self.reasons.set_back(run, until)
        if not why and until < run.over + RELEASED_LATER_S:
            why = self.reasons.circuit_open(run)
        if not why and until < run.over + 2 * self.story.run_lease:
            # It never had the lock: a dead delivery's lease had to lapse first.
            why = self.reasons.blind_gate(run)
        return why

    # -- two runs at once ------------------------------------------------------------

    def _overlaps(self) -> Iterator[Finding]:
        for key, runs in self._runs_of_key.items():
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
        admitted = min(self.story.admitted(first.id), self.story.admitted(second.id))
        why = (
            reasons.blind_gate(first)
            or reasons.blind_gate(second)
            or reasons.lapse(*self._in_order_of_gate(first, second))
            or reasons.store_restarted(lived, second.start)
            or reasons.evicted(first.key, admitted, second.start)
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
            why = self._why_lapsed(run, event["t"]) if run else self._why_forgotten(event)
            yield Finding("lapsed", key, event["t"], says, why)
        for run in self.story.runs:
            if run.still_mine is False and run.end is not None:
                says = f"task {run.id} on {run.worker} ended and its lock was not its own"
                yield Finding("lapsed", run.key, run.end, says, self._why_lapsed(run, run.end))

    def _why_forgotten(self, event: Event) -> str:
        """Why the store lost a follower, which no worker has received."""
        key, born = self.story.key_of.get(event["id"], ""), self.story.admitted(event["id"])
        return self.reasons.evicted(key, born, event["t"]) or self._failed_over(born, event["t"])

    def _failed_over(self, since: float, until: float) -> str:
        """Whether a replica may have lacked what the primary had: a server alone loses nothing."""
        if self.story.settings["store"] not in ("sentinel", "cluster"):
            return ""
        return self.reasons.store_restarted(since - 1, until)

    def _run_at(self, event: Event) -> Run | None:
        """The run that a signal is about; the signal may come before the body and after it."""
        runs = [run for run in self.story.runs_of[event["id"]] if run.worker == event["worker"]]
        near = [run for run in runs if self.story.received(run) - 0.05 <= event["t"]]
        ended = [run for run in near if run.end is not None and run.end <= event["t"]]
        if ended and event["reason"].endswith("when it ended"):
            # The same task may have been delivered to this worker once more by then.
            return max(ended, key=lambda run: run.over)
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
                    or self.reasons.evicted(first.key, self.story.received(first), second.start)
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
            why = self.reasons.waits_for_its_pool(event["waits_in"])
            yield Finding("stuck", "", event["t"], f"{says}: {event['waits_in']}", why)
        for event in self.story.by_what["ended"]:
            if event["waiting"]:
                says = f"{event['waiting']} messages were never handled"
                yield Finding("unhandled", "", event["t"], says)


def _supersedes(key: str) -> bool:
    """Whether calls of the key may take the place of others."""
    names = ("replacing", "rescheduling", "debounced", "rerunning")
    return key.startswith(tuple(f"tests.chaos.app.{name}" for name in names))


def check(events: Iterable[Event]) -> Report:
    checker = Checker(events)
    return Report(checker.story, sorted(checker.findings(), key=lambda finding: finding.t))


if __name__ == "__main__":
    report = check(read(sys.argv[1]))
    print(report.text())
    sys.exit(0 if report.passed else 1)
