"""The checker itself: histories of a register and of a queue whose verdict is known."""

from __future__ import annotations

from typing import Any

import pytest

from spec.linearizability.checker import NEVER, Operation, TooManyExplanations, check


class Register:
    """One value that can be written and read."""

    def first(self) -> int:
        return 0

    def after(self, state: int, operation: Operation) -> list[int]:
        if operation.act == "write":
            return [operation.arguments]
        return [state] if operation.reply == state else []

    def reads_only(self, operation: Operation) -> bool:
        return operation.act == "read"

    def fingerprint(self, state: int) -> int:
        return state


class Queue(Register):
    """First in, first out; ``take`` of an empty one replies None."""

    def first(self) -> Any:
        return ()

    def after(self, state: Any, operation: Operation) -> Any:
        if operation.act == "put":
            return [(*state, operation.arguments)]
        if operation.reply is None:
            return [()] if not state else []
        return [state[1:]] if state and state[0] == operation.reply else []

    def reads_only(self, operation: Operation) -> bool:
        return operation.act == "take" and operation.reply is None


def write(value: int, called: float, returned: float = NEVER) -> Operation:
    return Operation("write", value, None, called, returned)


def read(value: int, called: float, returned: float) -> Operation:
    return Operation("read", None, value, called, returned)


def put(value: str, called: float, returned: float) -> Operation:
    return Operation("put", value, None, called, returned)


def take(value: str | None, called: float, returned: float) -> Operation:
    return Operation("take", None, value, called, returned)


LINEARIZABLE = {
    "nothing happened": (Register(), []),
    "one after the other": (Register(), [write(1, 0, 1), read(1, 2, 3)]),
    "a read during a write sees the old value": (Register(), [write(1, 0, 9), read(0, 2, 3)]),
    "a read during a write sees the new value": (Register(), [write(1, 0, 9), read(1, 2, 3)]),
    "two reads during a write see old, then new": (
        Register(),
        [write(1, 0, 9), read(0, 1, 2), read(1, 3, 4)],
    ),
    "two writes at a time, either order": (
        Register(),
        [write(1, 0, 9), write(2, 0, 9), read(2, 10, 11), read(2, 12, 13)],
    ),
    "a write without a reply took effect late": (
        Register(),
        [write(1, 0), read(0, 5, 6), read(1, 7, 8)],
    ),
    "a write without a reply never took effect": (Register(), [write(1, 0), read(0, 5, 6)]),
    "a write that changes nothing now is needed later": (
        Register(),
        [write(0, 0, 9), write(1, 1, 2), read(0, 3, 4)],
    ),
    "call and return at one moment overlap": (Register(), [write(1, 0, 5), read(0, 5, 6)]),
    "elements in the order of overlapping puts": (
        Queue(),
        [put("a", 0, 5), put("b", 1, 4), take("b", 6, 7), take("a", 8, 9), take(None, 10, 11)],
    ),
}

NOT_LINEARIZABLE = {
    "a value that nobody wrote": (Register(), [read(7, 0, 1)]),
    "a stale read": (Register(), [write(1, 0, 1), read(0, 2, 3)]),
    "new, then old": (Register(), [write(1, 0, 9), read(1, 1, 2), read(0, 3, 4)]),
    "two readers see two orders": (
        Register(),
        [write(1, 0, 9), write(2, 0, 9), read(1, 1, 2), read(2, 3, 4), read(1, 5, 6)],
    ),
    "an effect before its call": (Register(), [read(1, 0, 1), write(1, 2, 3)]),
    "an element is taken twice": (
        Queue(),
        [put("a", 0, 1), take("a", 2, 9), take("a", 2, 9)],
    ),
    "an element is lost": (Queue(), [put("a", 0, 1), take(None, 2, 3)]),
    "second in, first out": (
        Queue(),
        [put("a", 0, 1), put("b", 2, 3), take("b", 4, 5)],
    ),
}


@pytest.mark.parametrize("name", LINEARIZABLE)
def test_a_history_that_an_order_explains_is_linearizable(name):
    specification, history = LINEARIZABLE[name]

    assert check(history, specification).linearizable


@pytest.mark.parametrize("name", NOT_LINEARIZABLE)
def test_a_history_that_no_order_explains_is_not_linearizable(name):
    specification, history = NOT_LINEARIZABLE[name]

    verdict = check(history, specification)

    assert not verdict.linearizable
    assert verdict.unexplained in history
    assert str(verdict.unexplained) in verdict.story()


def test_every_order_of_many_overlapping_writes_is_tried():
    writes = [write(n, 0, 100) for n in range(1, 8)]
    reads = [read(n, 10 * n, 10 * n + 1) for n in (3, 1, 2, 7, 5, 4, 6)]
    history = [*writes, *sorted(reads, key=lambda one: one.called)]

    assert check(history, Register()).linearizable
    assert not check([*history, read(3, 101, 102)], Register()).linearizable


def test_a_history_that_leaves_too_much_open_proves_nothing():
    puts = [put(str(n), 0, 100) for n in range(9)]

    with pytest.raises(TooManyExplanations):
        check([*puts, take("1", 101, 102)], Queue(), most=1000)
