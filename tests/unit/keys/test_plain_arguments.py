"""The short way to a canonical text gives the text of the long one, or nothing."""

from __future__ import annotations

import enum
import inspect
import os
import sys
from collections import OrderedDict
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any, NamedTuple

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from celery_unique.exceptions import UniqueKeyError
from celery_unique.keys.arguments import text_of_plain
from celery_unique.keys.call import Call
from celery_unique.keys.identity import canonical_text, identity, text_of
from celery_unique.policy.policy import UniquePolicy
from tests.support.calls import DEFAULT, call_of, circular, nested, one
from tests.vectors import generate

#: make test-fast tries fewer.
EXAMPLES = int(os.environ.get("CELERY_UNIQUE_EXAMPLES", "120"))
law = settings(max_examples=EXAMPLES // 2, deadline=None)


def some(first, second=2, *rest, third="c", fourth=None, **more): ...


# -- Values ---------------------------------------------------------------------------------------

ascii_texts = st.text(st.characters(max_codepoint=0x7F), max_size=8)
texts = st.one_of(
    ascii_texts,
    st.text(max_size=4),
    # Inside a string, what is looked for in numbers.
    st.sampled_from(
        ["[1.0]", ":1e5,", ',-0.0]"', '{"a":1.0}', "\\", '"', "\x7f", "\x00", "e\u0301"]
    ),
)
numbers = st.one_of(
    st.integers(),
    st.integers(-(2**70), 2**70),
    st.floats(allow_nan=False, allow_infinity=False),
    st.integers(-(2**54), 2**54).map(float),
    st.sampled_from(
        [
            *(0.0, -0.0, 1.0, -1.0, 0.5, 1e-4, 9.9e-5, 1e-6, 1e-7, 123456.75, 2.0**53),
            *(2.0**53 + 2, 9999999999999998.0, 1e16, 1.5e16, 1e20, 1e21, 1e22, 1e300, 5e-324),
        ]
    ),
)
scalars = st.one_of(st.none(), st.booleans(), numbers, texts)


def containers(items: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    lists = st.lists(items, max_size=5)
    objects = st.dictionaries(st.one_of(ascii_texts, texts), items, max_size=5)
    return st.one_of(lists, lists.map(tuple), objects)


values = st.recursive(scalars, containers, max_leaves=15)
#: Names that are no strings, as JSON writes them.
odd_names = st.one_of(st.integers(-20, 20), st.booleans(), st.none(), st.floats(-5, 5))


def agree(call: Call, policy: UniquePolicy = DEFAULT) -> bool:
    """Whether the short way had an answer; if so, it must be the other's."""
    short = text_of_plain(call, policy)
    try:
        long = canonical_text(identity(call, policy))
    except UniqueKeyError:
        assert short is None
        return False
    assert short is None or short == long
    assert text_of(call, policy) == long
    return short is not None


@law
@given(values)
@example([1.0, [2.5], {"a": -0.0}])
@example({"10": 1, "9": 2, "a": "[1.0]"})
def test_both_ways_agree_on_any_value(value):
    agree(call_of(one, value))


@law
@given(st.dictionaries(odd_names, scalars, max_size=4))
@example({2: "a", 10: "b"})
@example({1.0: "a"})
@example({True: 1, None: 2})
def test_names_that_are_no_strings_go_the_long_way(value):
    assert agree(call_of(one, value)) is (not value)
    assert agree(call_of(one, [{"deep": value}])) is (not value)


@law
@given(
    st.lists(values, min_size=1, max_size=4),
    st.dictionaries(st.sampled_from(["third", "fourth", "fifth", "a", "z"]), values, max_size=4),
)
def test_both_ways_agree_on_any_call(args, kwargs):
    agree(call_of(some, *args, **kwargs))


@law
@given(values, values)
def test_both_ways_leave_out_the_same_defaults(default, value):
    def task(x=default, *, y=default): ...

    agree(call_of(task, value))
    agree(call_of(task, value, y=default))
    agree(call_of(task, y=value))


@pytest.mark.parametrize("vector", generate.load(), ids=lambda vector: vector["name"])
def test_both_ways_agree_on_the_pinned_vectors(vector):
    call, policy = generate.call_of(vector), generate.policy_of(vector)

    if call.idempotency_key is None:
        agree(call, policy)


# -- What must take the short way: else it would not be there for anything ------------------------


@pytest.mark.parametrize(
    "value",
    [7, "abc", True, None, 2.5, [1, 2.5, "x", None], {"b": [1.0, {"a": -0.0}], "a": ()}, 2**80],
)
def test_plain_values_go_the_short_way(value):
    assert agree(call_of(one, value))


# -- What looks plain and is not ------------------------------------------------------------------


class Colour(enum.StrEnum):
    RED = "red"


class Point(NamedTuple):
    x: int
    y: int


@pytest.mark.parametrize(
    "value",
    [
        Colour.RED,
        [Colour.RED],
        {Colour.RED: 1},
        Point(1, 2),
        [Point(1, 2)],
        OrderedDict(b=1, a=2),
        enum.IntEnum("Size", ["S", "M"]).M,
        datetime(2026, 1, 2, tzinfo=UTC),
        [Decimal("1.50")],
        b"abc",
        "\u00e9",
        {"\u00e9": 1},
        1.0,
        1e22,
        nested(200),
    ],
)
def test_other_values_agree_too(value):
    agree(call_of(one, value))


@pytest.mark.parametrize(
    "value",
    [
        float("nan"),
        [float("inf")],
        {"a": object()},
        "\ud800",
        nested(201),
        {1: 1, "1": 2},
        10 ** (sys.get_int_max_str_digits() + 1),
        circular(),
    ],
    ids=["nan", "infinity", "object", "surrogate", "deep", "equal names", "digits", "circular"],
)
def test_what_has_no_key_is_left_to_the_long_way(value):
    call = call_of(one, value)

    assert text_of_plain(call, DEFAULT) is None
    with pytest.raises(UniqueKeyError):
        text_of(call, DEFAULT)


def test_a_call_that_does_not_fit_is_left_to_the_long_way():
    for call in (call_of(one), call_of(one, 1, 2), call_of(one, y=1), Call("shop.task", (1,))):
        assert text_of_plain(call, DEFAULT) is None


def test_other_policies_go_the_long_way():
    call = Call("shop.task", (1,), {}, inspect.signature(one), queue="mail")
    for policy in (
        UniquePolicy(keys=("type",)),
        UniquePolicy(keys=("type", "queue", "args")),
        UniquePolicy(args_keys=("x",)),
        UniquePolicy(key="{x}"),
    ):
        assert text_of_plain(call, policy) is None
