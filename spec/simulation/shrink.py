"""Makes the schedule of a violation minimal: fewer calls, fewer faults, fewer changes of actor.

Delta debugging over the decisions that are not the default: a smaller list is kept if a run of it
violates the same invariant.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from .checker import violation
from .plan import Plan
from .scheduler import Key
from .simulation import Event, Trace

Run = Callable[[Plan, dict[Key, object] | None], Trace]
#: A violation that is not minimal after so many runs is printed as it is then.
MOST_RUNS = 400


@dataclass(slots=True)
class Shrunk:
    trace: Trace
    violation: str
    runs: int


def shrink(trace: Trace, run: Run, most_runs: int = MOST_RUNS) -> Shrunk:
    """The smallest run found that violates the invariant that this one violates."""
    name = violation(trace).partition(":")[0]
    best = Shrunk(trace, violation(trace), 0)

    def fails(plan: Plan, decisions: dict[Key, object]) -> bool:
        best.runs += 1
        tried = run(plan, decisions)
        what = violation(tried)
        if what.partition(":")[0] != name or size(tried) > size(best.trace):
            return False
        best.trace, best.violation = tried, what
        return True

    before = -1
    while size(best.trace) != before and best.runs < most_runs:
        before = size(best.trace)
        for plan in _smaller(best.trace.plan):
            if best.runs < most_runs:
                fails(plan, best.trace.decisions)
        _fewer_decisions(best, fails, most_runs)
    return best


def size(trace: Trace) -> int:
    """How much there is to read."""
    plan = trace.plan
    delays = sum(bool(call.at_s) + bool(call.countdown_s) for call in plan.calls)
    parts = len(plan.calls) * 4 + plan.workers * 2 + plan.slots + len(plan.operator) * 2
    return parts + delays + len(trace.decisions)


def _smaller(plan: Plan) -> list[Plan]:
    """The plan with less of one thing, each once. Calls keep their numbers: one that is left out is
    made by a process that there is not."""
    smaller = []
    if plan.workers > 1:
        smaller.append(replace(plan, workers=1))
    if plan.slots > 1:
        smaller.append(replace(plan, slots=1))
    if plan.operator:
        smaller.append(replace(plan, operator=()))
    if plan.prefork:
        smaller.append(replace(plan, prefork=False))
    last = len(plan.calls) - 1
    for n in range(last, -1, -1):
        follows = any(call.after_result >= n for call in plan.calls)
        named = any(of >= n for _, _, of in plan.operator)
        if last and not (n < last and (follows or named)):
            smaller.append(replace(plan, calls=[*plan.calls[:n], *plan.calls[n + 1 :]]))
        call = plan.calls[n]
        simpler = (replace(call, at_s=0.0), replace(call, countdown_s=0.0))
        smaller += [
            replace(plan, calls=[*plan.calls[:n], each, *plan.calls[n + 1 :]])
            for each in simpler
            if each != call
        ]
    return smaller


def _fewer_decisions(
    best: Shrunk, fails: Callable[[Plan, dict[Key, object]], bool], most_runs: int
) -> None:
    """Leave out halves, quarters, ... and in the end each one alone."""
    pieces = 2
    while best.runs < most_runs:
        keys = list(best.trace.decisions)
        if not keys:
            return
        pieces = min(pieces, len(keys))
        length = -(-len(keys) // pieces)
        for begin in range(0, len(keys), length):
            left_out = set(keys[begin : begin + length])
            rest = {k: v for k, v in best.trace.decisions.items() if k not in left_out}
            if len(rest) < len(best.trace.decisions) and fails(best.trace.plan, rest):
                pieces = max(pieces - 1, 2)
                break
            if best.runs >= most_runs:
                return
        else:
            if length == 1:
                return
            pieces *= 2


#: What a reader of a run need not see: the leases of what lives are renewed.
_QUIET = ("renew",)


def story(shrunk: Shrunk) -> str:
    """The run as numbered steps, as ``spec.protocol.explorer`` prints them."""
    plan = shrunk.trace.plan
    lines = [f"{shrunk.violation}, after:"]
    shown = [event for event in shrunk.trace.events if event.kind not in _QUIET]
    lines += [f"{n:3}. {_told(event)}" for n, event in enumerate(_once(shown), 1)]
    lines.append(
        f"{len(shrunk.trace.decisions)} decisions, {plan.workers} workers, "
        f"{'late' if plan.late else 'early'} acknowledgement, "
        f"{'processes' if plan.prefork else 'threads'}"
    )
    return "\n".join(lines)


def _once(events: Sequence[Event]) -> list[Event]:
    """Without what repeats itself, such as a message that waits at the gate."""
    seen: Counter[str] = Counter()
    kept = []
    for event in events:
        same = f"{event.actor} {event.kind} {event.facts}"
        seen[same] += 1
        if seen[same] <= 2:
            kept.append(event)
    return kept


def _told(event: Event) -> str:
    shown = ", ".join(
        f"{name} {value}" for name, value in event.facts.items() if value not in ("", (), None)
    )
    return f"{event.at_s:8.3f} s  {event.actor}: {event.kind} ({shown})"
