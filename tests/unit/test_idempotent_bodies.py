"""``assert_idempotent`` finds bodies that may not run twice, or not after an interruption."""

from __future__ import annotations

import asyncio
import re
import sqlite3
import sys
import uuid
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from typing import Any

import pytest
from celery import Celery, Task

import celery_unique
from celery_unique import lookup
from celery_unique.exceptions import CeleryUniqueError
from celery_unique.testing import assert_idempotent
from celery_unique.testing.idempotency import ALL_UP_TO

#: As tests of users keep their fakes: in the module.
SENT: list[int] = []
total = 0


@pytest.fixture
def app() -> Celery:
    app = Celery("shop", broker="memory://", backend="cache+memory://", set_as_current=False)
    celery_unique.install(app, store_url="redis://127.0.0.1:1/0")
    app.conf.task_default_queue = uuid.uuid4().hex
    return app


@pytest.fixture
def task(app: Celery) -> Callable[..., Any]:
    def make(function: Any = None, **options: Any) -> Any:
        def define(body: Any) -> Any:
            return app.task(**{"name": f"shop.{body.__name__}", "shared": False, **options})(body)

        return define if function is None else define(function)

    return make


@pytest.fixture(autouse=True)
def _empty_module() -> Iterator[None]:
    global total
    yield
    SENT.clear()
    total = 0


def test_a_body_that_only_sets_values_passes(task: Any) -> None:
    paid: dict[int, str] = {}

    @task
    def pay(order: int, by: str = "card") -> None:
        paid[order] = "begun"
        paid[order] = by

    assert_idempotent(pay, (7,), {"by": "cash"}, state=lambda: dict(paid))
    assert_idempotent(pay, (7,), state=lambda: paid)
    assert_idempotent(pay, [7], state=paid)
    assert paid == {7: "card"}


def test_a_body_that_appends_is_caught_by_the_second_run(task: Any) -> None:
    sent: list[int] = []

    @task
    def send(user: int) -> None:
        sent.append(user)

    with pytest.raises(AssertionError, match="run twice"):
        assert_idempotent(send, (7,), state=sent)
    sent.clear()
    with pytest.raises(AssertionError) as caught:
        assert_idempotent(send, (7,), state=lambda: list(sent))

    assert str(caught.value) == (
        "shop.send(7) is not idempotent: run twice, it leaves another state than after one run.\n"
        "--- expected\n+++ found\n@@ -1 +1 @@\n-[7]\n+[7, 7]"
    )


def test_a_body_that_records_before_it_acts_is_caught_at_the_line_between(task: Any) -> None:
    """It can be run twice. Interrupted after its mark, it never sends."""
    marks: set[int] = set()
    sent: list[int] = []

    @task
    def send(user: int) -> None:
        if user in marks:
            return
        marks.add(user)
        sent.append(user)

    with pytest.raises(AssertionError) as caught:
        assert_idempotent(send, (7,), state=lambda: {"sent": sent})

    text = str(caught.value)
    assert re.search(
        r"^shop\.send\(7\) is not idempotent: interrupted before line \d+ of "
        r"test_idempotent_bodies\.py \(sent\.append\(user\)\), and run again, it leaves",
        text,
    ), text
    assert "-{'sent': [7]}\n+{'sent': []}" in text


def test_a_body_that_records_after_it_acted_is_caught_at_the_mark(task: Any) -> None:
    marks: set[int] = set()

    @task
    def send(user: int) -> None:
        if user not in marks:
            SENT.append(user)
            marks.add(user)

    with pytest.raises(AssertionError, match=r"interrupted before line \d+ .*marks.add\(user\)"):
        assert_idempotent(send, (7,), state=lambda: (sorted(marks), len(SENT)))


def test_each_turn_of_a_loop_is_a_checkpoint(task: Any) -> None:
    done: list[int] = []

    @task
    def ship(parts: list[int]) -> None:
        if len(done) == 2:  # wrong only after the second part
            done.append(0)
        for part in parts:
            if part not in done:
                done.append(part)

    with pytest.raises(AssertionError, match="interrupted before line"):
        assert_idempotent(ship, ([1, 2, 3],), state=lambda: done)


def test_long_loops_are_interrupted_at_their_first_second_and_last_turn(task: Any) -> None:
    done: set[int] = set()
    turns = ALL_UP_TO
    runs: SimpleQueue[None] = SimpleQueue()

    @task
    def ship() -> None:
        runs.put(None)
        for part in range(turns):
            done.add(part)

    assert_idempotent(ship, state=lambda: done)

    # One run, two, and one that counts; the lines of the loop are interrupted three times each.
    checkpoints = {"runs.put": 1, "for": 3, "done.add": 3}
    reached = sum(checkpoints.values()) - 1  # but for the one before runs.put
    assert runs.qsize() == 4 + reached + sum(checkpoints.values())


@pytest.mark.parametrize(
    "options", [{"unique": True}, {"unique": True, "unique_states": "window"}, {}]
)
def test_bound_unique_tasks_run_under_one_id(task: Any, app: Celery, options: Any) -> None:
    app.conf.unique_eager = True  # its body runs, whatever is held
    rows: dict[str, int] = {}
    ids: SimpleQueue[str] = SimpleQueue()

    @task(bind=True, **options)
    def write(self: Any, order: int) -> None:
        ids.put(self.request.id)
        rows[self.request.id] = order

    assert_idempotent(write, (7,), state=lambda: list(rows.values()), reset=rows.clear)
    first, second, again = (ids.get_nowait() for _ in range(3))
    assert first != second == again


def test_a_task_with_a_class_of_its_own_and_automatic_retries(app: Celery) -> None:
    sent: list[int] = []

    class Send(Task):  # type: ignore[misc]
        name = "shop.Send"
        autoretry_for = (OSError,)

        def run(self, user: int) -> None:
            if user not in sent:
                mark = user
                sent.append(mark)

    assert_idempotent(app.register_task(Send()), (7,), state=lambda: sent)


def test_children_are_enqueued_into_a_store_in_memory(task: Any, app: Celery) -> None:
    """Each trial has an empty one; the runs of a trial share it."""
    outcomes: SimpleQueue[str] = SimpleQueue()

    @task(unique=True, unique_for=600, unique_states="window")
    def child(n: int) -> None: ...

    @task
    def parent(n: int) -> None:
        outcomes.put(child.delay(n).outcome)

    assert_idempotent(parent, (7,), state=lambda: None)

    found = [outcomes.get_nowait() for _ in range(outcomes.qsize())]
    assert found == ["created", "created", "deduplicated", "created", "created"]
    assert app.conf.unique_store_url == "redis://127.0.0.1:1/0"


def test_lines_of_other_functions_count_if_they_are_named(task: Any) -> None:
    balance = {"from": 10, "to": 0, "moved": 0}

    def move() -> None:
        balance["from"] -= 5
        balance["to"] += 5
        balance["moved"] = 1

    @task
    def transfer() -> None:
        if not balance["moved"]:
            move()

    def reset() -> None:
        balance.update({"from": 10, "to": 0, "moved": 0})

    assert_idempotent(transfer, state=lambda: balance, reset=reset)  # as if it were one act
    with pytest.raises(AssertionError, match=r'before line \d+ .*\(balance\["to"\] \+= 5\)'):
        assert_idempotent(transfer, state=lambda: balance, reset=reset, checkpoints=[move])


def test_an_except_clause_of_the_body_does_not_stop_the_interruption(task: Any) -> None:
    sent: list[int] = []

    @task
    def send(user: int) -> None:
        if user not in sent:
            try:
                user += 0
                sent.append(user)
                user += 0
            except Exception:
                sent.append(-1)

    assert_idempotent(send, (7,), state=lambda: sent)


def test_a_transaction_is_rolled_back_by_an_interruption(task: Any) -> None:
    db = sqlite3.connect(":memory:")
    db.execute("CREATE TABLE moves (id INTEGER PRIMARY KEY)")
    db.execute("CREATE TABLE accounts (balance INTEGER)")

    def reset() -> None:
        with db:
            db.execute("DELETE FROM moves")
            db.execute("DELETE FROM accounts")
            db.execute("INSERT INTO accounts VALUES (0)")

    def state() -> list[Any]:
        return db.execute("SELECT balance FROM accounts").fetchall()

    @task
    def move(number: int) -> None:
        with db:
            new = db.execute("INSERT OR IGNORE INTO moves VALUES (?)", (number,)).rowcount
            if new:
                db.execute("UPDATE accounts SET balance = balance + 5")

    @task
    def move_in_two(number: int) -> None:
        with db:
            new = db.execute("INSERT OR IGNORE INTO moves VALUES (?)", (number,)).rowcount
        with db:
            if new:
                db.execute("UPDATE accounts SET balance = balance + 5")

    assert_idempotent(move, (1,), state=state, reset=reset)
    with pytest.raises(AssertionError, match="interrupted before line"):
        assert_idempotent(move_in_two, (1,), state=state, reset=reset)


class Bank:
    def __init__(self) -> None:
        self.paid = 0
        self.orders = {7: {"parts": [1]}}


def test_state_without_a_reset_is_found_and_restored(task: Any) -> None:
    """Variables, containers in containers, and objects of the test's own classes."""
    bank, count = Bank(), 0
    parts = bank.orders[7]["parts"]

    @task
    def pay() -> None:
        global total
        nonlocal count
        total = count = 1
        bank.paid = 5
        parts.append(2) if 2 not in parts else None
        bank.orders[8] = {"parts": []}

    def snapshot() -> Any:
        return total, count, bank.paid, str(bank.orders)

    assert_idempotent(pay, state=lambda: (snapshot(), len(SENT)))
    assert bank.orders[7]["parts"] is parts

    @task
    def pay_more() -> None:
        bank.paid += 1

    with pytest.raises(AssertionError, match="run twice"):
        assert_idempotent(pay_more, state=lambda: bank.paid)


def test_state_that_cannot_be_restored_needs_a_reset(task: Any) -> None:
    db = sqlite3.connect(":memory:")
    db.execute("CREATE TABLE rows (id INTEGER PRIMARY KEY)")

    @task
    def write() -> None:
        db.execute("INSERT OR IGNORE INTO rows VALUES (1)")

    def state() -> list[Any]:
        return db.execute("SELECT * FROM rows").fetchall()

    with pytest.raises(CeleryUniqueError, match=r"Pass reset=, a function that restores") as caught:
        assert_idempotent(write, state=state)
    assert "-[]\n+[(1,)]" in str(caught.value)

    with pytest.raises(CeleryUniqueError, match="reset= does not restore all that state= returns"):
        assert_idempotent(write, state=lambda: (state(), SENT.append(1), len(SENT)), reset=int)


def test_the_exception_of_a_body_is_raised(task: Any) -> None:
    @task
    def fail() -> None:
        raise KeyError("no such order")

    with pytest.raises(KeyError, match="no such order"):
        assert_idempotent(fail, state=lambda: None)


@pytest.mark.parametrize(
    ("how", "note"),
    [
        ("twice", "run twice"),
        ("half", r"interrupted before line \d+ of .*\(done\.add\(order\)\), and run again"),
    ],
)
def test_an_exception_of_a_later_run_says_which(task: Any, how: str, note: str) -> None:
    """Such as that of a unique column: the row is there."""
    rows: list[int] = []
    done: set[int] = set()

    @task
    def insert(order: int) -> None:
        if how == "half" and order in done:
            return
        if order in rows:
            raise KeyError("it is there")
        rows.append(order)
        done.add(order)

    with pytest.raises(KeyError) as caught:
        assert_idempotent(insert, (7,), state=lambda: (rows, done))

    [text] = caught.value.__notes__
    assert re.fullmatch(rf"Raised by shop\.insert\(7\), {note}\.", text), text


def test_each_run_gets_the_arguments_as_they_were_sent(task: Any) -> None:
    shipped: set[int] = set()
    given = [1, 2]

    @task
    def ship(parts: list[int]) -> None:
        while parts:
            shipped.add(parts.pop())

    assert_idempotent(ship, (given,), state=shipped)
    assert_idempotent(ship, kwargs={"parts": given}, state=shipped)
    assert given == [1, 2]


def test_a_body_that_is_retried_runs_to_its_end(task: Any) -> None:
    orders: set[int] = set()
    mails: list[int] = []

    @task(bind=True)
    def pay(self: Any, order: int) -> None:
        if not self.request.retries:
            raise self.retry(countdown=0)
        if order not in orders:
            orders.add(order)
            mails.append(order)

    assert_idempotent(pay, (7,), state=orders)
    orders.clear()
    mails.clear()
    with pytest.raises(AssertionError, match=r"\(mails\.append\(order\)\), and run again"):
        assert_idempotent(pay, (7,), state=lambda: [*mails])


@pytest.mark.filterwarnings("ignore:coroutine")
@pytest.mark.parametrize("kind", ["async def", "generator"])
def test_a_body_that_does_not_run_is_an_error(task: Any, kind: str) -> None:
    sent: list[int] = []

    async def send(user: int) -> None:
        sent.append(user)

    def send_each(user: int) -> Iterator[int]:
        sent.append(user)
        yield user

    body = send if kind == "async def" else send_each
    with pytest.raises(CeleryUniqueError, match="has executed no line of its body"):
        assert_idempotent(task(body), (7,), state=sent)

    @task
    def run(user: int) -> None:
        asyncio.run(send(user))

    with pytest.raises(AssertionError, match="run twice"):
        assert_idempotent(run, (7,), state=sent)


@pytest.mark.parametrize(
    ("state", "why"),
    [
        (object, "two copies of it are not equal. Its type is object"),
        (lambda: (n for n in SENT), "cannot pickle 'generator' object. Its type is generator"),
    ],
)
def test_a_state_that_cannot_be_compared_is_an_error(task: Any, state: Any, why: str) -> None:
    """A queryset of Django's, for example, equals itself alone."""

    @task
    def nothing() -> None: ...

    with pytest.raises(CeleryUniqueError, match=why):
        assert_idempotent(nothing, state=state)


def test_a_function_that_is_no_task_is_named() -> None:
    def send(user: int) -> None: ...

    with pytest.raises(CeleryUniqueError, match=r"takes a task, not <function .*send"):
        assert_idempotent(send, (7,), state=lambda: None)


def test_a_function_without_lines_is_no_checkpoint(task: Any) -> None:
    @task
    def nothing() -> None: ...

    with pytest.raises(CeleryUniqueError, match=r"written in Python, not <built-in function len>"):
        assert_idempotent(nothing, state=lambda: None, checkpoints=[len])


def test_the_tracer_of_a_debugger_is_back_afterwards(task: Any) -> None:
    def debugger(*_: Any) -> None: ...

    @task
    def nothing() -> None: ...

    before = sys.gettrace()
    sys.settrace(debugger)
    try:
        assert_idempotent(nothing, state=lambda: None)
        assert sys.gettrace() is debugger
    finally:
        sys.settrace(before)


def test_no_lock_is_left(task: Any, app: Celery) -> None:
    app.conf.unique_store_url = "memory://"

    @task(unique=True)
    def nothing() -> None: ...

    assert_idempotent(nothing, state=lambda: None)

    assert lookup(nothing, app=app) is None
