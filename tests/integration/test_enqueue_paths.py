"""Every way in which Celery enqueues a task passes the lock, and which do not take one."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from celery import Celery, beat, chain, chord, group, signature
from celery.signals import before_task_publish

import celery_unique
from celery_unique import UniqueResult, lookup
from tests.support import eventually
from tests.support.app import flush, locks, make_app, messages, value_of, working
from tests.support.worker import REPOSITORY


@pytest.fixture
def app(local_app: Celery) -> Celery:
    return local_app


@pytest.fixture
def conflicts(received: Any) -> Any:
    return received(celery_unique.unique_conflict)


# -- one call -----------------------------------------------------------------------------

WAYS: dict[str, Callable[[Any], Any]] = {
    "delay": lambda task: task.delay(7),
    "delay, by keyword": lambda task: task.delay(shop_id=7),
    "delay, default given": lambda task: task.delay(7, False),
    "apply_async": lambda task: task.apply_async((7,)),
    "apply_async, list and keyword": lambda task: task.apply_async([7], {"full": False}),
    "apply_async, in a minute": lambda task: task.apply_async((7,), countdown=60),
    "apply_async, another queue": lambda task: task.apply_async((7,), queue=f"{task.app.main}-b"),
    "signature": lambda task: task.s(7).apply_async(),
    "signature, delay": lambda task: task.s(7).delay(),
    "signature, partial": lambda task: task.s().apply_async((7,)),
    "signature, immutable": lambda task: task.si(7).apply_async(),
    "signature by name": lambda task: signature("shop.rebuild", (7,), app=task.app).apply_async(),
    "signature from JSON": lambda task: signature(
        json.loads(json.dumps(task.s(7))), app=task.app
    ).apply_async(),
    "send_task": lambda task: task.app.send_task("shop.rebuild", (7,)),
    "send_task, by keyword": lambda task: task.app.send_task("shop.rebuild", kwargs={"shop_id": 7}),
    "send_task, options by position": lambda task: task.app.send_task("shop.rebuild", (7,), {}, 60),
}


@pytest.mark.versions
@pytest.mark.parametrize("way", WAYS)
def test_a_call_in_any_way_takes_the_lock(app, rebuild, way):
    result = WAYS[way](rebuild)

    lock = lookup(rebuild, (7,))
    assert lock is not None
    assert (result.outcome, result.id, result.unique_key) == ("created", lock.task_id, lock.key)
    assert isinstance(result, UniqueResult)


@pytest.mark.versions
@pytest.mark.parametrize("way", WAYS)
def test_a_call_in_any_way_is_the_duplicate_of_a_holder(app, rebuild, way):
    first = rebuild.delay(7)

    again = WAYS[way](rebuild)

    assert (again.outcome, again.id, again.deduplicated) == ("deduplicated", first.id, True)
    assert isinstance(again, UniqueResult)
    assert [sent.id for sent in messages(app)] == [first.id]
    assert messages(app, f"{app.main}-b") == []


def test_two_calls_by_name_and_one_delay_are_one_message(app, rebuild):
    first = app.send_task("shop.rebuild", (7,))
    second = app.send_task("shop.rebuild", kwargs={"shop_id": 7})
    third = rebuild.delay(7)

    assert {first.id, second.id, third.id} == {first.id}
    assert [sent.id for sent in messages(app)] == [first.id]


def test_a_call_with_the_holders_own_id_is_a_duplicate(app, rebuild):
    rebuild.apply_async((7,), task_id="mine")
    flush(app)

    again = rebuild.apply_async((7,), task_id="mine")

    assert (again.outcome, again.id) == ("deduplicated", "mine")
    assert len(messages(app)) == 1


def test_a_duplicate_with_an_id_of_its_own_keeps_it(app, rebuild):
    rebuild.apply_async((7,), task_id="mine")

    again = rebuild.apply_async((7,), task_id="yours")

    assert (again.outcome, again.deduplicated, again.id) == ("joined", True, "yours")
    assert [sent.id for sent in messages(app)] == ["mine"]


def test_a_task_without_unique_is_published_as_ever(app):
    @app.task(name="plain")
    def plain(x: int) -> int:
        return x

    first, second = plain.delay(1), plain.delay(1)

    assert first.id != second.id
    assert (second.outcome, second.unique_key, second.deduplicated) == ("bypassed", None, False)
    assert isinstance(second, UniqueResult)
    assert len(messages(app)) == 2
    assert locks(app) == []


def test_calling_a_task_as_a_function_takes_no_lock(app, rebuild):
    assert rebuild(7) == 7

    assert locks(app) == []
    assert messages(app) == []


# -- callers without the task's code ------------------------------------------------------


def test_a_caller_without_the_code_is_unique_where_it_says_so(app):
    first = app.send_task("elsewhere.rebuild", kwargs={"shop_id": 7}, unique=True)
    again = app.send_task("elsewhere.rebuild", kwargs={"shop_id": 7}, unique=True)
    unasked = app.send_task("elsewhere.rebuild", kwargs={"shop_id": 7})

    assert (again.id, again.outcome) == (first.id, "deduplicated")
    assert unasked.outcome == "bypassed"
    assert len(messages(app)) == 2


@pytest.mark.versions
@pytest.mark.parametrize("said", ["in the call", "in the signature"])
def test_a_signature_of_an_unknown_task_is_unique_where_it_says_so(app, said):
    call = signature("elsewhere.rebuild", kwargs={"shop_id": 7}, app=app)
    options = {"unique": True} if said == "in the call" else {}
    if said == "in the signature":
        call = call.set(unique=True)
    assert "elsewhere.rebuild" not in app.tasks

    first, again = call.apply_async(**options), call.apply_async(**options)
    unasked = signature("elsewhere.rebuild", kwargs={"shop_id": 7}, app=app).apply_async()

    assert (first.outcome, again.outcome, again.id) == ("created", "deduplicated", first.id)
    assert locks(app) == [first.unique_key]
    assert unasked.outcome == "bypassed"
    assert [sent.id for sent in messages(app)] == [first.id, unasked.id]


def test_a_caller_without_the_code_has_the_key_of_one_with_it(app, rebuild):
    elsewhere = make_app("memory://")

    without = elsewhere.send_task("shop.rebuild", kwargs={"shop_id": 7}, unique=True)

    assert without.unique_key == rebuild.delay(7).unique_key


def test_positional_arguments_of_an_unknown_task_make_no_key(app):
    with pytest.raises(celery_unique.UniqueKeyError, match="keyword"):
        app.send_task("elsewhere.rebuild", (7,), unique=True)

    assert messages(app) == []
    assert locks(app) == []


# -- beat ---------------------------------------------------------------------------------


def scheduler_of(app: Celery, **entry: Any) -> beat.Scheduler:
    entry = {"task": "shop.rebuild", "schedule": 0.001, "kwargs": {"shop_id": 7}, **entry}
    app.conf.beat_schedule = {"rebuild": entry}
    return beat.Scheduler(app)


def tick_until(scheduler: beat.Scheduler, condition: Callable[[], Any]) -> None:
    def tick() -> Any:
        scheduler.tick()
        return condition()

    eventually(tick, interval=0.002)


@pytest.mark.versions
def test_beat_publishes_a_registered_task_once_while_it_waits(app, rebuild, conflicts):
    scheduler = scheduler_of(app)

    tick_until(scheduler, lambda: len(conflicts) >= 2)

    assert len(messages(app)) == 1


@pytest.mark.versions
def test_beat_publishes_a_task_by_name_once_where_its_entry_says_unique(app, conflicts):
    scheduler = scheduler_of(app, task="elsewhere.rebuild", options={"unique": True})

    tick_until(scheduler, lambda: len(conflicts) >= 2)

    assert len(messages(app)) == 1


@pytest.mark.versions
def test_beat_goes_on_after_a_rejected_duplicate(app, rebuild, conflicts, caplog):
    scheduler = scheduler_of(app, options={"unique_on_conflict": "reject"})

    tick_until(scheduler, lambda: len(conflicts) >= 3)

    assert len(messages(app)) == 1
    assert "was not published" in caplog.text


# -- canvas: whoever waits for an id gets a task of that id -------------------------------


@pytest.mark.versions
def test_equal_members_of_a_group_both_get_a_result(app, rebuild):
    with working(app):
        result = group(rebuild.s(7), rebuild.s(7))()

        assert result.get(timeout=10, interval=0.01) == [7, 7]


@pytest.mark.versions
def test_a_member_whose_work_waits_elsewhere_is_not_published(app, rebuild):
    holder = rebuild.delay(7)
    flush(app)

    members = group(rebuild.s(7), rebuild.s(8))()

    assert [sent.id for sent in messages(app)] == [holder.id, members.results[1].id]
    assert members.results[0].id != holder.id


@pytest.mark.versions
def test_a_duplicate_with_a_callback_follows_the_holder(app, rebuild):
    holder = rebuild.delay(7)

    again = rebuild.apply_async((7,), link=rebuild.si(8))

    assert (again.outcome, again.deduplicated) == ("joined", True)
    assert [sent.id for sent in messages(app)] == [holder.id]


@pytest.mark.versions
def test_equal_members_of_a_chord_reach_its_body(app, rebuild):
    @app.task(name="total")
    def total(values: list[int]) -> int:
        return sum(values)

    with working(app):
        result = chord([rebuild.s(7), rebuild.s(7)], total.s())()

        assert value_of(result) == 14


@pytest.mark.versions
@pytest.mark.parametrize("outcome", ["created", "joined"])
def test_a_call_that_a_task_adds_to_its_chord_is_counted(redis_url, outcome):
    """Results are in Redis: with no other backend can a task add to its chord."""
    app = make_app("memory://", result_backend=redis_url)
    added, ran = [], []

    @app.task(name="shop.rebuild", unique=True)
    def rebuild(shop_id: int) -> int:
        ran.append(shop_id)
        return shop_id

    @app.task(name="grow", bind=True)
    def grow(self: Any) -> int:
        added.append(self.add_to_chord(rebuild.s(7)))
        return 1

    @app.task(name="total")
    def total(values: list[int]) -> list[int]:
        return sorted(values)

    queues = [app.conf.task_default_queue, f"{app.main}-held"]
    if outcome == "joined":
        rebuild.apply_async((7,), queue=queues[1])
    with working(app, queues=queues[:1]):
        result = chord([grow.s(), rebuild.s(8)], total.s())()
        eventually(lambda: added and 8 in ran)
    with working(app, queues=queues):
        assert value_of(result) == [1, 7, 8]

    assert added[0].outcome == outcome
    assert sorted(ran) == [7, 8]


@pytest.mark.versions
@pytest.mark.parametrize("position", ["first", "second"])
def test_a_chain_goes_on_after_a_link_that_is_a_duplicate(app, rebuild, position):
    @app.task(name="echo")
    def echo(value: Any) -> Any:
        return value

    links = [rebuild.si(7), echo.s()] if position == "first" else [echo.si(1), rebuild.si(7)]
    holder = rebuild.apply_async((7,), countdown=1)

    with working(app):
        result = chain(*links, echo.s())()

        assert value_of(result) == 7
    assert value_of(holder) == 7


@pytest.mark.versions
def test_inner_calls_of_a_map_take_no_lock(app, rebuild):
    with working(app):
        mapped = rebuild.map([7, 7]).apply_async()

        assert value_of(mapped) == [7, 7]
    assert locks(app) == []


@pytest.mark.versions
def test_an_error_callback_that_celery_calls_directly_takes_no_lock(app, received):
    """One with several parameters, that is not bound: it runs in the worker, without a message."""
    told: list[Any] = []

    @app.task(name="fail", unique=True)
    def fail() -> None:
        raise ValueError("no")

    @app.task(name="tell", unique=True)
    def tell(request: Any, error: Exception, traceback: Any) -> None:
        told.append((request.id, str(error)))

    acquired, published = received(celery_unique.unique_acquired), received(before_task_publish)
    with working(app):
        failed = fail.apply_async(link_error=tell.s())
        eventually(lambda: told, message="the callback was not called")
        with pytest.raises(ValueError, match="no"):
            value_of(failed)

    assert told == [(failed.id, "no")]
    assert [each["sender"] for each in (*acquired, *published)] == ["fail", "fail"]
    assert locks(app) == []
    assert messages(app) == []


@pytest.mark.versions
def test_a_task_that_calls_itself_again_is_not_its_own_duplicate(app):
    again: list[Any] = []

    @app.task(name="poll", unique=True, bind=True)
    def poll(self: Any) -> None:
        if not again:
            again.append(self.delay())

    with working(app):
        first = poll.delay()
        value_of(first)
        eventually(lambda: again)

        assert again[0].id != first.id
        assert value_of(again[0]) is None


def test_a_call_from_the_body_of_another_task_is_a_duplicate_like_any(app, rebuild):
    results: list[Any] = []

    @app.task(name="caller")
    def caller() -> None:
        results.append(rebuild.delay(7))

    holder = rebuild.apply_async((7,), countdown=3600)
    with working(app):
        value_of(caller.delay())

    assert (results[0].id, results[0].outcome) == (holder.id, "deduplicated")


# -- the command line and Django ----------------------------------------------------------


def run_python(code: str, cwd: Path, *, module: str | None = None) -> str:
    """Run the code, or a module with these arguments, in a process of its own."""
    arguments = ["-c", textwrap.dedent(code)] if module is None else ["-m", module, *code.split()]
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env={"PATH": "", "PYTHONPATH": f"{cwd}:{REPOSITORY}"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


SHOP = """
from pathlib import Path
from celery import Celery
import celery_unique
from tests.support import filesystem_settings

app = Celery("shop")
app.conf.update(filesystem_settings(Path(__file__).parent))
celery_unique.install(app, store_url=f"sqlite:///{Path(__file__).parent}/locks.sqlite3")

@app.task(name="shop.rebuild", unique=True)
def rebuild(shop_id): ...
"""


@pytest.mark.versions
@pytest.mark.slow
def test_celery_call_gives_the_holders_id(tmp_path):
    (tmp_path / "shop.py").write_text(SHOP)
    command = "-A shop call shop.rebuild --args [7]"

    first = run_python(command, tmp_path, module="celery")
    again = run_python(command, tmp_path, module="celery")

    assert first
    assert again == first
    assert len(list((tmp_path / "queue").iterdir())) == 1


DJANGO = """
    import os
    import django
    from django.conf import settings

    database = {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}
    settings.configure(DATABASES={"default": database})
    os.environ["DJANGO_SETTINGS_MODULE"] = "configured_above"
    django.setup()

    from celery import Celery
    from celery.contrib.django.task import DjangoTask
    from django.db import transaction
    import celery_unique
    from tests.support.app import messages

    app = Celery("shop", broker="memory://", task_default_queue="q")
    celery_unique.install(app)

    @app.task(name="shop.rebuild", unique=True)
    def rebuild(shop_id): ...

    assert isinstance(rebuild._get_current_object(), DjangoTask)
    with transaction.atomic():
        returned = [rebuild.delay_on_commit(7), rebuild.delay_on_commit(shop_id=7)]
        assert messages(app, "q") == []
    print(returned, len(messages(app, "q")))
"""


@pytest.mark.slow
def test_delay_on_commit_of_django_publishes_once_and_returns_none(tmp_path):
    assert run_python(DJANGO, tmp_path) == "[None, None] 1"


# -- what goes out while others are busy --------------------------------------------------


def test_calls_of_many_threads_through_one_app_publish_once(app, rebuild):
    barrier = threading.Barrier(8)

    def call() -> None:
        barrier.wait()
        rebuild.delay(7)

    threads = [threading.Thread(target=call) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert len({sent.id for sent in messages(app)}) == 1
