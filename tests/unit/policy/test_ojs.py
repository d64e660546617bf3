"""A policy as an Open Job Spec document: section 2, 5, 6, 7 and 13 of the specification."""

from __future__ import annotations

import copy
import dataclasses
import json
import pickle
import warnings
from collections import OrderedDict
from collections.abc import Iterator
from datetime import timedelta
from types import MappingProxyType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from celery_unique.exceptions import InvalidPolicy, UniquePolicyWarning
from celery_unique.policy import policy as policy_module
from celery_unique.policy.durations import LONGEST, SHORTEST
from celery_unique.policy.layers import PolicyLayers
from celery_unique.policy.policy import UniquePolicy
from celery_unique.policy.states import LIVE, STATES

pytestmark = pytest.mark.filterwarnings(
    "ignore:states .* have gaps:celery_unique.exceptions.UniquePolicyWarning"
)


@pytest.fixture(autouse=True)
def nothing_was_warned_about() -> Iterator[None]:
    policy_module._warned.clear()
    yield
    policy_module._warned.clear()


def test_the_defaults_are_those_of_the_specification():
    with pytest.warns(UniquePolicyWarning):
        policy = UniquePolicy.from_ojs({})

    assert policy == UniquePolicy(keys=["type"], on_conflict="reject", states=LIVE)


def test_the_example_of_section_2():
    policy = UniquePolicy.from_ojs(
        {
            "keys": ["type", "queue", "args"],
            "args_keys": ["user_id"],
            "meta_keys": [],
            "period": "PT1H",
            "states": ["available", "active", "scheduled", "retryable", "pending"],
            "on_conflict": "reject",
        }
    )

    assert policy == UniquePolicy(
        keys=("type", "queue", "args"),
        args_keys=("user_id",),
        period=timedelta(hours=1),
        on_conflict="reject",
    )


EXAMPLES = [
    {
        "keys": ["type", "queue", "args"],
        "args_keys": ["user_id"],
        "meta_keys": [],
        "period": "PT1H",
        "states": ["available", "active", "scheduled", "retryable", "pending"],
        "on_conflict": "reject",
    },
    {"keys": ["type", "args"], "on_conflict": "reject", "states": ["available", "active"]},
    {"keys": ["type", "args"], "args_keys": ["user_id"], "on_conflict": "replace"},
    {"keys": ["type", "args"], "args_keys": ["user_id"], "on_conflict": "replace_except_schedule"},
    {"keys": ["type"], "on_conflict": "ignore"},
    {"keys": ["type"], "states": ["scheduled"]},
    {"keys": ["type"], "states": ["available"]},
    {"keys": ["type"], "states": ["available", "active"]},
    {"keys": ["type"], "states": ["available", "active", "retryable", "scheduled"]},
    {"keys": ["type", "args"], "period": "PT2S"},
    {
        "keys": ["type", "args"],
        "args_keys": ["user_id"],
        "states": ["available", "active", "scheduled", "retryable", "pending", "completed"],
        "period": "P7D",
        "on_conflict": "ignore",
    },
    {"keys": ["type", "args", "meta"], "meta_keys": ["tenant_id"], "on_conflict": "ignore"},
    {"keys": ["args"]},
    {"keys": []},
    {"keys": ["type", "args"], "args_keys": None, "meta_keys": None, "period": None},
]


@pytest.mark.parametrize("document", EXAMPLES, ids=json.dumps)
def test_documents_of_the_specification_are_accepted(document):
    policy = UniquePolicy.from_ojs(document)

    assert policy.on_conflict == document.get("on_conflict", "reject")
    assert set(policy.states) == set(document.get("states", LIVE))
    assert set(policy.keys) == {"type", *document["keys"]}
    assert policy.to_ojs() == document


@pytest.mark.parametrize("kind", [dict, OrderedDict, MappingProxyType])
def test_any_mapping_will_do(kind):
    assert UniquePolicy.from_ojs(kind({"keys": ["args"]})).keys == ("type", "args")


# -- Round trips -----------------------------------------------------------------------------------

names = st.lists(st.text(min_size=1), min_size=1, max_size=4, unique=True)


@st.composite
def policies(draw: st.DrawFn) -> UniquePolicy:
    keys = draw(st.lists(st.sampled_from(["type", "queue", "args", "meta"]), unique=True))
    return UniquePolicy(
        keys=keys,
        args_keys=draw(st.none() | names) if "args" in keys else None,
        meta_keys=draw(names) if "meta" in keys else None,
        period=draw(st.none() | st.timedeltas(SHORTEST, LONGEST)),
        states=draw(st.lists(st.sampled_from(STATES), min_size=1, unique=True)),
        on_conflict=draw(
            st.sampled_from(["reject", "replace", "replace_except_schedule", "ignore"])
        ),
    )


@given(policies())
def test_a_policy_comes_back_from_its_document(policy):
    document = json.loads(json.dumps(policy.to_ojs()))

    assert UniquePolicy.from_ojs(document) == policy


def spelled(unit_text: str) -> st.SearchStrategy[str]:
    return st.just("") | st.integers(0, 99).map(lambda count: f"{count}{unit_text}")


periods = st.builds(
    lambda days, times: f"P{''.join(days)}" + (f"T{''.join(times)}" if any(times) else ""),
    st.tuples(*map(spelled, "YMWD")),
    st.tuples(spelled("H"), spelled("M"), spelled("S") | spelled(".50S")),
).filter(lambda text: any(digit in text for digit in "123456789"))


@st.composite
def documents(draw: st.DrawFn) -> dict[str, Any]:
    """Any document that is accepted, its fields and lists in any order, with any left out."""
    keys = draw(st.lists(st.sampled_from(["type", "queue", "args", "meta"]), unique=True))
    optional: dict[str, Any] = {
        "period": st.none() | periods,
        "states": st.lists(st.sampled_from(STATES), min_size=1, unique=True),
        "on_conflict": st.sampled_from(["reject", "replace", "replace_except_schedule", "ignore"]),
        "args_keys": st.none() | names if "args" in keys else st.none(),
    }
    if "meta" not in keys:
        optional["meta_keys"] = st.none() | st.just([])
    fields = draw(st.fixed_dictionaries({}, optional=optional))
    given = {"keys": keys, **fields, **({"meta_keys": draw(names)} if "meta" in keys else {})}
    return dict(draw(st.permutations(list(given.items()))))


@given(documents())
def test_a_document_comes_back_from_its_policy_word_for_word(document):
    text = json.dumps(document)

    assert json.dumps(UniquePolicy.from_ojs(json.loads(text)).to_ojs()) == text


@pytest.mark.parametrize(
    "period",
    ["PT60M", "P1W", "P7D", "P1Y2M3W4DT5H6M7.5S", "PT3600S", "PT1.50S", "P0DT1H", "PT01H"],
)
def test_a_period_comes_back_as_it_was_written(period):
    document = {"keys": ["type"], "period": period}

    assert UniquePolicy.from_ojs(document).to_ojs() == document


@pytest.mark.parametrize("document", [{}, {"on_conflict": "ignore"}, {"period": "PT1H"}])
@pytest.mark.filterwarnings("ignore:.* has no 'keys'")
def test_what_a_document_leaves_to_the_specification_stays_left_out(document):
    assert UniquePolicy.from_ojs(document).to_ojs() == document


def test_a_document_with_tuples_comes_back_as_json_has_it():
    policy = UniquePolicy.from_ojs({"keys": ("args", "type")})

    assert policy.to_ojs() == {"keys": ["args", "type"]}


def test_a_document_that_changes_later_changes_no_policy():
    document = {"keys": ["args", "type"], "states": ["active", "available"]}
    policy = UniquePolicy.from_ojs(document)

    document["keys"].append("queue")
    policy.to_ojs()["states"].append("completed")

    assert policy.to_ojs() == {"keys": ["args", "type"], "states": ["active", "available"]}


def test_a_field_that_is_replaced_is_in_the_document():
    policy = UniquePolicy.from_ojs({"keys": ["args", "type"], "period": "PT60M"})

    assert dataclasses.replace(policy, on_conflict="ignore").to_ojs() == {
        "keys": ["type", "args"],
        "period": "PT1H",
        "states": list(LIVE),
        "on_conflict": "ignore",
    }
    assert (
        PolicyLayers([{"unique": policy}]).for_call({"unique_for": "PT2H"}).to_ojs()["period"]
        == "PT2H"
    )  # type: ignore[union-attr]


def test_two_spellings_are_one_policy():
    one = UniquePolicy.from_ojs({"keys": ["args", "type"], "period": "PT60M"})
    other = UniquePolicy.from_ojs({"keys": ["type", "args"], "period": "PT1H"})

    assert one == other == UniquePolicy(period="PT1H", on_conflict="reject")
    assert hash(one) == hash(other)
    assert repr(one) == repr(other)
    assert dataclasses.asdict(one) == dataclasses.asdict(other)


@pytest.mark.parametrize("way", [copy.copy, copy.deepcopy, lambda p: pickle.loads(pickle.dumps(p))])
def test_a_copy_has_the_document_too(way):
    document = {"keys": ["args", "type"], "meta_keys": [], "period": "PT60M"}
    policy = UniquePolicy.from_ojs(document)

    assert way(policy) == policy
    assert way(policy).to_ojs() == document


@given(policies())
def test_a_document_of_ours_comes_back_from_its_policy(policy):
    document = policy.to_ojs()

    assert UniquePolicy.from_ojs(document).to_ojs() == document


def test_to_ojs_says_what_could_be_left_out_and_leaves_out_what_is_none():
    assert UniquePolicy().to_ojs() == {
        "keys": ["type", "args"],
        "states": ["pending", "scheduled", "available", "active", "retryable"],
        "on_conflict": "ignore",
    }


def key_of_call(**arguments: Any) -> str:
    return "key"


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"key": "{a}"}, "key"),
        ({"key": key_of_call}, "key"),
        ({"on_conflict": "rerun"}, "on_conflict"),
        ({"on_conflict": "replace", "max_wait": 60}, "max_wait"),
        ({"identity_strategy": "caller_provided"}, "identity_strategy"),
    ],
)
def test_to_ojs_raises_for_what_the_specification_cannot_say(fields, field):
    with pytest.raises(InvalidPolicy, match="the Open Job Spec cannot express") as raised:
        UniquePolicy(**fields).to_ojs()

    assert raised.value.field == field


# -- What is refused -------------------------------------------------------------------------------

REFUSED = [
    ({"perod": "PT1H"}, "perod", "Did you mean 'period'?"),
    ({"Keys": ["type"]}, "Keys", "Did you mean 'keys'?"),
    ({"something": 1}, "something", "Use 'keys', 'args_keys'"),
    ({1: 2}, None, "Use 'keys', 'args_keys'"),
    ({"unique": {"keys": ["type"]}}, "unique", "Give the object under 'unique'"),
    ({"key": "{a}"}, "key", "Give unique_key= beside unique="),
    ({"max_wait": "PT1H"}, "max_wait", "Give unique_max_wait= beside unique="),
    ({"identity_strategy": "strict"}, "identity_strategy", "Give identity_strategy= beside"),
    ({"unique_for": "PT1H"}, "unique_for", "Give unique_for= beside unique="),
    ({"keys": "type"}, "keys", "a list of strings"),
    ({"keys": None}, "keys", "a list of strings"),
    ({"keys": {"type"}}, "keys", "a list of strings"),
    ({"keys": ["argz"]}, "keys", "Did you mean 'args'?"),
    ({"keys": ["Args"]}, "keys", "Did you mean 'args'?"),
    ({"keys": ["type", "type"]}, "keys", "'type' is repeated"),
    ({"keys": [["type"]]}, "keys", "every item is a string"),
    ({"keys": ["meta"]}, "meta_keys", "name the headers that count"),
    ({"keys": ["meta"], "meta_keys": None}, "meta_keys", "name the headers that count"),
    ({"keys": ["meta"], "meta_keys": []}, "meta_keys", "Give at least one name"),
    ({"keys": ["type"], "meta_keys": ["tenant"]}, "meta_keys", "add 'meta' to keys"),
    ({"keys": ["meta"], "meta_keys": ["a", "a"]}, "meta_keys", "'a' is repeated"),
    ({"keys": ["args"], "args_keys": "user_id"}, "args_keys", "a list of strings"),
    ({"keys": ["args"], "args_keys": ["a", "a"]}, "args_keys", "'a' is repeated"),
    ({"keys": ["args"], "args_keys": []}, "args_keys", "keys=['type'] in a policy"),
    ({"keys": ["args"], "args_keys": [1]}, "args_keys", "every item is a string"),
    ({"args_keys": ["user_id"]}, "args_keys", "add 'args' to keys"),
    ({"period": 600}, "period", "such as 'PT10M'"),
    ({"period": timedelta(hours=1)}, "period", "such as 'PT10M'"),
    ({"period": "1h"}, "period", "such as 'PT10M'"),
    ({"period": "PT1.5H"}, "period", "such as 'PT10M'"),
    ({"period": "-PT1H"}, "period", "such as 'PT10M'"),
    ({"period": "PT0S"}, "period", "at least one millisecond"),
    ({"period": "P"}, "period", "such as 'PT10M'"),
    ({"states": "until_done"}, "states", "a list of strings"),
    ({"states": []}, "states", "Give at least one state"),
    ({"states": ["actve"]}, "states", "Did you mean 'active'?"),
    ({"states": ["Active"]}, "states", "Did you mean 'active'?"),
    ({"states": ["active", "active"]}, "states", "'active' is repeated"),
    ({"on_conflict": "rerun"}, "on_conflict", "Use 'reject', 'replace'"),
    (
        {"on_conflict": "rerun"},
        "on_conflict",
        "has no 'rerun': give unique_on_conflict='rerun' beside unique=",
    ),
    ({"on_conflict": "rejct"}, "on_conflict", "Did you mean 'reject'?"),
    ({"on_conflict": None}, "on_conflict", "Use 'reject', 'replace'"),
]


@pytest.mark.parametrize(("document", "field", "cure"), REFUSED, ids=[str(d) for d, *_ in REFUSED])
def test_from_ojs_refuses_and_names_the_field_and_the_cure(document, field, cure):
    with pytest.raises(InvalidPolicy) as raised:
        UniquePolicy.from_ojs(document)

    assert raised.value.field == field
    assert (field or "") in str(raised.value)
    assert cure in str(raised.value)
    assert raised.value.to_ojs()["error"]["code"] == "invalid_request"


@pytest.mark.parametrize("document", [None, 1, "type", ["type"], True, UniquePolicy])
def test_from_ojs_wants_a_mapping(document):
    with pytest.raises(InvalidPolicy, match=r"unique: .* is not a policy: give True, False"):
        UniquePolicy.from_ojs(document)


# -- What is warned about --------------------------------------------------------------------------


def test_a_document_without_keys_is_warned_about_once():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            UniquePolicy.from_ojs({"on_conflict": "ignore"})

    assert [warning.filename for warning in caught] == [__file__]
    assert str(caught[0].message) == (
        "unique={'on_conflict': 'ignore'} has no 'keys', and the Open Job Spec's default is "
        "['type']: calls with different arguments are duplicates of each other. "
        "Add 'keys': ['type', 'args'] to distinguish them, or 'keys': ['type'] if that is meant"
    )


def test_another_document_without_keys_is_warned_about_too():
    for on_conflict in ("ignore", "reject"):
        with pytest.warns(UniquePolicyWarning, match=on_conflict):
            UniquePolicy.from_ojs({"on_conflict": on_conflict})


def test_a_document_with_keys_is_not_warned_about():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        UniquePolicy.from_ojs({"keys": ["type"]})


def test_a_document_that_is_refused_is_not_warned_about():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(InvalidPolicy):
            UniquePolicy.from_ojs({"period": "1h"})
