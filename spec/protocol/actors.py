"""What each actor can do next: callers, workers, reapers, an operator, the broker and time.

Every step that is an act of the store is one step here. Between two steps anything else can
happen, and each fault that a scenario allows can happen at any point.

``without`` names one rule of the actors that is left out, to show what it is for.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Hashable, Iterator

from celery_unique.stores.base import Acquired, Claim, Finish, Held, Orphan, Start, Started
from celery_unique.stores.memory import MemoryStore
from celery_unique.stores.record import State, terminal_letters
from spec.linearizability.record_model import copied

from . import invariants
from .world import (
    BEGAN,
    GRACE,
    KEY,
    LAST_TICK,
    QUEUE_LEASE,
    RETENTION,
    RUN_LEASE,
    TICK,
    Call,
    Caller,
    Ghost,
    Message,
    Reaper,
    Record,
    Run,
    Scenario,
    Store,
    Worker,
    World,
    put,
    put_out,
)

Step = tuple[str, World]

#: Rules of callers, workers and reapers, which no store can keep for them.
RULES = {
    "confirm after publish": "a caller confirms once its message is published, never before",
    "give back": "a caller whose publish failed gives its lock back",
    "no give back after a publish": "a call that published without a reply gives nothing back",
    "help": "a duplicate of a pending task makes sure that its message is published",
    "acquire again": "a caller slower than half the grace acquires again before it publishes",
    "acquire if not helped": "a caller that may not help acquires again",
    "finish before the result": "the key is free before the result can be read",
    "settle after the result": "an end is settled once the result is stored",
    "settle after the ack": "an end is settled once the message is acknowledged",
    "gate": "a worker starts a message only if the store says run",
    "wait": "a message that is told to wait is held and asks again",
    "renew": "a living worker renews what it runs",
    "renew held": "a living worker renews what it holds",
    "waits as": "a message that has started is not renewed as one that waits",
    "tell copies": "a message that may exist twice is reported at its end",
    "followers before settle": "followers are completed before the end is settled",
    "ask the backend": "a follower that has its result is not completed again",
    "complete then remove": "a follower is removed once it has its result, never before",
    "reaper": "followers whose holder died are reaped",
    "publish the promoted": "a promoted follower's message is published",
    "retry copies": "a retry of a message that is not acknowledged says that there are two",
    "publish the called": "a parked call that has its turn is published",
    "run with the payload": "a body runs with the values of all calls that were merged into it",
    "merge once": "a merged call that acquires again says so",
    "merged with its task": "a task that is gone before its lease has taken merged values along",
    "unmerge": "a merged call that raises removes its values",
    "leave the lane": "a call that has no reply leaves the lane in which it may be parked",
}
#: Without any of these an end is settled too early.
SETTLED_LAST = ("settle after the result", "settle after the ack", "followers before settle")


class Protocol:
    """The model of one scenario. See ``explorer.Model``."""

    def __init__(
        self,
        scenario: Scenario,
        without: str = "",
        store_class: type[MemoryStore] = MemoryStore,
    ) -> None:
        if without and without not in RULES:
            raise ValueError(without)
        self.scenario = scenario
        self.store = Store(store_class)
        self._without = without
        #: In how many states each sentence was checked.
        self.checked: Counter[str] = Counter()

    def follows(self, rule: str) -> bool:
        return rule != self._without

    def first(self) -> World:
        calls = len(self.scenario.calls)
        ghost = Ghost((0,) * calls, (0,) * calls, superseded_by=(-1,) * calls)
        fails_over = dict(self.scenario.faults).get("fail-over")
        return World(
            BEGAN,
            Record(),
            Record() if fails_over else None,
            (),
            (Caller(),) * calls,
            (Worker(),) * self.scenario.workers,
            (Reaper(),) * self.scenario.reapers,
            tuple(sorted(self.scenario.faults)),
            ghost,
        )

    def key(self, world: World) -> Hashable:
        return world.key()

    def violation(self, world: World) -> str:
        self.checked.update(invariants.checked(self.scenario, world))
        return invariants.violation(self.scenario, world)

    def final_violation(self, world: World) -> str:
        self.checked.update(invariants.OF_AN_END)
        return invariants.final_violation(self.scenario, world)

    def steps(self, world: World) -> Iterator[Step]:
        acted = False
        for step in self._actions(world):
            acted = True
            yield step
        yield from self._faults(world)
        if not acted and self._something_is_left(world):
            yield "time passes", self._tick(world)

    def _actions(self, world: World) -> Iterator[Step]:
        for c in range(len(world.callers)):
            yield from self._caller(world, c)
        for w, worker in enumerate(world.workers):
            if worker.stopped:
                yield f"worker {w} continues", world.with_worker(w, stopped=False)
                continue
            yield from self._publish_called(world, w)
            yield from self._gate(world, w)
            for n in range(len(worker.runs)):
                yield from self._run(world, w, n)
        for r in range(len(world.reapers)):
            yield from self._reaper(world, r)

    # -- time -----------------------------------------------------------------

    def _something_is_left(self, world: World) -> bool:
        if world.now > BEGAN + LAST_TICK * TICK:
            return False
        left = world.record
        return bool(left.tasks or left.marks or left.following or world.queue)

    def _tick(self, world: World) -> World:
        """Living workers renew, and then the clock moves on."""
        for w, worker in enumerate(world.workers):
            if worker.stopped:
                continue
            for run in worker.runs:
                if run.at in ("settled", "done"):
                    continue
                world = self._renew_run(world, run)
            for message in worker.held:
                if self.follows("renew held"):
                    held = Held(KEY, str(message.task_id), "", QUEUE_LEASE, waits_as=f"w{w}")
                    world, _ = self.store.act(world, "renew", held)
        after = world.but(now=world.now + TICK, record=copied(world.record))
        after.record.purge(after.now)  # as the next act would
        gone = world.record.tasks.keys() - _alive(world.record, after.now)
        if not gone & self._believed(world):
            return after
        # With the record goes what it knew of copies: a message that has one may run twice.
        return after.excusing("admission", "once", "values")

    def _renew_run(self, world: World, run: Run) -> World:
        if not self.follows("renew"):
            return world
        lease = RUN_LEASE if run.acked else QUEUE_LEASE
        copies = run.lost_connection and self.follows("tell copies")
        task_id = str(run.task_id)
        held = Held(KEY, task_id, run.delivery, lease, RUN_LEASE, copies)
        world, _ = self.store.act(world, "renew", held)
        if run.at == "body" and run.acked:
            # From a list that is a moment old: when it was made, the message only waited.
            waits_as = run.delivery if self.follows("waits as") else ""
            stale = Held(KEY, task_id, "", QUEUE_LEASE, waits_as=waits_as)
            world, _ = self.store.act(world, "renew", stale)
        return world

    def _believed(self, world: World) -> set[str]:
        """Tasks that nobody renews, and whose lease lapses although they are in the broker, or a
        caller means to publish them: a second one is admitted then, as the documentation says."""
        believed = {str(message.task_id) for message in world.queue}
        for c, caller in enumerate(world.callers):
            if caller.at in ("publish", "confirm", "copy", "confirm copy"):
                believed.add(str(c if caller.holder < 0 else caller.holder))
        return believed

    # -- the caller -----------------------------------------------------------

    def _claim(self, c: int, again: bool = False) -> Claim:
        call = self.scenario.calls[c]
        return Claim(
            str(c),
            "shop.rebuild",
            call.states,
            GRACE,
            call.strategy,
            parent=str(call.in_body_of) if call.in_body_of >= 0 else "",
            max_wait_ms=call.max_wait * TICK + TICK // 4 if call.max_wait else 0,
            window_ms=call.window * TICK + TICK // 2 if call.window else 0,
            delay_ms=call.delay * TICK - TICK // 4 if call.delay else 0,
            keep=terminal_letters(call.states),
            again=again,
            join=f"message of {c}" if call.joins or call.strategy == "queue" else "",
            canvas=call.canvas,
            limit=call.limit,
            max_queue=call.max_queue,
            merge=_values(c) if call.strategy == "merge" else "",
            merge_max_bytes=1000 if call.strategy == "merge" else 0,
        )

    def _may_begin(self, world: World, c: int) -> bool:
        call = self.scenario.calls[c]
        if call.after_result >= 0:
            return call.after_result in world.ghost.results
        if call.in_body_of >= 0:
            runs = [run for worker in world.workers for run in worker.runs]
            return any(run.task_id == call.in_body_of and run.at == "body" for run in runs)
        return True

    def _caller(self, world: World, c: int) -> Iterator[Step]:
        caller, call = world.callers[c], self.scenario.calls[c]
        if caller.at == "begin" and self._may_begin(world, c):
            if call.way == "guard":
                after = world.published(Message(c)).with_caller(c, at="returned", outcome="created")
                yield f"caller {c} publishes a plain message", after
            elif call.way == "atomic":
                yield f"caller {c} publishes in one act", self._publish_in_one_act(world, c)
            else:
                again = caller.merged and self.follows("merge once")
                yield f"caller {c} acquires", self._acquire(world, c, again)
        elif caller.at == "publish":
            if world.now > caller.acquired_at and self.follows("acquire again"):
                yield f"caller {c} acquires again", self._acquire(world, c, again=True)
            else:
                yield from self._publish(world, c)
        elif caller.at in ("confirm", "confirm copy"):
            named = c if caller.at == "confirm" else caller.holder
            after, _ = self.store.act(world, "confirm", str(named), QUEUE_LEASE)
            yield f"caller {c} confirms {named}", after.with_caller(c, at="returned")
        elif caller.at == "give back":
            after, given = self.store.act(world, "give_back", str(c), QUEUE_LEASE)
            withdrawn = {"queue": "leave", "merge": "unmerge"}
            at = withdrawn.get(call.strategy, "returned")
            after = after.with_caller(c, at=at, outcome=caller.outcome or "raised")
            if given and not caller.outcome:
                after = after.noting(raised=after.ghost.raised | {c})
            yield f"caller {c} gives back", after
        elif caller.at == "leave":
            after = world
            if self.follows("leave the lane"):
                after, _ = self.store.act(world, "complete_follower", str(c))
            if c in after.ghost.parked and c not in after.ghost.called:
                after = after.noting(raised=after.ghost.raised | {c})
            yield f"caller {c} leaves the lane", after.with_caller(c, at="returned")
        elif caller.at == "unmerge":
            after = world
            if self.follows("unmerge"):
                after, _ = self.store.act(world, "unmerge", str(c))
            yield f"caller {c} removes its values", _raised(after, c)
        elif caller.at == "help":
            yield f"caller {c} helps {caller.holder}", self._help(world, c)
        elif caller.at == "copy":
            merges = call.strategy == "merge"
            after = world.published(Message(caller.holder, values=c if merges else -1))
            yield (
                f"caller {c} publishes a copy of {caller.holder}",
                after.with_caller(c, at="confirm copy", outcome=_named(call)),
            )
            if merges and (failed := world.after_fault("publish fails")) is not None:
                yield f"the publish of a copy by {c} fails", failed.with_caller(c, at="unmerge")

    def _acquire(self, world: World, c: int, again: bool = False) -> World:
        after, reply = self.store.act(world, "acquire", self._claim(c, again))
        if reply.outcome == "created" and not again:
            after = invariants.noting_beside(self.scenario, after, c, world.record)
        return self._replied(self._admitting(after, c, reply, world.record), c, reply)

    def _admitting(self, world: World, c: int, reply: Acquired, before: Record) -> World:
        """Note the order in which calls are parked, and values admitted."""
        if reply.outcome == "queued":
            return invariants.noting_parked(world, c)
        strategy = self.scenario.calls[c].strategy
        if strategy == "queue" and reply.outcome == "created":
            return invariants.noting_admitted(world, c)
        if strategy == "merge" and not _has_values(before, c):  # it had, and they lapsed: anew
            others = tuple(other for other in world.ghost.merged if other != c)
            return world.noting(merged=(*others, c))
        return world

    def _replied(self, world: World, c: int, reply: Acquired) -> World:
        outcome = reply.outcome
        if outcome == "created":
            world = self._superseding(world, c, reply.replaced)
            world = invariants.noting_replaced(self.scenario, world, c, reply.replaced)
            if not self.follows("confirm after publish"):
                world, _ = self.store.act(world, "confirm", str(c), QUEUE_LEASE)
            return world.with_caller(c, at="publish", acquired_at=world.now, holder=-1)
        if outcome in ("queued", "full"):
            return world.with_caller(c, at="returned", outcome=outcome)
        holder = reply.holder
        h = int(holder.task_id)
        world = invariants.noting_a_swallowed_call(self.scenario, world, c, holder)
        if outcome == "ended":
            completed = world.ghost.completed | {c}
            world = world.noting(completed=completed, results=world.ghost.results | {c})
            return world.with_caller(c, at="returned", outcome="joined", holder=h)
        helps = outcome in ("duplicate", "merged")
        pending = holder.state is State.PENDING and helps and h != c
        if pending and self.follows("help"):
            lease = holder.lease if outcome == "merged" else 0
            return world.with_caller(c, at="help", holder=h, lease=lease)
        return world.with_caller(c, at="returned", outcome=outcome, holder=h)

    def _superseding(self, world: World, c: int, replaced: tuple[str, ...]) -> World:
        superseded_by = world.ghost.superseded_by
        for other in replaced:
            superseded_by = put(superseded_by, int(other), c)
        return world.noting(superseded_by=superseded_by)

    def _publish_in_one_act(self, world: World, c: int) -> World:
        """Acquire, push and confirm as one act."""
        after, reply = self.store.act(world, "acquire", self._claim(c))
        after = self._admitting(after, c, reply, world.record)
        if reply.outcome != "created":
            return self._replied(after, c, reply)
        after = invariants.noting_beside(self.scenario, after, c, world.record)
        after = self._superseding(after, c, reply.replaced)
        after = invariants.noting_replaced(self.scenario, after, c, reply.replaced)
        after, _ = self.store.act(after, "confirm", str(c), QUEUE_LEASE)
        after = after.published(Message(c)).with_caller(c, at="returned", outcome="created")
        return after.but(previous=world.record if world.previous is not None else None)

    def _publish(self, world: World, c: int) -> Iterator[Step]:
        published = world.published(Message(c))
        yield (
            f"caller {c} publishes",
            published.with_caller(c, at="confirm", outcome="created"),
        )
        failed = world.after_fault("publish fails")
        if failed is None:
            return
        if not self.follows("give back"):
            yield (
                f"the publish of {c} fails",
                failed.with_caller(c, at="returned", outcome="raised"),
            )
            return
        yield f"the publish of {c} fails", failed.with_caller(c, at="give back")
        arrived = failed.published(Message(c)).with_caller(c, at="give back")
        # A message that arrived although its publish raised may run, and is then said to be lost.
        yield f"the publish of {c} fails (its message arrived)", arrived.excusing("admission")

    def _help(self, world: World, c: int) -> World:
        holder = world.callers[c].holder
        after, verdict = self.store.act(world, "help", str(holder))
        outcome = _named(self.scenario.calls[c])
        if verdict == "published":
            return after.with_caller(c, at="returned", outcome=outcome)
        caller = world.callers[c]
        gone = outcome == "merged" and str(caller.holder) not in after.record.tasks
        if gone and after.now < caller.lease and self.follows("merged with its task"):
            return after.with_caller(c, at="returned", outcome=outcome)
        if gone and after.now >= caller.lease:  # slower than the grace: has it run, or lapsed?
            after = after.excusing("values")
        if verdict == "again":
            if not self.follows("acquire if not helped"):
                return after.with_caller(c, at="returned", outcome=outcome)
            return after.with_caller(c, at="begin", holder=-1, merged=outcome == "merged")
        return after.with_caller(c, at="copy")

    # -- the worker -----------------------------------------------------------

    def _publish_called(self, world: World, w: int) -> Iterator[Step]:
        """Parked calls for which the end of a task has made room, while that stores its result."""
        worker = world.workers[w]
        if worker.unconfirmed:
            after, _ = self.store.act(world, "confirm", worker.unconfirmed, QUEUE_LEASE)
            yield f"worker {w} confirms {worker.unconfirmed}", after.with_worker(w, unconfirmed="")
        elif worker.called:
            first, *rest = worker.called
            after = world
            if self.follows("publish the called"):
                after = world.published(Message(int(first)))
            after = after.with_worker(w, called=tuple(rest), unconfirmed=first)
            yield f"worker {w} publishes {first}, which has its turn", after

    def _gate(self, world: World, w: int) -> Iterator[Step]:
        worker = world.workers[w]
        if any(run.at == "body" for run in worker.runs):
            return  # its one slot is taken
        for n, message in enumerate(worker.held):
            taken = world.with_worker(w, held=put_out(worker.held, n))
            _, reply = self._start(world, w, message)
            if reply.verdict != "wait":
                yield f"{message.task_id} asks again", self._start_step(taken, w, message)
        for n, message in enumerate(world.queue):
            if n and world.queue[n - 1] == message:
                continue
            taken = world.but(queue=put_out(world.queue, n))
            yield (
                f"worker {w} receives {message.task_id}",
                self._start_step(taken, w, message),
            )

    def _start(self, world: World, w: int, message: Message) -> tuple[World, Started]:
        call = self.scenario.calls[message.task_id]
        early = not self.scenario.late
        start = Start(
            str(message.task_id),
            f"w{w}.{world.ghost.deliveries}",
            "shop.rebuild",
            RUN_LEASE if early else QUEUE_LEASE,
            RUN_LEASE,
            QUEUE_LEASE,
            keep=terminal_letters(call.states),
            merge=call.strategy == "merge",
        )
        return self.store.act(world, "start", start)

    def _values_of(self, started: Started, message: Message) -> tuple[int, ...]:
        """Of which calls the body gets the values."""
        if started.payload and self.follows("run with the payload"):
            return tuple(int(json.loads(line)[0]) for line in started.payload.splitlines())
        return (message.task_id if message.values < 0 else message.values,)

    def _start_step(self, world: World, w: int, message: Message) -> World:
        c = message.task_id
        call = self.scenario.calls[c]
        after, reply = self._start(world, w, message)
        worker = after.workers[w]
        verdict = reply.verdict
        if verdict == "wait" and self.follows("gate"):
            if not self.follows("wait"):
                return after
            return after.with_worker(w, held=tuple(sorted((*worker.held, message))))
        if verdict in ("superseded", "done") and self.follows("gate"):
            if reply.mark == "superseded" and reply.by:
                after = self._superseding(after, int(reply.by), (str(c),))
            if reply.mark == "superseded" and self.scenario.calls[c].canvas:
                claim = self._claim(c)
                claim.join = f"message of {c}"
                after, _ = self.store.act(after, "follow", claim, reply.by)
            if verdict == "superseded" and not message.again:
                after, _ = self.store.act(after, "forget", str(c))
            return after
        token = reply.token
        run = Run(
            c,
            f"w{w}.{world.ghost.deliveries}",
            token,
            message,
            acked=not self.scenario.late,
            lost_connection=message.again,
        )
        after = after.with_worker(w, runs=tuple(sorted((*worker.runs, run))))
        after = invariants.noting_a_start(self.scenario, after, c, token)
        if call.strategy == "merge":
            after = invariants.noting_values(after, c, self._values_of(reply, message))
        starts = put(after.ghost.starts, c, after.ghost.starts[c] + 1)
        return after.noting(starts=starts, deliveries=after.ghost.deliveries + 1)

    def _finish_of(self, run: Run) -> Finish:
        failed = self.scenario.calls[run.task_id].fails
        guarded = self.scenario.calls[run.task_id].way == "guard"
        again = run.lost_connection and self.follows("tell copies")
        return Finish(
            str(run.task_id),
            run.delivery,
            State.DISCARDED if failed else State.COMPLETED,
            RETENTION,
            QUEUE_LEASE,
            self.scenario.late or again or guarded,
            RUN_LEASE,
            run.token,
        )

    def _run(self, world: World, w: int, n: int) -> Iterator[Step]:
        run = world.workers[w].runs[n]
        c = run.task_id
        if run.at == "body":
            if run.message.number < self.scenario.calls[c].retries:
                message = run.message._replace(again=False, number=run.message.number + 1)
                after = world.published(message).with_run(w, n, at="retry")
                yield f"{c} publishes its retry", after
            elif self.follows("finish before the result"):
                yield f"{c} finishes", self._finish(world, w, n)
            else:
                yield f"{c} stores its result", self._result(world, c).with_run(w, n, at="late")
        elif run.at == "late":
            yield f"{c} finishes", self._finish(world, w, n)
        elif run.at == "retry":
            copies = (self.scenario.late or run.lost_connection) and self.follows("retry copies")
            after, _ = self.store.act(world, "retry", str(c), run.delivery, QUEUE_LEASE, copies)
            yield f"{c} is retryable", after.without_run(w, n)
        elif run.at == "ended":
            yield self._ended(world, w, n)
        elif run.at == "unstored":
            yield f"{c} stores its result", self._result(world, c).with_run(w, n, at="stored")
        elif run.at == "stored":
            yield from self._complete_followers(world, w, n)
        elif run.at == "acked":
            if not run.settle:
                yield f"worker has done with {c}", world.without_run(w, n)
                return
            after, _ = self.store.act(world, "settle", self._finish_of(run), self._marks_done(run))
            yield f"{c} is settled", after.without_run(w, n)

    def _ended(self, world: World, w: int, n: int) -> Step:
        """The lock is released, the result not stored yet."""
        run = world.workers[w].runs[n]
        if run.settle and any(not self.follows(rule) for rule in SETTLED_LAST):
            world, _ = self.store.act(world, "settle", self._finish_of(run), self._marks_done(run))
            world = world.with_run(w, n, settle=False)
            if not self.follows("settle after the result"):
                return f"{run.task_id} is settled", world.with_run(w, n, at="unstored")
        return (
            f"{run.task_id} stores its result",
            self._result(world, run.task_id).with_run(w, n, at="stored"),
        )

    def _marks_done(self, run: Run) -> bool:
        guarded = self.scenario.calls[run.task_id].way == "guard"
        return guarded or (run.lost_connection and self.follows("tell copies"))

    def _finish(self, world: World, w: int, n: int) -> World:
        run = world.workers[w].runs[n]
        c = run.task_id
        after, reply = self.store.act(world, "finish", self._finish_of(run))
        ends = put(after.ghost.ends, c, after.ghost.ends[c] + 1)
        after = after.noting(ends=ends)
        settle = reply.verdict == "ended" and reply.settle
        followed = reply.verdict == "ended" and reply.followers
        after = after.with_run(w, n, at="ended", settle=settle, followed=followed)
        if reply.verdict == "ended" and reply.called:
            ids = [one.task_id for one in reply.called]
            after = invariants.noting_called(after, ids)
            after = after.with_worker(w, called=(*after.workers[w].called, *ids))
        if self.scenario.one_act or run.at == "late":
            after = self._result(after, c).with_run(w, n, at="stored")
        return after

    def _result(self, world: World, c: int) -> World:
        return world.noting(results=world.ghost.results | {c})

    def _complete_followers(self, world: World, w: int, n: int) -> Iterator[Step]:
        run = world.workers[w].runs[n]
        if run.followed:
            after, followers = self.store.act(world, "followers", str(run.task_id))
            if followers:
                follower = followers[0][0]
                yield from self._complete(world, int(follower))
                return
            world = after.with_run(w, n, followed=False)
        if not run.acked:
            yield (
                f"{run.task_id} is acknowledged",
                world.with_run(w, n, at="acked", acked=True),
            )
        else:
            yield f"{run.task_id} is told", world.with_run(w, n, at="acked")

    def _complete(self, world: World, follower: int) -> Iterator[Step]:
        """Its result first, then its removal; what has its result is only removed."""
        known = follower in world.ghost.results and self.follows("ask the backend")
        if known or not self.follows("complete then remove"):
            after, _ = self.store.act(world, "complete_follower", str(follower))
            yield f"follower {follower} is removed", after
            return
        after = invariants.noting_a_completion(self.scenario, world, follower)
        after = after.noting(
            results=after.ghost.results | {follower}, completed=after.ghost.completed | {follower}
        )
        if not self.follows("ask the backend"):
            after, _ = self.store.act(after, "complete_follower", str(follower))
        yield f"follower {follower} gets its result", after

    # -- the reaper -----------------------------------------------------------

    def _reaper(self, world: World, r: int) -> Iterator[Step]:
        reaper = world.reapers[r]
        if not self.follows("reaper"):
            return
        if reaper.unconfirmed:
            after, _ = self.store.act(world, "confirm", reaper.unconfirmed, QUEUE_LEASE)
            yield (
                f"reaper {r} confirms {reaper.unconfirmed}",
                after.with_reaper(r, unconfirmed=""),
            )
        elif reaper.promoted:
            after = world.published(Message(int(reaper.promoted)))
            is_parked = int(reaper.promoted) in world.ghost.parked
            if not self.follows("publish the called" if is_parked else "publish the promoted"):
                after = world
            after = after.with_reaper(r, promoted="", unconfirmed=reaper.promoted)
            yield f"reaper {r} publishes {reaper.promoted}", after
        elif reaper.orphans:
            yield from self._reap_one(world, r)
        elif self.store.is_due(world):
            after, orphans = self.store.act(world, "reap", f"r{r}", RUN_LEASE)
            ids = tuple(orphan.follower_id for orphan in orphans)
            fates = tuple(f"{orphan.holder} {_fate(orphan)}" for orphan in orphans)
            called = [orphan.follower_id for orphan in orphans if orphan.called is not None]
            after = invariants.noting_called(after, called)
            yield f"reaper {r} reaps", after.with_reaper(r, orphans=ids, fates=fates)

    def _reap_one(self, world: World, r: int) -> Iterator[Step]:
        reaper = world.reapers[r]
        follower, (holder, _, fate) = reaper.orphans[0], reaper.fates[0].partition(" ")
        rest = world.with_reaper(r, orphans=reaper.orphans[1:], fates=reaper.fates[1:])
        f = int(follower)
        if fate == "called again" and f in world.ghost.results:
            after, _ = self.store.act(rest, "cancel", follower, QUEUE_LEASE)
            after, _ = self.store.act(after, "complete_follower", follower)
            yield f"reaper {r} removes {follower}, which has run", after
        elif fate.startswith("called"):
            yield f"reaper {r} calls {follower}", rest.with_reaper(r, promoted=follower)
        elif f in world.ghost.results:
            after, _ = self.store.act(rest, "complete_follower", follower)
            yield f"reaper {r} removes {follower}", after
        elif int(holder) in world.ghost.results and int(holder) != f:
            yield from (
                (f"reaper {r}: {label}", after) for label, after in self._complete(world, f)
            )
        elif fate == "revoked":
            revoked = rest.noting(
                revoked=rest.ghost.revoked | {f}, results=rest.ghost.results | {f}
            )
            after, _ = self.store.act(revoked, "complete_follower", follower)
            yield f"reaper {r} revokes {follower}", after
        else:
            after, verdict = self.store.act(rest, "promote", follower, f"r{r}", GRACE, QUEUE_LEASE)
            if verdict != "gone":  # it has the payload of a task that is lost, or is redelivered
                after = after.excusing("values")
            if verdict == "publish":  # it runs itself, whatever replaced it before
                after = after.noting(superseded_by=put(after.ghost.superseded_by, f, -1))
                after = after.with_reaper(r, promoted=follower)
            yield f"reaper {r} promotes {follower} ({verdict})", after

    # -- faults ---------------------------------------------------------------

    def _faults(self, world: World) -> Iterator[Step]:
        for c, caller in enumerate(world.callers):
            yield from self._caller_faults(world, c, caller)
        for w, worker in enumerate(world.workers):
            yield from self._worker_faults(world, w, worker)
        for r, reaper in enumerate(world.reapers):
            busy = reaper != Reaper()
            if busy and (after := world.after_fault("reaper dies")) is not None:
                yield f"reaper {r} dies", after.but(reapers=put(after.reapers, r, Reaper()))
        if (after := world.after_fault("delay")) is not None and world.record:
            yield "time passes (a delay)", self._tick(after)
        has_written = world.previous is not None and world.previous is not world.record
        if has_written and (after := world.after_fault("fail-over")) is not None:
            lost = after.but(record=world.previous)
            excused = ("admission", "one delivery", "once", "superseded", "token", "revoked")
            lanes = ("states", "room", "in order", "lane", "values", "unmerged")
            yield "the store fails over", lost.excusing(*excused, *lanes, "raised", "live delivery")
        yield from self._operator(world)

    def _operator(self, world: World) -> Iterator[Step]:
        if world.record.tasks and (after := world.after_fault("release")) is not None:
            after, _ = self.store.act(after, "release", None)
            yield "the operator releases the key", after.excusing("admission", "states", "values")
        c = self.scenario.revokes
        if world.callers[c].outcome and (after := world.after_fault("revoke")) is not None:
            after, verdict = self.store.act(after, "cancel", str(c), QUEUE_LEASE)
            if verdict == "cancelled":
                after = after.noting(revoked=after.ghost.revoked | {c})
            yield f"the operator revokes {c} ({verdict})", after

    def _caller_faults(self, world: World, c: int, caller: Caller) -> Iterator[Step]:
        if caller.at in ("returned", "dead"):
            return
        if caller.at != "begin" and (after := world.after_fault("caller dies")) is not None:
            # A message that it has published stays; the call itself was never answered.
            outcome = "created" if caller.at == "confirm" else ""
            yield f"caller {c} dies", after.with_caller(c, at="dead", outcome=outcome)
        call = self.scenario.calls[c]
        begins = caller.at == "begin" and call.way == "two steps" and self._may_begin(world, c)
        if begins and (after := world.after_fault("no reply")) is not None:
            after, reply = self.store.act(after, "acquire", self._claim(c))
            if reply.outcome == "created":
                after = self._superseding(after, c, reply.replaced)
            after = self._admitting(after, c, reply, world.record)
            if call.on_error == "raise":
                yield f"caller {c} acquires, no reply", after.with_caller(c, at="give back")
                return
            at = "confirm" if self.follows("no give back after a publish") else "give back"
            after = after.published(Message(c)).with_caller(c, at=at, outcome="bypassed")
            yield (
                f"caller {c} publishes without a reply",
                after.excusing("admission", "once"),
            )

    def _worker_faults(self, world: World, w: int, worker: Worker) -> Iterator[Step]:
        if worker.stopped:
            return
        if worker != Worker() and (after := world.after_fault("worker dies")) is not None:
            yield f"worker {w} dies", self._killed(after, w)
        if worker.runs and (after := world.after_fault("worker stops")) is not None:
            after = after.excusing("admission", "one delivery", "once")
            runs = tuple(run._replace(lost_connection=True, stalled=True) for run in worker.runs)
            yield (
                f"worker {w} stops",
                self._redelivered(after, w).with_worker(w, stopped=True, runs=runs),
            )
        unacked = [run for run in worker.runs if not run.acked and not run.lost_connection]
        if unacked and (after := world.after_fault("redelivery")) is not None:
            runs = tuple(run._replace(lost_connection=True) for run in worker.runs)
            yield (
                f"worker {w} loses its connection",
                self._redelivered(after, w).with_worker(w, runs=runs),
            )

    def _redelivered(self, world: World, w: int) -> World:
        for run in world.workers[w].runs:
            if not run.acked:
                world = world.published(run.message._replace(again=True))
        return world

    def _killed(self, world: World, w: int) -> World:
        worker = world.workers[w]
        world = self._redelivered(world, w)
        for message in worker.held:
            world = world.published(message._replace(again=True))
        lost = {run.task_id for run in worker.runs if run.acked}
        if worker.runs:  # lost if it was acknowledged early, and there is no copy
            world = world.noting(lost=world.ghost.lost | lost).excusing("once")
        if any(run.settle or not run.acked for run in worker.runs):
            # Redelivered, or without the mark of its settle: perhaps beside another one.
            world = world.excusing("admission")
        return world.but(workers=put(world.workers, w, Worker()))


def _values(c: int) -> str:
    return f'{{"docs":[{c}]}}'


def _has_values(record: Record, c: int) -> bool:
    """Whether a task runs with its values."""
    return any(f'["{c}",' in record.payloads.text(task_id) for task_id in record.tasks)


def _named(call: Call) -> str:
    """What a call is whose holder does its work."""
    return "merged" if call.strategy == "merge" else "duplicate"


def _fate(orphan: Orphan) -> str:
    return "called again" if orphan.called is not None and orphan.promoted else orphan.fate


def _raised(world: World, c: int) -> World:
    """Its caller gets an error: its values are to be in no payload that has not started."""
    world = world.with_caller(c, at="returned", outcome="raised")
    ran = any(c in values for _, values in world.ghost.ran_with)
    return world if ran else world.noting(unmerged=world.ghost.unmerged | {c})


def _alive(record: Record, now: int) -> set[str]:
    return {i for i, task in record.tasks.items() if task.lease > now}
