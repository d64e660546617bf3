"""Laws that hold for every call, tried on generated ones."""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import unicodedata
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from typing import Any

import pytest
import rfc8785
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st
from kombu.utils.json import dumps, loads

from celery_unique.exceptions import UniqueKeyError
from celery_unique.keys.arguments import CannotBind, parameters_of
from celery_unique.keys.call import Call
from celery_unique.keys.digest import key_of
from celery_unique.keys.identity import (
    arguments_fingerprint,
    canonical_text,
    idempotency_identity,
    identity,
)
from celery_unique.policy.policy import UniquePolicy
from tests.support.calls import DEFAULT, call_of, one, text_of

#: make test-fast tries fewer.
EXAMPLES = int(os.environ.get("CELERY_UNIQUE_EXAMPLES", "120"))

law = settings(
    max_examples=EXAMPLES,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)

SAFE = 2**53 - 1


def three(first, second, third): ...


# -- Values --------------------------------------------------------------------------------------


def nfc(value: Any) -> Any:
    return _mapped(value, lambda text: unicodedata.normalize("NFC", text))


def nfd(value: Any) -> Any:
    return _mapped(value, lambda text: unicodedata.normalize("NFD", text))


def _mapped(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, list):
        return [_mapped(item, change) for item in value]
    if isinstance(value, dict):
        return {change(name): _mapped(member, change) for name, member in value.items()}
    return value


def as_tuples(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(as_tuples(item) for item in value)
    if isinstance(value, dict):
        return {name: as_tuples(member) for name, member in value.items()}
    return value


def turned_round(value: Any) -> Any:
    if isinstance(value, list):
        return [turned_round(item) for item in value]
    if isinstance(value, dict):
        return {name: turned_round(value[name]) for name in reversed(value)}
    return value


def meaning(value: Any) -> Any:
    """What of a value the key must tell apart, said without canonical texts."""
    if isinstance(value, bool) or value is None:
        return ("constant", value)
    if isinstance(value, int):
        return ("number", Fraction(value))
    if isinstance(value, float):
        # Documented: a float beyond 2**53 is the number that its shortest digits say, and from
        # 1e21 on no integer at all.
        if abs(value) >= 1e21:
            return ("float", value)
        return ("number", Fraction(Decimal(repr(value))))
    if isinstance(value, str):
        return ("string", unicodedata.normalize("NFC", value))
    if isinstance(value, (list, tuple)):
        return ("array", tuple(meaning(item) for item in value))
    members = {unicodedata.normalize("NFC", k): meaning(v) for k, v in value.items()}
    return ("object", tuple(sorted(members.items(), key=lambda member: member[0])))


# Few letters, with marks that compose, so that NFC has something to do.
texts = st.one_of(
    st.text(st.characters(exclude_categories=["Cs"]), max_size=8),
    st.text("eaoE\u0301\u0308\u0327\u00e9\u1e9b\u0323\u212b\ufb33\U0001f600\uff21", max_size=6),
)
numbers = st.one_of(
    st.integers(),
    st.integers(-(2**70), 2**70),
    st.sampled_from([2**53 - 1, 2**53, 2**53 + 1, 2**63, 2**64, 10**21, 10**300]),
    st.floats(allow_nan=False, allow_infinity=False),
    st.sampled_from([0.0, -0.0, 1.0, 2.0**53, 2.0**60, 1e20, 1e21, 1e300, 5e-324]),
)
scalars = st.one_of(st.none(), st.booleans(), numbers, texts)
names = st.dictionaries(texts, st.none(), max_size=4).map(
    lambda found: list({unicodedata.normalize("NFC", name): name for name in found}.values())
)


def containers(items: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    objects = names.flatmap(lambda found: st.fixed_dictionaries(dict.fromkeys(found, items)))
    return st.one_of(st.lists(items, max_size=4), objects)


values = st.recursive(scalars, containers, max_leaves=12)


# -- What never changes the key ------------------------------------------------------------------


@law
@given(
    st.permutations(["first", "second", "third"]),
    st.integers(0, 3),
    st.tuples(values, values, values),
)
def test_position_name_and_order_never_change_the_key(order, split, arguments):
    names_of = dict(zip(("first", "second", "third"), arguments, strict=True))
    by_position = dict(list(names_of.items())[:split])

    named = {name: names_of[name] for name in order if name not in by_position}

    assert text_of(three, *by_position.values(), **named) == text_of(three, *arguments)


@law
@given(values, values)
def test_a_default_given_or_left_out_never_changes_the_key(default, other):
    def task(other, x=default, *, y=default): ...

    left_out = text_of(task, other)

    # A copy, for one that is the very same object is left out without a look at it.
    assert text_of(task, other, json.loads(json.dumps(default))) == left_out
    assert text_of(task, other, y=as_tuples(turned_round(default))) == left_out
    assert text_of(task, other, default, y=default) == left_out


@law
@given(values, values)
def test_only_an_argument_of_the_defaults_meaning_is_left_out(default, value):
    def task(x=default): ...

    left_out = text_of(task, value) == '{"args":{},"type":"shop.task"}'

    assert left_out is (meaning(value) == meaning(default))


@law
@given(values, st.sampled_from([as_tuples, nfd, nfc, turned_round]))
@example({"\u1e9b\u0323": "\u212b"}, nfd)
def test_the_form_of_a_value_never_changes_the_key_however_deep(value, change):
    assert text_of(one, change(value)) == text_of(one, value)


@law
@given(st.one_of(values, st.datetimes(), st.dates(), st.times(), st.uuids(), st.binary()))
def test_what_a_worker_decodes_has_the_same_key(value):
    assert text_of(one, loads(dumps(value))) == text_of(one, value)


@law
@given(values, st.booleans())
def test_a_sender_without_the_code_gives_the_same_key_by_keywords(value, full):
    def task(shop_id, full=None): ...

    unbound = Call("shop.task", (), {"full": full, "shop_id": value})

    assert canonical_text(identity(unbound, DEFAULT)) == text_of(task, value, full)


@law
@given(values)
def test_a_fingerprint_changes_with_the_arguments_and_never_with_their_form(value):
    signature = inspect.signature(one)

    found = arguments_fingerprint(Call("a", (value,), {}, signature, idempotency_key="1"))

    same = Call("b", (), {"x": as_tuples(nfd(value))}, signature, idempotency_key="2")
    assert found == arguments_fingerprint(same)
    assert found != arguments_fingerprint(Call("a", ([value],), {}, signature))


# -- What always changes it ----------------------------------------------------------------------


@law
@given(values, values)
def test_different_values_are_different_keys(first, second):
    same_key = key_of(text_of(one, first)) == key_of(text_of(one, second))

    assert same_key is (meaning(first) == meaning(second))


@law
@given(st.integers(-(2**200), 2**200), st.integers(1, 2**64))
@example(2**53, 1)
@example(2**63 - 1, 1)
@example(2**64 - 1, 1)
def test_different_integers_are_different_keys(number, distance):
    assert text_of(one, number) != text_of(one, number + distance)


@law
@given(
    *2 * [st.one_of(st.binary(max_size=6), texts.map(nfd).map(str.encode), texts.map(str.encode))]
)
@example("\u00e9".encode(), "e\u0301".encode())
def test_different_bytes_are_different_keys(first, second):
    assert (text_of(one, first) == text_of(one, second)) is (first == second)
    assert (text_of(one, [first]) == text_of(one, [second])) is (first == second)


@law
@given(values)
def test_a_value_is_neither_its_text_nor_a_list_of_it(value):
    found = text_of(one, value)

    assert found != text_of(one, [value])
    assert found != text_of(one, {"x": value})
    assert found != text_of(one, json.dumps(value)) or isinstance(value, str)


def test_the_kinds_of_nothing_and_of_one_are_all_different():
    kinds = [None, False, 0, "", [], {}, [[]], [{}], [None], {"": None}, True, 1, "1", [1], ["1"]]

    assert len({text_of(one, value) for value in kinds}) == len(kinds)


@law
@given(values, values)
def test_a_value_never_moves_from_one_argument_to_another(first, second):
    def task(a=0, b=0, *rest, **extra): ...

    assume(meaning(first) != meaning(second))

    assert text_of(task, first, second) != text_of(task, second, first)
    assert text_of(task, 0, 0, first) != text_of(task, 0, 0, c=first)
    assert text_of(task, 0, 0, first, second) != text_of(task, 0, 0, [first, second])


@law
@given(texts.filter(bool), texts.filter(bool))
def test_different_idempotency_keys_are_different_keys(first, second):
    a, b = (Call("pay", idempotency_key=key) for key in (first, second))
    equal = unicodedata.normalize("NFC", first) == unicodedata.normalize("NFC", second)

    for scope in ("task", "app"):
        found = [canonical_text(idempotency_identity(call, scope=scope)) for call in (a, b)]
        assert (found[0] == found[1]) is equal


# -- The form itself -----------------------------------------------------------------------------


small = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-SAFE, SAFE),
        st.floats(allow_nan=False, allow_infinity=False),
        texts,
    ),
    containers,
    max_leaves=12,
)


@law
@given(small)
def test_the_text_is_that_of_the_reference_library_wherever_it_has_one(value):
    found = identity(call_of(one, value), DEFAULT)

    assert canonical_text(found) == rfc8785.dumps(nfc(found)).decode()


@law
@given(st.floats(allow_nan=False, allow_infinity=False))
def test_a_float_is_read_back_exactly(number):
    text = canonical_text({"args": {"x": number}})

    assert json.loads(text, parse_int=float) == {"args": {"x": number}}


@law
@given(values)
def test_the_text_is_json_of_the_same_meaning(value):
    text = text_of(one, value)

    assert meaning(json.loads(text)["args"]["x"]) == meaning(value)


@law
@given(texts, st.one_of(st.none(), texts.filter(bool), st.binary(min_size=1)))
def test_a_key_has_one_shape(text, secret):
    key = key_of(text, secret)

    version, _, digest = key.partition(":")
    assert version == "1"
    assert len(digest) == 64
    assert set(digest) <= set("0123456789abcdef")


# -- Binding -------------------------------------------------------------------------------------

letters = st.sampled_from("abcdef")


@st.composite
def functions(draw: st.DrawFn) -> Callable[..., Any]:
    """A function of any shape that returns what its body sees."""
    found = draw(st.lists(letters, unique=True, max_size=5))
    kinds = sorted(draw(st.lists(st.integers(0, 2), min_size=len(found), max_size=len(found))))
    groups: list[list[str]] = [[], [], []]
    with_default = False
    for name, kind in zip(found, kinds, strict=True):
        optional = draw(st.booleans())
        if kind < 2:
            # Python wants every positional parameter after one with a default to have one.
            with_default = optional = with_default or optional
        groups[kind].append(f"{name}=None" if optional else name)
    alone, either, keyword = groups
    rest = draw(st.booleans())
    parts = [*alone, *(["/"] if alone else []), *either]
    parts += ["*rest"] if rest else ["*"] if keyword else []
    parts += [*keyword, *(["**extra"] if draw(st.booleans()) else [])]
    scope: dict[str, Any] = {}
    exec(f"def task({', '.join(parts)}): return locals()", scope)
    return scope["task"]


@settings(law, max_examples=EXAMPLES * 5 // 2)
@given(
    functions(),
    st.lists(st.integers(), max_size=6).map(tuple),
    st.dictionaries(letters, st.integers(), max_size=4),
)
def test_arguments_are_bound_as_python_binds_them(function, args, kwargs):
    parameters = parameters_of(inspect.signature(function))
    try:
        seen = function(*args, **kwargs)
    except TypeError:
        with pytest.raises(CannotBind):
            parameters.bind(args, kwargs)
        return

    bound = parameters.bind(args, kwargs)

    assert parameters.complete(bound) == seen
    assert all(bound.get(name, True) for name in ("rest", "extra"))


# -- Anything at all -----------------------------------------------------------------------------


class Odd:
    """An object that behaves as badly as an object can."""

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, made: Any) -> None:
        self.made = made

    def __json__(self) -> Any:
        if isinstance(self.made, BaseException):
            raise self.made
        return self.made

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("never compare")

    def __repr__(self) -> str:
        raise RuntimeError("never show")

    __str__ = __bool__ = __repr__  # type: ignore[assignment]

    def __format__(self, spec: str) -> str:
        raise RuntimeError("never format")


class OddDict(dict[Any, Any]):
    def items(self) -> Any:
        return [("a", 1), ("a", 2), (3, object())]


@dataclass(frozen=True)
class Plain:
    x: int = 0


anything = st.recursive(
    st.one_of(
        scalars,
        st.floats(),
        st.text(),
        st.text(st.characters(categories=["Cs"]), max_size=3),
        st.binary(),
        st.complex_numbers(),
        st.decimals(),
        st.fractions(),
        st.datetimes(timezones=st.none() | st.timezones()),
        st.timedeltas(),
        st.uuids(),
        st.ip_addresses(),
        st.functions(),
        st.builds(object),
        st.builds(Plain),
        st.builds(OddDict),
        st.builds(bytearray),
        st.sampled_from([int, Odd, ..., NotImplemented, OSError("x"), range(3)]),
        st.just(5000).map(lambda digits: 10**digits),
        st.sampled_from([KeyError("k"), RecursionError(), MemoryError(), None, 1.5]).map(Odd),
    ),
    lambda items: st.one_of(
        st.lists(items, max_size=4),
        st.lists(items, max_size=4).map(tuple),
        st.dictionaries(
            st.one_of(st.text(), st.integers(), st.booleans(), st.none(), st.floats(), st.binary()),
            items,
            max_size=4,
        ),
        st.frozensets(st.integers(), max_size=3),
        items.map(Odd),
    ),
    max_leaves=8,
)


@settings(law, max_examples=EXAMPLES * 5 // 2)
@given(anything, anything, st.sampled_from([DEFAULT, UniquePolicy(args_keys=["y", "x"])]))
def test_a_call_has_a_key_or_a_unique_key_error_whatever_its_arguments(first, second, policy):
    def task(x, y=second, *rest, **extra): ...

    call = Call("shop.task", (first, second, first), {"z": second}, inspect.signature(task))

    _key_or_error(lambda: key_of(canonical_text(identity(call, policy))))
    _key_or_error(lambda: arguments_fingerprint(call))


@law
@given(anything, st.sampled_from(["{x}", "{x!r}", "{x:>10}", "{x:%Y}", "{x:d}", "{x!s:.3}"]))
def test_a_format_string_makes_a_key_or_a_unique_key_error(value, template):
    call = call_of(one, value)

    _key_or_error(lambda: key_of(canonical_text(identity(call, UniquePolicy(key=template)))))


@law
@given(anything)
def test_whatever_unique_key_returns_or_raises_is_a_key_or_a_unique_key_error(made):
    def unique_key(x):
        if isinstance(made, Exception):
            raise made
        return made

    call = call_of(one, 1)

    _key_or_error(lambda: key_of(canonical_text(identity(call, UniquePolicy(key=unique_key)))))


@law
@given(
    st.lists(anything, max_size=3).map(tuple),
    st.dictionaries(st.one_of(st.text(), st.integers()), anything, max_size=3),
    st.sampled_from([None, inspect.signature(one), inspect.signature(three)]),
)
def test_a_call_that_does_not_fit_is_a_unique_key_error(args, kwargs, signature):
    call = Call("shop.task", args, kwargs, signature)

    _key_or_error(lambda: key_of(canonical_text(identity(call, DEFAULT))))


def _key_or_error(make: Callable[[], str]) -> None:
    with contextlib.suppress(UniqueKeyError):
        assert make()
