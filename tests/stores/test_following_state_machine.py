"""Every store against the plain model, over histories of tasks and those who follow them.

As in ``test_state_machine``.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import initialize

from tests.stores import broken_following
from tests.stores.model import EVERY_STATE
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
    check,
    told,
)

pytestmark = TIME_LIMIT

FOLLOWERS = ["f1", "f2", "f3"]
REAPERS = st.sampled_from(["w1", "w1", "w2"])
#: Most of the acts that followers wait for, and twice those that make, find and move them.
FOLLOWING_ACTS: list[tuple[str, Sequence[str]]] = [
    *(
        (act, ACTS[act])
        for act in ("acquire", "confirm", "give_back", "cancel", "release", "start", "renew")
    ),
    *((act, ACTS[act]) for act in ("retry", "finish", "settle")),
    ("complete_follower", ["follower"]),
    ("due", ["follower"]),
    ("due", ["orphan"]),
    *[("time_passes", ())] * 2,
    *[("join", ())] * 2,
    ("replace", ()),
    ("reap", ["follower"]),
    *[("reap", ["orphan"])] * 3,
    *[("promote", ["follower"])] * 2,
    *[("promote", ["orphan"])] * 4,
]


class FollowersAgainstModel(StoreAgainstModel):
    """The same with fewer tasks and with those who follow them."""

    acts = FOLLOWING_ACTS
    ids = ("t1", "t2", *FOLLOWERS)

    @initialize(
        stages=st.tuples(STAGES, STAGES),
        call=CALLS,
        header=HEADERS,
        followers=st.sampled_from([0, 1, 3]),
    )
    def tasks_are_under_way(  # type: ignore[override]
        self, stages: tuple[str, ...], call: Call, header: Call, followers: int
    ) -> None:
        call["arguments"] = ""
        super().tasks_are_under_way(stages=(*stages, "none", "none"), call=call, header=header)
        for follower_id in FOLLOWERS[:followers]:
            self.both.acquire(self.both.keys[0], follower_id, self._to_join(call))

    def _to_join(self, call: Call) -> Call:
        """A call that would follow any task."""
        any_task = {"states": set(EVERY_STATE), "window": None, "parent": None}
        return {**call, **any_task, "on_conflict": "ignore", "join": True}

    def _subjects(self, states: Sequence[str]) -> list[tuple[str, str]]:
        model = self.both.model
        wanted = [one for one in model.followers if "follower" in states]
        if "orphan" in states:
            wanted += [one for one in model.followers if model.is_orphan(one)]
        return [*super()._subjects(states), *((one["key"], one["id"]) for one in wanted)]

    def _join(self, draw: Draw) -> None:
        call = self._to_join(draw(CALLS))
        self.both.acquire(self._key(draw), draw(st.sampled_from(FOLLOWERS)), call)

    def _replace(self, draw: Draw) -> None:
        """A call that takes the place of any task that waits, and most often is published."""
        call = {**self._to_join(draw(CALLS)), "on_conflict": "replace", "arguments": ""}
        key, task_id = self._key(draw), draw(st.sampled_from(self.ids))
        self.both.acquire(key, task_id, call)
        if draw(AIMED):
            self.both.confirm(key, task_id, draw(DURATIONS))

    def _complete_follower(self, draw: Draw) -> None:
        self.both.complete_follower(*self._subject(draw, ["follower"]))

    def _due(self, draw: Draw) -> None:
        self.both.due()

    def _reap(self, draw: Draw) -> None:
        key, _ = self._lost_if_any(draw)
        self.both.reap(key, draw(REAPERS), draw(DURATIONS))

    def _promote(self, draw: Draw) -> None:
        key, follower_id = self._lost_if_any(draw)
        claimed_by, _ = self.both.model.claims.get(key, ("w1", 0))
        reaper = claimed_by if draw(AIMED) else draw(REAPERS)
        self.both.promote(key, follower_id, reaper, draw(DURATIONS), draw(DURATIONS))

    def _lost_if_any(self, draw: Draw) -> tuple[str, str]:
        lost = self._subjects(["orphan"]) and draw(AIMED)
        return self._subject(draw, ["orphan" if lost else "follower"])


@pytest.mark.slow
def test_the_store_answers_as_the_model_does_about_followers(store, request, report):
    kind = request.node.callspec.id

    figures = check(store, kind, budget(kind, share=0.3), FollowersAgainstModel)

    report(told(figures, f"{kind}, followers"))


@pytest.mark.slow
@pytest.mark.parametrize("broken", broken_following.every_broken_store())
def test_the_machine_finds_a_store_that_leaves_a_rule_of_followers_out(broken):
    with pytest.raises(AssertionError):
        check(broken(), broken.__name__, UNTIL_THE_FIRST_DIFFERENCE, FollowersAgainstModel)
