"""The options of tasks and calls: which layer wins, what each one does, and where they end."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from celery import Celery, Task

import celery_unique
from celery_unique import DuplicateTask, UniqueKeyError, UniquePolicy, UniqueTask
from celery_unique.exceptions import UniquePolicyWarning
from celery_unique.header import HEADER
from celery_unique.policy import policy as policy_module
from tests.support.app import advance, flush, locks, make_app, messages, plain_app

NAME = "shop.rebuild"


@pytest.fixture
def app(local_app: Celery) -> Celery:
    return local_app


def body(shop_id: int, full: bool = False) -> int:
    return shop_id


def task_of(app: Celery, **options: Any) -> Any:
    return app.task(name=NAME, **options)(body)


# -- layers: call > task > annotations > app ------------------------------------------------

WINDOWS = {"call": 10, "task": 20, "annotations": 30, "app": 40}
SUBSETS = [
    {layer for layer, said in zip(WINDOWS, says, strict=True) if said}
    for says in product((True, False), repeat=len(WINDOWS))
]


def define_with_the_decorator(app: Celery, options: dict[str, Any]) -> Any:
    celery_unique.install(app)
    return task_of(app, **options)


def define_before_installing(app: Celery, options: dict[str, Any]) -> Any:
    task = task_of(app, **options)
    celery_unique.install(app)
    return task


def define_with_the_base_class(app: Celery, options: dict[str, Any]) -> Any:
    return task_of(app, base=UniqueTask, **options)


def define_as_a_class(app: Celery, options: dict[str, Any]) -> Any:
    celery_unique.install(app)
    namespace = {"name": NAME, "run": staticmethod(body), **options}
    return app.register_task(type("Rebuild", (Task,), namespace)())


def define_as_a_class_with_the_base_class(app: Celery, options: dict[str, Any]) -> Any:
    namespace = {"name": NAME, "run": staticmethod(body), **options}
    return app.register_task(type("Rebuild", (UniqueTask,), namespace)())


DEFINITIONS = [
    define_with_the_decorator,
    define_before_installing,
    define_with_the_base_class,
    define_as_a_class,
    define_as_a_class_with_the_base_class,
]


@pytest.mark.parametrize("define", DEFINITIONS)
@pytest.mark.parametrize("says", SUBSETS, ids=lambda says: "+".join(sorted(says)) or "none")
def test_the_highest_layer_that_says_a_field_decides_it(define, says):
    app = plain_app()
    if "app" in says:
        app.conf.unique_default_for = WINDOWS["app"]
    if "annotations" in says:
        app.conf.task_annotations = {NAME: {"unique_for": WINDOWS["annotations"]}}
    own = {"unique_for": WINDOWS["task"]} if "task" in says else {}
    task = define(app, {"unique": True, **own})

    task.apply_async((7,), **({"unique_for": WINDOWS["call"]} if "call" in says else {}))

    lock = celery_unique.lookup(NAME, (7,), app=app)
    assert lock is not None
    window = lock.window_ends_at - lock.created_at if lock.window_ends_at else None
    expected = [WINDOWS[layer] for layer in WINDOWS if layer in says]
    assert window == (timedelta(seconds=expected[0]) if expected else None)


def test_each_field_is_decided_by_itself():
    app = make_app(
        "memory://",
        unique_default_for=40,
        task_annotations={NAME: {"unique_on": "shop_id", "unique_for": 30}},
    )
    task = task_of(app, unique=True, unique_on_conflict="reject")
    task.apply_async((7,), unique_for=10)
    lock = celery_unique.lookup(task, (7,))

    with pytest.raises(DuplicateTask):
        task.delay(7, full=True)

    assert lock is not None
    assert lock.window_ends_at == lock.created_at + timedelta(seconds=10)


@pytest.mark.parametrize("define", DEFINITIONS)
@pytest.mark.parametrize("named", [NAME, "*"])
def test_an_annotation_makes_a_task_unique(define, named):
    app = plain_app(task_annotations={named: {"unique": True}})
    task = define(app, {})

    first, again = task.delay(7), task.delay(7)

    assert again.id == first.id


def test_a_default_of_the_app_makes_no_task_unique():
    app = make_app("memory://", unique_default_for=40)
    task = task_of(app)

    assert task.delay(7).outcome == "bypassed"


# -- what each option does at a call ----------------------------------------------------------


def test_unique_makes_one_call_unique(app):
    task = task_of(app)
    first = task.apply_async((7,), unique=True)

    assert task.apply_async((7,), unique=True).id == first.id
    assert task.delay(7).outcome == "bypassed"


def test_unique_false_publishes_beside_the_holder_and_takes_no_lock(app):
    task = task_of(app, unique=True)
    holder = task.delay(7)
    flush(app)

    beside = task.apply_async((7,), unique=False)

    assert (beside.outcome, beside.unique_key) == ("bypassed", None)
    assert {sent.id for sent in messages(app)} == {holder.id, beside.id}
    assert HEADER not in messages(app)[1].headers
    assert celery_unique.lookup(task, (7,)).task_id == holder.id


@pytest.mark.parametrize(
    "policy",
    [
        UniquePolicy(args_keys="shop_id", on_conflict="reject"),
        {"keys": ["type", "args"], "args_keys": ["shop_id"], "on_conflict": "reject"},
    ],
    ids=["policy", "mapping"],
)
def test_unique_as_a_policy_gives_all_fields(app, policy):
    task = task_of(app, unique=True, unique_for=60)
    task.apply_async((7,), unique=policy)

    with pytest.raises(DuplicateTask):
        task.apply_async((7, True), unique=policy)

    assert celery_unique.lookup(task, (7,)) is not None
    assert len(locks(app)) == 1


def test_a_field_beside_a_policy_replaces_that_field(app):
    task = task_of(app)
    policy = UniquePolicy(args_keys="shop_id", on_conflict="reject")
    first = task.apply_async((7,), unique=policy)

    again = task.apply_async((7, True), unique=policy, unique_on_conflict="ignore")

    assert again.id == first.id


def test_unique_for_is_the_window_of_the_call_that_asks(app):
    task = task_of(app, unique=True, unique_for=60)
    task.delay(7)
    advance(app, 30)

    assert task.delay(7).deduplicated
    assert task.apply_async((7,), unique_for="PT20S").outcome == "created"


def test_unique_on_names_the_arguments_that_count(app):
    task = task_of(app, unique=True)
    first = task.apply_async((7,), unique_on="shop_id")

    assert task.apply_async((7, True), unique_on=["shop_id"]).id == first.id
    assert task.apply_async((8, True), unique_on=["shop_id"]).id != first.id


def test_unique_by_names_the_dimensions(app):
    task = task_of(app, unique=True)
    first = task.apply_async((7,), unique_by="type")

    assert task.apply_async((8,), unique_by=["type"]).id == first.id


def test_unique_meta_names_headers(app):
    task = task_of(app, unique=True)
    first = task.apply_async((7,), unique_meta="tenant", headers={"tenant": "a"})

    same = task.apply_async((7,), unique_meta="tenant", headers={"tenant": "a"})
    other = task.apply_async((7,), unique_meta="tenant", headers={"tenant": "b"})

    assert same.id == first.id
    assert other.outcome == "created"
    with pytest.raises(UniqueKeyError, match="tenant"):
        task.apply_async((7,), unique_meta="tenant")


@pytest.mark.parametrize("key", ["{shop_id}", lambda shop_id, full=False: str(shop_id)])
def test_unique_key_makes_the_key(app, key):
    task = task_of(app, unique=True)
    first = task.apply_async((7,), unique_key=key)

    assert task.apply_async((7, True), unique_key=key).id == first.id
    assert task.apply_async((8, True), unique_key=key).id != first.id


@pytest.mark.filterwarnings("ignore::celery_unique.exceptions.UniquePolicyWarning")
def test_unique_states_are_those_of_the_call_that_asks(app):
    task = task_of(app, unique=True)
    task.apply_async((7,), countdown=60)
    flush(app)

    assert task.apply_async((7,), unique_states="until_start").deduplicated
    beside = task.apply_async((7,), unique_states=["active", "available", "retryable", "pending"])
    assert beside.outcome == "created"


def test_unique_on_conflict_is_that_of_the_call_that_asks(app):
    task = task_of(app, unique=True)
    first = task.delay(7)

    with pytest.raises(DuplicateTask) as rejected:
        task.apply_async((7,), unique_on_conflict="reject")

    assert rejected.value.task_id == first.id
    assert task.delay(7).id == first.id


def test_a_signature_carries_options_to_the_call(app):
    task = task_of(app, unique=True)
    task.delay(7)

    with pytest.raises(DuplicateTask):
        task.s(7).set(unique_on_conflict="reject").apply_async()


# -- what goes out -----------------------------------------------------------------------------

EVERY_OPTION: dict[str, dict[str, Any]] = {
    "unique": {"unique": True},
    "unique=False": {"unique": False},
    "policy": {"unique": UniquePolicy()},
    "mapping": {"unique": {"keys": ["type", "args"]}},
    "unique_for": {"unique_for": 60},
    "unique_on": {"unique_on": "shop_id"},
    "unique_by": {"unique_by": "type"},
    "unique_meta": {"unique_meta": "tenant"},
    "unique_key": {"unique_key": "{shop_id}"},
    "unique_states": {"unique_states": "window"},
    "unique_on_conflict": {"unique_on_conflict": "reject"},
    "identity_strategy": {"identity_strategy": "strict"},
    "idempotency_key": {
        "idempotency_key": "order-7",
        "idempotency_ttl": 60,
        "idempotency_scope": "app",
    },
}


@pytest.mark.parametrize("name", EVERY_OPTION)
def test_no_option_reaches_the_message(app, name):
    task = task_of(app, unique=True)
    plain = plain_app()
    task_of(plain).apply_async((7,), headers={"tenant": "a"}, priority=3)

    task.apply_async((7,), headers={"tenant": "a"}, priority=3, **EVERY_OPTION[name])

    [ours], [plains] = messages(app), messages(plain)
    assert set(ours.properties) == set(plains.properties)
    assert set(ours.headers) - {HEADER} == set(plains.headers)
    assert (ours.args, ours.kwargs) == (plains.args, plains.kwargs)


def test_the_header_names_the_task_and_its_key(app):
    result = task_of(app, unique=True).delay(7)

    [sent] = messages(app)
    assert (sent.headers[HEADER]["id"], sent.headers[HEADER]["key"]) == (
        result.id,
        result.unique_key,
    )


def test_a_header_copied_from_another_task_is_replaced(app):
    task = task_of(app, unique=True)
    task.delay(7)
    copied = messages(app)[0].headers[HEADER]

    result = task.apply_async((8,), headers={HEADER: copied, "tenant": "a"})

    header = messages(app)[1].headers
    assert (header[HEADER]["id"], header[HEADER]["key"]) == (result.id, result.unique_key)
    assert header["tenant"] == "a"


def test_a_header_copied_to_a_task_that_is_not_unique_is_taken_off(app):
    task_of(app, unique=True).delay(7)
    copied = messages(app)[0].headers[HEADER]

    app.send_task("plain", headers={HEADER: copied})

    assert HEADER not in messages(app)[1].headers


def test_the_callers_own_headers_are_left_as_they_were(app):
    headers = {"tenant": "a"}

    task_of(app, unique=True).apply_async((7,), headers=headers)

    assert headers == {"tenant": "a"}


# -- the queue dimension -----------------------------------------------------------------------


IGNORE_QUEUE_ATTRIBUTE = pytest.mark.filterwarnings("ignore::celery.exceptions.CDeprecationWarning")


def test_the_queue_in_the_key_is_the_one_that_is_really_chosen(app):
    app.conf.task_routes = {NAME: {"queue": f"{app.main}-routed"}}
    task = task_of(app, unique=True, unique_by=["type", "queue"])

    first = task.delay(7)

    assert task.apply_async((7,), queue=f"{app.main}-routed").id == first.id
    assert app.send_task(NAME, (7,)).id == first.id
    assert celery_unique.lookup(task, (7,)).task_id == first.id
    assert task.apply_async((7,), queue=f"{app.main}-other").id != first.id


@IGNORE_QUEUE_ATTRIBUTE
def test_the_queue_of_the_task_is_part_of_the_key(app):
    task = task_of(app, unique=True, unique_by=["type", "queue"], queue=f"{app.main}-own")

    first = task.delay(7)

    assert celery_unique.lookup(task, (7,)).task_id == first.id
    assert task.apply_async((7,), queue=f"{app.main}-own").id == first.id


@pytest.mark.versions
@IGNORE_QUEUE_ATTRIBUTE
def test_a_call_by_name_has_the_key_of_the_queue_that_it_goes_to(app):
    own = f"{app.main}-own"
    task = task_of(app, unique=True, unique_by=["type", "queue"], queue=own)

    by_name = app.send_task(NAME, (7,))
    by_task = task.delay(7)

    # Since 5.7 Celery sends a call by name to the queue of the task, before that to its own.
    same_queue = messages(app) == []
    assert (by_task.id == by_name.id) == same_queue
    assert len(messages(app, own)) == 1


# -- how long a message counts -----------------------------------------------------------------


def lease_of(app: Celery) -> timedelta:
    flush(app)
    lock = celery_unique.lookup(NAME, (7,), app=app)
    assert lock is not None
    return lock.expires_at - lock.created_at


@pytest.mark.parametrize("options", [{}, {"countdown": 3600}])
def test_a_waiting_task_holds_its_key_for_the_queue_lease_from_its_eta(app, options):
    task_of(app, unique=True).apply_async((7,), **options)

    expected = timedelta(hours=24, seconds=options.get("countdown", 0))
    assert abs(lease_of(app) - expected) < timedelta(minutes=1)


@pytest.mark.parametrize("how", ["at the call", "on the task"])
def test_the_expiry_of_a_message_bounds_its_lease(app, how):
    task = task_of(app, unique=True, **({"expires": 600} if how == "on the task" else {}))

    task.apply_async((7,), **({"expires": 600} if how == "at the call" else {}))

    assert abs(lease_of(app) - timedelta(minutes=10)) < timedelta(minutes=1)


@pytest.mark.versions
def test_a_call_by_name_is_bound_by_the_expiry_that_it_is_sent_with(app):
    task_of(app, unique=True, expires=600)

    app.send_task(NAME, (7,))

    is_sent_with_it = messages(app)[0].headers["expires"] is not None
    assert (lease_of(app) < timedelta(minutes=11)) == is_sent_with_it


# -- what is warned about --------------------------------------------------------------------


@pytest.fixture
def warned() -> Iterator[list[warnings.WarningMessage]]:
    policy_module._warned.clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("ignore")
        warnings.simplefilter("always", UniquePolicyWarning)
        yield caught
    policy_module._warned.clear()


#: Left over from another library, and what the warning says of it.
LEFT_OVERS = [
    ({"once": {"keys": ["shop_id"]}}, "celery-once", "becomes unique_on=['a']"),
    ({"lock_expiry": 60}, "celery-singleton", "unique_for=N"),
    ({"raise_on_duplicate": True}, "celery-singleton", "unique_on_conflict='reject'"),
    ({"heimdall": {"unique": True}}, "celery-heimdall", "becomes unique=True"),
]


@pytest.mark.parametrize(("options", "library", "cure"), LEFT_OVERS)
@pytest.mark.parametrize("where", ["task", "call"])
def test_an_option_of_another_library_is_warned_about_once_for_a_unique_task(
    app, where, options, library, cure, warned
):
    [name] = options
    task = task_of(app, unique=True, **(options if where == "task" else {}))

    for number in range(2):
        task.apply_async((number,), **(options if where == "call" else {}))

    [message] = [str(each.message) for each in warned]
    assert message.startswith(f"{NAME}: {name} is an option of {library}")
    assert cure in message
    assert f"'From {library}' in docs/howto/migrate.md" in message
    page = (Path(__file__).parents[2] / "docs/howto/migrate.md").read_text(encoding="utf-8")
    assert f"## From {library}" in page
    assert any(line.startswith("|") and name in line for line in page.splitlines())


@pytest.mark.parametrize("options", [options for options, _, _ in LEFT_OVERS])
def test_an_option_of_another_library_stays_its_own_on_a_task_that_is_not_unique(
    app, options, warned
):
    task = task_of(app, **options)
    task.apply_async((7,), **options)

    assert warned == []


@pytest.mark.parametrize(("options", "library"), [each[:2] for each in LEFT_OVERS])
def test_an_option_of_another_library_is_read_by_its_own_base_class(app, options, library, warned):
    """While both are live, the old options stay where they are."""
    module = f"{library.replace('-', '_')}.tasks"
    base = type("Base", (Task,), {"abstract": True, "__module__": module})
    task = task_of(app, unique=True, base=base, **options)
    task.apply_async((7,), **options)

    assert warned == []


@pytest.mark.parametrize(
    "delay", [{"countdown": 61}, {"eta": datetime.now(UTC) + timedelta(days=9)}]
)
def test_a_window_that_is_shorter_than_the_countdown_of_a_call_is_warned_about(app, delay, warned):
    task = task_of(app, unique=True, unique_for=60, unique_states="window")
    task.apply_async((7,), countdown=59)
    assert warned == []

    task.apply_async((8,), **delay)
    task.apply_async((9,), **delay)

    [message] = [str(each.message) for each in warned]
    assert message.startswith(f"{NAME}: unique_for=PT1M is shorter than the countdown")


def test_the_log_of_a_call_with_the_id_of_its_holder_says_what_to_do(app, caplog):
    task = task_of(app, unique=True)
    task.apply_async((7,), task_id="mine")
    assert task.apply_async((7,), task_id="other").deduplicated
    assert "the id of this call" not in caplog.text

    assert task.apply_async((7,), task_id="mine").deduplicated

    [record] = [each for each in caplog.records if "the id of this call" in each.getMessage()]
    assert record.levelname == "WARNING"
    assert "call it without task_id" in record.getMessage()
    assert "unique release --task-id" in record.getMessage()
