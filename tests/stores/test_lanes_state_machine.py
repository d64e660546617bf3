"""Every store against the plain model, over histories of lanes and of limits.

As in ``test_state_machine``.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import initialize

from tests.stores import broken_lanes
from tests.stores.model import EVERY_STATE, FINAL
from tests.stores.side_by_side import Call
from tests.stores.test_state_machine import (
    ACTS,
    AIMED,
    CALLS,
    DURATIONS,
    HEADERS,
    STAGES,
    TIME_LIMIT,
    UNTIL_THE_FIRST_DIFFERENCE,
    Draw,
    StoreAgainstModel,
    budget,
    cheap_share,
    check,
    told,
)

pytestmark = TIME_LIMIT

CALLERS = ["p1", "p2", "p3", "p4"]
REAPERS = st.sampled_from(["w1", "w1", "w2"])
#: Most calls of a lane have the same policy.
LANE_STATES = st.sampled_from(
    [
        *[set(EVERY_STATE) - set(FINAL)] * 3,
        {"pending", "scheduled", "available"},
        set(EVERY_STATE) - {"discarded", "cancelled"},
    ]
)
LANE_CALLS = st.builds(
    lambda call, states, limit, max_queue: {
        **call,
        "states": states,
        "on_conflict": "queue",
        "join": True,
        "limit": limit,
        "max_queue": max_queue,
    },
    CALLS,
    LANE_STATES,
    st.sampled_from([1, 1, 2]),
    st.sampled_from([None, None, None, 2]),
)
LANE_ACTS: list[tuple[str, Sequence[str]]] = [
    *(
        (act, ACTS[act])
        for act in ("acquire", "confirm", "give_back", "cancel", "release", "start", "renew")
    ),
    *((act, ACTS[act]) for act in ("retry", "finish", "finish", "settle")),
    ("complete_follower", ["parked"]),
    ("due", ["parked"]),
    *[("time_passes", ())] * 2,
    *[("park", ())] * 5,
    ("of_many", ()),
    ("follow", ()),
    *[("reap", ["parked"])] * 3,
]


class LanesAgainstModel(StoreAgainstModel):
    acts = LANE_ACTS
    ids = ("t1", "t2", *CALLERS)

    @initialize(
        stages=st.tuples(STAGES, STAGES),
        call=CALLS,
        header=HEADERS,
        parked=LANE_CALLS,
        number=st.sampled_from([0, 2, 3]),
    )
    def tasks_are_under_way(  # type: ignore[override]
        self, stages: tuple[str, ...], call: Call, header: Call, parked: Call, number: int
    ) -> None:
        call["arguments"] = ""
        super().tasks_are_under_way(stages=(*stages, "none", "none"), call=call, header=header)
        for task_id in CALLERS[:number]:
            self.both.acquire(self.both.keys[0], task_id, {**parked, "again": False})

    def _subjects(self, states: Sequence[str]) -> list[tuple[str, str]]:
        lane = self.both.model.lane if "parked" in states or "follower" in states else []
        return [*super()._subjects(states), *((one["key"], one["id"]) for one in lane)]

    def _park(self, draw: Draw) -> None:
        call = draw(LANE_CALLS)
        self.both.acquire(self._key(draw), draw(st.sampled_from(self.ids)), call)

    def _of_many(self, draw: Draw) -> None:
        call = {**draw(CALLS), "limit": draw(st.sampled_from([2, 2, 3])), "arguments": ""}
        self.both.acquire(self._key(draw), draw(st.sampled_from(self.ids)), call)

    def _follow(self, draw: Draw) -> None:
        """A call that follows a task beside those that are parked."""
        call = {**draw(CALLS), "states": set(EVERY_STATE), "window": None, "parent": None}
        call = {**call, "on_conflict": "ignore", "join": True}
        self.both.acquire(self._key(draw), draw(st.sampled_from(self.ids)), call)

    def _complete_follower(self, draw: Draw) -> None:
        self.both.complete_follower(*self._subject(draw, ["parked"]))

    def _due(self, draw: Draw) -> None:
        self.both.due()

    def _reap(self, draw: Draw) -> None:
        key, _ = self._subject(draw, ["parked"])
        self.both.reap(key, draw(REAPERS), draw(DURATIONS))
        if draw(AIMED):
            for task_id in self.both.model.called(key)[:1]:
                self.both.confirm(key, task_id, draw(DURATIONS))


@pytest.mark.slow
def test_the_store_answers_as_the_model_does_about_lanes(store, request, report):
    kind = request.node.callspec.id

    figures = check(store, kind, budget(kind, share=cheap_share(kind)), LanesAgainstModel)

    report(told(figures, f"{kind}, lanes"))


@pytest.mark.slow
@pytest.mark.parametrize("broken", broken_lanes.every_broken_store())
def test_the_machine_finds_a_store_that_leaves_a_rule_of_lanes_out(broken):
    with pytest.raises(AssertionError):
        check(broken(), broken.__name__, UNTIL_THE_FIRST_DIFFERENCE, LanesAgainstModel)
