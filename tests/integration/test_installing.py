"""How an app comes to know the library, and what it leaves alone."""

from __future__ import annotations

import pickle
import subprocess
import sys
from typing import Any

import pytest
from celery import Celery, Task, shared_task

import celery_unique
from celery_unique import InvalidPolicy, UniqueResult, UniqueTask, lookup
from tests.support import eventually, filesystem_settings
from tests.support.app import (
    define,
    flush,
    locks,
    make_app,
    messages,
    plain_app,
    value_of,
    working,
)
from tests.support.worker import REPOSITORY


def is_unique(task: Any) -> bool:
    """Whether the second of two equal calls is a duplicate of the first."""
    first, again = task.delay(7), task.delay(7)
    return bool(again.id == first.id and again.deduplicated)


# -- install ---------------------------------------------------------------------------------


def test_install_returns_the_app_and_is_idempotent():
    app = plain_app()

    installed = [celery_unique.install(app), celery_unique.install(app, namespace="shop")]

    rebuild = define(app, unique=True)

    assert all(each is app for each in installed)
    assert is_unique(rebuild)
    assert len(messages(app)) == 1
    assert app.conf.unique_namespace == "shop"


def test_install_connects_to_nothing(monkeypatch):
    def connect(*_: Any) -> None:
        raise AssertionError("something connects")

    monkeypatch.setattr("socket.socket.connect", connect)
    nowhere = "redis://192.0.2.1"
    app = Celery("shop", broker=nowhere, backend=nowhere, set_as_current=False)

    celery_unique.install(app, store_url=nowhere)

    rebuild = define(app, unique=True)

    assert app.tasks[rebuild.name].name == rebuild.name


@pytest.mark.parametrize("order", ["settings first", "install first"])
def test_settings_given_to_install_stay_beside_those_from_an_object(order):
    app = Celery("shop", set_as_current=False)
    config = {"broker_url": "memory://", "unique_run_lease": 30}

    if order == "settings first":
        app.config_from_object(config)
        celery_unique.install(app, namespace="shop")
    else:
        celery_unique.install(app, namespace="shop")
        app.config_from_object(config)

    assert (app.conf.unique_namespace, app.conf.unique_run_lease) == ("shop", 30)
    assert app.conf.broker_url == "memory://"


def test_a_setting_that_is_changed_later_is_used_from_then_on():
    app = make_app("memory://")

    rebuild = define(app, unique=True)

    rebuild.delay(7)
    assert lookup(rebuild, (7,)).window_ends_at is None
    app.conf.unique_default_for = 60
    rebuild.delay(8)

    assert lookup(rebuild, (8,)).window_ends_at is not None
    assert lookup(rebuild, (7,)) is not None


def test_tasks_of_celery_itself_are_never_unique():
    app = make_app("memory://", task_annotations={"*": {"unique": True}})

    first, second = (app.tasks["celery.backend_cleanup"].delay() for _ in range(2))

    assert first.id != second.id
    assert second.outcome == "bypassed"
    with pytest.raises(InvalidPolicy, match="never unique"):
        app.tasks["celery.backend_cleanup"].apply_async(unique=True)


# -- every kind of task ------------------------------------------------------------------------


@pytest.mark.parametrize("defined", ["before the app", "after the app"])
def test_a_shared_task_is_unique_in_an_installed_app(defined):
    def define_shared() -> None:
        @shared_task(name=f"shared.{defined}", unique=True)
        def rebuild(shop_id: int) -> None: ...

    if defined == "before the app":
        define_shared()
    app = make_app("memory://")
    if defined == "after the app":
        app.finalize()
        define_shared()

    assert is_unique(app.tasks[f"shared.{defined}"])


@pytest.mark.parametrize("used", [False, True], ids=["defined", "used"])
def test_a_task_that_was_there_before_installing_is_unique(used):
    app = plain_app()
    rebuild = define(app, unique=True)
    if used:
        app.finalize()
        assert rebuild.delay(1).id
    celery_unique.install(app)

    assert is_unique(rebuild)


def test_the_base_class_needs_no_install():
    app = plain_app()

    rebuild = define(app, base=UniqueTask, unique=True)

    assert is_unique(rebuild)


def test_the_base_class_for_all_tasks_of_an_app_needs_no_install():
    app = Celery("shop", task_cls="celery_unique:UniqueTask", set_as_current=False)
    app.conf.update(broker_url="memory://", task_default_queue="of-test-task-cls")

    rebuild = define(app, unique=True)

    plain = define(app, "shop.plain")

    assert is_unique(rebuild)
    assert not is_unique(plain)


def test_calls_by_name_of_the_base_class_are_unique_from_the_first_one_with_install():
    app = plain_app()
    celery_unique.install(app)

    define(app, base=UniqueTask, unique=True)

    results = [app.send_task("shop.rebuild", kwargs={"shop_id": 7}) for _ in range(2)]

    assert [each.outcome for each in results] == ["created", "deduplicated"]


def test_an_abstract_base_class_hands_its_options_down():
    app = make_app("memory://")

    class OncePerShop(Task):
        abstract = True
        unique = True
        unique_on = "shop_id"

    @app.task(base=OncePerShop)
    def rebuild(shop_id: int, full: bool = False) -> None: ...

    first = rebuild.delay(7)

    assert rebuild.delay(7, full=True).id == first.id


def test_a_class_based_task_is_unique():
    app = make_app("memory://")

    class Rebuild(Task):
        name = "shop.rebuild"
        unique = True
        unique_key = staticmethod(lambda shop_id, full=False: str(shop_id))

        def run(self, shop_id: int, full: bool = False) -> None: ...

    rebuild = app.register_task(Rebuild())
    first = rebuild.delay(7)

    assert rebuild.delay(7, full=True).id == first.id
    assert rebuild.delay(8).id != first.id


def test_a_base_class_with_an_apply_async_of_its_own_keeps_it():
    app = make_app("memory://")

    class Tagging(Task):
        def apply_async(self, args: Any = None, kwargs: Any = None, **options: Any) -> Any:
            options["headers"] = {**(options.get("headers") or {}), "tag": "mine"}
            return super().apply_async(args, kwargs, **options)

    rebuild = define(app, base=Tagging, unique=True)

    assert is_unique(rebuild)
    assert messages(app)[0].headers["tag"] == "mine"


def test_a_base_class_with_a_call_of_its_own_keeps_it_and_frees_the_key():
    app = make_app("memory://")
    called: list[tuple[Any, ...]] = []

    class Recording(Task):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            called.append(args)
            return super().__call__(*args, **kwargs)

    @app.task(base=Recording, unique=True)
    def rebuild(shop_id: int) -> int:
        return shop_id

    with working(app):
        assert value_of(rebuild.delay(7)) == 7
        assert rebuild.delay(7).outcome == "created"

    assert called[0] == (7,)


def test_a_bound_task_is_known_by_its_own_arguments():
    app = make_app("memory://")

    @app.task(bind=True, unique=True, unique_on="shop_id")
    def rebuild(self: Any, shop_id: int, full: bool = False) -> None: ...

    first = rebuild.delay(7)

    assert rebuild.delay(shop_id=7, full=True).id == first.id


def test_a_result_class_of_the_app_is_kept():
    from celery.result import AsyncResult

    class OwnResult(AsyncResult):
        def shout(self) -> str:
            return str(self.id).upper()

    app = plain_app()
    app.AsyncResult = type("AsyncResult", (OwnResult,), {"app": app})
    celery_unique.install(app)

    rebuild = define(app, unique=True)

    result = rebuild.delay(7)

    assert isinstance(result, UniqueResult)
    assert result.shout() == result.id.upper()


# -- wrong options fail where the task is defined ----------------------------------------------

WRONG: dict[str, dict[str, Any]] = {
    "unique_fro": {"unique": True, "unique_fro": 60},
    "unique_on": {"unique": True, "unique_on": "shop"},
    "unique_key": {"unique": True, "unique_key": "{shop}"},
    "unique_for": {"unique_for": 60},
    "unique_states": {"unique": True, "unique_states": "until_dawn"},
    "idempotency_key": {"unique": True, "idempotency_key": "k"},
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_option_fails_when_the_task_is_made(name):
    app = plain_app()

    define(app, **WRONG[name])

    celery_unique.install(app, store_url="memory://")

    with pytest.raises(InvalidPolicy):
        app.finalize()


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize(
    "base", [UniqueTask, Task], ids=["base class", "defined before installing"]
)
def test_a_wrong_option_fails_however_the_task_is_defined(name, base):
    app = plain_app()

    rebuild = define(app, base=base, **WRONG[name])

    if base is Task:
        celery_unique.install(app)

    with pytest.raises(InvalidPolicy):
        rebuild.delay(7)
    assert messages(app) == []


# -- workers of apps that were never installed by name ----------------------------------------


@pytest.mark.versions
@pytest.mark.parametrize("define", ["install", "base class", "task_cls"])
def test_a_task_that_is_retried_automatically_keeps_its_key(define):
    app = plain_app()
    if define == "task_cls":
        app.task_cls = "celery_unique:UniqueTask"
    if define == "install":
        celery_unique.install(app)

    @app.task(
        name="flaky",
        unique=True,
        autoretry_for=(ConnectionError,),
        retry_kwargs={"countdown": 3600},
        **({"base": UniqueTask} if define == "base class" else {}),
    )
    def flaky(shop_id: int) -> None:
        raise ConnectionError

    with working(app):
        first = flaky.delay(7)
        eventually(lambda: first.state == "RETRY", message="the body did not run")
        flush(app)

        assert lookup(flaky, (7,)).state == "retryable"
        assert flaky.delay(7).id == first.id


WITHOUT_INSTALL = """
from pathlib import Path
from celery import Celery
from celery_unique import UniqueTask
from tests.support import filesystem_settings

app = Celery("shop")
app.conf.update(filesystem_settings(Path(__file__).parent))
app.conf.unique_store_url = f"sqlite:///{Path(__file__).parent}/locks.sqlite3"

@app.task(name="shop.rebuild", base=UniqueTask, unique=True)
def rebuild(shop_id):
    return shop_id
"""


@pytest.mark.slow
def test_a_real_worker_of_an_app_without_install_frees_the_key(tmp_path, start_worker):
    (tmp_path / "shop_without_install.py").write_text(WITHOUT_INSTALL)
    app = plain_app(**filesystem_settings(tmp_path), task_default_queue="celery")
    app.conf.unique_store_url = f"sqlite:///{tmp_path}/locks.sqlite3"

    rebuild = define(app, base=UniqueTask, unique=True)

    start_worker("shop_without_install", pool="solo", python_path=[tmp_path])

    assert rebuild.delay(7).get(timeout=15, interval=0.05) == 7
    assert rebuild.delay(7).outcome == "created"


# -- several apps, other processes --------------------------------------------------------------


def test_two_apps_of_one_process_have_a_store_each(tmp_path):
    apps = [
        make_app(url)
        for url in ("memory://", "memory://", f"sqlite:///{tmp_path / 'locks.sqlite3'}")
    ]
    tasks = []
    for app in apps:
        define(app, unique=True)

        tasks.append(app.tasks["shop.rebuild"])

    results = [task.delay(7) for task in tasks]

    assert [each.outcome for each in results] == ["created"] * 3
    assert len({each.unique_key for each in results}) == 1
    assert [len(locks(app)) for app in apps] == [1, 1, 1]
    assert [lookup(task, (7,)).task_id for task in tasks] == [each.id for each in results]


@pytest.mark.versions
def test_the_worker_of_each_of_two_apps_frees_the_keys_of_its_tasks():
    apps = [make_app("memory://"), make_app("memory://")]
    for app in apps:

        @app.task(name="shop.rebuild", unique=True, shared=False)
        def rebuild(shop_id: int) -> int:
            return shop_id

    for app in apps:
        task = app.tasks["shop.rebuild"]
        with working(app):
            assert value_of(task.delay(7)) == 7
            assert task.delay(7).outcome == "created"


def test_an_app_that_was_pickled_is_still_installed(tmp_path):
    app = make_app(f"sqlite:///{tmp_path / 'locks.sqlite3'}")

    define(app, unique=True)

    first = app.send_task("shop.rebuild", kwargs={"shop_id": 7})
    flush(app)

    copy = pickle.loads(pickle.dumps(app))

    assert copy is not app
    assert copy.send_task("shop.rebuild", kwargs={"shop_id": 7}, unique=True).id == first.id


# -- importing ------------------------------------------------------------------------------------

IMPORTED = """
import sys, time
import celery, celery.app.task, celery.app.amqp
before = set(sys.modules)
began = time.process_time()
import celery_unique
took = time.process_time() - began
print(f"{took * 1000:.2f}")
print(*sorted(set(sys.modules) - before))
app = celery.Celery("shop", broker="memory://")
app.conf.broker_url
began = time.process_time()
celery_unique.install(app)
print(f"{(time.process_time() - began) * 1000:.2f}")
print(*sorted({name.partition(".")[0] for name in set(sys.modules) - before}))
"""
HEAVY = {"redis", "sqlalchemy", "django", "psycopg", "prometheus_client"}


@pytest.mark.slow
def test_importing_and_installing_load_no_store_and_cost_next_to_nothing(report):
    def run() -> list[str]:
        done = subprocess.run(
            [sys.executable, "-c", IMPORTED],
            cwd=REPOSITORY,
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        )
        return done.stdout.splitlines()

    outputs = [run() for _ in range(3)]

    importing = min(float(lines[0]) for lines in outputs)
    installing = min(float(lines[2]) for lines in outputs)
    report(f"importing takes {importing:.2f} ms over importing celery, installing {installing:.2f}")
    assert outputs[0][1].split() == ["celery_unique"]
    assert HEAVY.isdisjoint(outputs[0][3].split())
    assert importing < 10


LOADED_BY_A_DUPLICATE = """
import sys
from celery import Celery
import celery_unique
app = Celery("shop", broker="memory://")
celery_unique.install(app, store_url=sys.argv[1])

@app.task(name="shop.rebuild", unique=True)
def rebuild(shop_id): ...

first = rebuild.delay(7)
before = set(sys.modules)
again = rebuild.delay(7)
assert again.deduplicated and again.id == first.id
print(*sorted(set(sys.modules) - before))
try:
    rebuild.apply_async((7,), unique_on_conflict="reject")
except celery_unique.DuplicateTask:
    print(*sorted(set(sys.modules) - before))
"""


def test_the_first_duplicate_of_a_process_imports_nothing(redis_url):
    done = subprocess.run(
        [sys.executable, "-c", LOADED_BY_A_DUPLICATE, redis_url],
        capture_output=True,
        text=True,
        timeout=60,
    )

    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["", ""]
