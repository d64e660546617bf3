"""UniquePolicy: one form for everything it accepts, and what it refuses or warns about."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import warnings
from collections.abc import Iterator
from datetime import timedelta
from itertools import combinations
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from celery_unique.exceptions import InvalidPolicy, UniquePolicyWarning
from celery_unique.policy import policy as policy_module
from celery_unique.policy.fields import CHECKS, DEFAULTS, OPTION_OF
from celery_unique.policy.policy import UniquePolicy
from celery_unique.policy.states import GROUPS, LIVE, STATES, TERMINAL, explain_gaps


@pytest.fixture(autouse=True)
def nothing_was_warned_about() -> Iterator[None]:
    policy_module._warned.clear()
    yield
    policy_module._warned.clear()


def key_of_shop(shop_id: int, **others: Any) -> str:
    return f"shop-{shop_id}"


# -- What it keeps ---------------------------------------------------------------------------------


def test_a_policy_by_default_is_what_unique_true_means():
    policy = UniquePolicy()

    assert policy.as_fields() == DEFAULTS
    assert policy.as_fields() == {
        "keys": ("type", "args"),
        "args_keys": None,
        "meta_keys": None,
        "period": None,
        "states": ("pending", "scheduled", "available", "active", "retryable"),
        "on_conflict": "ignore",
        "key": None,
        "max_wait": None,
        "identity_strategy": "strict",
        "label": None,
        "limit": 1,
        "max_queue": None,
        "group": None,
        "merge": None,
        "merge_max_bytes": 1_000_000,
    }


def test_fields_checks_defaults_and_options_are_the_same_list():
    names = [field.name for field in dataclasses.fields(UniquePolicy)]

    assert names == list(CHECKS) == list(DEFAULTS) == list(OPTION_OF)


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ({"keys": []}, {"keys": ("type",)}),
        ({"keys": "queue"}, {"keys": ("type", "queue")}),
        ({"keys": ["args"]}, {"keys": ("type", "args")}),
        ({"keys": ("args", "queue", "type")}, {"keys": ("type", "queue", "args")}),
        ({"args_keys": "shop_id"}, {"args_keys": ("shop_id",)}),
        ({"args_keys": ["b", "a"]}, {"args_keys": ("b", "a")}),
        ({"args_keys": {"b", "a"}}, {"args_keys": ("a", "b")}),
        ({"args_keys": frozenset({"b", "a"})}, {"args_keys": ("a", "b")}),
        ({"keys": ["meta"], "meta_keys": "tenant"}, {"meta_keys": ("tenant",)}),
        ({"period": 600}, {"period": timedelta(minutes=10)}),
        ({"period": "PT10M"}, {"period": timedelta(minutes=10)}),
        ({"period": timedelta(minutes=10)}, {"period": timedelta(minutes=10)}),
        ({"states": ["retryable", "active", "available", "scheduled"]}, {"states": LIVE[1:]}),
        ({"states": set(STATES)}, {"states": STATES}),
        ({"states": "window"}, {"states": STATES}),
        ({"on_conflict": "rerun"}, {"on_conflict": "rerun"}),
        ({"on_conflict": "replace", "max_wait": "PT1H"}, {"max_wait": timedelta(hours=1)}),
        ({"key": "{shop_id}"}, {"key": "{shop_id}"}),
        ({"key": key_of_shop}, {"key": key_of_shop}),
        ({"identity_strategy": "always_unique"}, {"identity_strategy": "always_unique"}),
    ],
)
def test_it_brings_values_into_one_form(given, kept):
    policy = UniquePolicy(**given)

    assert {field: getattr(policy, field) for field in kept} == kept


def test_the_named_groups():
    expected = {
        "until_start": ("pending", "scheduled", "available"),
        "until_done": LIVE,
        "until_success": (*LIVE, "completed"),
        "window": (*LIVE, *TERMINAL),
    }

    assert expected == GROUPS
    for name, states in GROUPS.items():
        assert UniquePolicy(states=name) == UniquePolicy(states=states)


names = st.lists(st.text(min_size=1), min_size=1, unique=True)
good_fields = st.fixed_dictionaries(
    {},
    optional={
        "keys": st.lists(st.sampled_from(["type", "queue", "args"]), unique=True).map(
            lambda keys: [*keys, "args"] if "args" not in keys else keys
        ),
        "args_keys": names,
        "period": st.one_of(st.floats(1, 1e9), st.just("P1D"), st.timedeltas(timedelta(seconds=1))),
        "states": st.one_of(
            st.sampled_from(list(GROUPS)),
            st.lists(st.sampled_from(STATES), min_size=1, unique=True),
        ),
        "on_conflict": st.sampled_from(["ignore", "reject", "replace", "rerun"]),
        "identity_strategy": st.sampled_from(["strict", "caller_provided", "always_unique"]),
    },
).filter(
    lambda fields: not isinstance(fields.get("period"), timedelta) or fields["period"].days < 1e5
)


@given(good_fields)
@pytest.mark.filterwarnings("ignore::celery_unique.exceptions.UniquePolicyWarning")
def test_a_policy_of_its_own_fields_is_the_same_policy(fields):
    policy = UniquePolicy(**fields)

    again = UniquePolicy(**policy.as_fields())

    assert again == policy
    assert hash(again) == hash(policy)
    assert repr(again) == repr(policy)


@pytest.mark.parametrize("key", [None, "{shop_id}", key_of_shop])
def test_policies_pickle_and_copy(key):
    policy = UniquePolicy(period="PT1H", states="window", key=key)

    assert pickle.loads(pickle.dumps(policy)) == policy
    assert copy.copy(policy) == copy.deepcopy(policy) == policy


def test_unpickling_does_not_warn_again():
    with pytest.warns(UniquePolicyWarning):
        policy = UniquePolicy(states=["active"])
    policy_module._warned.clear()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pickle.loads(pickle.dumps(policy))


def test_a_field_can_be_replaced():
    policy = dataclasses.replace(UniquePolicy(period=60), on_conflict="reject")

    assert policy == UniquePolicy(period=60, on_conflict="reject")


def test_a_policy_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        UniquePolicy().period = timedelta(1)  # type: ignore[misc]


def test_fields_are_given_by_name_only():
    with pytest.raises(TypeError):
        UniquePolicy(("type",))  # type: ignore[misc]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, ()),
        ({"args_keys": ["b", "a"]}, ("b", "a")),
        ({"key": "{order}-{day:%Y-%m}:{total:>8}-{order!r}"}, ("order", "day", "total")),
        ({"key": "{{x}}{a}"}, ("a",)),
        ({"key": key_of_shop}, ()),
    ],
)
def test_the_arguments_it_asks_for_by_name(fields, expected):
    assert UniquePolicy(**fields).argument_names == expected


# -- What it refuses -------------------------------------------------------------------------------

REFUSED = [
    ({"keys": "argz"}, "keys", "Did you mean 'args'?"),
    ({"keys": ["Type"]}, "keys", "Did you mean 'type'?"),
    ({"keys": ["args", "args"]}, "keys", "give every name once"),
    ({"keys": None}, "keys", "give a list of strings"),
    ({"keys": 1}, "keys", "give a list of strings"),
    ({"keys": [1]}, "keys", "every item is a string"),
    ({"keys": {"args": True}}, "keys", "give a list of strings"),
    ({"keys": b"args"}, "keys", "give a list of strings"),
    ({"args_keys": []}, "args_keys", "leave it out for all arguments"),
    ({"args_keys": []}, "args_keys", "give unique_by='type' in its place"),
    ({"args_keys": ["a", ""]}, "args_keys", "every item is a string that is not empty"),
    ({"args_keys": ""}, "args_keys", "every item is a string that is not empty"),
    ({"args_keys": ["a", "b", "a"]}, "args_keys", "'a' is repeated"),
    ({"args_keys": [0]}, "args_keys", "every item is a string"),
    ({"keys": ["meta"], "meta_keys": []}, "meta_keys", "leave it out"),
    ({"keys": ["meta"], "meta_keys": ["a", "a"]}, "meta_keys", "'a' is repeated"),
    ({"period": "10m"}, "period", "ISO 8601 duration ('PT10M')"),
    ({"period": 0}, "period", "at least one millisecond"),
    ({"states": []}, "states", "Give at least one state"),
    ({"states": ["active", "actve"]}, "states", "Did you mean 'active'?"),
    ({"states": "until_don"}, "states", "Did you mean 'until_done'?"),
    ({"states": "active"}, "states", "write ['active']"),
    (
        {"states": "completd"},
        "states",
        "Did you mean the state 'completed'? A string names a group: ",
    ),
    ({"states": "completd"}, "states", "write ['completed'], or use 'until_start'"),
    ({"states": ["until_done"]}, "states", "Use 'pending', 'scheduled'"),
    ({"states": ["active", "active"]}, "states", "'active' is repeated"),
    ({"states": None}, "states", "give a list of strings"),
    ({"on_conflict": "ignroe"}, "on_conflict", "Did you mean 'ignore'?"),
    ({"on_conflict": "REJECT"}, "on_conflict", "Did you mean 'reject'?"),
    ({"on_conflict": None}, "on_conflict", "Use 'ignore', 'reject'"),
    ({"on_conflict": ["reject"]}, "on_conflict", "Use 'ignore', 'reject'"),
    ({"key": 1}, "key", "give a callable"),
    ({"key": "shop_id"}, "key", "'{shop_id}'"),
    ({"key": ""}, "key", "unique_by='type'"),
    ({"key": "{}"}, "key", "write every argument by name"),
    ({"key": "{0}"}, "key", "write every argument by name"),
    ({"key": "{shop id}"}, "key", "write every argument by name"),
    ({"key": "{shop_id"}, "key", "double a brace"),
    ({"key": "shop_id}"}, "key", "double a brace"),
    ({"key": "{a.__class__.__init__.__globals__}"}, "key", "a callable that returns the string"),
    ({"key": "{a:{}}"}, "key", "a callable that returns the string"),
    ({"key": "{a:{b}}"}, "key", "a callable that returns the string"),
    ({"key": "{order.id}"}, "key", "a callable that returns the string"),
    ({"key": "{order[id]}"}, "key", "a callable that returns the string"),
    ({"key": "{shop_id}-{order.id}"}, "key", "a callable that returns the string"),
    ({"key": "{a!x}"}, "key", "'!r', '!s' or '!a'"),
    ({"on_conflict": "replace", "max_wait": "soon"}, "max_wait", "ISO 8601"),
    ({"identity_strategy": "callers"}, "identity_strategy", "Use 'strict', 'caller_provided'"),
    (
        {"identity_strategy": "caller-provided"},
        "identity_strategy",
        "Did you mean 'caller_provided'?",
    ),
    # Two that clash
    ({"key": "{a}", "args_keys": "a"}, "key", "give only one of them"),
    ({"keys": ["type"], "args_keys": "a"}, "args_keys", "add 'args' to keys"),
    ({"keys": ["type"], "key": "{a}"}, "key", "add 'args' to keys"),
    ({"keys": ["meta"]}, "meta_keys", "name the headers that count"),
    ({"meta_keys": ["tenant"]}, "meta_keys", "add 'meta' to keys"),
    ({"max_wait": 60}, "max_wait", "'replace', 'replace_except_schedule' or 'merge'"),
    (
        {"max_wait": 60, "on_conflict": "rerun"},
        "max_wait",
        "'replace', 'replace_except_schedule' or 'merge'",
    ),
]


@pytest.mark.parametrize(("fields", "field", "cure"), REFUSED, ids=[str(f) for f, *_ in REFUSED])
def test_it_refuses_and_names_the_field_and_the_cure(fields, field, cure):
    with pytest.raises(InvalidPolicy) as raised:
        UniquePolicy(**fields)

    message = str(raised.value)
    assert raised.value.field == field
    assert message.startswith(field)
    assert OPTION_OF[field] in message
    assert cure in message


def test_an_unknown_field_is_refused_by_python():
    with pytest.raises(TypeError, match="perod"):
        UniquePolicy(perod=60)  # type: ignore[call-arg]


# -- What it warns about ---------------------------------------------------------------------------


def has_gap(states: tuple[str, ...]) -> bool:
    """Say by walking every life of a task whether one is seen, then unseen, or first unseen."""
    following = {
        "scheduled": ["available", "cancelled"],
        "available": ["active", "cancelled"],
        "active": ["retryable", *TERMINAL],
        "retryable": ["active", "cancelled"],
    }
    return any(
        before not in states and after in states
        for before, afters in following.items()
        for after in afters
    )


def every_choice_of_states() -> Iterator[tuple[str, ...]]:
    for size in range(1, len(STATES) + 1):
        yield from combinations(STATES, size)


def test_every_choice_of_states_is_accepted_and_exactly_those_with_gaps_are_warned_about():
    for states in every_choice_of_states():
        policy_module._warned.clear()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            policy = UniquePolicy(states=states)

        assert policy.states == states
        assert [str(w.category.__name__) for w in caught] == ["UniquePolicyWarning"] * has_gap(
            states
        )


@pytest.mark.parametrize("name", GROUPS)
def test_no_named_group_has_a_gap(name):
    assert explain_gaps(GROUPS[name]) == ""


@pytest.mark.parametrize(
    ("states", "left_out"),
    [
        (("available", "active"), ["scheduled", "retryable"]),  # of the Open Job Spec
        (("available", "completed"), ["scheduled", "active"]),
        (("pending", "active", "retryable"), ["available"]),
        (("active",), ["available", "retryable"]),
        (("completed",), ["active"]),
        (("pending", "available"), ["scheduled"]),
        (("scheduled",), []),  # the Open Job Spec, 6.4
        (("scheduled", "available", "active", "retryable"), []),
        (("pending",), []),
    ],
)
def test_a_gap_is_a_state_left_out_from_which_one_that_is_in_is_entered(states, left_out):
    said = explain_gaps(states)

    assert [state for state in STATES if f"({state!r} is left out)" in said] == left_out


def test_a_gap_is_explained_in_plain_words_with_the_cure():
    with pytest.warns(UniquePolicyWarning) as caught:
        UniquePolicy(states=["pending", "scheduled", "available", "active"])

    assert str(caught[0].message) == (
        "states ['pending', 'scheduled', 'available', 'active'] have gaps in the life of a task: "
        "while a task waits for a retry, another call is admitted, and may run beside the retry "
        "('retryable' is left out). Add what is left out, or name a group: "
        "'until_start', 'until_done', 'until_success' or 'window'"
    )


def test_a_gap_is_warned_about_once_at_the_line_of_the_user():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            UniquePolicy(states=["active"])

    assert [warning.filename for warning in caught] == [__file__]


def test_warnings_are_bounded(monkeypatch):
    monkeypatch.setattr(policy_module, "_MOST_WARNINGS", 2)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for states in every_choice_of_states():
            UniquePolicy(states=states)

    assert len(caught) == 2
