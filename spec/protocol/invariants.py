"""What must hold, as sentences. Each names what suspends it; nothing suspends the first three.

``wrong`` sentences are noted at the step that breaks them; the others are read off the state.
"""

from __future__ import annotations

from collections.abc import Iterator

from celery_unique.stores.base import Holder

from .world import (
    BEGAN,
    LAST_TICK,
    RUN_LEASE,
    TICK,
    UNTIL_DONE,
    Call,
    Ghost,
    Record,
    Scenario,
    World,
)

#: name: (sentence, what suspends it)
INVARIANTS = {
    "nothing is lost": (
        """A call that was accepted runs to its end, is revoked, or is superseded by a later call
        for which the same holds; a duplicate names a task for which it holds; a follower gets a
        result.""",
        """nothing. A task that was acknowledged early by a worker that died counts as Celery's
        loss; a fail-over may lose a parked call""",
    ),
    "nothing is stuck": (
        "Without new faults the key becomes free and every message is handled.",
        "nothing",
    ),
    "free soon": (
        "The key of a task that was acknowledged early is free a run lease after its worker died.",
        "nothing",
    ),
    "admission": (
        "No more tasks of one key run at a time than its limit: one, if it has none.",
        """a lease that lapsed on a task that a process still means to run, an operator, a
        fail-over, a publish that raised and arrived, a worker that died between finish and
        acknowledgement, policies that leave out states of living tasks""",
    ),
    "states": (
        "No call is admitted beside a task in a state that its policy names.",
        "strategies that replace, follow or park; a window; an operator, a fail-over",
    ),
    "room": (
        """A call that replaces tasks leaves as many that are still to run as its limit admits,
        itself included.""",
        "a fail-over",
    ),
    "one delivery": (
        "One task never runs in two deliveries at a time.",
        "a worker that stopped for longer than its lease, a fail-over",
    ),
    "once": (
        "A body runs to its end once, redelivered, retried, helped or not.",
        "a worker that died or stopped, a fail-over, a publish without a reply",
    ),
    "live delivery": (
        "No act changes the task of a delivery that renews it but its own.",
        "a fail-over",
    ),
    "superseded": (
        "A superseded task does not start once its replacement was published.",
        "a lease that lapsed on the replacement, a fail-over",
    ),
    "raised": ("A call that raised, and whose lock was released, does not run.", "a fail-over"),
    "revoked": ("A task that was revoked while it waited does not run.", "a fail-over"),
    "token": ("Every start has a larger token than all before it.", "a fail-over"),
    "result seen": (
        "A caller that has seen the result is not a duplicate of the task that stored it.",
        "a policy that keeps ended tasks, a worker that died",
    ),
    "own successor": ("A call from the body of a task is never its duplicate.", "nothing"),
    "one outcome": (
        "A follower is completed or run, never both.",
        "a worker that died or stopped, a lapsed lease, a fail-over",
    ),
    "in order": (
        "Parked calls have their turn in the order of their admission, before any later call.",
        "a fail-over",
    ),
    "lane": ("A lane holds no more parked calls than its bound.", "a fail-over"),
    "values": (
        """The values of each merged call are in the runs of one task alone, the same in each of its
        deliveries, in the order of admission.""",
        """a follower that replaces a task whose worker died, a lease that lapsed on a task that a
        process still means to run, a caller slower than the grace, an operator, a fail-over""",
    ),
    "unmerged": (
        "No body runs with the values of a merged call that raised before that started.",
        "two failed publishes of one task, of which one has arrived; a fail-over",
    ),
}


def violation(scenario: Scenario, world: World) -> str:
    ghost = world.ghost
    if ghost.wrong:
        return ghost.wrong
    bodies = [run for worker in world.workers for run in worker.runs if run.at == "body"]
    ids = [run.task_id for run in bodies]
    if len(set(ids)) < len(ids) and "one delivery" not in ghost.excused:
        return f"one delivery: {ids} run at a time"
    exclusive = all(call.states != "" and _excludes(call.states) for call in scenario.calls)
    limit = max(call.limit for call in scenario.calls)
    if len(set(ids)) > limit and exclusive and "admission" not in ghost.excused:
        return f"admission: {ids} run at a time"
    bound = max(call.max_queue for call in scenario.calls)
    if bound and world.record.parked > bound and "lane" not in ghost.excused:
        return f"lane: {world.record.parked} calls are parked"
    for c, ends in enumerate(ghost.ends):
        if ends > 1 and "once" not in ghost.excused:
            return f"once: {c} ran {ends} times"
    for run in bodies:
        task = world.record.tasks.get(str(run.task_id))
        changed = task is None or task.delivery != run.delivery
        if changed and not run.stalled and "live delivery" not in ghost.excused:
            return f"live delivery: {run.task_id} runs, and the store does not say so"
    if not scenario.late:
        held = {m.task_id for worker in world.workers for m in worker.held}
        waiting = {str(c) for c in held | {m.task_id for m in world.queue}}
        for task_id, task in world.record.tasks.items():
            long = task.running and task.lease - world.now > RUN_LEASE
            if long and task_id not in waiting:
                return f"free soon: {task_id} would hold the key for longer than a run lease"
    return ""


def checked(scenario: Scenario, world: World) -> Iterator[str]:
    """The sentences that say something of this state, and are not suspended in it."""
    ghost = world.ghost
    bodies = [run for worker in world.workers for run in worker.runs if run.at == "body"]
    strategies = {call.strategy for call in scenario.calls}
    says = {
        "free soon": not scenario.late and any(t.running for t in world.record.tasks.values()),
        "admission": bodies and all(_excludes(call.states) for call in scenario.calls),
        "states": any(map(counts_states, scenario.calls)) and world.record.tasks,
        "room": any(by >= 0 for by in ghost.superseded_by),
        "one delivery": bodies,
        "once": any(ghost.ends),
        "live delivery": any(not run.stalled for run in bodies),
        "superseded": any(by >= 0 for by in ghost.superseded_by),
        "raised": ghost.raised,
        "revoked": ghost.revoked,
        "token": any(ghost.starts),
        "result seen": any(call.after_result in ghost.results for call in scenario.calls),
        "own successor": any(
            run.task_id == call.in_body_of for call in scenario.calls for run in bodies
        ),
        "one outcome": ghost.completed,
        "in order": "queue" in strategies and ghost.parked,
        "lane": world.record.parked and any(call.max_queue for call in scenario.calls),
        "values": "merge" in strategies and ghost.ran_with,
        "unmerged": ghost.unmerged,
    }
    return (name for name, does in says.items() if does and name not in ghost.excused)


#: Those that are read off a state in which nothing can happen any more.
OF_AN_END = ("nothing is lost", "nothing is stuck")


def _excludes(states: str) -> bool:
    return all(letter in states for letter in UNTIL_DONE)


def final_violation(scenario: Scenario, world: World) -> str:
    if world.now > BEGAN + LAST_TICK * TICK:
        return f"nothing is stuck: {sorted(world.record.tasks)} and {world.queue} are left"
    if world.record.tasks or world.queue or any(w.held or w.runs for w in world.workers):
        return f"nothing is stuck: {sorted(world.record.tasks)}, {world.queue}, {world.workers}"
    for c, caller in enumerate(world.callers):
        accepted = caller.outcome in ("created", "queued", "bypassed")
        forgotten = caller.outcome == "queued" and "lane" in world.ghost.excused
        if accepted and not forgotten and not has_outcome(world, c, frozenset()):
            return f"nothing is lost: call {c} was accepted and is lost"
        if caller.outcome == "merged" and not has_outcome(world, caller.holder, frozenset()):
            return f"nothing is lost: {c} was merged into {caller.holder}, which is lost"
        merges = scenario.calls[c].strategy == "merge"
        made = caller.outcome in ("created", "merged", "joined")
        if merges and made and not _delivered(world, c):
            return f"nothing is lost: no body ran with the values of {c}"
        if caller.outcome == "duplicate" and not has_outcome(world, caller.holder, frozenset()):
            return f"nothing is lost: {c} is a duplicate of {caller.holder}, which is lost"
        if caller.outcome == "joined" and not has_outcome(world, c, frozenset()):
            return f"nothing is lost: follower {c} has no result"
        canvas = scenario.calls[c].canvas and caller.outcome == "created"
        if canvas and not (world.ghost.results | world.ghost.lost | world.ghost.revoked) & {c}:
            return f"nothing is lost: the canvas of {c} waits for ever"
    return ""


def _delivered(world: World, c: int) -> bool:
    """Whether some body ran with its values, or was revoked with them."""
    holder = world.callers[c].holder if world.callers[c].holder >= 0 else c
    ran = any(c in values for _, values in world.ghost.ran_with)
    return ran or holder in world.ghost.revoked


def has_outcome(world: World, c: int, seen: frozenset[int]) -> bool:
    ghost = world.ghost
    if c in ghost.results or c in ghost.lost or c in ghost.revoked:
        return True
    by = ghost.superseded_by[c]
    return by >= 0 and by not in seen and has_outcome(world, by, seen | {c})


# -- noted at a step ----------------------------------------------------------


def noting_a_start(scenario: Scenario, world: World, c: int, token: int) -> World:
    ghost = world.ghost
    if c in ghost.raised and "raised" not in ghost.excused:
        return world.wrong(f"raised: {c} raised, its lock was released, and it runs")
    if c in ghost.revoked and "revoked" not in ghost.excused:
        return world.wrong(f"revoked: {c} was revoked and runs")
    by = ghost.superseded_by[c]
    accepted = by >= 0 and world.callers[by].outcome == "created" and by not in ghost.raised
    if accepted and "superseded" not in ghost.excused and "admission" not in ghost.excused:
        return world.wrong(f"superseded: {c} was replaced by {by} and runs")
    if token <= ghost.last_token and "token" not in ghost.excused:
        return world.wrong(f"token: {c} got {token} after {ghost.last_token}")
    both = c in ghost.completed and not {"once", "admission", "one delivery"} & ghost.excused
    if both:
        return world.wrong(f"one outcome: follower {c} was completed and runs")
    return world.noting(last_token=token)


def noting_values(world: World, c: int, values: tuple[int, ...]) -> World:
    """The body of a task begins with the values of these calls."""
    ghost = world.ghost
    if "values" not in ghost.excused:
        before = dict(ghost.ran_with).get(c, values)
        if values != before:
            return world.wrong(f"values: {c} ran with those of {before}, and runs with {values}")
        for other, others in ghost.ran_with:
            if other != c and set(values) & set(others):
                return world.wrong(f"values: {c} runs with {values}, and {other} with {others}")
        places = [ghost.merged.index(value) for value in values]
        if len({*places}) < len(places):
            return world.wrong(f"values: {c} runs with {values}, some of them twice")
        if places != sorted(places):
            return world.wrong(f"values: {c} runs with {values}, admitted as {ghost.merged}")
    if ghost.unmerged & {*values} and "unmerged" not in ghost.excused:
        return world.wrong(f"unmerged: {c} runs with {values}")
    if c in dict(ghost.ran_with):
        return world
    return world.noting(ran_with=tuple(sorted((*ghost.ran_with, (c, values)))))


def counts_states(call: Call) -> bool:
    """Whether a call is admitted only beside tasks in states that its policy leaves out."""
    ignores = call.strategy in ("ignore", "reject") and call.limit == 1 and not call.window
    return ignores and call.in_body_of < 0


def noting_beside(scenario: Scenario, world: World, c: int, before: Record) -> World:
    """A call is admitted; ``before`` is the record that it found."""
    call = scenario.calls[c]
    for task_id, task in before.tasks.items():
        gone = task.released or task.by or task.lease <= world.now or task_id == str(c)
        if gone or not counts_states(call) or "states" in world.ghost.excused:
            continue
        waiting = "s" if task.eta > world.now else "w"
        states = {"p": f"p{waiting}", "w": waiting}.get(task.state, task.state)
        if {*states} & {*call.states}:
            return world.wrong(f"states: {c} is admitted beside {task_id} in {states!r}")
    return world


def noting_replaced(scenario: Scenario, world: World, c: int, replaced: tuple[str, ...]) -> World:
    left = [i for i, task in world.record.tasks.items() if not (task.terminal or task.by)]
    if replaced and len(left) < scenario.calls[c].limit and "room" not in world.ghost.excused:
        return world.wrong(f"room: {c} replaces {replaced}, and {left} are left")
    return world


def noting_parked(world: World, c: int) -> World:
    if c in world.ghost.parked:
        return world
    return world.noting(parked=(*world.ghost.parked, c))


def noting_admitted(world: World, c: int) -> World:
    """A call is admitted to a lane and not parked."""
    overtaken = _waiting(world.ghost, world.ghost.parked)
    if c not in world.ghost.parked and overtaken and "in order" not in world.ghost.excused:
        return world.wrong(f"in order: {c} is admitted before {sorted(overtaken)}")
    return world


def _waiting(ghost: Ghost, parked: tuple[int, ...]) -> set[int]:
    """Those of the parked calls that have not had their turn."""
    return {*parked} - {*ghost.called} - ghost.revoked - ghost.raised


def noting_called(world: World, ids: list[str]) -> World:
    """These parked calls have their turn; some of them again."""
    for c in map(int, ids):
        ghost = world.ghost
        if c in ghost.called:
            continue
        overtaken = _waiting(ghost, ghost.parked[: ghost.parked.index(c)])
        if overtaken and "in order" not in ghost.excused:
            return world.wrong(f"in order: {c} is called before {sorted(overtaken)}")
        world = world.noting(called=(*ghost.called, c))
    return world


def noting_a_completion(scenario: Scenario, world: World, c: int) -> World:
    if c in world.ghost.results:
        return world.wrong(f"one outcome: follower {c} has a result and is completed")
    return world


def noting_a_swallowed_call(scenario: Scenario, world: World, c: int, holder: Holder) -> World:
    h = int(holder.task_id)
    seen = scenario.calls[c].after_result == h
    if scenario.calls[c].in_body_of == h and holder.state == "active":
        return world.wrong(f"own successor: {c}, called by {h}, is its duplicate")
    kept = holder.state in ("completed", "discarded", "cancelled")
    if seen and not kept and "once" not in world.ghost.excused:
        return world.wrong(f"result seen: {c} saw the result of {h} and is its duplicate")
    return world


def as_table() -> str:
    """For docs/explanation/evidence.md."""
    lines = ["| | holds | suspended by |", "| --- | --- | --- |"]
    for name, (sentence, unless) in INVARIANTS.items():
        lines.append(f"| {name} | {' '.join(sentence.split())} | {' '.join(unless.split())} |")
    return "\n".join(lines)
