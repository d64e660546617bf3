"""A task whose policy is wrong is refused, and the tasks beside it are as unique as ever."""

from __future__ import annotations

import logging
import threading
from typing import Any
from weakref import WeakSet

import celery
import pytest
from celery import Celery, Task, _state, shared_task
from pydantic import BaseModel

import celery_unique
from celery_unique import (
    ConfigurationError,
    DuplicateTask,
    InvalidPolicy,
    UniqueKeyError,
    UniqueTask,
    lookup,
)
from tests.support.app import define, make_app, messages, plain_app, working
from tests.support.waiting import eventually


def outcomes_by_name(app: Celery, name: str, times: int = 2) -> list[str]:
    return [app.send_task(name, kwargs={"shop_id": 7}).outcome for _ in range(times)]


def with_one_bad_task(app: Celery) -> tuple[Any, Any]:
    """Two tasks, the first with an option that has no effect, which only shows when all of the
    app's configuration is known."""
    return define(app, "shop.bad", unique_for=60), define(app, "shop.good", unique=True)


def outcomes(task: Any, times: int = 2) -> list[str]:
    return [task.delay(7).outcome for _ in range(times)]


class OncePerShop(Task):
    abstract = True
    unique = True
    unique_on = "shop_id"


# -- at the decorator --------------------------------------------------------------------------


def bound(self: Any, shop_id: int) -> None: ...


def of_a_shelf(shelf: int) -> None: ...


#: Options of a task, and what the error says of them.
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "unknown option": ({"unique_fro": 60}, "Did you mean 'unique_for'"),
    "near miss": ({"uniqe": True}, "Did you mean 'unique'"),
    "another near miss": ({"identity_stratgy": "strict"}, "Did you mean 'identity_strategy'"),
    "near miss of an option of a call": ({"idempotencykey": "k"}, "'idempotency_key'"),
    "option of a call": ({"idempotency_key": "k"}, "idempotency_key"),
    "function for an unknown option": (
        {"unique_kye": lambda shop_id: f"shop {shop_id}"},
        "Did you mean 'unique_key'",
    ),
    "unknown argument": ({"unique_on": "shop"}, "no argument 'shop'"),
    "no argument": ({"unique_on": []}, "unique_on.* unique_by='type'"),
    "first argument of a bound task": (
        {"function": bound, "bind": True, "unique_on": "self"},
        "no argument 'self'",
    ),
    "unknown argument of a model": (
        {"function": bound, "pydantic": True, "bind": True, "unique_on": "shop"},
        "no argument 'shop'",
    ),
    "unknown argument by a base class": (
        {"function": of_a_shelf, "base": OncePerShop},
        "no argument 'shop_id'",
    ),
    "unknown argument in a key": ({"unique_key": "{shop}"}, "shop"),
    "unknown parameter of a key": (
        {"unique_key": lambda shop_id, day: "x"},
        "unique_key has the parameter 'day'.* Write",
    ),
    # As the mapping of all arguments it would give no two calls one key.
    "one unknown parameter of a key": (
        {"unique_key": lambda shop: f"shop-{shop}"},
        r"unique_key has the parameter 'shop'.* mean 'shop_id'\?",
    ),
    "key without parameters": ({"unique_key": lambda: "x"}, "unique_key"),
    "unknown value": ({"unique_states": "until_dawn"}, "unique_states"),
    "unknown value, not unique": ({"unique": None, "unique_states": "until_dawn"}, "unique_states"),
    "not a policy": ({"unique": "yes"}, "not a policy"),
    "document": ({"unique": {"keys": ["typ"]}}, "keys"),
    "clash": ({"unique_on": "shop_id", "unique_key": "{shop_id}"}, "clashes"),
    "clash with a strategy": (
        {"unique_max_wait": 60, "unique_on_conflict": "ignore"},
        "unique_max_wait",
    ),
}
#: Right or wrong by what annotations and the app's defaults say.
OPEN: dict[str, dict[str, Any]] = {
    "unique by annotation": {"unique_for": 60},
    "strategy by annotation": {"unique": True, "unique_max_wait": 60},
    "headers by annotation": {"unique": True, "unique_by": ["type", "meta"]},
    "a lane by annotation": {"unique": True, "unique_max_queue": 3},
}


@pytest.mark.parametrize("in_use", [False, True], ids=["new app", "app in use"])
@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_policy_is_refused_at_the_decorator(wrong, in_use):
    app = make_app("memory://")
    options, message = WRONG[wrong]
    if in_use:
        app.finalize()

    with pytest.raises(InvalidPolicy, match=rf"^shop\.bad.*{message}") as caught:
        define(app, "shop.bad", **{"unique": True, **options})

    app.finalize()
    assert "shop.bad" not in app.tasks
    assert str(caught.value).count("shop.bad") == 1


@pytest.mark.parametrize("undecided", OPEN)
def test_what_annotations_decide_is_refused_when_the_task_is_made(undecided):
    app = make_app("memory://")
    define(app, "shop.bad", **OPEN[undecided])

    with pytest.raises(InvalidPolicy, match=r"^shop\.bad: "):
        app.finalize()


@pytest.mark.parametrize("option", ["unique_fro", "idempotency_key"])
def test_an_unknown_option_in_annotations_is_reported_there(option):
    app = make_app("memory://", task_annotations={"shop.rebuild": {option: 60}})

    with pytest.raises(InvalidPolicy, match=rf"^shop\.rebuild: {option} .*task_annotations"):
        define(app, unique=True).delay(7)


def test_a_call_that_is_wrong_names_its_task():
    rebuild = define(make_app("memory://"), unique=True)

    with pytest.raises(InvalidPolicy, match=r"^shop\.rebuild: .*unique_for"):
        rebuild.apply_async((7,), unique_for="10m")


@pytest.mark.parametrize("undecided", OPEN)
def test_annotations_can_complete_what_the_decorator_says(undecided):
    strategy = "queue" if "lane" in undecided else "replace"
    said = {"unique": True, "unique_on_conflict": strategy, "unique_meta": ["tenant"]}
    app = make_app("memory://", task_annotations={"shop.rebuild": said})

    rebuild = define(app, **OPEN[undecided])

    assert rebuild.apply_async((7,), headers={"tenant": "a"}).outcome == "created"


def test_the_default_strategy_of_the_app_can_complete_what_the_decorator_says():
    app = make_app("memory://", unique_default_on_conflict="queue")

    rebuild = define(app, unique=True, unique_max_queue=3)

    assert [rebuild.delay(7).outcome for _ in range(2)] == ["created", "queued"]


def test_an_annotation_can_make_a_task_merge():
    app = make_app("memory://", task_annotations={"shop.index": {"unique_on_conflict": "merge"}})

    def run(docs: list[int]) -> None: ...

    index = define(app, "shop.index", function=run, unique=True, unique_merge="docs")

    assert [index.delay([n]).outcome for n in range(2)] == ["created", "merged"]


@pytest.mark.parametrize("in_use", [False, True], ids=["new app", "app in use"])
def test_a_default_of_the_app_can_complete_what_the_decorator_says(in_use):
    app = make_app("memory://", unique_default_on_conflict="replace")
    if in_use:
        app.finalize()

    rebuild = define(app, unique=True, unique_max_wait=60)

    assert outcomes(rebuild) == ["created", "replaced"]


def test_wrong_settings_are_not_reported_by_the_definition_of_a_task():
    app = make_app("memory://", unique_default_for="sometimes")

    rebuild = define(app, unique=True)
    app.finalize()

    with pytest.raises(ConfigurationError):
        rebuild.delay(7)


@pytest.mark.parametrize(
    "options",
    [
        {"base": OncePerShop},
        {"function": bound, "bind": True, "unique": True, "unique_on": "shop_id"},
        {"unique": True, "unique_by": "type"},
        {"unique": True, "uniqueness": "much", "identity_map": {}},
    ],
    ids=["base class", "bound", "type alone", "options of others"],
)
def test_a_right_policy_beside_those_is_accepted(options):
    assert outcomes(define(make_app("memory://"), **options)) == ["created", "deduplicated"]


def test_models_do_not_hide_the_arguments_from_the_decorator():
    define(make_app("memory://"), pydantic=True, unique=True, unique_on="shop_id")


class Order(BaseModel):
    shop_id: int
    full: bool = False


def test_a_model_has_the_key_of_its_dump_and_the_body_gets_the_model():
    app = make_app("memory://")
    received: list[Any] = []

    def import_orders(order: Order) -> None:
        received.append(order)

    task = define(app, function=import_orders, pydantic=True, unique=True)
    order = Order(shop_id=7)
    first = task.delay(order.model_dump(mode="json"))

    if celery.VERSION >= (5, 7):  # dumps a model that is passed to a call
        assert task.delay(order).id == first.id
    else:
        with pytest.raises(UniqueKeyError, match="no JSON form"):
            task.delay(order)
    assert lookup(task, (order.model_dump(mode="json"),)).task_id == first.id
    with pytest.raises(UniqueKeyError, match="no JSON form"):
        lookup(task, (order,))
    with working(app):
        eventually(lambda: received)
    assert received == [order]


class Helpful(Task):
    """A base class with methods of its own that have names like ours."""

    abstract = True

    def unique_thing(self) -> str:
        return "a method"

    @property
    def unique_view(self) -> str:
        return "a property"

    @classmethod
    def idempotency_key(cls) -> str:
        return "a class method"

    @staticmethod
    def unique_name() -> str:
        return "a static method"


@pytest.mark.parametrize("define", ["decorator", "made at once", "class", "base class"])
def test_methods_with_names_like_ours_are_no_options(define):
    app = make_app("memory://")
    if define == "class":

        class Rebuild(Helpful):
            name = "shop.rebuild"
            unique = True

            def run(self, shop_id: int) -> None: ...

            def unique_more(self) -> str:
                return "a method of the task"

        task = app.register_task(Rebuild())
    else:
        base = type("Both", (Helpful, UniqueTask), {}) if define == "base class" else Helpful
        if define == "made at once":
            app.finalize()

        @app.task(base=base, unique=True)
        def task(shop_id: int) -> None: ...

    assert outcomes(task) == ["created", "deduplicated"]
    assert task.unique_view == "a property"


@pytest.mark.parametrize("value", [60, "PT1M", [60]])
def test_a_value_with_a_name_like_ours_is_refused_in_a_base_class(value):
    base = type("Wrong", (Task,), {"abstract": True, "unique_fro": value})

    with pytest.raises(InvalidPolicy, match="Did you mean 'unique_for'"):
        define(make_app("memory://"), base=base, unique=True)


def test_the_base_class_of_the_app_counts_at_the_decorator():
    app = make_app("memory://")
    app.task_cls = OncePerShop

    with pytest.raises(InvalidPolicy, match="no argument 'shop_id'"):
        define(app, function=of_a_shelf)


def test_a_callable_key_names_the_arguments_that_it_wants():
    app = make_app("memory://")

    for name, unique_key in {
        "rebuild": lambda shop_id: f"shop-{shop_id}",
        "count": lambda arguments: str(arguments["shop_id"]),
    }.items():
        task = define(app, name, unique=True, unique_key=unique_key)
        calls = [task.delay(7), task.delay(7, full=True), task.delay(8)]
        assert [call.outcome for call in calls] == ["created", "deduplicated", "created"]


def test_names_like_ours_stay_the_own_of_a_class():
    own = {"uniq": "mine", "uniques_on": 3, "identity_stratgy": "mine"}

    rebuild = define(make_app("memory://"), base=type("Base", (Task,), own), unique=True)

    assert rebuild.delay(7).outcome == "created"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"unique": True, "unique_on": "shop"}, "no argument 'shop'"),
        ({"uniqe": True}, r"^shared\.bad: uniqe .* Did you mean 'unique'\?"),
    ],
)
def test_a_shared_task_is_refused_when_an_app_makes_it(options, message, monkeypatch):
    monkeypatch.setattr(_state, "_apps", WeakSet())

    @shared_task(name="shared.bad", **options)
    def bad(shop_id: int) -> None: ...

    with pytest.raises(InvalidPolicy, match=message):
        make_app("memory://").finalize()


def test_the_decorator_does_not_settle_the_base_class_of_the_app():
    app = make_app("memory://")
    rebuild = define(app, unique=True)

    app.task_cls = type("Marked", (Task,), {"mark": "later"})

    assert rebuild.mark == "later"


# -- the tasks beside a wrong one ------------------------------------------------------------


def test_calls_by_name_are_unique_although_another_task_was_refused(caplog):
    app = make_app("memory://")
    with_one_bad_task(app)

    assert outcomes_by_name(app, "shop.good") == ["created", "deduplicated"]
    assert "shop.bad cannot be called: unique_for=60 has no effect" in caplog.text


def test_calls_and_lookups_work_after_finalizing_has_raised():
    app = make_app("memory://")
    _, good = with_one_bad_task(app)

    with pytest.raises(InvalidPolicy):
        app.finalize()

    assert lookup(good, (7,)) is None
    assert outcomes_by_name(app, "shop.good") == ["created", "deduplicated"]


def test_a_shared_task_is_unique_although_another_one_was_refused(monkeypatch):
    monkeypatch.setattr(_state, "_apps", WeakSet())  # the apps of other tests would refuse it

    for number in range(10):  # Celery makes them in no order

        @shared_task(name=f"shared.bad_{number}", unique_for=60)
        def bad(shop_id: int) -> None: ...

        @shared_task(name=f"shared.good_{number}", unique=True)
        def good(shop_id: int) -> None: ...

    app = make_app("memory://")

    with pytest.raises(InvalidPolicy):
        app.finalize()
    for number in range(10):
        assert outcomes_by_name(app, f"shared.good_{number}") == ["created", "deduplicated"]
    assert "celery.group" in app.tasks


@pytest.mark.parametrize("call", ["by name", "by task", "eager"])
def test_every_call_of_a_refused_task_raises(call):
    app = make_app("memory://")
    bad, _ = with_one_bad_task(app)
    ways = {
        "by name": lambda: app.send_task("shop.bad", kwargs={"shop_id": 7}),
        "by task": lambda: bad.delay(7),
        "eager": lambda: bad.apply((7,)),
    }

    for _ in range(3):
        with pytest.raises(InvalidPolicy, match="unique_for=60 has no effect"):
            ways[call]()
    assert messages(app) == []


def test_a_worker_does_not_start_with_a_refused_task():
    app = make_app("memory://")
    with_one_bad_task(app)
    outcomes_by_name(app, "shop.good")  # has made the tasks, and gone on

    with pytest.raises(InvalidPolicy, match="unique_for=60 has no effect"), working(app):
        pass


def test_the_base_class_alone_keeps_the_tasks_after_a_refused_one():
    app = plain_app()

    define(app, "shop.first", base=UniqueTask, unique=True)
    with_one_bad_task(app)

    assert app.tasks["shop.first"].delay(7).outcome == "created"
    assert outcomes_by_name(app, "shop.good") == ["created", "deduplicated"]
    with pytest.raises(InvalidPolicy):
        app.send_task("shop.bad", kwargs={"shop_id": 7})


# -- making the tasks fails for another reason -------------------------------------------------


def test_tasks_are_made_again_after_something_else_has_failed():
    app = make_app("memory://")
    fails = [True]

    class Failing(Task):
        @classmethod
        def on_bound(cls, app: Any) -> None:
            if fails:
                raise ConnectionError("a base class that looks something up")

    define(app, "shop.failing", base=Failing)
    define(app, "shop.good", unique=True)

    for _ in range(2):
        with pytest.raises(ConnectionError):
            app.send_task("shop.good", kwargs={"shop_id": 7})
    fails.clear()

    assert outcomes_by_name(app, "shop.good") == ["created", "deduplicated"]
    assert messages(app)[0].task == "shop.good"


def test_a_call_by_name_waits_until_another_thread_has_made_the_tasks():
    app = make_app("memory://")
    begun, go_on = threading.Event(), threading.Event()

    class Slow(Task):
        @classmethod
        def on_bound(cls, app: Any) -> None:
            begun.set()
            go_on.wait(10)

    define(app, "shop.slow", base=Slow)
    define(app, "shop.good", unique=True)
    outcomes: list[str] = []
    making = threading.Thread(target=app.finalize)
    calling = threading.Thread(target=lambda: outcomes.extend(outcomes_by_name(app, "shop.good")))
    making.start()
    assert begun.wait(10)
    calling.start()
    calling.join(0.05)  # it cannot go on: what is shown is that it does not
    go_on.set()
    making.join(10)
    calling.join(10)

    assert outcomes == ["created", "deduplicated"]


# -- tasks of other apps -------------------------------------------------------------------------


def test_a_task_of_another_app_with_options_like_ours_is_left_alone(caplog):
    other, app = plain_app(), make_app("memory://")
    define(other, "other.single", shared=True, unique_on=["shop_id"], unique_ness="much")
    define(app, "shop.good", unique=True)
    app.finalize()

    assert outcomes_by_name(app, "shop.good") == ["created", "deduplicated"]
    assert outcomes_by_name(app, "other.single") == ["bypassed", "bypassed"]
    (line,) = [each for each in caplog.records if "other.single" in each.getMessage()]
    assert line.levelno == logging.WARNING
    assert "is not unique in this app" in line.getMessage()
    assert app.tasks["other.single"].apply_async((7,), unique=True).outcome == "created"


def test_a_wrong_annotation_of_a_task_of_another_app_is_refused():
    other = plain_app()
    app = make_app(
        "memory://", task_annotations={"other.count": {"unique": True, "unique_on": "shelf"}}
    )
    define(other, "other.count", shared=True)

    with pytest.raises(InvalidPolicy, match="no argument 'shelf'"):
        app.finalize()


@pytest.mark.parametrize("made", ["not yet", "before installing"])
def test_a_wrong_task_of_the_app_itself_is_refused_when_it_was_defined_before_installing(made):
    app = plain_app()
    bad = define(app, "shop.bad", shared=True, unique_for=60)
    if made == "before installing":
        assert bad.name == "shop.bad"
    celery_unique.install(app, store_url="memory://")

    with pytest.raises(InvalidPolicy):
        app.finalize()


# -- annotations are below the task ----------------------------------------------------------


class FlaskTask(Task):
    """As Flask's documentation has it: a ``__call__`` of its own."""

    abstract = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(*args, **kwargs)


IGNORING = {"unique": True, "unique_on_conflict": "ignore"}
ANNOTATED = {"shop.rebuild": {"unique_on_conflict": "reject", "unique_on": "shop_id"}}


def warned_of(caplog):
    """Task -> its warning that it was used before install(app)."""
    return {each.args[0]: each for each in caplog.records if "install(app)" in each.getMessage()}


@pytest.mark.parametrize(
    ("base", "installed"),
    [
        *[(base, "first") for base in (Task, FlaskTask, UniqueTask)],
        (Task, "after the definition"),
        (UniqueTask, "after the first use"),
    ],
)
@pytest.mark.parametrize("shared", [True, False], ids=["shared", "not shared"])
def test_the_task_wins_over_annotations(base, shared, installed, caplog):
    app = plain_app(task_annotations=ANNOTATED)
    if installed == "first":
        celery_unique.install(app, store_url="memory://")
    rebuild = define(app, base=base, shared=shared, **IGNORING)
    if installed == "after the first use":
        app.finalize()
    celery_unique.install(app, store_url="memory://")

    outcomes = [rebuild.delay(7).outcome, rebuild.delay(7, full=True).outcome]

    assert outcomes == ["created", "deduplicated"]
    assert "shop.rebuild" not in warned_of(caplog)


@pytest.mark.parametrize("base", [Task, FlaskTask])
@pytest.mark.parametrize("shared", [True, False], ids=["shared", "not shared"])
def test_a_task_that_was_used_before_installing_is_warned_of(base, shared, caplog):
    app = plain_app(task_annotations=ANNOTATED)

    rebuild = define(app, base=base, shared=shared, **IGNORING)
    count = define(app, "shop.count", unique=True)
    define(app, "shop.plain")
    app.finalize()
    celery_unique.install(app, store_url="memory://")

    lines = warned_of(caplog)
    # Shared tasks of other test modules are in every app of this process.
    assert {name for name in lines if name.startswith("shop.")} == {"shop.rebuild", "shop.count"}
    assert {each.levelno for each in lines.values()} == {logging.WARNING}
    assert "before the first use of a task" in lines["shop.count"].getMessage()
    assert "(unique_on, unique_on_conflict)" in lines["shop.rebuild"].getMessage()
    # The annotations count, as the warning has it.
    rebuild.delay(7)
    with pytest.raises(DuplicateTask):
        rebuild.delay(7)
    assert [count.delay(7).outcome for _ in range(2)] == ["created", "deduplicated"]
