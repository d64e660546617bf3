"""Every store against the plain model, act by act, over histories that Hypothesis makes.

After every act the reply and all records must be those of the model.

``STATE_MACHINE_EXAMPLES=5000 pytest tests/stores/test_state_machine.py`` looks further,
with histories that differ on every run.
"""

from __future__ import annotations

import os
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from celery_unique.stores.base import LockStore
from tests.stores import broken_replacing
from tests.stores.broken import every_broken_store
from tests.stores.model import EVERY_STATE, FINAL
from tests.stores.side_by_side import Call, SideBySide

IDS = ["t1", "t2", "t3", "t4"]
ANY_STATE = [*EVERY_STATE, "ending"]
MARKS = ["superseded", "withdrawn", "revoked", "done"]
ENDS = st.sampled_from(FINAL)
#: Three in four acts are aimed at a task that they have something to do with.
AIMED = st.sampled_from([True, True, True, False])
#: None stands for the delivery that is recorded: most acts of a worker are its own.
DELIVERIES = st.sampled_from([None, None, None, "d1", "d2", "d3"])

# Minutes.
DURATIONS = st.sampled_from([1, 2, 5, 30])
WINDOWS = st.none() | DURATIONS
TIMES = st.tuples(DURATIONS, DURATIONS)

STATES = st.one_of(
    st.just(set(EVERY_STATE) - set(FINAL)),
    st.just(set(EVERY_STATE)),
    st.sets(st.sampled_from(EVERY_STATE)),
    st.sampled_from(EVERY_STATE).map(lambda gap: set(EVERY_STATE) - {gap}),
)
STRATEGIES = ["ignore", "reject", "replace", "replace", "replace_except_schedule", "rerun", "rerun"]
#: Others are in the way of every strategy, so they are seldom.
ARGUMENTS = st.sampled_from(["", "", "", "", "", "f00d"])
CALLS = st.fixed_dictionaries(
    {
        "states": STATES,
        "on_conflict": st.sampled_from(STRATEGIES),
        "grace": DURATIONS,
        "window": WINDOWS,
        "delay": WINDOWS,
        "keep_for": st.none() | WINDOWS,
        "arguments": ARGUMENTS,
        "again": st.sampled_from([False, False, True]),
        "parent": st.none() | st.none() | st.sampled_from(IDS),
        "max_wait": WINDOWS,
        "join": st.just(False),
    }
)
HEADERS = st.fixed_dictionaries(
    {
        "created_ago": WINDOWS,
        "window": WINDOWS,
        "keep": st.sets(ENDS),
        "arguments": ARGUMENTS,
    }
)
#: How far a task has come when the history begins.
STAGES = st.sampled_from(
    ["none", "pending", "published", "running", "retrying", "ending", "ended", "revoked"]
)


Draw = Callable[[st.SearchStrategy[Any]], Any]

#: Every act, and what must be there for it to have something to do.
ACTS: dict[str, Sequence[str]] = {
    "time_passes": (),
    "acquire": (),
    "acquire_many": (),
    "confirm": ["pending"],
    "give_back": ["pending"],
    "help": ["pending", *MARKS],
    "cancel": (),
    "release": ANY_STATE,
    "start": (),
    "renew": [*ANY_STATE, *MARKS],
    "retry": ["active"],
    "finish": ["active", "ending"],
    "settle": ["ending"],
    "forget": MARKS,
}


class StoreAgainstModel(RuleBasedStateMachine):
    """Chooses the acts; what is compared is in ``SideBySide``.

    There is one rule that draws the act, not a rule for each: Hypothesis leaves many rules
    out of each history, and the deeper states need most of them.
    """

    acts: Sequence[tuple[str, Sequence[str]]] = tuple(ACTS.items())
    ids: Sequence[str] = IDS

    def __init__(self, store: LockStore, figures: Counter[str]) -> None:
        super().__init__()
        self.both = SideBySide(store, figures)

    @invariant()
    def every_record_is_as_the_model_says(self) -> None:
        self.both.compare_records()

    @initialize(stages=st.tuples(STAGES, STAGES, STAGES, STAGES), call=CALLS, header=HEADERS)
    def tasks_are_under_way(self, stages: tuple[str, ...], call: Call, header: Call) -> None:
        # Naming only final states lets several of them in at once.
        call = {**call, "states": call["states"] & set(FINAL), "grace": 30, "parent": None}
        for task_id, stage in zip(IDS, stages, strict=True):
            self._bring_to(stage, self.both.keys[0], task_id, call, header)

    def _bring_to(self, stage: str, key: str, task_id: str, call: Call, header: Call) -> None:
        if stage == "none":
            return
        self.both.acquire(key, task_id, call)
        if stage == "pending":
            return
        self.both.confirm(key, task_id, 30)
        if stage in ("running", "retrying", "ending", "ended"):
            self.both.start(key, task_id, "d1", (30, 5, 30), header)
        if stage == "retrying":
            self.both.retry(key, task_id, "d1", 30, False)
        if stage in ("ending", "ended"):
            self.both.finish(key, task_id, "d1", "completed", (30, 30), stage == "ending")
        if stage == "revoked":
            self.both.cancel(key, task_id, 30)

    @rule(data=st.data())
    def act(self, data: st.DataObject) -> None:
        possible = [act for act, needs in self.acts if not needs or self._subjects(needs)]
        name = data.draw(st.sampled_from(possible), label="act")
        act: Callable[[Draw], None] = getattr(self, f"_{name}")
        act(data.draw)

    def _subjects(self, states: Sequence[str]) -> list[tuple[str, str]]:
        """Key and id of tasks in one of the states (or ending), and of marks of that kind."""
        tasks = [
            task
            for task in self.both.model.tasks
            if ("ending" if task["ending"] else task["state"]) in states
        ]
        marks = [mark for mark in self.both.model.marks if mark["kind"] in states]
        return [(entry["key"], entry["id"]) for entry in tasks + marks]

    def _subject(self, draw: Draw, states: Sequence[str]) -> tuple[str, str]:
        found = self._subjects(states)
        if found and draw(AIMED):
            subject: tuple[str, str] = draw(st.sampled_from(found))
            return subject
        return self._key(draw), draw(st.sampled_from(self.ids))

    def _key(self, draw: Draw) -> str:
        """One key gets most of the acts, so that they meet; they must not touch the other."""
        return self.both.keys[draw(st.sampled_from([0, 0, 0, 1]))]

    def _delivery(self, draw: Draw, key: str, task_id: str) -> str:
        return draw(DELIVERIES) or self.both.delivery_of(key, task_id)

    def _time_passes(self, draw: Draw) -> None:
        self.both.advance(draw(DURATIONS))

    # -- acts of the caller -------------------------------------------------

    def _acquire(self, draw: Draw) -> None:
        self.both.acquire(self._key(draw), draw(st.sampled_from(self.ids)), draw(CALLS))

    def _acquire_many(self, draw: Draw) -> None:
        claims = [
            (self._key(draw), draw(st.sampled_from(IDS)), draw(CALLS))
            for _ in range(draw(st.integers(2, 4)))
        ]
        self.both.acquire_many(claims)

    def _confirm(self, draw: Draw) -> None:
        self.both.confirm(*self._subject(draw, ACTS["confirm"]), draw(DURATIONS))

    def _give_back(self, draw: Draw) -> None:
        self.both.give_back(*self._subject(draw, ACTS["give_back"]), draw(DURATIONS))

    def _help(self, draw: Draw) -> None:
        self.both.help(*self._subject(draw, ACTS["help"]))

    def _cancel(self, draw: Draw) -> None:
        self.both.cancel(*self._subject(draw, ["follower", *ANY_STATE]), draw(DURATIONS))

    def _release(self, draw: Draw) -> None:
        key, task_id = self._subject(draw, ACTS["release"])
        self.both.release(key, draw(st.sampled_from([None, task_id])))

    # -- acts of the worker -------------------------------------------------

    def _start(self, draw: Draw) -> None:
        key, task_id = self._subject(draw, ["follower", *ANY_STATE, *MARKS])
        delivery = self._delivery(draw, key, task_id)
        leases = draw(DURATIONS), draw(DURATIONS), draw(DURATIONS)
        self.both.start(key, task_id, delivery, leases, draw(HEADERS))

    def _renew(self, draw: Draw) -> None:
        lines = []
        for _ in range(draw(st.integers(1, 3))):
            key, task_id = self._subject(draw, ACTS["renew"])
            only_held = draw(st.booleans())
            delivery = waits_as = self._delivery(draw, key, task_id)
            if only_held:
                delivery, waits_as = "", draw(st.sampled_from(["", waits_as]))
            leases = draw(DURATIONS), draw(DURATIONS)
            lines.append((key, task_id, delivery, *leases, draw(st.booleans()), waits_as))
        self.both.renew(lines)

    def _retry(self, draw: Draw) -> None:
        key, task_id = self._subject(draw, ACTS["retry"])
        delivery = self._delivery(draw, key, task_id)
        self.both.retry(key, task_id, delivery, draw(DURATIONS), draw(st.booleans()))

    def _finish(self, draw: Draw) -> None:
        key, task_id = self._subject(draw, ACTS["finish"])
        delivery = self._delivery(draw, key, task_id)
        self.both.finish(key, task_id, delivery, draw(ENDS), draw(TIMES), later=draw(st.booleans()))

    def _settle(self, draw: Draw) -> None:
        key, task_id = self._subject(draw, ACTS["settle"])
        delivery = self._delivery(draw, key, task_id)
        self.both.settle(key, task_id, delivery, draw(ENDS), draw(TIMES), again=draw(st.booleans()))

    def _forget(self, draw: Draw) -> None:
        self.both.forget(*self._subject(draw, ACTS["forget"]))


#: Histories, and acts in each.
BUDGET = {
    "memory": (60, 40),
    "sqlite": (40, 30),
    # Where only the way to the server is another one.
    "cluster": (20, 40),
    "sentinel": (15, 30),
    "tls": (15, 30),
    "mariadb": (25, 30),
    "django-cache://locks": (15, 30),
    "django-db://locks": (10, 30),
}
SERVER_BUDGET = (40, 40)


def budget(kind: str, share: float = 1.0) -> settings:
    histories, acts = BUDGET.get(kind, SERVER_BUDGET)
    return settings(
        max_examples=int(os.environ.get("STATE_MACHINE_EXAMPLES", histories * share)),
        stateful_step_count=acts,
        database=None,
        deadline=None,
        print_blob=False,
        suppress_health_check=list(HealthCheck),
    )


def cheap_share(kind: str) -> float:
    """For a machine beside the first one: few histories where every act is slow."""
    return 0.4 if kind in ("memory", "sqlite", "redis", "valkey") else 0.2


def check(
    store: LockStore,
    kind: str,
    settings: settings,
    about: type[StoreAgainstModel] = StoreAgainstModel,
) -> Counter[str]:
    figures: Counter[str] = Counter()

    def machine() -> StoreAgainstModel:
        return about(store, figures)

    if "STATE_MACHINE_EXAMPLES" not in os.environ:
        # The same seed on every run, and another one on every store.
        machine = seed(zlib.crc32(kind.encode()))(machine)
    run_state_machine_as_test(machine, settings=settings)
    return figures


def told(figures: Counter[str], kind: str) -> str:
    histories, acts = figures.pop("histories"), figures.pop("acts")
    rarest = ", ".join(f"{what} {count}" for what, count in figures.most_common()[:-5:-1])
    return (
        f"state machine on {kind}: {histories} histories, {acts} acts, "
        f"{len(figures)} kinds of answer (rarest: {rarest}), no difference from the model"
    )


TIME_LIMIT = pytest.mark.timeout(0 if "STATE_MACHINE_EXAMPLES" in os.environ else 120)
pytestmark = TIME_LIMIT


@pytest.mark.slow
def test_the_store_answers_as_the_model_does(store, request, report):
    kind = request.node.callspec.id

    figures = check(store, kind, budget(kind))

    report(told(figures, kind))


UNTIL_THE_FIRST_DIFFERENCE = settings(
    budget("memory"), max_examples=1000, phases=[Phase.generate], report_multiple_bugs=False
)


#: Rules that only a rare history breaks, and what to add to the seed so that it comes soon.
SOONER = {
    "FreesWhatAMiddleReplacementReplaced": "5",
    "RenewsAsWaitingWhatHasStarted": "3",
    "PushesBackForEver": "3",
}


@pytest.mark.slow
@pytest.mark.parametrize("broken", [*every_broken_store(), *broken_replacing.every_broken_store()])
def test_the_machine_finds_a_store_that_leaves_a_rule_out(broken):
    luck = SOONER.get(broken.__name__, "")

    with pytest.raises(AssertionError):
        check(broken(), broken.__name__ + luck, UNTIL_THE_FIRST_DIFFERENCE)
