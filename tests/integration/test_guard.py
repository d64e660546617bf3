"""``unique_guard``: deliveries of one task id, of callers that know nothing of locks."""

from __future__ import annotations

from typing import Any

import pytest
from celery import Celery, chain, chord, group, uuid

import celery_unique
from celery_unique import ConfigurationError, InvalidPolicy
from celery_unique.config.app_state import state_of
from celery_unique.config.leases import RESTORE_MARGIN_S
from celery_unique.header import HEADER
from celery_unique.keys.digest import guard_key, guard_text
from celery_unique.operations.explain import explain_record, meaning
from celery_unique.operations.select import Selection, find, select
from celery_unique.stores.base import Start
from celery_unique.stores.record import Record
from tests.support import eventually
from tests.support.app import define, flush, make_app, messages, plain_app, value_of, working


class Bodies:
    """What ran, and what each body saw of its lock."""

    def __init__(self) -> None:
        self.ran: list[str] = []
        self.locks: list[Any] = []

    def note(self, task: Any, value: Any) -> Any:
        self.ran.append(task.request.id)
        lock = task.request.unique
        self.locks.append((lock.key, lock.token, lock.still_mine()) if lock else None)
        return value


def guarded(app: Celery, name: str = "shop.guarded", **options: Any) -> tuple[Any, Bodies]:
    bodies = Bodies()

    def run(self: Any, value: int = 0) -> int:
        return bodies.note(self, value)

    task = define(app, name, function=run, **{"bind": True, "unique_guard": True, **options})
    return task, bodies


def deliver(app: Celery, name: str, task_id: str, *args: Any, **options: Any) -> None:
    """Publish as an app without the library does."""
    caller = plain_app(app.main, broker="memory://", backend="cache+memory://", **_same(app))
    caller.send_task(name, args, task_id=task_id, **options)


def _same(app: Celery) -> dict[str, Any]:
    return {
        "task_default_queue": app.conf.task_default_queue,
        "broker_transport_options": app.conf.broker_transport_options,
    }


def marks(app: Celery, task_id: str) -> dict[str, str]:
    flush(app)
    record, _ = state_of(app).store.read(guard_key(task_id))
    assert not record.tasks
    return {each: mark.kind for each, mark in record.marks.items()}


@pytest.fixture
def events(caplog):
    caplog.set_level("DEBUG", logger="celery_unique")
    return lambda outcome: [r for r in caplog.records if getattr(r, "outcome", "") == outcome]


# -- what it does --------------------------------------------------------------------------


@pytest.mark.parametrize("acks_late", [False, True])
def test_a_delivery_of_an_id_that_has_finished_is_dropped(app, acks_late, events):
    task, bodies = guarded(app, acks_late=acks_late)
    task_id, other = uuid(), uuid()

    with working(app):
        deliver(app, task.name, task_id, 1)
        assert value_of(app.AsyncResult(task_id)) == 1
        eventually(lambda: marks_or_none(app, task_id))
        deliver(app, task.name, task_id, 2)
        deliver(app, task.name, other, 3)
        value_of(app.AsyncResult(other))
        eventually(lambda: len(events("dropped")) == 1)

    assert bodies.ran == [task_id, other]
    assert [lock[::2] for lock in bodies.locks] == [
        (guard_key(each), True) for each in (task_id, other)
    ]
    assert value_of(app.AsyncResult(task_id)) == 1
    assert marks(app, task_id) == {task_id: "done"}
    assert events("lost") == []


def marks_or_none(app: Celery, task_id: str) -> Any:
    flush(app)
    return state_of(app).store.mark(guard_key(task_id), task_id)


def test_the_mark_stays_for_as_long_as_the_broker_may_restore_the_message(local_app):
    task, _ = guarded(local_app, acks_late=True)
    with working(local_app):
        result = task.delay(1)
        value_of(result)
        mark = eventually(lambda: marks_or_none(local_app, result.id))

    _, now = state_of(local_app).store.read(guard_key(result.id))
    left_s = (mark.until - now) / 1000
    assert 3600 + RESTORE_MARGIN_S - 60 < left_s <= 3600 + RESTORE_MARGIN_S


def test_the_caller_opens_no_store_and_sends_no_header():
    app = make_app("memory://", unique_guard=True)
    task = define(app)

    result = task.delay(1)

    assert result.unique_key is None
    [message] = messages(app)
    assert HEADER not in message.headers
    assert state_of(app)._store is None


def test_a_retry_comes_through_and_its_finished_id_is_dropped(app, events):
    tries = []

    def run(self: Any) -> str:
        tries.append((self.request.retries, self.request.unique.key))
        if self.request.retries == 0:
            raise self.retry(countdown=0)
        return "done"

    task = define(app, "shop.retried", function=run, bind=True, unique_guard=True, acks_late=True)
    task_id = uuid()
    with working(app):
        deliver(app, task.name, task_id)
        assert value_of(app.AsyncResult(task_id)) == "done"
        eventually(lambda: marks_or_none(app, task_id))
        deliver(app, task.name, task_id)
        eventually(lambda: len(events("dropped")) == 1)

    assert tries == [(0, guard_key(task_id)), (1, guard_key(task_id))]
    assert events("lost") == []
    assert marks(app, task_id) == {task_id: "done"}


def test_a_failure_is_an_end_too(local_app, events):
    runs = []

    def run(self: Any) -> None:
        runs.append(self.request.id)
        raise ValueError

    task = define(local_app, "shop.fails", function=run, bind=True, unique_guard=True)
    task_id = uuid()
    with working(local_app):
        deliver(local_app, task.name, task_id)
        local_app.AsyncResult(task_id).get(timeout=30, propagate=False)
        eventually(lambda: marks_or_none(local_app, task_id))
        deliver(local_app, task.name, task_id)
        eventually(lambda: len(events("dropped")) == 1)

    assert runs == [task_id]


# -- canvas --------------------------------------------------------------------------------


def sums(app: Celery) -> tuple[Any, Any]:
    def add(x: int, y: int) -> int:
        return x + y

    def total(numbers: list[int]) -> int:
        return sum(numbers)

    added = define(app, "shop.add", function=add, acks_late=True)
    return added, define(app, "shop.total", function=total)


def test_chains_and_groups_of_guarded_tasks_end_as_without(app):
    app.conf.update(unique_guard=True)
    add, _ = sums(app)

    with working(app, concurrency=2):
        assert value_of(chain(add.s(1, 2), add.s(3), add.s(4)).delay()) == 10
        assert value_of(group(add.s(n, n) for n in range(4)).delay()) == [0, 2, 4, 6]


def test_a_chord_of_guarded_tasks_completes(redis_url):
    app = make_app(redis_url, broker=redis_url, backend=redis_url, unique_guard=True)
    add, total = sums(app)

    with working(app, concurrency=2):
        assert value_of(chord([add.s(n, n) for n in range(4)], total.s()).delay()) == 12


def test_what_replaces_a_task_under_its_id_runs(app, events):
    """A chain whose last link has the id of the task that it replaces: no second delivery."""
    app.conf.update(unique_guard=True)
    ran = []

    def nothing() -> None: ...

    def step(self: Any, left: int) -> str:
        ran.append(self.request.id)
        if left:
            self.replace(chain(first.si(), again.si(left - 1)))
        return "end"

    first = define(app, "shop.first", function=nothing, acks_late=True)
    again = define(app, "shop.again", function=step, bind=True, acks_late=True)
    with working(app):
        result = again.delay(2)
        assert value_of(result) == "end"

    assert ran == [result.id] * 3
    assert events("dropped") == []
    assert events("lost") == []


# -- which tasks ----------------------------------------------------------------------------


def guarded_names(app: Celery) -> set[str]:
    state = state_of(app)
    guarded = {name for name, task in app.tasks.items() if state.is_guarded(name, task)}
    return {name for name in guarded if "." not in name}  # not shared tasks of other test modules


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        (None, {"on", "always"}),
        (False, {"on", "always"}),
        ("late", {"on", "always", "late", "unique_late"}),
        (True, {"on", "always", "late", "unique_late", "plain", "unique"}),
    ],
)
def test_the_setting_the_option_and_the_strategy(setting, expected):
    app = make_app("memory://", **({} if setting is None else {"unique_guard": setting}))
    define(app, "plain")
    define(app, "late", acks_late=True)
    define(app, "on", unique_guard=True)
    define(app, "off", unique_guard=False, acks_late=True)
    define(app, "unique", unique=True)
    define(app, "unique_late", unique=True, acks_late=True)
    define(app, "always", unique=True, identity_strategy="always_unique")
    define(app, "never", unique=True, identity_strategy="always_unique", unique_guard=False)

    assert guarded_names(app) == expected


def test_annotations_give_the_option_and_the_task_has_precedence():
    app = make_app("memory://", task_annotations={"*": {"unique_guard": True}})
    define(app, "plain")
    define(app, "off", unique_guard=False)

    assert guarded_names(app) == {"plain"}


def test_the_kill_switch_turns_it_off():
    app = make_app("memory://", unique_guard=True, unique_enabled=False)
    define(app, "plain")

    assert guarded_names(app) == set()


@pytest.mark.parametrize("strategy", ["strict", "always_unique"])
def test_a_message_with_a_key_has_one_record(local_app, strategy):
    """The gate of the key does what a guard would do."""
    task, bodies = guarded(local_app, unique=True, identity_strategy=strategy)
    with working(local_app):
        result = task.apply_async((1,), idempotency_key="k")
        value_of(result)

    assert [lock[0] for lock in bodies.locks] == [result.unique_key]
    assert marks(local_app, result.id) == {}


def test_a_call_of_an_always_unique_task_is_guarded(local_app):
    task, bodies = guarded(
        local_app, unique=True, identity_strategy="always_unique", unique_guard=None
    )
    with working(local_app):
        result = task.delay(1)
        value_of(result)

    assert [lock[0] for lock in bodies.locks] == [guard_key(result.id)]


def test_an_eager_call_takes_no_lock(local_app):
    task, bodies = guarded(local_app)

    assert task.apply((1,)).get() == 1
    assert bodies.locks == [None]


# -- revokes --------------------------------------------------------------------------------


def test_a_revoked_task_does_not_run_in_a_worker_that_did_not_hear_of_it(app, events):
    task, bodies = guarded(app)
    task_id, other = uuid(), uuid()
    deliver(app, task.name, task_id, 1)

    app.control.revoke(task_id)
    with working(app):
        deliver(app, task.name, other, 2)
        value_of(app.AsyncResult(other))

    assert bodies.ran == [other]
    assert app.AsyncResult(task_id).state == "REVOKED"


# -- wrong values -----------------------------------------------------------------------------


@pytest.mark.parametrize("value", ["late", "yes", 1, [], object()])
def test_a_wrong_option_is_refused_where_the_task_is_defined(local_app, value):
    with pytest.raises(InvalidPolicy, match=r"unique_guard=.*True or False") as raised:
        define(local_app, unique_guard=value)

    assert raised.value.field == "unique_guard"


def test_a_wrong_annotation_is_refused():
    app = make_app("memory://", task_annotations={"shop.rebuild": {"unique_guard": "on"}})
    define(app)

    with pytest.raises(InvalidPolicy, match=r"shop\.rebuild: unique_guard='on'.*True or False"):
        app.finalize()


def test_a_call_cannot_give_it(local_app):
    task = define(local_app)

    with pytest.raises(InvalidPolicy, match=r"@app\.task\(unique_guard=True\)") as raised:
        task.apply_async((1,), unique_guard=True)

    assert raised.value.field == "unique_guard"
    assert messages(local_app) == []


@pytest.mark.parametrize("value", ["Late", "always", 1, 0, []])
def test_a_wrong_setting_is_a_configuration_error(value):
    app = make_app("memory://", unique_guard=value)

    with pytest.raises(ConfigurationError, match=r"unique_guard: .*'late'") as raised:
        _ = state_of(app).settings

    assert raised.value.setting == "unique_guard"


@pytest.mark.parametrize("setting", ["unique_guard", "unique_run_lease"])
def test_a_worker_with_a_wrong_setting_does_not_start(setting):
    """It would run without the library: Celery ignores what the receiver of a signal raises."""
    app = make_app("memory://", **{setting: "sometimes"})
    define(app)

    with pytest.raises(SystemExit, match=rf"celery_unique: {setting}"), working(app):
        pytest.fail("it has started")


def test_install_takes_the_setting():
    app = celery_unique.install(plain_app(), guard="late")

    assert state_of(app).settings.guard == "late"


# -- what operators see -----------------------------------------------------------------------


@pytest.fixture
def held(local_app):
    """A guarded task that a worker has started."""
    task_id = uuid()
    start = Start(task_id, "w1@host/1/1/1", "shop.guarded", 60_000, 60_000)
    state_of(local_app).store.start(guard_key(task_id), start)
    return local_app, task_id


def test_the_guard_of_a_running_task_is_listed_as_such(held):
    app, task_id = held

    [lock] = select(state_of(app), Selection())

    document = lock.as_document()
    assert (document["task_id"], document["state"], document["guard"]) == (task_id, "active", True)
    assert (document["task"], document["worker"]) == ("shop.guarded", "w1@host")


def test_its_id_finds_it_and_says_what_its_key_is_made_of(held):
    app, task_id = held

    [(key, record, now)] = find(state_of(app), task_id)

    explanation = explain_record(state_of(app), key, record, now)
    assert key == guard_key(task_id)
    assert explanation.made_from == f'{{"guard":"{task_id}"}}'
    assert meaning(explanation.locks[0]) == "running; a second delivery of this task waits"


def test_the_lock_of_a_call_is_no_guard(local_app):
    task = define(local_app, unique=True)
    result = task.delay(1)

    [lock] = select(state_of(local_app), Selection())

    assert (lock.task_id, lock.guards) == (result.id, False)
    assert (
        explain_record(
            state_of(local_app), lock.key, Record(tasks={lock.task_id: lock.entry}), 0
        ).made_from
        is None
    )


def test_the_key_of_a_guard_is_pinned():
    assert guard_text("5b1f") == '{"guard":"5b1f"}'
    assert guard_key("5b1f") == (
        "1:99f952846727152282f93735fdec12a1062f8b0d54fa3cba943aefdfd2e33920"
    )
    assert guard_text("5b1f", 2) == '{"guard":"5b1f","nesting":2}'
