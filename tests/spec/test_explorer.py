"""The explorer, on models whose states and shortest runs are known."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from spec.protocol.explorer import TooManyStates, explore

Jugs = tuple[int, int]


class TwoJugs:
    """Jugs of three and of five litres, to be filled, emptied and poured into each other. There are
    16 states, all with 0 or 3 litres in the one or 0 or 5 in the other, and it takes six steps to
    measure four litres."""

    SIZES = (3, 5)

    def __init__(self, forbidden: int = -1) -> None:
        self.forbidden = forbidden
        self.visited: list[Jugs] = []

    def first(self) -> Jugs:
        return 0, 0

    def key(self, state: Jugs) -> Jugs:
        return state

    def steps(self, state: Jugs) -> Iterator[tuple[str, Jugs]]:
        three, five = state
        poured = min(three, self.SIZES[1] - five)
        returned = min(five, self.SIZES[0] - three)
        for label, reached in (
            ("fill three", (3, five)),
            ("fill five", (three, 5)),
            ("empty three", (0, five)),
            ("empty five", (three, 0)),
            ("pour into five", (three - poured, five + poured)),
            ("pour into three", (three + returned, five - returned)),
        ):
            if reached != state:
                yield label, reached

    def violation(self, state: Jugs) -> str:
        self.visited.append(state)
        return f"{self.forbidden} litres" if self.forbidden in state else ""

    def final_violation(self, state: Jugs) -> str:
        return "an end"


class TwoCounters:
    """Two processes that count to ``last`` each, one step at a time, and then stop."""

    def __init__(self, last: int, wrong_end: bool = False) -> None:
        self.last = last
        self.wrong_end = wrong_end

    def first(self) -> Jugs:
        return 0, 0

    def key(self, state: Jugs) -> Jugs:
        return state

    def steps(self, state: Jugs) -> Iterator[tuple[str, Jugs]]:
        one, other = state
        if one < self.last:
            yield "one counts (again)", (one + 1, other)
        if other < self.last:
            yield "the other counts", (one, other + 1)

    def violation(self, state: Jugs) -> str:
        return ""

    def final_violation(self, state: Jugs) -> str:
        return f"ended with {state}" if self.wrong_end else ""


def test_each_state_that_can_be_reached_is_visited_once():
    jugs = TwoJugs()

    explored = explore(jugs)

    border = {(three, five) for three in range(4) for five in range(6) if three in (0, 3)}
    border |= {(three, five) for three in range(4) for five in (0, 5)}
    assert len(border) == 16
    assert sorted(jugs.visited) == sorted(border)
    assert explored.states == 16
    assert not explored.violation
    assert explored.ends == 0


def test_a_violation_is_found_by_a_run_with_the_fewest_steps():
    explored = explore(TwoJugs(forbidden=4))

    assert explored.violation == "4 litres"
    assert explored.run == [
        "fill five",
        "pour into three",
        "empty three",
        "pour into three",
        "fill five",
        "pour into three",
    ]
    assert explored.story().startswith("4 litres, after:\n  1. fill five\n  2. pour into three\n")


@pytest.mark.parametrize(("forbidden", "steps"), [(0, 0), (3, 1), (5, 1), (2, 2), (1, 4), (4, 6)])
def test_the_shortest_run_is_as_long_as_breadth_first_search_says(forbidden, steps):
    assert len(explore(TwoJugs(forbidden)).run) == steps


@pytest.mark.parametrize("last", [1, 2, 7])
def test_states_steps_ends_and_labels_are_counted(last):
    explored = explore(TwoCounters(last))

    assert explored.states == (last + 1) ** 2
    assert explored.steps == 2 * last * (last + 1)
    assert explored.ends == 1
    assert explored.labels == {
        "one counts": last * (last + 1),
        "the other counts": last * (last + 1),
    }


def test_a_state_in_which_nothing_can_happen_is_an_end():
    explored = explore(TwoCounters(2, wrong_end=True))

    assert explored.violation == "ended with (2, 2)"
    assert len(explored.run) == 4


def test_a_model_with_more_states_than_allowed_is_not_taken_for_explored():
    with pytest.raises(TooManyStates):
        explore(TwoCounters(7), most=63)

    assert explore(TwoCounters(7), most=64).states == 64
