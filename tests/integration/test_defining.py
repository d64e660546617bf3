"""A task whose policy is wrong is refused, and the tasks beside it are as unique as ever."""

from __future__ import annotations

import logging
import threading
from typing import Any
from weakref import WeakSet

import pytest
from celery import Celery, Task, _state, shared_task

import celery_unique
from celery_unique import ConfigurationError, DuplicateTask, InvalidPolicy, UniqueTask, lookup
from tests.support.app import make_app, messages, plain_app, working


def outcomes_by_name(app: Celery, name: str, times: int = 2) -> list[str]:
    return [app.send_task(name, kwargs={"shop_id": 7}).outcome for _ in range(times)]


def with_one_bad_task(app: Celery) -> tuple[Any, Any]:
    """Two tasks, the first with an option that has no effect, which only shows when all of the
    app's configuration is known."""

    @app.task(name="shop.bad", unique_for=60, shared=False)
    def bad(shop_id: int) -> None: ...

    @app.task(name="shop.good", unique=True, shared=False)
    def good(shop_id: int) -> None: ...

    return bad, good


# -- at the decorator --------------------------------------------------------------------------

WRONG: dict[str, dict[str, Any]] = {
    "unknown option": {"unique": True, "unique_fro": 60},
    "near miss": {"uniqe": True},
    "another near miss": {"unique": True, "identity_stratgy": "always_unique"},
    "near miss of an option of a call": {"unique": True, "idempotencykey": "k"},
    "option of a call": {"unique": True, "idempotency_key": "k"},
    "unknown argument": {"unique": True, "unique_on": "shop"},
    "unknown argument in a key": {"unique": True, "unique_key": "{shop}"},
    "unknown parameter of a key": {"unique": True, "unique_key": lambda shop, day: "x"},
    "key without parameters": {"unique": True, "unique_key": lambda: "x"},
    "unknown value": {"unique": True, "unique_states": "until_dawn"},
    "unknown value, not unique": {"unique_states": "until_dawn"},
    "not a policy": {"unique": "yes"},
    "document": {"unique": {"keys": ["typ"]}},
    "clash": {"unique": True, "unique_on": "shop_id", "unique_key": "{shop_id}"},
    "clash with a strategy": {
        "unique": True,
        "unique_max_wait": 60,
        "unique_on_conflict": "ignore",
    },
}
#: Right or wrong by what annotations and the app's defaults say.
OPEN: dict[str, dict[str, Any]] = {
    "unique by annotation": {"unique_for": 60},
    "strategy by annotation": {"unique": True, "unique_max_wait": 60},
    "headers by annotation": {"unique": True, "unique_by": ["type", "meta"]},
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_policy_is_refused_at_the_decorator(wrong):
    app = make_app("memory://")

    with pytest.raises(InvalidPolicy, match=r"^shop\.bad") as caught:

        @app.task(name="shop.bad", **WRONG[wrong])
        def bad(shop_id: int) -> None: ...

    app.finalize()
    assert "shop.bad" not in app.tasks
    assert str(caught.value).count("shop.bad") == 1


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_policy_is_refused_by_an_app_that_is_in_use(wrong):
    app = make_app("memory://")
    app.finalize()

    with pytest.raises(InvalidPolicy):

        @app.task(name="shop.bad", **WRONG[wrong])
        def bad(shop_id: int) -> None: ...

    assert "shop.bad" not in app.tasks


@pytest.mark.parametrize("undecided", OPEN)
def test_what_annotations_decide_is_refused_when_the_task_is_made(undecided):
    app = make_app("memory://")

    @app.task(name="shop.bad", **OPEN[undecided])
    def bad(shop_id: int) -> None: ...

    with pytest.raises(InvalidPolicy, match=r"^shop\.bad: "):
        app.finalize()


def test_an_unknown_option_in_annotations_is_told_to_be_there():
    for option in ("unique_fro", "idempotency_key"):
        app = make_app("memory://", task_annotations={"shop.rebuild": {option: 60}})

        @app.task(name="shop.rebuild", unique=True, shared=False)
        def rebuild(shop_id: int) -> None: ...

        with pytest.raises(InvalidPolicy, match=rf"^shop\.rebuild: {option} .*task_annotations"):
            rebuild.delay(7)


def test_a_call_that_is_wrong_names_its_task():
    app = make_app("memory://")

    @app.task(name="shop.rebuild", unique=True, shared=False)
    def rebuild(shop_id: int) -> None: ...

    with pytest.raises(InvalidPolicy, match=r"^shop\.rebuild: .*unique_for"):
        rebuild.apply_async((7,), unique_for="10m")


@pytest.mark.parametrize("undecided", OPEN)
def test_annotations_can_complete_what_the_decorator_says(undecided):
    said = {"unique": True, "unique_on_conflict": "replace", "unique_meta": ["tenant"]}
    app = make_app("memory://", task_annotations={"shop.rebuild": said})

    @app.task(name="shop.rebuild", **OPEN[undecided])
    def rebuild(shop_id: int) -> None: ...

    assert rebuild.apply_async((7,), headers={"tenant": "a"}).outcome == "created"


@pytest.mark.parametrize("made", ["late", "at once"])
def test_a_default_of_the_app_can_complete_what_the_decorator_says(made):
    app = make_app("memory://", unique_default_on_conflict="replace")
    if made == "at once":
        app.finalize()

    @app.task(name="shop.rebuild", unique=True, unique_max_wait=60)
    def rebuild(shop_id: int) -> None: ...

    assert [rebuild.delay(7).outcome for _ in range(2)] == ["created", "replaced"]


def test_wrong_settings_are_not_told_by_the_definition_of_a_task():
    app = make_app("memory://", unique_default_for="sometimes")

    @app.task(name="shop.rebuild", unique=True)
    def rebuild(shop_id: int) -> None: ...

    app.finalize()
    with pytest.raises(ConfigurationError):
        rebuild.delay(7)


def test_a_wrong_base_class_is_refused_at_the_decorator():
    app = make_app("memory://")

    class OncePerShop(Task):
        abstract = True
        unique = True
        unique_on = "shop_id"

    @app.task(base=OncePerShop)
    def rebuild(shop_id: int) -> None: ...

    with pytest.raises(InvalidPolicy, match="no argument 'shop_id'"):

        @app.task(base=OncePerShop)
        def count(shelf: int) -> None: ...


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

    assert [task.delay(7).outcome for _ in range(2)] == ["created", "deduplicated"]
    assert task.unique_view == "a property"


@pytest.mark.parametrize("value", [60, "PT1M", [60]])
def test_a_value_with_a_name_like_ours_is_refused_in_a_base_class(value):
    app = make_app("memory://")
    base = type("Wrong", (Task,), {"abstract": True, "unique_fro": value})

    with pytest.raises(InvalidPolicy, match="Did you mean 'unique_for'"):

        @app.task(base=base, unique=True)
        def rebuild(shop_id: int) -> None: ...


def test_a_function_for_an_option_that_there_is_not_is_refused_at_the_decorator():
    app = make_app("memory://")

    with pytest.raises(InvalidPolicy, match="Did you mean 'unique_key'"):

        @app.task(unique=True, unique_kye=lambda shop_id: f"shop {shop_id}")
        def rebuild(shop_id: int) -> None: ...


def test_the_base_class_of_the_app_counts_at_the_decorator():
    class OncePerShop(Task):
        abstract = True
        unique = True
        unique_on = "shop_id"

    app = make_app("memory://")
    app.task_cls = OncePerShop

    with pytest.raises(InvalidPolicy, match="no argument 'shop_id'"):

        @app.task
        def count(shelf: int) -> None: ...


def test_a_callable_key_names_the_arguments_that_it_wants():
    app = make_app("memory://")

    @app.task(unique=True, unique_key=lambda shop_id: f"shop-{shop_id}")
    def rebuild(shop_id: int, full: bool = False, **extra: Any) -> None: ...

    @app.task(bind=True, unique=True, unique_key=lambda arguments: str(arguments["shop_id"]))
    def count(self: Any, shop_id: int, full: bool = False) -> None: ...

    for task in (rebuild, count):
        outcomes = [task.delay(7).outcome, task.delay(7, full=True).outcome, task.delay(8).outcome]
        assert outcomes == ["created", "deduplicated", "created"]


def test_a_callable_key_that_does_not_fit_is_refused_with_the_cure():
    app = make_app("memory://")

    with pytest.raises(
        InvalidPolicy, match=r"shop.bad: unique_key has the parameter 'day'.* Write"
    ):

        @app.task(name="shop.bad", unique=True, unique_key=lambda shop_id, day: "x")
        def bad(shop_id: int, **extra: Any) -> None: ...


def test_a_callable_key_with_one_parameter_that_is_no_argument_is_refused():
    """As the mapping of all arguments it would give no two calls one key."""
    app = make_app("memory://")

    with pytest.raises(
        InvalidPolicy, match=r"shop.bad: unique_key has the parameter 'user'.* mean 'user_id'\?"
    ):

        @app.task(name="shop.bad", unique=True, unique_key=lambda user: f"user-{user}")
        def bad(user_id: int, image_url: str) -> None: ...


def test_no_argument_is_named_by_an_empty_list_and_the_error_says_how_to_ignore_them():
    app = make_app("memory://")

    with pytest.raises(InvalidPolicy, match=r"shop.bad: .*unique_on.* unique_by='type'"):

        @app.task(name="shop.bad", unique=True, unique_on=[])
        def bad(shop_id: int) -> None: ...

    @app.task(name="shop.rebuild", unique=True, unique_by="type")
    def rebuild(shop_id: int) -> None: ...

    assert [rebuild.delay(7).outcome, rebuild.delay(8).outcome] == ["created", "deduplicated"]


def test_the_first_argument_of_a_bound_task_is_not_one_of_a_call():
    app = make_app("memory://")

    @app.task(bind=True, unique=True, unique_on="shop_id")
    def rebuild(self: Any, shop_id: int) -> None: ...

    with pytest.raises(InvalidPolicy, match="no argument 'self'"):

        @app.task(bind=True, unique=True, unique_on="self")
        def count(self: Any, shop_id: int) -> None: ...


def test_models_do_not_hide_the_arguments_from_the_decorator():
    app = make_app("memory://")

    @app.task(pydantic=True, unique=True, unique_on="shop_id")
    def rebuild(shop_id: int) -> None: ...

    with pytest.raises(InvalidPolicy, match="no argument 'shop'"):

        @app.task(pydantic=True, bind=True, unique=True, unique_on="shop")
        def count(self: Any, shop_id: int) -> None: ...


def test_a_near_miss_is_refused_in_a_shared_task_too(monkeypatch):
    monkeypatch.setattr(_state, "_apps", WeakSet())

    @shared_task(name="shared.near", uniqe=True)
    def near(shop_id: int) -> None: ...

    app = make_app("memory://")

    with pytest.raises(InvalidPolicy, match=r"^shared\.near: uniqe .* Did you mean 'unique'\?"):
        app.finalize()


def test_names_like_ours_stay_the_own_of_a_class():
    app = make_app("memory://")

    class Base(Task):
        uniq = "mine"
        uniques_on = 3
        identity_stratgy = "mine"

    @app.task(base=Base, unique=True, uniqueness="much", identity_map={})
    def rebuild(shop_id: int) -> None: ...

    assert rebuild.delay(7).outcome == "created"


def test_a_shared_task_is_refused_when_an_app_makes_it(monkeypatch):
    monkeypatch.setattr(_state, "_apps", WeakSet())

    @shared_task(name="shared.bad", unique=True, unique_on="shop")
    def bad(shop_id: int) -> None: ...

    app = make_app("memory://")

    with pytest.raises(InvalidPolicy, match="no argument 'shop'"):
        app.finalize()


def test_the_decorator_does_not_settle_the_base_class_of_the_app():
    app = make_app("memory://")

    @app.task(name="shop.rebuild", unique=True)
    def rebuild(shop_id: int) -> None: ...

    class Marked(Task):
        mark = "later"

    app.task_cls = Marked

    assert rebuild.mark == "later"


# -- the tasks beside a wrong one ------------------------------------------------------------


def test_calls_by_name_are_unique_although_another_task_was_refused(caplog):
    app = make_app("memory://")
    with_one_bad_task(app)

    assert outcomes_by_name(app, "shop.good") == ["created", "deduplicated"]
    assert "shop.bad cannot be called: unique_for=60 has no effect" in caplog.text


def test_calls_by_name_are_unique_after_finalizing_has_raised():
    app = make_app("memory://")
    with_one_bad_task(app)

    with pytest.raises(InvalidPolicy):
        app.finalize()

    assert outcomes_by_name(app, "shop.good") == ["created", "deduplicated"]


def test_a_lock_can_be_looked_up_although_another_task_was_refused():
    app = make_app("memory://")
    _, good = with_one_bad_task(app)

    assert lookup(good, (7,)) is None


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

    @app.task(name="shop.first", base=UniqueTask, unique=True, shared=False)
    def first(shop_id: int) -> None: ...

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

    @app.task(name="shop.failing", base=Failing, shared=False)
    def failing(shop_id: int) -> None: ...

    @app.task(name="shop.good", unique=True, shared=False)
    def good(shop_id: int) -> None: ...

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

    @app.task(name="shop.slow", base=Slow, shared=False)
    def slow(shop_id: int) -> None: ...

    @app.task(name="shop.good", unique=True, shared=False)
    def good(shop_id: int) -> None: ...

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

    @other.task(name="other.single", unique_on=["shop_id"], unique_ness="much")
    def single(shop_id: int) -> None: ...

    @app.task(name="shop.good", unique=True)
    def good(shop_id: int) -> None: ...

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

    @other.task(name="other.count")
    def count(shop_id: int) -> None: ...

    with pytest.raises(InvalidPolicy, match="no argument 'shelf'"):
        app.finalize()


@pytest.mark.parametrize("made", ["not yet", "before installing"])
def test_a_wrong_task_of_the_app_itself_is_refused_when_it_was_defined_before_installing(made):
    app = plain_app()

    @app.task(name="shop.bad", unique_for=60)
    def bad(shop_id: int) -> None: ...

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


ANNOTATED = {"shop.rebuild": {"unique_on_conflict": "reject", "unique_on": "shop_id"}}


@pytest.mark.parametrize("base", [Task, FlaskTask, UniqueTask])
@pytest.mark.parametrize("shared", [True, False], ids=["shared", "not shared"])
def test_the_task_wins_over_annotations(base, shared):
    app = make_app("memory://", task_annotations=ANNOTATED)

    @app.task(
        name="shop.rebuild", base=base, shared=shared, unique=True, unique_on_conflict="ignore"
    )
    def rebuild(shop_id: int, full: bool = False) -> None: ...

    assert rebuild.delay(7).outcome == "created"
    assert rebuild.delay(7, full=True).outcome == "deduplicated"


def test_a_task_of_the_base_class_wins_over_annotations_although_it_was_made_first():
    app = plain_app(task_annotations=ANNOTATED)

    @app.task(name="shop.rebuild", base=UniqueTask, unique=True, unique_on_conflict="ignore")
    def rebuild(shop_id: int, full: bool = False) -> None: ...

    app.finalize()
    celery_unique.install(app, store_url="memory://")

    assert rebuild.delay(7).outcome == "created"
    assert rebuild.delay(7, full=True).outcome == "deduplicated"


@pytest.mark.parametrize("base", [Task, FlaskTask])
@pytest.mark.parametrize("shared", [True, False], ids=["shared", "not shared"])
def test_a_task_that_was_used_before_installing_is_warned_of(base, shared, caplog):
    app = plain_app(task_annotations=ANNOTATED)

    @app.task(
        name="shop.rebuild", base=base, shared=shared, unique=True, unique_on_conflict="ignore"
    )
    def rebuild(shop_id: int, full: bool = False) -> None: ...

    @app.task(name="shop.count", shared=False, unique=True)
    def count(shop_id: int) -> None: ...

    @app.task(name="shop.plain", shared=False)
    def plain(shop_id: int) -> None: ...

    app.finalize()
    celery_unique.install(app, store_url="memory://")

    lines = {each.args[0]: each for each in caplog.records if "install(app)" in each.getMessage()}  # type: ignore[index]
    assert set(lines) == {"shop.rebuild", "shop.count"}
    assert {each.levelno for each in lines.values()} == {logging.WARNING}
    assert "before the first use of a task" in lines["shop.count"].getMessage()
    assert "(unique_on, unique_on_conflict)" in lines["shop.rebuild"].getMessage()
    # The annotations count, as the warning has it.
    rebuild.delay(7)
    with pytest.raises(DuplicateTask):
        rebuild.delay(7)
    assert [count.delay(7).outcome for _ in range(2)] == ["created", "deduplicated"]


def test_a_task_that_was_only_defined_before_installing_is_not_warned_of(caplog):
    app = plain_app(task_annotations=ANNOTATED)

    @app.task(name="shop.rebuild", unique=True, unique_on_conflict="ignore")
    def rebuild(shop_id: int, full: bool = False) -> None: ...

    celery_unique.install(app, store_url="memory://")

    assert rebuild.delay(7).outcome == "created"
    assert rebuild.delay(7, full=True).outcome == "deduplicated"
    assert "install(app)" not in caplog.text
