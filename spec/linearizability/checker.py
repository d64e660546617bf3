"""Is there an order of the operations that explains every reply?

A history is *linearizable* if each operation can be given one moment between its call and its
return such that, taken in the order of these moments, every operation replies what the sequential
specification replies. (Herlihy and Wing, 1990.)

The search follows the history through time and keeps every explanation that is still possible,
a ``Configuration``: which of the operations under way have taken effect, and the state they left.
When an operation returns, it must have taken effect, so each explanation is extended until it has;
explanations that cannot be are dropped, and if none is left the history is not linearizable. This
is the just-in-time form of the search (Lowe, 2017): no wrong choice is found out only much later,
so the cost grows with the length of the history and not with the power of it.

Nothing here knows of locks: the tests check it with a register and a queue.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

S = TypeVar("S")

#: The return of an operation whose reply never came: it may take effect at any time, or never.
NEVER = math.inf


@dataclass(frozen=True, slots=True)
class Operation:
    """One act of one process. Times are of one monotonic clock, in any unit."""

    act: str
    arguments: Any
    reply: Any
    called: float
    returned: float = NEVER
    process: str = ""

    def __str__(self) -> str:
        return f"{self.process:>6}  {self.act}({self.arguments}) -> {self.reply}"


class Specification(Protocol, Generic[S]):
    """What an operation may reply, and leave behind, if it runs alone."""

    def first(self) -> S:
        """The state before the history."""

    def after(self, state: S, operation: Operation) -> Iterable[S]:
        """Every state that the operation can leave if it replies what it did; none if it cannot
        reply that. Must not change ``state``."""

    def reads_only(self, operation: Operation) -> bool:
        """Whether an operation with this reply changes nothing, in whatever state. (False is
        always right, and slower.)"""

    def fingerprint(self, state: S) -> Hashable:
        """Equal for states that no later operation can tell apart."""


@dataclass(slots=True)
class Verdict:
    """``linearizable``; if not, the operation that nothing explains and those around it."""

    linearizable: bool
    operations: int
    overlapping: int = 0  # operations that were under way together with another one
    applied: int = 0  # how often the specification was run
    widest: int = 1  # most explanations kept at one time
    unexplained: Operation | None = None
    around: list[Operation] = field(default_factory=list)
    possible: list[str] = field(default_factory=list)  # states before it, as far as explained

    def story(self) -> str:
        lines = [f"No order explains the reply of\n{self.unexplained}\namong"]
        lines += [*map(str, self.around), "in any of these states:", *self.possible]
        return "\n".join(lines)


Configuration = tuple[frozenset[int], Hashable]


class TooManyExplanations(RuntimeError):
    """The history leaves more open than the search can follow: it proves nothing either way."""


def check(
    history: Sequence[Operation], specification: Specification[S], most: int = 200_000
) -> Verdict:
    """Follow the history of one object; see the module."""
    search = _Search(history, specification, most)
    # A call and a return at one moment overlap: the clock cannot tell them apart.
    events = [(operation.called, 0, n) for n, operation in enumerate(history)]
    events += [(o.returned, 1, n) for n, o in enumerate(history) if o.returned != NEVER]
    open_now: set[int] = set()
    overlapped: set[int] = set()
    for _, is_return, n in sorted(events):
        if not is_return:
            open_now.add(n)
            if len(open_now) > 1:
                overlapped |= open_now
            continue
        if not search.explain_return(n, open_now):
            verdict = search.verdict(len(overlapped))
            verdict.linearizable = False
            verdict.unexplained = history[n]
            verdict.possible = [str(state) for state in search.possible()]
            verdict.around = [history[i] for i in sorted({*open_now, *range(max(0, n - 8), n)})]
            return verdict
        open_now.discard(n)
    return search.verdict(len(overlapped))


class _Search(Generic[S]):
    def __init__(
        self, history: Sequence[Operation], specification: Specification[S], most: int
    ) -> None:
        self._history = history
        self._specification = specification
        self._most = most
        first = specification.first()
        self._states: dict[Hashable, S] = {specification.fingerprint(first): first}
        self._configurations: set[Configuration] = {
            (frozenset(), fingerprint) for fingerprint in self._states
        }
        #: What an operation leaves of a state: several explanations meet in the same one.
        self._left: dict[tuple[Hashable, int], tuple[Hashable, ...]] = {}
        self._applied = 0
        self._widest = 1

    def verdict(self, overlapping: int) -> Verdict:
        return Verdict(True, len(self._history), overlapping, self._applied, self._widest)

    def possible(self) -> list[S]:
        return [self._states[state] for _, state in self._configurations]

    def explain_return(self, n: int, open_now: set[int]) -> bool:
        """Extend every explanation until the operation has taken effect in it."""
        explained: set[Configuration] = set()
        seen = set(self._configurations)
        work = list(self._configurations)
        while work:
            configuration = work.pop()
            done, _ = configuration
            if n in done:
                explained.add(configuration)
                continue
            for reached in self._extended(configuration, open_now):
                if reached not in seen:
                    seen.add(reached)
                    work.append(reached)
            if len(seen) > self._most:
                raise TooManyExplanations(f"more than {self._most} explanations")
        if not explained:
            return False
        self._configurations = {(done - {n}, state) for done, state in explained}
        self._widest = max(self._widest, len(self._configurations))
        self._forget()
        return True

    def _extended(
        self, configuration: Configuration, open_now: set[int]
    ) -> Iterable[Configuration]:
        done, fingerprint = configuration
        reached: list[Configuration] = []
        for n in sorted(open_now - done):
            after = done | {n}
            left = self._after(fingerprint, n)
            if left == (fingerprint,) and self._specification.reads_only(self._history[n]):
                # It fits here, and wherever it fits it changes nothing: no other order needs to
                # be tried from here.
                return [(after, fingerprint)]
            reached += [(after, state) for state in left]
        return reached

    def _after(self, fingerprint: Hashable, n: int) -> tuple[Hashable, ...]:
        known = self._left.get((fingerprint, n))
        if known is None:
            self._applied += 1
            found = {}
            for state in self._specification.after(self._states[fingerprint], self._history[n]):
                found[self._specification.fingerprint(state)] = state
            for left, state in found.items():
                self._states.setdefault(left, state)
            known = self._left[fingerprint, n] = tuple(found)
        return known

    def _forget(self) -> None:
        """Only states that an explanation ends in can be met again."""
        if len(self._states) > 4 * len(self._configurations) + 64:
            alive = {state for _, state in self._configurations}
            self._states = {f: self._states[f] for f in alive}
            self._left.clear()
