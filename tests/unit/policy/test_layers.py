"""Options of tasks and calls: their names, and how layers become one policy."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from celery_unique.exceptions import InvalidPolicy
from celery_unique.policy import policy as policy_module
from celery_unique.policy.layers import PolicyLayers, take_call_options
from celery_unique.policy.option_names import (
    CALL_ONLY,
    OPTION_FIELDS,
    TASK_OPTIONS,
    check_names,
    check_near_names,
)
from celery_unique.policy.policy import UniquePolicy
from celery_unique.policy.states import LIVE, STATES


def resolve(layers, *, defaults=None):
    """The policy of these layers, the highest first; None if it is not unique."""
    return PolicyLayers(layers, defaults=defaults).policy


def override(policy, call_options):
    """The policy with the fields that a call gives; None for ``unique=False``."""
    return PolicyLayers([{"unique": policy}]).for_call(call_options)


MINUTE = timedelta(minutes=1)
HOUR = timedelta(hours=1)


def test_the_options_and_the_fields_they_set():
    expected = {
        "unique_for": "period",
        "unique_on": "args_keys",
        "unique_by": "keys",
        "unique_meta": "meta_keys",
        "unique_key": "key",
        "unique_states": "states",
        "unique_on_conflict": "on_conflict",
        "unique_max_wait": "max_wait",
        "identity_strategy": "identity_strategy",
        "unique_label": "label",
        "unique_limit": "limit",
        "unique_max_queue": "max_queue",
        "unique_group": "group",
        "unique_merge": "merge",
        "unique_merge_max_bytes": "merge_max_bytes",
    }

    assert expected == OPTION_FIELDS
    assert {"unique", *expected} == TASK_OPTIONS
    assert {"idempotency_key", "idempotency_scope", "idempotency_ttl"} == CALL_ONLY


# -- Taking them out of a call ---------------------------------------------------------------------


OTHERS = ["unit", "user_id", "union", "until", "id", "identity", "timeout"]
TAKEN: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    # options, those taken out, those left
    "ours and others": (
        {"queue": "slow", "unique_for": 60, "idempotency_key": "k", "headers": {"unique": 1}},
        {"unique_for": 60, "idempotency_key": "k"},
        {"queue": "slow", "headers": {"unique": 1}},
    ),
    "every one of ours": (dict.fromkeys(TASK_OPTIONS), dict.fromkeys(TASK_OPTIONS), {}),
    "none of ours": ({"countdown": 3}, {}, {"countdown": 3}),
    "names like ours": (dict.fromkeys(OTHERS, "x"), {}, dict.fromkeys(OTHERS, "x")),
    "a stamp of any name": (
        {"unite": "x", "stamped_headers": ["unite"]},
        {},
        {"unite": "x", "stamped_headers": ["unite"]},
    ),
    "a time to live, which is parsed": (
        {"idempotency_key": "k", "idempotency_ttl": "PT1H"},
        {"idempotency_key": "k", "idempotency_ttl": HOUR},
        {},
    ),
    "no idempotency key": (
        {"idempotency_key": None, "idempotency_ttl": None, "unique_for": None},
        {"unique_for": None},
        {},
    ),
}


@pytest.mark.parametrize(("options", "taken", "left"), TAKEN.values(), ids=TAKEN)
def test_our_options_are_taken_out_and_the_others_stay(options, taken, left):
    given = dict(options)

    assert take_call_options(given) == taken
    assert given == left


@pytest.mark.parametrize(
    ("options", "field", "cure"),
    [
        ({"unique_fro": 60}, "unique_fro", "Did you mean 'unique_for'?"),
        ({"unique_period": 60}, "unique_period", "Did you mean 'unique_for'?"),
        ({"unique_args_keys": "a"}, "unique_args_keys", "Did you mean 'unique_on'?"),
        ({"unique_state": "window"}, "unique_state", "Did you mean 'unique_states'?"),
        ({"uniqe": True}, "uniqe", "Did you mean 'unique'?"),
        ({"unqiue": False}, "unqiue", "Did you mean 'unique'?"),
        ({"uinque": False}, "uinque", "Did you mean 'unique'?"),
        ({"unqiue_for": False}, "unqiue_for", "Did you mean 'unique_for'?"),
        ({"unique_nonsense": 1}, "unique_nonsense", "Use 'idempotency_key'"),
        ({"idempotency_keys": "k"}, "idempotency_keys", "Did you mean 'idempotency_key'?"),
        ({"idempotent_key": "k"}, "idempotent_key", "Did you mean 'idempotency_key'?"),
        ({"identity_stratgy": "strict"}, "identity_stratgy", "Did you mean 'identity_strategy'?"),
        ({"idempotency_ttl": 60}, "idempotency_ttl", "give both"),
        ({"idempotency_scope": "run"}, "idempotency_scope", "give both"),
        (
            {"idempotency_scope": "runs", "idempotency_key": "k"},
            "idempotency_scope",
            "Did you mean 'run'?",
        ),
        (
            {"idempotency_scope": ["run"], "idempotency_key": "k"},
            "idempotency_scope",
            "'task', 'app' or 'run'",
        ),
        ({"idempotency_ttl": "x", "idempotency_key": "k"}, "idempotency_ttl", "ISO 8601"),
        ({"idempotency_ttl": 0, "idempotency_key": "k"}, "idempotency_ttl", "one millisecond"),
    ],
)
def test_a_wrong_call_option_is_refused(options, field, cure):
    with pytest.raises(InvalidPolicy) as raised:
        take_call_options({"queue": "slow", **options})

    assert raised.value.field == field
    assert field in str(raised.value)
    assert cure in str(raised.value)


MEANT = {
    "unique_max_w": "'unique_max_wait'",
    "unique_lane": "'unique_group'",
    "unique_concurrency": "'unique_limit'",
    "unique_f": "'unique_for'",
    "unique_s": "'unique_states'",
    "unique_o": "'unique_on'",
    "unique_on_args": "'unique_on'",
    "unique_args": "'unique_on'",
    "unique_kwargs": "'unique_on'",
    "unique_window": "'unique_for'",
    "unique_ttl": "'unique_for'",
    "unique_timeout": "'unique_for'",
    "unique_expires": "'unique_for'",
    "unique_headers": "'unique_meta'",
    "unique_keys": "'unique_by'",
    "unique_strategy": "'unique_on_conflict' or 'identity_strategy'",
    "unique_default_for": "'unique_for'",
    "unique_default_period": "'unique_for'",
}
MEANT_OF_A_KEY = {
    "idempotency_expires": "idempotency_ttl",
    "idempotency_timeout": "idempotency_ttl",
    "idempotency_token": "idempotency_key",
    "idempotencykey": "idempotency_key",
}


@pytest.mark.parametrize(("name", "meant"), MEANT.items())
@pytest.mark.parametrize("where", ["call", "task"])
def test_what_was_meant_by_another_word_is_named(name, meant, where):
    with pytest.raises(InvalidPolicy) as raised:
        check_names([name], where)

    assert f"{name} ({where}) is not an option. Did you mean {meant}? Use" in str(raised.value)


@pytest.mark.parametrize(("name", "meant"), MEANT_OF_A_KEY.items())
def test_what_was_meant_of_a_key_is_named_and_belongs_to_the_call(name, meant):
    with pytest.raises(InvalidPolicy, match=rf"\(call\) .* Did you mean '{meant}'\? Use"):
        check_names([name], "call")
    with pytest.raises(InvalidPolicy, match=rf"'{meant}'\? It is for one call: .*{meant}="):
        check_near_names([name], "task")


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("uniqe", "unique"),
        ("uniq", "unique"),
        ("unqiue", "unique"),
        ("Unique", "unique"),
        ("uniques", "unique"),
        ("uniqe_for", "unique_for"),
        ("uniq_on_conflict", "unique_on_conflict"),
        ("uniquefor", "unique_for"),
        ("identity_stratgy", "identity_strategy"),
        ("identitystrategy", "identity_strategy"),
        ("unique_fro", "unique_for"),
    ],
)
def test_a_near_miss_in_a_decorator_is_refused(name, meant):
    with pytest.raises(InvalidPolicy, match=rf"{name} \(task\) .* Did you mean '{meant}'\?"):
        check_near_names([name], "task")


def test_options_and_those_of_others_are_no_near_misses() -> None:
    theirs = ["uniqueness", "unit", "union", "until", "unlock", "idempotent", "identity", "id"]
    others = ["identity_map", "identity_source", "identity_store", "idle", "uid", "queue", "once"]

    check_near_names([*TASK_OPTIONS, *theirs, *others, "ignore_result", "lock_expiry"], "task")
    check_names(["uniq", "uniqueness", "identity_map", "identity_s", *TASK_OPTIONS], "task")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        *(
            (name, f"{name} was given in the task shop.pay.*apply_async")
            for name in sorted(CALL_ONLY)
        ),
        ("unique_fr", r"unique_fr \(task shop.pay\) .* 'unique_for'\?"),
    ],
)
def test_an_option_that_a_task_has_not_is_refused(name, message):
    with pytest.raises(InvalidPolicy, match=message):
        check_names(["rate_limit", name], "task shop.pay")


# -- One layer -------------------------------------------------------------------------------------


WINDOW = UniquePolicy(period=60, states="window")
REJECTING = UniquePolicy(period=60, on_conflict="reject")
OF_TASK = {"unique": True, "unique_for": 60, "unique_on": "a", "unique_on_conflict": "reject"}

#: What the layers say, highest first, and the policy that comes of it.
RESOLVED: dict[str, tuple[list[dict[str, Any]], UniquePolicy | None]] = {
    "no layer": ([], None),
    "an empty layer": ([{}], None),
    "unique is None": ([{"unique": None}], None),
    "unique is False": ([{"unique": False}], None),
    "options of others alone": ([{"queue": "x"}], None),
    "unique is True": ([{"unique": True}], UniquePolicy()),
    "every option sets its field": (
        [
            {
                "unique": True,
                "unique_for": "PT1M",
                "unique_on": "shop_id",
                "unique_by": ["queue", "args", "meta"],
                "unique_meta": "tenant",
                "unique_states": "window",
                "unique_on_conflict": "replace",
                "unique_max_wait": "PT1H",
                "identity_strategy": "always_unique",
            }
        ],
        UniquePolicy(
            period=MINUTE,
            args_keys=("shop_id",),
            keys=("type", "queue", "args", "meta"),
            meta_keys=("tenant",),
            states=STATES,
            on_conflict="replace",
            max_wait=HOUR,
            identity_strategy="always_unique",
        ),
    ),
    "a policy": ([{"unique": REJECTING}], REJECTING),
    "a mapping": ([{"unique": {"keys": ["type", "args"], "period": "PT1M"}}], REJECTING),
    "an option beside a policy": (
        [{"unique": REJECTING, "unique_for": "PT1H"}],
        UniquePolicy(period=HOUR, on_conflict="reject"),
    ),
    "an option beside a mapping": (
        [{"unique": {"keys": ["type"]}, "unique_on_conflict": "rerun"}],
        UniquePolicy(keys="type", on_conflict="rerun"),
    ),
    "an option that clashes with the policy beside it": (
        [{"unique": UniquePolicy(args_keys="a"), "unique_key": "{b}"}],
        UniquePolicy(key="{b}"),
    ),
    "an option that clashes with the mapping beside it": (
        [{"unique": {"keys": ["type"]}, "unique_on": "a"}],
        UniquePolicy(args_keys="a", on_conflict="reject"),
    ),
    "an option above a policy": (
        [{"unique_for": 1}, {"unique": WINDOW}],
        UniquePolicy(period=1, states="window"),
    ),
    "True above a policy": ([{"unique": True}, {"unique": WINDOW}], WINDOW),
    "True above False above a policy": (
        [{"unique": True}, {"unique": False}, {"unique": WINDOW}],
        WINDOW,
    ),
    "True above False and its options": (
        [{"unique": True}, {"unique": False, "unique_for": 60}],
        UniquePolicy(period=60),
    ),
    "True above an option": ([{"unique": True}, {"unique_for": 60}], UniquePolicy(period=60)),
    "False above True": ([{"unique": False}, {"unique": True, "unique_for": 60}], None),
    "False beside an option": ([{"unique": False, "unique_for": 60}], None),
    "False above an option": ([{"unique": False}, {"unique_for": 60}], None),
    "a policy hides what is below it": ([{"unique": UniquePolicy()}, OF_TASK], UniquePolicy()),
    "options that are None": ([{"unique_for": None}, {"unique_on": None}], None),
    "None is the library's default": ([dict.fromkeys(OPTION_FIELDS), OF_TASK], UniquePolicy()),
}
#: The same above the defaults of an app.
ABOVE_DEFAULTS: dict[str, tuple[list[dict[str, Any]], dict[str, Any], UniquePolicy | None]] = {
    "the highest layer that gives a field": (
        [
            {"unique_for": 1},
            {"unique": True, "unique_for": 2, "unique_on_conflict": "reject"},
            {"unique_for": 3, "unique_on_conflict": "replace", "unique_states": "window"},
        ],
        {"unique_for": 4, "unique_states": "until_start", "identity_strategy": "always_unique"},
        UniquePolicy(
            period=1, on_conflict="reject", states="window", identity_strategy="always_unique"
        ),
    ),
    "a policy": (
        [{"unique": UniquePolicy()}],
        {"unique_states": "window", "unique_on_conflict": "reject"},
        UniquePolicy(),
    ),
    "a mapping": (
        [{"unique": {"keys": ["type"]}}, {"unique": True, "unique_for": 60}],
        {"unique_on_conflict": "ignore"},
        UniquePolicy(keys="type", on_conflict="reject"),
    ),
    "None": ([dict.fromkeys(OPTION_FIELDS), OF_TASK], {"unique_for": 5}, UniquePolicy()),
    "nothing": ([{}], {"unique_for": 60, "unique_on_conflict": "reject"}, None),
    "unique is True": (
        [{"unique": True}],
        {"unique_for": 60, "unique_on_conflict": "reject"},
        REJECTING,
    ),
}


@pytest.mark.parametrize(("layers", "policy"), RESOLVED.values(), ids=RESOLVED)
def test_layers_make_one_policy(layers, policy):
    assert resolve(layers) == policy


@pytest.mark.parametrize(
    ("layers", "defaults", "policy"), ABOVE_DEFAULTS.values(), ids=ABOVE_DEFAULTS
)
def test_layers_above_the_defaults_of_an_app_make_one_policy(layers, defaults, policy):
    assert resolve(layers, defaults=defaults) == policy


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ([{"unique": False, "unique_for": "10m"}], "unique_for"),
        ([{"unique": True, "unique_for": "10m"}], "unique_for"),
        ([{"unique": False, "unique_on": "a", "unique_key": "{a}"}], "clashes"),
        (
            [{"unique_for": 60}, {"unique": False}],
            "unique_for=60 .* unique is False: add unique=True",
        ),
        (
            [{"unique_max_wait": 60}, {"unique": True, "unique_on_conflict": "reject"}],
            "unique_max_wait",
        ),
    ],
)
def test_layers_that_are_wrong_are_refused_before_any_call(layers, message):
    with pytest.raises(InvalidPolicy, match=message):
        PolicyLayers(layers)


@pytest.mark.parametrize("wrong", [1, 0, "yes", "", ["type"], UniquePolicy, object()])
def test_unique_is_true_false_a_policy_or_a_mapping(wrong):
    with pytest.raises(
        InvalidPolicy, match=r"unique: .* is not a policy: give True, False"
    ) as raised:
        resolve([{"unique": wrong}])

    assert raised.value.field == "unique"


# -- Several layers --------------------------------------------------------------------------------


@pytest.mark.parametrize("option", sorted(OPTION_FIELDS))
def test_an_option_where_unique_is_set_nowhere_is_refused(option):
    values = {"unique_max_wait": 60, "unique_for": 60, "unique_key": "{a}"}
    values |= {"unique_limit": 2, "unique_max_queue": 2, "unique_merge_max_bytes": 60}
    choices = {"unique_states": "window", "unique_on_conflict": "reject", "unique_by": "args"}
    value = {**values, **choices, "identity_strategy": "strict"}.get(option, "name")

    with pytest.raises(InvalidPolicy, match=f"{option}=.* unique is set nowhere: add unique=True"):
        resolve([{}, {option: value}])


# -- Fields that depend on each other --------------------------------------------------------------

DEPENDENT = [
    # above, below, expected
    ({"unique_on": "a"}, {"unique_by": "queue"}, {"keys": ("queue", "args"), "args_keys": "a"}),
    ({"unique_key": "{a}"}, {"unique_by": "queue"}, {"keys": ("queue", "args"), "key": "{a}"}),
    ({"unique_key": "{a}"}, {"unique_on": "a"}, {"key": "{a}"}),
    ({"unique_on": "a"}, {"unique_key": "{a}"}, {"args_keys": "a"}),
    ({"unique_by": "type"}, {"unique_on": "a"}, {"keys": "type"}),
    ({"unique_by": "type"}, {"unique_key": "{a}"}, {"keys": "type"}),
    ({"unique_by": "args"}, {"unique_on": "a"}, {"args_keys": "a"}),
    ({"unique_meta": "t"}, {}, {"keys": ("args", "meta"), "meta_keys": "t"}),
    ({"unique_meta": "t"}, {"unique_by": "type"}, {"keys": "meta", "meta_keys": "t"}),
    ({"unique_by": "args"}, {"unique_meta": "t"}, {}),
    ({"unique_meta": None}, {"unique_meta": "t"}, {}),
    ({"unique_meta": "u"}, {"unique_meta": "t"}, {"keys": ("args", "meta"), "meta_keys": "u"}),
    ({"unique_by": ["meta"]}, {"unique_meta": "t"}, {"keys": "meta", "meta_keys": "t"}),
    (
        {"unique_on_conflict": "ignore"},
        {"unique_on_conflict": "replace", "unique_max_wait": 60},
        {"on_conflict": "ignore"},
    ),
    (
        {"unique_on_conflict": "replace_except_schedule"},
        {"unique_on_conflict": "replace", "unique_max_wait": 60},
        {"on_conflict": "replace_except_schedule", "max_wait": 60},
    ),
]


@pytest.mark.parametrize(("above", "below", "expected"), DEPENDENT)
def test_a_field_from_below_gives_way(above, below, expected):
    policy = UniquePolicy(**expected)

    assert resolve([above, {"unique": True, **below}]) == policy
    assert resolve([{"unique": True, **above}], defaults=below) == policy


CLASHES = [
    ({"unique_on": "a", "unique_key": "{a}"}, "give only one of them"),
    ({"unique_on": "a", "unique_by": "type"}, "add 'args' to keys"),
    ({"unique_key": "{a}", "unique_by": "type"}, "add 'args' to keys"),
    ({"unique_meta": "t", "unique_by": "args"}, "add 'meta' to keys"),
    ({"unique_by": "meta"}, "name the headers"),
    ({"unique_max_wait": 60}, "'replace', 'replace_except_schedule' or 'merge'"),
    ({"unique_max_wait": 60, "unique_on_conflict": "reject"}, "'replace', "),
]


@pytest.mark.parametrize(("options", "cure"), CLASHES)
def test_two_that_clash_in_one_layer_are_refused(options, cure):
    for layers in ([{"unique": True, **options}], [options, {"unique": True}]):
        with pytest.raises(InvalidPolicy, match="clashes") as raised:
            resolve(layers)

        assert cure in str(raised.value)


def test_a_wait_of_the_app_is_for_the_tasks_that_replace():
    defaults = {"unique_max_wait": 60}

    layers = PolicyLayers([{"unique": True}], defaults=defaults)

    assert layers.policy == UniquePolicy()
    assert layers.for_call({"unique_on_conflict": "replace"}) == UniquePolicy(
        on_conflict="replace", max_wait=60
    )
    assert layers.for_call(
        {"unique_on_conflict": "replace", "unique_max_wait": None}
    ) == UniquePolicy(on_conflict="replace")


# -- Calls above resolved layers -------------------------------------------------------------------


def test_a_call_without_options_of_the_policy_gets_the_same_object():
    layers = PolicyLayers([{"unique": True}])

    assert layers.for_call({}) is layers.policy
    assert layers.for_call({"idempotency_key": "k", "idempotency_ttl": HOUR}) is layers.policy


def test_a_call_leaves_the_layers_as_they_are():
    layers = PolicyLayers([{"unique": True, "unique_on": "a"}])

    layers.for_call({"unique_key": "{b}", "unique_by": ["args", "queue"]})

    assert layers.for_call({"unique_for": 60}) == UniquePolicy(args_keys="a", period=60)


def test_override_replaces_single_fields_of_a_policy():
    policy = UniquePolicy(period=60, on_conflict="reject")

    assert override(policy, {"unique_for": None}) == UniquePolicy(on_conflict="reject")
    assert override(policy, {}) == policy
    assert override(policy, {"unique": False}) is None
    assert override(policy, {"unique": UniquePolicy()}) == UniquePolicy()


layer_options = st.fixed_dictionaries(
    {},
    optional={
        "unique": st.sampled_from([True, False, None, UniquePolicy(args_keys="p", period=9)]),
        "unique_for": st.sampled_from([None, 1, "PT1M"]),
        "unique_on": st.sampled_from([None, "a", ["a", "b"]]),
        "unique_by": st.sampled_from([None, "type", "args", ["queue", "args"], ["args", "meta"]]),
        "unique_meta": st.sampled_from([None, "t"]),
        "unique_key": st.sampled_from([None, "{a}"]),
        "unique_on_conflict": st.sampled_from([None, "reject", "replace"]),
        "unique_max_wait": st.sampled_from([None, 60]),
    },
)


def outcome(action: Any) -> Any:
    try:
        return action()
    except InvalidPolicy as error:
        return str(error)


@given(layer_options, st.lists(layer_options, max_size=2), layer_options)
def test_resolving_below_a_call_first_changes_nothing(call, below, defaults):
    defaults = {name: value for name, value in defaults.items() if name in OPTION_FIELDS and value}
    at_once = outcome(lambda: resolve([call, *below], defaults=defaults))

    in_two_steps = outcome(lambda: PolicyLayers(below, defaults=defaults).for_call(call))

    # The layers below can be wrong by themselves, which a call above might have healed.
    alone = outcome(lambda: resolve(below, defaults=defaults))
    assert in_two_steps == (alone if isinstance(alone, str) else at_once)


@given(layer_options)
def test_what_comes_out_is_a_policy_none_or_a_named_error(options):
    result = outcome(lambda: resolve([options]))

    assert result is None or isinstance(result, (UniquePolicy, str))
    if isinstance(result, str):
        assert any(option in result for option in OPTION_FIELDS)


# -- a mapping without keys ----------------------------------------------------------------------


@pytest.fixture
def warned() -> Iterator[list[warnings.WarningMessage]]:
    policy_module._warned.clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield caught
    policy_module._warned.clear()


@pytest.mark.parametrize(
    "beside",
    [
        {"unique_on": "shop_id"},
        {"unique_key": "{shop_id}"},
        {"unique_by": ["type", "args"]},
        {"unique_by": "type"},  # that is meant, then
    ],
)
@pytest.mark.parametrize("layer", ["beside it", "above it"])
def test_a_mapping_is_not_warned_about_where_the_keys_are_given_elsewhere(beside, layer, warned):
    document = {"unique": {"on_conflict": "ignore"}}

    resolve([{**document, **beside}] if layer == "beside it" else [beside, document])

    assert warned == []


@pytest.mark.parametrize("beside", [{}, {"unique_for": 60}, {"unique_meta": "tenant"}])
def test_a_mapping_is_warned_about_where_nothing_brings_arguments_in(beside, warned):
    resolve([{"unique": {"on_conflict": "ignore"}, **beside}])

    assert ["has no 'keys'" in str(each.message) for each in warned] == [True]


def test_a_mapping_of_a_call_is_warned_about_once_for_the_task(warned):
    layers = {name: PolicyLayers([], task=name) for name in ("shop.rebuild", "shop.count")}

    for minutes in range(1, 4):
        for below in layers.values():
            below.for_call({"unique": {"period": f"PT{minutes}M", "states": list(LIVE)}})

    assert [str(each.message).partition(" ")[0] for each in warned] == [
        "shop.rebuild:",
        "shop.count:",
    ]


def test_a_mapping_that_is_switched_off_is_not_warned_about(warned):
    resolve([{"unique": False}, {"unique": {"on_conflict": "ignore"}}])

    assert warned == []


# -- a window that says nothing of states ------------------------------------------------------


@pytest.mark.parametrize(
    "layers",
    [
        [{"unique": True, "unique_for": 60}],
        [{"unique_for": 60}, {"unique": True}],
        [{"unique": True, "unique_for": 60, "unique_states": None}],
        [{"unique": UniquePolicy(period=60)}],
        [{"unique": {"keys": ["type", "args"], "period": "PT1M"}}],
        [{"unique": UniquePolicy(period=60), "unique_for": 60}],
    ],
)
def test_a_window_without_states_is_warned_about_once_for_the_task_with_both_meanings(
    layers, warned
):
    for _ in range(2):
        PolicyLayers(layers, task="shop.digest").for_call({"unique_for": 90})

    [warning] = warned
    message = str(warning.message)
    assert message.startswith("shop.digest: unique_for=PT1M is given without unique_states")
    assert "add unique_states='window'" in message
    assert "add unique_states='until_done'" in message


@pytest.mark.parametrize(
    "layers",
    [
        [{"unique": True}],
        [{"unique": False, "unique_for": 60}],
        [{"unique": True, "unique_for": 60, "unique_states": "until_done"}],
        [{"unique": True, "unique_for": 60, "unique_states": "window"}],
        [{"unique": True, "unique_for": 60, "unique_states": ["active"]}],
        [{"unique": True, "unique_for": 60}, {"unique_states": "until_done"}],
        [{"unique": UniquePolicy(period=60, states="until_done")}],
        [{"unique": pickle.loads(pickle.dumps(UniquePolicy(period=60, states="until_done")))}],
        [{"unique": UniquePolicy.from_ojs({"keys": ["type"], "period": "PT1M", "states": LIVE})}],
        [{"unique": {"keys": ["type"], "period": "PT1M", "states": list(LIVE)}}],
    ],
)
def test_a_window_whose_states_are_said_is_not_warned_about(layers, warned):
    layers_of_task = PolicyLayers(layers, task="shop.digest")
    layers_of_task.for_call({})

    assert [each for each in warned if "without unique_states" in str(each.message)] == []


def test_the_states_of_the_app_say_what_a_window_is_for(warned):
    said = {"unique_for": 60, "unique_states": "until_done"}
    PolicyLayers([{"unique": True}], defaults=said, task="shop.digest")
    assert warned == []

    PolicyLayers([{"unique": True}], defaults={"unique_for": 60}, task="shop.digest")
    assert len(warned) == 1
