"""Visit every state that the steps of a model reach, breadth first.

So the first violation found is one with the fewest steps, and its run can be read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

S = TypeVar("S")


class Model(Protocol, Generic[S]):
    def first(self) -> S:
        """The state in which a run begins."""

    def steps(self, state: S) -> Iterable[tuple[str, S]]:
        """What can happen next: a label, and the state that it leaves."""

    def key(self, state: S) -> Hashable:
        """Equal for states that are the same."""

    def violation(self, state: S) -> str:
        """What is wrong with the state; empty for nothing."""

    def final_violation(self, state: S) -> str:
        """What is wrong with it if nothing can happen any more."""


@dataclass(slots=True)
class Explored:
    states: int = 0
    steps: int = 0
    ends: int = 0  # states in which nothing can happen any more
    violation: str = ""
    run: list[str] = field(default_factory=list)
    labels: Counter[str] = field(default_factory=Counter)

    def story(self) -> str:
        numbered = [
            f"{n:3}. {label}"
            for n, label in enumerate(self.run, 1)
            if label != "time passes" or self.run[n - 2] != label  # said once in a row
        ]
        return "\n".join([f"{self.violation}, after:", *numbered])


class TooManyStates(RuntimeError):
    """The scenario is too large to be explored to its end."""


def explore(model: Model[S], most: int = 1_000_000) -> Explored:
    explored = Explored()
    first = model.first()
    first_key = model.key(first)
    came_from: dict[Hashable, tuple[Hashable, str]] = {}
    seen = {first_key}
    level = [(first_key, first)]
    while level:
        following: list[tuple[Hashable, S]] = []
        for key, state in level:
            violation = model.violation(state)
            ends = True
            for label, reached in () if violation else model.steps(state):
                ends = False
                explored.steps += 1
                explored.labels[label.split(" (")[0]] += 1
                reached_key = model.key(reached)
                if reached_key not in seen:
                    seen.add(reached_key)
                    came_from[reached_key] = (key, label)
                    following.append((reached_key, reached))
            if ends and not violation:
                explored.ends += 1
                violation = model.final_violation(state)
            if violation:
                explored.states = len(seen)
                explored.violation = violation
                explored.run = _run_to(came_from, key)
                return explored
        if len(seen) > most:
            raise TooManyStates(f"more than {most} states")
        level = following
    explored.states = len(seen)
    return explored


def _run_to(came_from: dict[Hashable, tuple[Hashable, str]], key: Hashable) -> list[str]:
    labels = []
    while key in came_from:
        key, label = came_from[key]
        labels.append(label)
    return labels[::-1]
