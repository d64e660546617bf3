"""Keys: the readable text first, then the digest; test_key_vectors.py pins most of both."""

from __future__ import annotations

import enum
import functools
import hashlib
import hmac
import inspect
import pickle
import struct
import sys
from collections import OrderedDict, namedtuple
from datetime import time
from decimal import Decimal
from pathlib import PurePosixPath
from typing import Any
from uuid import UUID

import pytest
from kombu.utils.json import _encoders, register_type

from celery_unique.exceptions import UniqueKeyError
from celery_unique.keys.arguments import _MOST_KNOWN, _known
from celery_unique.keys.call import Call
from celery_unique.keys.canonical import MAX_DEPTH, canonical, wire_form
from celery_unique.keys.digest import key_of
from celery_unique.keys.identity import (
    arguments_fingerprint,
    canonical_text,
    idempotency_identity,
    identity,
)
from celery_unique.policy.policy import UniquePolicy
from tests.support.calls import DEFAULT, call_of, circular, nested, one, text_of


def rebuild(shop_id, full=False): ...


def collect(first, /, second=2, *rest, only=None, **extra): ...


def argument(value: Any) -> str:
    """The canonical text of one argument."""
    text = text_of(one, value)
    assert text.startswith('{"args":{"x":')
    assert text.endswith('},"type":"shop.task"}')
    return text.removeprefix('{"args":{"x":').removesuffix('},"type":"shop.task"}')


CARRIED = "Pass a header whose value JSON can carry"


# -- Dimensions ----------------------------------------------------------------------------------


def test_type_and_arguments_make_the_key_by_default():
    text = text_of(rebuild, 7, full=True)

    assert text == '{"args":{"full":true,"shop_id":7},"type":"shop.task"}'
    assert key_of(text) == "1:" + hashlib.sha256(text.encode()).hexdigest()


def test_identity_is_the_object_of_the_open_job_spec():
    call = Call(
        "email.send",
        kwargs={"user_id": 42, "template": "welcome", "locale": "en-US"},
        queue="notifications",
        meta={"tenant_id": "acme", "trace_id": "abc123"},
    )
    policy = UniquePolicy(keys=["type", "queue", "args"], args_keys=["user_id"])

    found = identity(call, policy)

    assert found == {"type": "email.send", "queue": "notifications", "args": {"user_id": 42}}
    assert canonical_text(found) == (
        '{"args":{"user_id":42},"queue":"notifications","type":"email.send"}'
    )


def test_queue_tells_calls_apart_only_where_it_is_a_dimension():
    fast = Call("shop.task", queue="fast")
    slow = Call("shop.task", queue="slow")
    by_queue = UniquePolicy(keys=["type", "queue"])

    assert identity(fast, DEFAULT) == identity(slow, DEFAULT)
    assert canonical_text(identity(fast, by_queue)) == '{"queue":"fast","type":"shop.task"}'
    assert identity(fast, by_queue) != identity(slow, by_queue)


def test_only_the_named_headers_are_in_meta():
    call = Call("shop.task", meta={"tenant_id": UUID(int=7), "trace_id": "abc123"})
    policy = UniquePolicy(keys=["type", "meta"], meta_keys=["tenant_id"])

    assert canonical_text(identity(call, policy)) == (
        '{"meta":{"tenant_id":{"__type__":"uuid","__value__":'
        '{"hex":"00000000000000000000000000000007"}}},"type":"shop.task"}'
    )


@pytest.mark.parametrize(
    ("meta", "reason", "cure"),
    [
        ({}, "unique_meta names the header 'tenant_id', which neither", "Pass it in headers="),
        (
            {"tenant_id": "\ud800"},
            "header 'tenant_id' holds a lone surrogate",
            CARRIED,
        ),
        (
            {"tenant_id": float("nan")},
            "header 'tenant_id' is NaN",
            CARRIED,
        ),
        (
            {"tenant_id": [float("inf")]},
            "header 'tenant_id' holds NaN",
            CARRIED,
        ),
        (
            {"tenant_id": object()},
            "header 'tenant_id' .*Object of type object",
            CARRIED,
        ),
        (
            {"tenant_id": [10**5000]},
            "header 'tenant_id' .*Exceeds the limit",
            CARRIED,
        ),
    ],
    ids=["missing", "surrogate", "nan", "infinity", "object", "digits"],
)
def test_a_header_without_a_text_is_named_with_a_cure_that_helps(meta, reason, cure):
    policy = UniquePolicy(keys=["type", "meta"], meta_keys=["tenant_id"])

    with pytest.raises(UniqueKeyError, match=f"^shop.task gets no unique key: {reason}") as caught:
        canonical_text(identity(Call("shop.task", meta=meta), policy))

    message = str(caught.value)
    assert cure in message
    assert "argument" not in message
    assert "unique_key=" not in message
    assert caught.value.argument == "tenant_id"


# -- Binding -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("function", "args", "kwargs", "message", "name"),
    [
        (rebuild, (), {}, "argument 'shop_id' is missing", "shop_id"),
        (rebuild, (1, 2, 3), {}, "takes 2 positional arguments, not 3", None),
        (rebuild, (1,), {"ful": True}, "no keyword parameter 'ful'", "ful"),
        (rebuild, (1,), {"shop_id": 1}, "'shop_id' is given by position and by name", "shop_id"),
        (rebuild, (1,), {2: True}, "a keyword is a string, not a int", None),
        (collect, (), {"first": 1}, "argument 'first' is missing", "first"),
        (lambda shop_id, /: ..., (), {"shop_id": 7}, "no keyword parameter 'shop_id'", "shop_id"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(function, args, kwargs, message, name):
    call = Call("shop.task", args, kwargs, inspect.signature(function))

    with pytest.raises(UniqueKeyError, match=message) as caught:
        identity(call, DEFAULT)

    assert caught.value.argument == name
    assert "shop.task" in str(caught.value)


class Name(enum.StrEnum):
    SHOP = "shop_id"

    def __str__(self):
        return "never this"


class Odd:
    """Equal to nothing: a comparison is a mistake."""

    __hash__ = None

    def __eq__(self, other):
        raise AssertionError("compared")

    def __json__(self):
        return [1]


UNSET = object()

TEXTS = {
    "a wrong argument beside the type alone": (
        call_of(rebuild, 7, nonsense=object()),
        UniquePolicy(keys=["type"]),
        '{"type":"shop.task"}',
    ),
    "a keyword of a subclass of str": (
        Call("shop.task", (), {Name.SHOP: 7}, inspect.signature(rebuild)),
        DEFAULT,
        '{"args":{"shop_id":7},"type":"shop.task"}',
    ),
    "an argument whose equality is odd": (
        call_of(lambda x=(1,): ..., Odd()),
        DEFAULT,
        '{"args":{},"type":"shop.task"}',
    ),
    "a default without wire form, given": (
        call_of(lambda x=UNSET: ..., UNSET),
        DEFAULT,
        '{"args":{},"type":"shop.task"}',
    ),
    "a default without wire form, left out": (
        call_of(lambda x=UNSET: ...),
        DEFAULT,
        '{"args":{},"type":"shop.task"}',
    ),
    "another value than a default without wire form": (
        call_of(lambda x=UNSET: ..., 1),
        DEFAULT,
        '{"args":{"x":1},"type":"shop.task"}',
    ),
    "rest and extra that are named, when empty": (
        call_of(collect, 1),
        UniquePolicy(args_keys=["rest", "extra"]),
        '{"args":{"extra":{},"rest":[]},"type":"shop.task"}',
    ),
    "a named parameter before an extra keyword of its name": (
        call_of(collect, 1, first=2),
        UniquePolicy(args_keys=["first"]),
        '{"args":{"first":1},"type":"shop.task"}',
    ),
    "unique_key of a value without wire form": (
        call_of(one, PurePosixPath("/srv/shop")),
        UniquePolicy(key="{x}"),
        '{"key":"/srv/shop","type":"shop.task"}',
    ),
    "unique_key of a string that looks like an address": (
        call_of(one, "crash at 0xdeadbeef"),
        UniquePolicy(key="{x}"),
        '{"key":"crash at 0xdeadbeef","type":"shop.task"}',
    ),
    "unique_key that shows a value and braces": (
        call_of(one, "a"),
        UniquePolicy(key="{{{x!r}}}"),
        '{"key":"{\'a\'}","type":"shop.task"}',
    ),
    "unique_key that returns an instance of a subclass of str": (
        call_of(rebuild, 7),
        UniquePolicy(key=lambda **_: Name.SHOP),
        '{"key":"shop_id","type":"shop.task"}',
    ),
    "unique_key that takes every argument": (
        call_of(collect, 1, 2, "a"),
        UniquePolicy(key=lambda **arguments: repr(arguments)),
        (
            "{\"key\":\"{'first': 1, 'second': 2, 'rest': ('a',), 'only': None, 'extra': {}}\","
            '"type":"shop.task"}'
        ),
    ),
    "unique_key beside every other dimension": (
        Call("t", (7,), {}, inspect.signature(rebuild), queue="fast", meta={"tenant": "acme"}),
        UniquePolicy(keys=["type", "queue", "args", "meta"], meta_keys=["tenant"], key="{shop_id}"),
        '{"key":"7","meta":{"tenant":"acme"},"queue":"fast","type":"t"}',
    ),
    "unique_key without parameters where there are no arguments": (
        call_of(lambda: ...),
        UniquePolicy(key=lambda: "x"),
        '{"key":"x","type":"shop.task"}',
    ),
    "unique_key for positional arguments of an unknown signature": (
        call_of(None, 7),
        UniquePolicy(key=lambda: "shop-7"),
        '{"key":"shop-7","type":"shop.task"}',
    ),
    "unique_key that changes the mapping it is passed": (
        call_of(rebuild, 7),
        UniquePolicy(key=lambda arguments: str(arguments.pop("shop_id"))),
        '{"key":"7","type":"shop.task"}',
    ),
}


@pytest.mark.parametrize(("call", "policy", "text"), TEXTS.values(), ids=TEXTS)
def test_a_call_has_one_text(call, policy, text):
    assert canonical_text(identity(call, policy)) == text
    assert canonical_text(identity(call, policy)) == text


def test_signatures_are_remembered_but_not_without_bound():
    for _ in range(_MOST_KNOWN + 10):
        text_of(one, 1)

    assert 0 < len(_known) <= _MOST_KNOWN


# -- Defaults ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("default", "given", "equal"),
    [
        (0, False, False),
        (False, 0, False),
        (0, -0.0, True),
        (1.0, 1, True),
        ("1", 1, False),
        (None, "", False),
        ([], {}, False),
        ((1, (2,)), [1, [2]], True),
        ("caf\u00e9", "cafe\u0301", True),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}, True),
        ({1: "a"}, {"1": "a"}, True),
        (Decimal("1.0"), Decimal("1.00"), False),
        (UUID(int=1), UUID(int=1), True),
        (2**60, float(2**60), False),
    ],
)
def test_a_default_is_compared_by_its_canonical_form(default, given, equal):
    def task(x=default): ...

    left_out = text_of(task) == text_of(task, given)

    assert left_out is equal


def test_a_default_that_the_body_changes_does_not_change_keys():
    def task(x=[]):  # noqa: B006
        x.append(1)

    signature = inspect.signature(task)
    before = canonical_text(identity(Call("t", ([],), {}, signature), DEFAULT))
    task()
    after = canonical_text(identity(Call("t", ([],), {}, signature), DEFAULT))

    assert before == after == '{"args":{},"type":"t"}'


def test_an_argument_without_text_beside_a_default_is_named():
    def task(x="a"): ...

    with pytest.raises(UniqueKeyError, match="argument 'x' holds a lone surrogate"):
        text_of(task, "\udc00")


# -- unique_on -----------------------------------------------------------------------------------


def test_named_arguments_are_in_even_as_defaults():
    policy = UniquePolicy(args_keys=["full"])

    assert text_of(rebuild, 7, policy=policy) == '{"args":{"full":false},"type":"shop.task"}'
    assert text_of(rebuild, 8, full=False, policy=policy) == text_of(rebuild, 7, policy=policy)


@pytest.mark.parametrize("function", [rebuild, collect, None])
def test_a_name_that_the_call_has_not_is_refused_with_the_nearest(function):
    policy = UniquePolicy(args_keys=["shopid"])
    kwargs = {"shop_id": 7} if function is not collect else {"shop_id": 7, "second": 1}
    args = (1,) if function is collect else ()

    with pytest.raises(UniqueKeyError, match=r"'shopid'.*Did you mean 'shop_id'\?") as caught:
        text_of(function, *args, policy=policy, **kwargs)

    assert caught.value.argument == "shopid"
    assert "Pass 'shopid' by name, or take it out of unique_on" in str(caught.value)


def test_a_name_like_none_of_the_arguments_is_refused_with_all_of_them():
    policy = UniquePolicy(args_keys=["zzz"])

    with pytest.raises(UniqueKeyError, match="the arguments are 'full', 'shop_id'"):
        text_of(rebuild, 7, policy=policy)
    with pytest.raises(UniqueKeyError, match="the arguments are none that has a name"):
        text_of(None, policy=policy)


# -- unique_key ----------------------------------------------------------------------------------


@pytest.mark.parametrize("made", [None, 7, b"7", ["7"]])
def test_unique_key_must_return_a_string(made):
    policy = UniquePolicy(key=lambda **_: made)

    with pytest.raises(UniqueKeyError, match="must return a string"):
        text_of(rebuild, 7, policy=policy)


def test_an_error_in_unique_key_is_the_cause():
    def unique_key(shop_id, full):
        raise LookupError("no such shop")

    with pytest.raises(UniqueKeyError, match="unique_key raised LookupError") as caught:
        text_of(rebuild, 7, policy=UniquePolicy(key=unique_key))

    assert isinstance(caught.value.__cause__, LookupError)
    assert "no such shop" not in str(caught.value)


class _Prefixed:
    """A callable that cannot be hashed."""

    __hash__ = None

    def __call__(self, shop_id, *, prefix="shop"):
        return f"{prefix}-{shop_id}"


@pytest.mark.parametrize(
    ("unique_key", "made"),
    [
        (lambda shop_id: f"{shop_id}", "7"),
        (lambda full, shop_id: f"{shop_id} {full}", "7 False"),
        (lambda shop_id, prefix="shop": f"{prefix}-{shop_id}", "shop-7"),
        (lambda *rest, shop_id: f"{shop_id} {rest}", "7 ()"),
        (lambda shop_id, **others: f"{shop_id} {others}", "7 {'full': False}"),
        (eval("lambda shop_id, /: f'{shop_id}'"), "7"),
        (
            eval("lambda shop_id, nothing=0, full=1, /, **others: f'{shop_id} {full} {others}'"),
            "7 1 {}",
        ),
        (functools.partial(lambda prefix, shop_id: f"{prefix}-{shop_id}", "p"), "p-7"),
        (_Prefixed(), "shop-7"),
        (_Prefixed().__call__, "shop-7"),
        # One parameter that is called so, or has no name for a caller: all of them.
        (lambda arguments: f"{arguments['shop_id']} {arguments['full']}", "7 False"),
        (lambda kwargs, full=True: f"{kwargs['shop_id']} {full}", "7 False"),
        (eval("lambda a, /, full=True: f'{a[\"shop_id\"]} {full}'"), "7 False"),
        (lambda *, arguments: f"{arguments}", "{'shop_id': 7, 'full': False}"),
        (eval("lambda arguments, /: f'{arguments}'"), "{'shop_id': 7, 'full': False}"),
        (repr, "{'shop_id': 7, 'full': False}"),
    ],
)
def test_a_callable_is_passed_the_arguments_that_it_names(unique_key, made):
    signature = inspect.signature(lambda shop_id, full=False: ...)
    call = Call("shop.task", (7,), {}, signature)

    found = identity(call, UniquePolicy(key=unique_key))["key"]

    assert found == made


def test_a_callable_sees_the_arguments_in_the_order_of_the_signature():
    def task(a, b=1, *, c): ...

    for unique_key in (repr, lambda **arguments: repr(arguments)):
        policy = UniquePolicy(key=unique_key)
        texts = {text_of(task, 1, b=1, c=3, policy=policy), text_of(task, c=3, a=1, policy=policy)}

        assert texts == {'{"key":"{\'a\': 1, \'b\': 1, \'c\': 3}","type":"shop.task"}'}


@pytest.mark.parametrize(
    ("unique_key", "argument", "message"),
    [
        (lambda shop, full: "x", "shop", r"'shop', but .* Did you mean 'shop_id'\? Write it with"),
        (lambda shop_id, day: "x", "day", "parameter 'day', .* give that parameter a default"),
        (lambda shop: "x", "shop", r"'shop', but .* Did you mean 'shop_id'\? .* 'arguments' and"),
        (lambda *, user: "x", "user", "parameter 'user', but the arguments are 'shop_id', 'full'"),
        (lambda shop, full=1: "x", "shop", "parameter 'shop', but the arguments are"),
        (lambda shop, **others: "x", "shop", "parameter 'shop', but the arguments are"),
        (lambda self, shop_id: "x", "self", "@staticmethod"),
        (lambda: "x", None, r"no parameter, .* same key\. Write .* unique_by='type'"),
        (lambda *rest: "x", None, "no parameter, .* same key"),
        (lambda shop=None: "x", "shop", r"only 'shop', .* Did you mean 'shop_id'\?"),
    ],
)
def test_a_callable_that_the_arguments_do_not_fit_is_told_so(unique_key, argument, message):
    with pytest.raises(UniqueKeyError, match=message) as caught:
        text_of(rebuild, 7, policy=UniquePolicy(key=unique_key))

    assert caught.value.argument == argument


def test_the_parameters_of_a_callable_are_looked_at_once(monkeypatch):
    policy = UniquePolicy(key=lambda shop_id: f"{shop_id}")
    first, second = call_of(rebuild, 7), call_of(rebuild, shop_id=8)
    assert identity(first, policy)["key"] == "7"
    monkeypatch.delattr("celery_unique.keys.unique_key.inspect.signature")

    assert identity(second, policy)["key"] == "8"


@pytest.mark.parametrize("unique_key", [lambda shop_id: "x", lambda arguments: "x"])
def test_without_the_code_a_callable_is_not_passed_a_mapping_of_some_arguments(unique_key):
    """Which ones are missing from it is not known, and neither is whether it wants a mapping."""
    with pytest.raises(UniqueKeyError, match=r"Pass '\w+' by name, or write it with \*\*arguments"):
        text_of(None, 7, policy=UniquePolicy(key=unique_key))


@pytest.mark.parametrize("key", [lambda **_: "x\ud800", "{shop_id}"])
def test_a_string_of_unique_key_without_a_text_is_at_fault_itself(key):
    with pytest.raises(UniqueKeyError) as caught:
        text_of(rebuild, "x\ud800", policy=UniquePolicy(key=key))

    assert str(caught.value) == (
        "shop.task gets no unique key: the string that unique_key returned holds a lone surrogate, "
        "which is no character. Change unique_key so that the string it returns can be encoded as "
        "UTF-8"
    )


class _Template:
    """A policy as far as keys look at it, for templates that UniquePolicy refuses itself."""

    keys = ("type", "args")
    args_keys = meta_keys = group = None

    def __init__(self, key: str) -> None:
        self.key = key


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{user.password}", "but the arguments are"),
        ("{user[password]}", "but the arguments are"),
        ("{user.__class__.__init__.__globals__}", "but the arguments are"),
        ("{}", "but the arguments are"),
        ("{0}", "but the arguments are"),
        ("{user name}", "but the arguments are"),
        ("{user:{width}}", "cannot show argument 'user'"),
        ("{user!x}", "cannot show argument 'user'"),
    ],
)
def test_a_format_string_reaches_into_nothing(template, message):
    def task(user, width=3): ...

    with pytest.raises(UniqueKeyError, match=message):
        text_of(task, "bob", policy=_Template(template))


def test_a_format_string_with_an_unknown_name_is_refused_with_the_nearest():
    with pytest.raises(UniqueKeyError, match=r"'shopid'.*Did you mean 'shop_id'\?") as caught:
        text_of(rebuild, 7, policy=UniquePolicy(key="{shopid}"))

    assert caught.value.argument == "shopid"


def test_a_value_that_cannot_be_formatted_is_named():
    with pytest.raises(UniqueKeyError, match="cannot show argument 'x'") as caught:
        text_of(one, "seven", policy=UniquePolicy(key="{x:05d}"))

    assert caught.value.argument == "x"


@pytest.mark.parametrize("value", [object(), [object()], lambda: None])
def test_a_value_shown_by_its_address_is_refused(value):
    with pytest.raises(UniqueKeyError, match=r"argument 'x'.*shown by its address"):
        text_of(one, value, policy=UniquePolicy(key="{x}"))


# -- A sender without the task's code ------------------------------------------------------------


def test_positional_arguments_are_refused_with_the_cure():
    cure = "Pass keyword arguments, or unique_key=, or import the task"

    with pytest.raises(UniqueKeyError, match=cure):
        text_of(None, 7)


def test_a_format_string_finds_keyword_arguments_without_the_code():
    policy = UniquePolicy(key="{shop_id}")

    assert text_of(None, shop_id=7, policy=policy) == text_of(rebuild, 7, policy=policy)
    with pytest.raises(
        UniqueKeyError, match=r"unique_key names 'shop_id'.* Pass 'shop_id' by name"
    ):
        text_of(None, 7, policy=policy)


def test_keywords_are_strings_without_the_code_too():
    with pytest.raises(UniqueKeyError, match="a keyword is a string"):
        identity(Call("shop.task", (), {1: 2}), DEFAULT)
    for key in ("{a}", lambda a: "x", lambda **_: "x"):
        with pytest.raises(UniqueKeyError, match="a keyword is a string"):
            identity(Call("shop.task", (), {1: 2}), UniquePolicy(key=key))


# -- Values --------------------------------------------------------------------------------------

Point = namedtuple("Point", "x y")


class Colour(enum.StrEnum):
    RED = "red"


class Level(enum.IntEnum):
    HIGH = 3


class Mixed(str, enum.Enum):  # noqa: UP042  they differ in what str() gives
    A = "a"


class Word(str):
    __slots__ = ()

    def __str__(self) -> str:
        return "never this"


class Money:
    def __init__(self, cents):
        self.cents = cents

    def __repr__(self):  # without an address: it names a test case in every process
        return f"Money({self.cents})"

    def __json__(self):
        return {"cents": self.cents}


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (1e-7, "1e-7"),
        ((1, "a"), '[1,"a"]'),
        (Point(1, 2), "[1,2]"),
        (OrderedDict(b=1, a=2), '{"a":2,"b":1}'),
        (Colour.RED, '"red"'),
        (Level.HIGH, "3"),
        (Mixed.A, '"a"'),
        ({Mixed.A: 1}, '{"a":1}'),
        (Word("word"), '"word"'),
        (Money(5), '{"cents":5}'),
        ([{"x": b"\xc3\xa9"}], '[{"x":{"__type__":"bytes","__value__":"\u00e9"}}]'),
        (b"\xff", '{"__type__":"base64","__value__":"/w=="}'),
        (time(1, 2, 3), '{"__type__":"time","__value__":"01:02:03"}'),
        ("\x00\b\t\n\f\r\x1f\x7f", '"\\u0000\\b\\t\\n\\f\\r\\u001f\x7f"'),
        ("\u2028<\u20ac\U0001f600", '"\u2028<\u20ac\U0001f600"'),
        (["\ud83d\ude00"], '["\U0001f600"]'),
    ],
    ids=repr,
)
def test_a_value_is_written_as_kombu_sends_it(value, text):
    assert argument(value) == text


@pytest.mark.parametrize(
    ("bits", "text"),
    [
        ("0000000000000000", "0"),
        ("8000000000000000", "0"),
        ("8000000000000001", "-5e-324"),
        ("ffefffffffffffff", "-1.7976931348623157e+308"),
        ("4340000000000000", "9007199254740992"),
        ("c340000000000000", "-9007199254740992"),
        ("4430000000000000", "295147905179352830000"),
        ("44b52d02c7e14af7", "1.0000000000000001e+23"),
        ("444b1ae4d6e2ef4e", "999999999999999700000"),
        ("444b1ae4d6e2ef50", "1e+21"),
        ("41b3de4355555553", "333333333.3333332"),
        ("41b3de4355555555", "333333333.3333333"),
        ("41b3de4355555556", "333333333.3333334"),
        ("41b3de4355555557", "333333333.33333343"),
    ],
)
def test_floats_are_the_samples_of_rfc_8785_appendix_b_that_no_vector_has(bits, text):
    (value,) = struct.unpack(">d", bytes.fromhex(bits))

    assert argument(value) == text


@pytest.mark.parametrize("value", [2**53 - 1, 2**53, 2**53 + 1, 2**64, -(2**63) - 1, 10**300])
def test_an_integer_of_any_size_is_its_digits(value):
    assert argument(value) == str(value)
    assert argument([value]) == f"[{value}]"


def test_what_a_user_registered_with_kombu_is_used():
    class Shop:
        pass

    register_type(Shop, "shop", lambda shop: 7)
    try:
        text = argument(Shop())
    finally:
        del _encoders[Shop]

    assert text == '{"__type__":"shop","__value__":7}'


# -- Values that have no key ---------------------------------------------------------------------


class Raises:
    def __json__(self):
        raise ZeroDivisionError("inside")


class Endless:
    def __json__(self):
        return [Endless()]


class Loud:
    @property
    def __json__(self):
        raise KeyError("loud")


class BadMessage:
    def __json__(self):
        raise ValueError(BadText())


class BadText:
    def __str__(self):
        raise RuntimeError

    __repr__ = __str__


NO_KEY = {
    "nan": (float("nan"), "argument 'full' is NaN or an infinity"),
    "infinity": (float("inf"), "argument 'full' is NaN or an infinity"),
    "nested minus infinity": ({"a": [float("-inf")]}, "argument 'full' holds NaN or an infinity"),
    "nan as a name": ({float("nan"): 1}, "argument 'full' holds NaN or an infinity"),
    "lone surrogate": ("\ud800", "lone surrogate"),
    "nested lone surrogate": ([{"a": "x\udfff"}], "lone surrogate"),
    "lone surrogate in a name": ({"\ud800": 1}, "lone surrogate"),
    "names equal under nfc": ({"\u00e9": 1, "e\u0301": 2}, "NFC"),
    "names equal in json": ({1: "a", "1": "b"}, "two object keys that are one key in JSON"),
    "null and none": ({None: "a", "null": "b"}, "two object keys that are one key in JSON"),
    "name without wire form": ({(1, 2): 3}, "keys must be str"),
    "set": ({1, 2}, "Object of type set"),
    "object": (object(), "Object of type object"),
    "class": (int, "Object of type type"),
    "function": (len, "Object of type builtin_function_or_method"),
    "generator": ((x for x in ()), "Object of type generator"),
    "complex": (1j, "Object of type complex"),
    "enum": (enum.Enum("E", "A").A, "Object of type E"),
    "circular": (circular(), "Circular reference"),
    "too deep": (nested(MAX_DEPTH + 1), f"nested deeper than {MAX_DEPTH} levels"),
    "much too deep": (nested(100_000), f"nested deeper than {MAX_DEPTH} levels"),
    "endless": (Endless(), "nested deeper|Circular"),
    "json raises": (Raises(), "ZeroDivisionError"),
    "attribute raises": (Loud(), "KeyError"),
    "message raises": (BadMessage(), "ValueError"),
    "more digits than python writes": (10**5000, "digits"),
    "nested too many digits": ([10**5000], "Exceeds the limit"),
}


@pytest.mark.parametrize(("value", "reason"), NO_KEY.values(), ids=NO_KEY)
def test_a_value_without_a_key_is_named_with_the_cure(value, reason):
    with pytest.raises(UniqueKeyError, match=reason) as caught:
        text_of(rebuild, 1, full=value)

    assert caught.value.argument == "full"
    assert str(caught.value).startswith("shop.task gets no unique key: argument 'full' ")
    assert "unique_key=" in str(caught.value)


def test_a_value_at_the_limit_of_depth_has_a_key():
    assert argument(nested(MAX_DEPTH)) == "[" * MAX_DEPTH + "]" * MAX_DEPTH


# On Python 3.11 the encoder finds no room in 100 frames and the writer none in 300; how many a
# level takes differs between versions.
@pytest.mark.parametrize("frames_left", [100, 300])
def test_a_caller_near_the_end_of_its_stack_gets_the_key_or_the_same_error(frames_left):
    def deeper(frames):
        return deeper(frames - 1) if frames else text_of(one, nested(MAX_DEPTH))

    left = sys.getrecursionlimit() - len(inspect.stack())
    try:
        outcome = deeper(left - frames_left)
    except UniqueKeyError as error:
        outcome = str(error)

    assert outcome == text_of(one, nested(MAX_DEPTH)) or "argument 'x' is nested" in outcome


def test_an_error_in_users_code_is_the_cause():
    with pytest.raises(UniqueKeyError) as caught:
        argument(Raises())

    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_an_error_pickles_and_shows_no_value():
    with pytest.raises(UniqueKeyError) as caught:
        text_of(rebuild, "hunter2", full={"token": "hunter3\ud800"})

    again = pickle.loads(pickle.dumps(caught.value))
    assert str(again) == str(caught.value)
    assert again.argument == "full"
    assert "hunter" not in repr(caught.value)
    assert caught.value.__cause__ is None


def test_canonical_text_refuses_what_is_not_plain():
    with pytest.raises(UniqueKeyError, match="argument 'x' has no JSON form"):
        canonical_text({"args": {"x": UUID(int=1)}, "type": "t"})
    with pytest.raises(UniqueKeyError, match="'args' has two object keys"):
        canonical_text({"args": {"\u00e9": 1, "e\u0301": 1}, "type": "t"})
    with pytest.raises(UniqueKeyError, match="the identity has two object keys"):
        canonical_text({"\u00e9": 1, "e\u0301": 1})


def test_canonical_and_wire_form_are_steps_of_the_same_way():
    assert canonical(wire_form((1, UUID(int=0)))) == argument((1, UUID(int=0)))


# -- Digest --------------------------------------------------------------------------------------


@pytest.mark.parametrize("secret", ["s\u00e9same", "s\u00e9same".encode()])
def test_a_secret_makes_it_an_hmac(secret):
    expected = hmac.new("s\u00e9same".encode(), b"{}", hashlib.sha256).hexdigest()

    assert key_of("{}", secret) == f"1:{expected}"


@pytest.mark.parametrize("secret", ["", b""])
def test_an_empty_secret_is_refused(secret):
    with pytest.raises(UniqueKeyError, match="empty"):
        key_of("{}", secret)


# -- Idempotency keys ----------------------------------------------------------------------------


def test_an_idempotency_key_stands_for_the_arguments():
    call = Call("pay", (1,), {}, None, idempotency_key="order-7")

    assert canonical_text(idempotency_identity(call)) == (
        '{"idempotency_key":"order-7","type":"pay"}'
    )
    assert canonical_text(idempotency_identity(call, scope="app")) == (
        '{"idempotency_key":"order-7"}'
    )


@pytest.mark.parametrize("key", [None, "", "x" * 256, 7, b"x", ["x"]])
def test_a_bad_idempotency_key_is_refused(key):
    with pytest.raises(UniqueKeyError, match="1 to 255 characters") as caught:
        idempotency_identity(Call("pay", idempotency_key=key))

    assert caught.value.argument == "idempotency_key"


def test_an_idempotency_key_without_a_text_is_refused_and_not_shown():
    call = Call("pay", idempotency_key="hunter2\ud800")

    with pytest.raises(UniqueKeyError, match="'idempotency_key' holds a lone") as caught:
        canonical_text(idempotency_identity(call))

    assert "hunter2" not in str(caught.value)
    assert str(caught.value).startswith("pay gets no unique key: ")
    assert "unique_key=" not in str(caught.value)


def test_another_scope_is_a_mistake():
    with pytest.raises(ValueError, match="scope is 'task', 'app' or 'run', not 'queue'"):
        idempotency_identity(Call("pay", idempotency_key="x"), scope="queue")


def test_a_fingerprint_is_a_digest_of_all_bound_arguments():
    expected = hashlib.sha256(b'{"args":{"shop_id":7}}').hexdigest()

    assert arguments_fingerprint(call_of(rebuild, 7)) == expected
    assert arguments_fingerprint(call_of(rebuild, shop_id=7, full=False)) == expected
    assert arguments_fingerprint(call_of(None, shop_id=7)) == expected
    assert arguments_fingerprint(call_of(rebuild, 8)) != expected
    assert arguments_fingerprint(call_of(rebuild, 7), secret="sesame") != expected


@pytest.mark.parametrize(
    "call",
    [
        Call("pay", (1,), idempotency_key="x"),
        Call("pay", kwargs={"x": object()}, idempotency_key="x"),
        Call("pay", kwargs={"x": "\ud800"}, idempotency_key="x"),
    ],
)
def test_unique_key_is_no_cure_beside_an_idempotency_key(call):
    with pytest.raises(UniqueKeyError) as caught:
        arguments_fingerprint(call)

    assert str(caught.value).startswith("pay gets no unique key: ")
    assert "Pass " in str(caught.value)
    assert "unique_key=" not in str(caught.value)


def test_making_keys_loads_no_celery():
    assert "celery" not in vars(sys.modules["celery_unique.keys.call"])
    assert "celery" not in vars(sys.modules["celery_unique.keys.digest"])
