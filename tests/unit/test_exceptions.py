"""Every error: its message, its facts, and what is left of it after a journey."""

from __future__ import annotations

import copy
import pickle

import pytest
from celery import Celery

from celery_unique import exceptions
from celery_unique.exceptions import (
    BatchInterrupted,
    CeleryUniqueError,
    ConfigurationError,
    DuplicateTask,
    IdempotencyKeyConflict,
    IdempotencyKeyRequired,
    InvalidPolicy,
    StoreUnavailable,
    UniqueKeyError,
    UnreadableRecord,
    conceal_passwords,
)

KEY = "1:b89a6e7c3f2d1e4a5b8c9d0e1f2a3b4c"


def duplicate() -> DuplicateTask:
    return DuplicateTask(
        task_name="shop.rebuild", task_id="abc", state="active", key=KEY, reason="it runs"
    )


ERRORS = [
    InvalidPolicy("states: 'actve' is not known", field="states"),
    UniqueKeyError("shop_id is not a number", argument="shop_id"),
    duplicate(),
    DuplicateTask("shop.rebuild"),
    DuplicateTask("shop.pay", "abc", "completed", None, True, key=KEY),
    IdempotencyKeyRequired("shop.pay"),
    IdempotencyKeyConflict("shop.pay", key=KEY),
    StoreUnavailable("no answer in 2 s", store="redis://localhost/0"),
    UnreadableRecord("the record of key 1:10b8 is not JSON", store="redis://localhost/0", key=KEY),
    BatchInterrupted("1 of 2 calls were made", results=["one", None]),
    ConfigurationError("unique_eager: 'yes' is not a switch", setting="unique_eager"),
]
FACTS = {
    InvalidPolicy: {"field"},
    UniqueKeyError: {"argument"},
    DuplicateTask: {"task_name", "task_id", "state", "key", "reason"},
    IdempotencyKeyRequired: {"task_name"},
    IdempotencyKeyConflict: {"task_name", "key"},
    StoreUnavailable: {"store"},
    UnreadableRecord: {"store", "key"},
    BatchInterrupted: {"results"},
    ConfigurationError: {"setting"},
}

each_error = pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)


def test_the_list_above_has_every_error():
    public = {getattr(exceptions, name) for name in exceptions.__all__}

    errors = {cls for cls in public if issubclass(cls, CeleryUniqueError)}

    assert errors == {*FACTS, CeleryUniqueError} == {*map(type, ERRORS), CeleryUniqueError}


@each_error
def test_it_is_one_of_ours(error):
    assert isinstance(error, CeleryUniqueError)
    assert isinstance(error, ValueError) == isinstance(error, (InvalidPolicy, UniqueKeyError))


@each_error
@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_it_pickles_with_all_its_facts(error, protocol):
    again = pickle.loads(pickle.dumps(error, protocol))

    assert type(again) is type(error)
    assert vars(again).keys() == FACTS[type(error)]
    assert vars(again) == vars(error)
    assert (again.args, str(again), repr(again)) == (error.args, str(error), repr(error))


@each_error
def test_it_copies(error):
    assert vars(copy.copy(error)) == vars(copy.deepcopy(error)) == vars(error)


@each_error
def test_notes_and_causes_do_not_stand_in_the_way_of_pickling(error):
    error = copy.copy(error)
    error.add_note("while rebuilding")
    error.__cause__ = OSError("reset")

    again = pickle.loads(pickle.dumps(error))

    assert again.__notes__ == ["while rebuilding"]


@each_error
def test_a_json_result_backend_gives_the_same_class_and_message_back(error):
    backend = Celery(backend="cache+memory://", set_as_current=False).backend

    again = backend.exception_to_python(backend.prepare_exception(error, serializer="json"))

    assert type(again) is type(error)
    assert str(again) == str(error)


def test_a_json_result_backend_keeps_the_holder_of_a_duplicate():
    backend = Celery(backend="cache+memory://", set_as_current=False).backend

    again = backend.exception_to_python(backend.prepare_exception(duplicate(), serializer="json"))

    assert (again.task_id, again.state, again.reason) == ("abc", "active", "it runs")


@each_error
def test_the_key_is_an_attribute_only(error):
    shown = f"{error} {error!r} {error.args}"

    assert KEY not in shown
    assert KEY.partition(":")[2] not in shown


@each_error
def test_repr_is_the_class_and_the_message(error):
    assert repr(error) == f"{type(error).__name__}({str(error)!r})"


def test_duplicate_names_the_holder_the_reason_and_the_way_out():
    assert str(duplicate()) == (
        "shop.rebuild was not published: task abc in state active holds its unique key (it runs). "
        "Wait for that task to finish, or call with unique_on_conflict='ignore' to get its result, "
        "or with unique=False to publish anyway"
    )


def test_a_duplicate_of_an_ended_holder_is_not_told_to_wait_for_its_end():
    message = str(DuplicateTask("shop.rebuild", "holder", "completed"))

    assert "Wait until its window or its idempotency key's time has passed" in message
    assert "Wait for that task to finish" not in message


def test_who_may_not_know_the_holder_is_not_told_to_ask_for_its_result():
    """Concealed, 'ignore' is the same error."""
    assert "'ignore'" not in str(DuplicateTask("shop.rebuild"))
    assert "'ignore'" in str(DuplicateTask("shop.rebuild", "holder", "active"))


@pytest.mark.parametrize("state", ["active", "completed"])
def test_a_duplicate_by_the_callers_key_is_told_to_take_a_new_one(state):
    """unique=False would not help: the key wins over it."""
    told = DuplicateTask("shop.pay", "abc", state, by_idempotency_key=True)
    concealed = DuplicateTask("shop.pay", by_idempotency_key=True)

    assert (told.by_idempotency_key, duplicate().by_idempotency_key) == (True, False)
    for message in (str(told), str(concealed)):
        assert message.endswith("or take a new idempotency_key for new work")
        assert "unique=False" not in message
    assert "'ignore'" in str(told)
    assert "'ignore'" not in str(concealed)


def test_duplicate_without_a_holder_tells_nothing_of_it():
    message = str(DuplicateTask(task_name="shop.rebuild", task_id=None, state=None, key=KEY))

    assert message.startswith("shop.rebuild was not published: another task holds its unique key.")


def test_a_missing_idempotency_key_says_how_to_give_one():
    assert "apply_async(..., idempotency_key='...')" in str(IdempotencyKeyRequired("shop.pay"))


def test_a_conflict_says_that_calls_differ_and_not_where():
    message = str(IdempotencyKeyConflict("shop.pay", key=KEY))

    assert "another task or other arguments" in message


OJS = [
    (duplicate(), "duplicate", False),
    (InvalidPolicy("x"), "invalid_request", False),
    (UniqueKeyError("x"), "invalid_request", False),
    (IdempotencyKeyRequired("t"), "invalid_request", False),
    (IdempotencyKeyConflict("t"), "invalid_request", False),
    (StoreUnavailable("x"), "backend_error", True),
    (UnreadableRecord("x"), "backend_error", False),
    (BatchInterrupted("x"), "backend_error", True),
    (ConfigurationError("x"), "backend_error", False),
    (CeleryUniqueError("x"), "internal_error", False),
]


@pytest.mark.parametrize(
    ("error", "code", "retryable"), OJS, ids=[type(e).__name__ for e, *_ in OJS]
)
def test_to_ojs_has_the_code_and_whether_to_try_again(error, code, retryable):
    document = error.to_ojs()["error"]

    assert document.keys() == {"code", "message", "retryable", "details"}
    assert (document["code"], document["retryable"]) == (code, retryable)
    assert document["message"] == str(error)


def test_duplicate_to_ojs_has_the_details_of_section_5_1():
    assert duplicate().to_ojs()["error"]["details"] == {
        "existing_job_id": "abc",
        "existing_job_state": "active",
        "uniqueness_key": KEY,
        "job_type": "shop.rebuild",
        "reason": "it runs",
    }


def test_to_ojs_leaves_out_what_is_not_known():
    error = DuplicateTask("shop.rebuild", key=KEY)

    details = error.to_ojs()["error"]["details"]

    assert details == {"uniqueness_key": KEY, "job_type": "shop.rebuild"}


def test_invalid_policy_to_ojs_names_the_field():
    assert InvalidPolicy("x", field="keys").to_ojs()["error"]["details"] == {"field": "keys"}


PASSWORDS = [
    ("redis://:hunter2@host:6379/0", "redis://***@host:6379/0"),
    ("redis://me:hunter2@host", "redis://***@host"),
    ("at postgresql+psycopg://me:hunter2@host/db now", "at postgresql+psycopg://***@host/db now"),
    ("redis://:hun/te?r#2@host/0", "redis://***@host/0"),
    ("redis://:hunter2@a@host/0", "redis://***@host/0"),
    ("redis://host/0?password=hunter2&db=1", "redis://host/0?password=***&db=1"),
    ("sentinel://:hunter2@a;sentinel://:hunter2@b", "sentinel://***@b"),
    ("redis://host/0", "redis://host/0"),
    ("me@example.org", "me@example.org"),
]


@pytest.mark.parametrize(("text", "concealed"), PASSWORDS)
def test_passwords_are_concealed(text, concealed):
    assert conceal_passwords(text) == concealed


def test_no_error_about_a_store_shows_a_password():
    url = "redis://:hunter2@host/0"

    errors = [StoreUnavailable(f"cannot reach {url}", store=url), ConfigurationError(f"bad {url}")]

    for error in errors:
        assert "hunter2" not in f"{error} {error!r} {vars(error)} {error.to_ojs()}"
