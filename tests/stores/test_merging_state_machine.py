"""Every store against a plain model of merged calls, as in ``test_state_machine``."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from celery_unique.stores.base import LockStore, Started
from celery_unique.testing.store_contract.factories import MINUTE, Key, fresh_key
from tests.stores import broken_merging
from tests.stores.model_merging import GRACE, QUEUE, RUN, MergingModel
from tests.stores.test_state_machine import (
    TIME_LIMIT,
    UNTIL_THE_FIRST_DIFFERENCE,
    budget,
    cheap_share,
    check,
)

pytestmark = TIME_LIMIT

IDS = st.sampled_from(["a", "b", "c", "d"])
#: Three in four acts are aimed at a task that is there.
AIMED = st.sampled_from([True, True, True, False])
DRAWN: dict[str, st.SearchStrategy[Any]] = {
    "call_id": IDS,
    "task_id": IDS,
    "delivery": st.sampled_from(["d1", "d1", "d1", "d2"]),
    "later": st.booleans(),
    "delay": st.sampled_from([None, None, 3, 8]),
    "max_wait": st.sampled_from([None, 10]),
    "minutes": st.sampled_from([1, 4, 6, 31]),
}
TAKES = {
    "merge": ("call_id", "delay", "max_wait"),
    "confirm": ("task_id",),
    "give_back": ("task_id",),
    "unmerge": ("call_id",),
    "cancel": ("task_id",),
    "release": ("task_id",),
    "start": ("task_id", "delivery"),
    "retry": ("task_id", "delivery"),
    "finish": ("task_id", "delivery", "later"),
    "settle": ("task_id", "delivery"),
    "time_passes": ("minutes",),
}
#: Calls and starts are most of what happens.
ACTS = [*TAKES, *["merge"] * 5, *["start"] * 4, "confirm", "time_passes"]
STATE_OF = {"r": "active", "t": "retryable", "p": "pending", "w": "available"}
LEASES: dict[str, Any] = {"lease_ms": QUEUE * MINUTE, "run_lease_ms": RUN * MINUTE, "merge": True}


def values(value: int) -> str:
    return f'{{"n":[{value:03}]}}'


def read(started: Started) -> list[int] | None:
    lines = started.payload.splitlines()
    return [json.loads(line)[1]["n"][0] for line in lines] if lines else None


class MergingAgainstModel(RuleBasedStateMachine):
    def __init__(self, store: LockStore, figures: Counter[str]) -> None:
        super().__init__()
        self.key = Key(store, fresh_key())
        self.model = MergingModel()
        self.figures = figures
        self.figures["histories"] += 1
        self.number = 100

    @rule(data=st.data())
    def act(self, data: st.DataObject) -> None:
        """One rule that draws the act: Hypothesis leaves many rules out of each history."""
        name = data.draw(st.sampled_from(ACTS), label="act")
        arguments = {each: data.draw(DRAWN[each], label=each) for each in TAKES[name]}
        live = [task.id for task in self.model.tasks]
        if "task_id" in arguments and live and data.draw(AIMED):
            arguments["task_id"] = data.draw(st.sampled_from(live), label="task_id")
        getattr(self, name)(**arguments)

    def count(self, what: str) -> None:
        self.figures["acts"] += 1
        self.figures[what] += 1
        self.key.store.clock_offset_ms += 1  # no two tasks are of the same millisecond

    @invariant()
    def every_task_is_as_the_model_says(self) -> None:
        tasks = self.key.record().tasks
        assert {
            i: ("ending" if task.ending else STATE_OF[task.state], task.released, task.copies)
            for i, task in tasks.items()
        } == {task.id: (task.state, task.released, task.copies) for task in self.model.tasks}
        for task in self.model.tasks:
            if task.values:  # one that lost its record, and then its payload, has no more
                assert tasks[task.id].merges, task.id

    def merge(self, call_id: str, delay: int | None, max_wait: int | None) -> None:
        limit, self.number = 4, self.number + 1
        reply = self.key.acquire(
            call_id,
            merge=values(self.number),
            merge_max_bytes=limit * len(values(0)),
            grace_ms=GRACE * MINUTE,
            delay_ms=(delay or 0) * MINUTE,
            max_wait_ms=(max_wait or 0) * MINUTE,
        )

        outcome, task_id = self.model.call(
            call_id, self.number, limit=limit, delay=delay, max_wait=max_wait
        )
        assert reply.outcome == outcome
        about = reply.holder.task_id if reply.holder is not None else reply.after or None
        assert about == task_id
        self.count(f"merge: {outcome}{', succeeds' if reply.after else ''}")

    def confirm(self, task_id: str) -> None:
        self.key.confirm(task_id, QUEUE * MINUTE)
        self.model.confirm(task_id)
        self.count("confirm")

    def give_back(self, task_id: str) -> None:
        removed = self.key.give_back(task_id, QUEUE * MINUTE)

        assert removed == self.model.give_back(task_id)
        self.count(f"give_back: {removed}")

    def unmerge(self, call_id: str) -> None:
        removed = self.key.unmerge(call_id)

        assert removed == self.model.unmerge(call_id)
        self.count(f"unmerge: {removed}")

    def cancel(self, task_id: str) -> None:
        verdict = self.key.cancel(task_id, QUEUE * MINUTE)

        assert verdict == self.model.cancel(task_id)
        self.count(f"cancel: {verdict}")

    def release(self, task_id: str) -> None:
        assert self.key.release(task_id) == self.model.release(task_id)
        self.count("release")

    def start(self, task_id: str, delivery: str) -> None:
        started = self.key.start(task_id, delivery, **LEASES)

        verdict, expected = self.model.start(task_id, delivery)
        assert started.verdict == verdict
        assert read(started) == expected
        self.count(f"start: {verdict}{', with a payload' if expected else ''}")

    def retry(self, task_id: str, delivery: str) -> None:
        self.key.retry(task_id, delivery, lease_ms=QUEUE * MINUTE)
        self.model.retry(task_id, delivery)
        self.count("retry")

    def finish(self, task_id: str, delivery: str, later: bool) -> None:
        finished = self.key.finish(
            task_id, delivery, settle_later=later, mark_ms=QUEUE * MINUTE, merge=True
        )

        assert finished.verdict == self.model.finish(task_id, delivery, later)
        self.count(f"finish: {finished.verdict}")

    def settle(self, task_id: str, delivery: str) -> None:
        self.key.settle(task_id, delivery, mark_ms=QUEUE * MINUTE, merge=True)
        self.model.settle(task_id, delivery)
        self.count("settle")

    def time_passes(self, minutes: int) -> None:
        self.key.advance(minutes * MINUTE)
        self.model.advance(minutes)
        self.count("time passes")


@pytest.mark.slow
def test_the_store_answers_as_the_model_does_about_merged_calls(store, request, report):
    kind = request.node.callspec.id

    histories_of = settings(budget(kind, share=cheap_share(kind)), phases=[Phase.generate])
    figures = check(store, kind, histories_of, MergingAgainstModel)  # type: ignore[arg-type]

    histories, acts = figures.pop("histories"), figures.pop("acts")
    report(
        f"state machine on {kind}, merged calls: {histories} histories, {acts} acts, "
        f"{len(figures)} kinds of answer, no difference from the model"
    )


#: Rules about what the machine does not do: it has one task, no followers, repeats no attempt, and
#: seldom postpones a task often enough. The contract finds these.
ELSEWHERE = (
    broken_merging.BeginsAnewAfterTheGrace,
    broken_merging.MergesARepeatedAttemptTwice,
    broken_merging.MergesIntoAnotherTask,
    broken_merging.PostponesMergedTasksForEver,
    broken_merging.PromotesWithoutValues,
)


@pytest.mark.slow
@pytest.mark.parametrize(
    "broken", [each for each in broken_merging.every_broken_store() if each not in ELSEWHERE]
)
def test_the_machine_finds_a_store_that_leaves_a_rule_of_merging_out(broken):
    with pytest.raises(AssertionError):
        check(broken(), broken.__name__, UNTIL_THE_FIRST_DIFFERENCE, MergingAgainstModel)  # type: ignore[arg-type]
