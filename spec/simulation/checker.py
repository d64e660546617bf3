"""Whether a trace violates the protocol: by what callers, bodies and faults did, as the simulation
has noted it, and by none of the library's own words for it.

The sentences are those of ``spec.protocol.invariants``, and so is what suspends each of them.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field

from spec.protocol.invariants import INVARIANTS

from .plan import Plan
from .simulation import Event, Trace

#: What each fault suspends. What is in the list of no fault holds in every run.
SUSPENDED_BY: dict[str, tuple[str, ...]] = {
    "short pause": (),
    "long pause": (
        *("admission", "one delivery", "once", "live delivery", "superseded", "one outcome"),
        "result seen",
    ),
    "caller dies": (),
    "worker dies": ("admission", "once", "one outcome", "result seen"),
    "pool process dies": ("admission", "once", "one outcome", "result seen"),
    "connection lost": (),
    "request lost": (),
    "reply lost": (),
    "request late": (),
    "publish fails": (),
    "publish fails after it arrived": ("admission", "once"),
    "operator releases": ("admission",),
    # Of a task that runs: Celery stores that as its result where a second delivery is dropped.
    "operator revokes": ("result seen",),
}
#: A fault of the store at the gate: a task that was admitted when it was published runs anyway.
#: The record does not say that it runs before the next renewal, and calls are answered by it.
BLIND = (
    *("admission", "one delivery", "once", "live delivery", "superseded", "one outcome"),
    *("raised", "revoked", "result seen"),
)
#: An early acknowledgement that does not reach the broker: that delivers the message again, while
#: or after it runs. Celery does not prevent it, either.
EARLY_AND_LOST = ("admission", "once", "one outcome", "live delivery", "result seen")
#: A call that was published without a reply of the store.
BYPASSED = ("admission", "once", "superseded", "one outcome")
#: A call was published by a duplicate, since its own caller was slow: there are two messages.
HELPED = ("once", "one outcome")
#: What is about a lease in a record, or about all of its tasks: the model's to look at.
OF_A_RECORD = ("free soon", "states", "room")
#: Of the sentences of the protocol, the ones that are checked here.
CHECKED = tuple(name for name in INVARIANTS if name not in OF_A_RECORD)
#: What happens while something is left to do.
LIVELY = (
    "body begins",
    "body ends",
    "received",
    "redelivered",
    "pushed",
    "result",
    "call returned",
)
#: Longer than the leases of what has no message, of a run or of a publish, with all that delays
#: them; and shorter than that of a message in a queue.
LONGEST_IDLE_S = 120.0


@dataclass(slots=True)
class Seen:
    """What is known at one event of those before it."""

    #: Bodies that run: task -> how many; and the key of each task.
    running: Counter[str] = field(default_factory=Counter)
    key_of: dict[str, object] = field(default_factory=dict)
    ends: Counter[str] = field(default_factory=Counter)
    gone: set[str] = field(default_factory=set)
    results: dict[str, str] = field(default_factory=dict)
    shared: set[str] = field(default_factory=set)  # completed with the result of another
    #: By which calls; one of them may have raised, which brings the task back.
    superseded_by: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    accepted: dict[int, tuple[str, str]] = field(default_factory=dict)  # call: task, outcome
    #: By which actor: the lock that its call has acquired, and not given back.
    holding: dict[str, str] = field(default_factory=dict)
    unreachable: bool = False  # some request to the store failed
    given_back: set[str] = field(default_factory=set)
    cancelled: set[str] = field(default_factory=set)
    #: Of each key: delivery -> token.
    tokens: dict[object, dict[str, int]] = field(default_factory=lambda: defaultdict(dict))
    values: set[str] = field(default_factory=set)  # with which bodies ran
    #: Followers that were removed from the store before they had a result.
    dropped: set[str] = field(default_factory=set)
    parents: dict[int, str] = field(default_factory=dict)
    saw: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))


def violation(trace: Trace) -> str:
    """The first sentence that does not hold, and where; empty if all do."""
    seen, suspended = Seen(), set[str]()
    for event in trace.events:
        suspended.update(suspended_by(trace.plan, event))
    for event in trace.events:
        for name, what in _wrong(seen, event):
            if name not in suspended:
                return f"{name}: {what}"
    if not trace.ended:
        return f"nothing is stuck: {trace.left}"
    idle_s = _idle_s(trace)
    if idle_s > LONGEST_IDLE_S and not _may_be_idle(trace):
        return f"nothing is stuck: for {idle_s:.0f} s a key was held, and no message was left"
    return _lost(trace, seen)


def _idle_s(trace: Trace) -> float:
    """For how long the run had to wait for the end of a lease."""
    moments = [event.at_s for event in trace.events if event.kind in LIVELY]
    return trace.events[-1].at_s - max(moments, default=0.0)


def _may_be_idle(trace: Trace) -> bool:
    """Whether a key may be held for the lease of a queue without a message: the next call after
    ``unique_check_after`` finds that its task has ended, or that its message is lost."""
    kinds = {event.kind for event in trace.events}
    # Published without a lock, it has ended before the lock was acquired: it is confirmed.
    late = any(e.kind == "acquire" and e.facts.get("late") for e in trace.events)
    # A revoked message, whose lock is a dead or ending delivery's, is gone; and then the worker
    # that was to end that.
    return late or {"operator revokes", "worker dies"} <= kinds


def suspended_by(plan: Plan, event: Event) -> tuple[str, ...]:
    at = event.facts.get("at", "")
    if event.kind == "acknowledgement lost" and not plan.late:
        return EARLY_AND_LOST
    if event.kind == "call returned" and event.facts["outcome"] == "bypassed":
        return BYPASSED
    if at.startswith("store ") and " loop" in event.actor:
        return BLIND
    if event.kind == "help" and event.facts["reply"] == "go":
        return HELPED
    return SUSPENDED_BY.get(event.kind, ())


def _wrong(seen: Seen, event: Event) -> list[tuple[str, str]]:
    facts = event.facts
    task = facts.get("task", "")
    if event.kind == "body begins":
        return _begins(seen, event)
    if event.kind == "body ends":
        seen.running[task] -= 1
        wrong = []
        if facts["how"] != "retries":
            seen.ends[task] += 1
            if seen.ends[task] > 1:
                wrong.append(("once", f"{task} ran to its end {seen.ends[task]} times"))
        if not facts["holds"]:
            wrong.append(("live delivery", f"{task} runs, and the store does not say so"))
        return wrong
    if event.kind in ("worker dies", "pool process dies"):
        for each in facts["took"]:
            seen.running[each] = max(0, seen.running[each] - 1)
        seen.gone.update(facts["gone"])
    elif event.kind == "result":
        if facts["value"] != f"result of {task}":
            seen.shared.add(task)
        seen.results[task] = f"{facts['state']} {facts['value']}"
        if facts["value"].startswith("superseded by task "):
            seen.superseded_by[task].add(facts["value"].removeprefix("superseded by task "))
    elif event.kind == "acquire":
        for replaced in facts["replaced"]:
            seen.superseded_by[replaced].add(task)
        if facts["reply"] == "created":
            seen.holding[event.actor] = task
    elif event.kind in ("request lost", "reply lost", "request late"):
        seen.unreachable = True
    elif event.kind == "call raised":
        if event.actor in seen.holding and not seen.unreachable:
            return [("raised", f"{seen.holding[event.actor]} raised, and its lock is held")]
    elif event.kind == "give_back":
        if seen.holding.get(event.actor) == task:
            del seen.holding[event.actor]
        if facts["reply"] == "True":
            seen.given_back.add(task)
    elif event.kind == "cancel":
        if facts["reply"] == "cancelled":
            seen.cancelled.add(task)
    elif event.kind == "start":
        if "token" in facts:
            given, token = seen.tokens[facts["key"]], facts["token"]
            last = max(given.values(), default=0)
            # A start that is repeated, since its reply was lost, gets the token that it had.
            repeated = given.get(facts["delivery"]) == token
            given[facts["delivery"]] = token
            if token <= last and not repeated:
                return [("token", f"{task} got {token} after {last}")]
    elif event.kind == "removed without a result":
        seen.dropped.add(task)
    elif event.kind == "call begins":
        seen.parents[facts["call"]] = facts["parent"]
        seen.holding.pop(event.actor, None)
    elif event.kind == "saw result":
        seen.saw[event.actor].add(task)
    elif event.kind == "call returned":
        return _returned(seen, event)
    return []


def _begins(seen: Seen, event: Event) -> list[tuple[str, str]]:
    task, key = event.facts["task"], event.facts["key"]
    seen.running[task] += 1
    seen.key_of[task] = key
    seen.values.update(event.facts["values"])
    wrong = []
    if seen.running[task] > 1:
        wrong.append(("one delivery", f"{task} runs in {seen.running[task]} deliveries"))
    others = [i for i, n in seen.running.items() if n and i != task and seen.key_of[i] == key]
    if others:
        wrong.append(("admission", f"{sorted([task, *others])} run at a time"))
    if task in seen.given_back:
        wrong.append(("raised", f"{task} raised, its lock was released, and it runs"))
    if task in seen.cancelled:
        wrong.append(("revoked", f"{task} was revoked and runs"))
    by = seen.superseded_by[task] & {accepted for accepted, _ in seen.accepted.values()}
    if by:
        wrong.append(("superseded", f"{task} was replaced by {', '.join(sorted(by))} and runs"))
    if task in seen.shared and seen.results[task].startswith("SUCCESS"):
        wrong.append(("one outcome", f"follower {task} was completed and runs"))
    return wrong


def _returned(seen: Seen, event: Event) -> list[tuple[str, str]]:
    n, task, outcome = event.facts["call"], event.facts["task"], event.facts["outcome"]
    seen.accepted[n] = (task, outcome)
    if outcome == "deduplicated":
        if seen.parents[n] == task:
            return [("own successor", f"call {n}, made by {task}, is its duplicate")]
        if task in seen.saw[event.actor]:
            return [("result seen", f"call {n} saw the result of {task} and is its duplicate")]
    return []


def _lost(trace: Trace, seen: Seen) -> str:
    # A call that leaves the lane because it raises is not accepted; one that is published without a
    # lock follows nobody.
    bypassed = {task for task, outcome in seen.accepted.values() if outcome == "bypassed"}
    for n, (task, outcome) in sorted(seen.accepted.items()):
        if task in seen.dropped - bypassed:
            return f"nothing is lost: {task} of call {n} was removed before it had a result"
        if not _has_outcome(seen, task, set()):
            what = f"call {n} ({outcome}) was accepted as {task}, which is lost"
            return f"nothing is lost: {what}"
        merges = trace.plan.calls[n].strategy == "merge" and seen.ends[task]
        if merges and f"v{n}" not in seen.values and task not in seen.shared:
            return f"nothing is lost: {task} ran without the values of call {n} ({outcome})"
    return ""


def _has_outcome(seen: Seen, task: str, passed: set[str]) -> bool:
    if task in passed:
        return False
    if seen.ends[task] or task in seen.gone or task in seen.cancelled:
        return True
    by = seen.superseded_by[task]
    if by:
        return any(_has_outcome(seen, each, passed | {task}) for each in by)
    result = seen.results.get(task, "")
    # A message that is dropped as withdrawn has no outcome: its call is to have raised.
    return bool(result) and "withdrawn" not in result
