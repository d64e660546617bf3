"""Every option, field, setting and URL scheme, with every kind of wrong.

The cases are generated from the library's own tables, so a new field or setting is tried as soon
as it exists. An error must be of the right class, name what is wrong, and say what to do. How many
cases there were is printed by the last test. What needs an app, a broker and a store is in
``test_bad_input_public``, and so is the rest of a URL after its scheme.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

import pytest
from celery import Celery

from celery_unique.config.settings import (
    DEFAULT_SETTINGS,
    SETTINGS,
    check_setting_names,
    read_settings,
)
from celery_unique.config.store_url import store_url
from celery_unique.exceptions import CeleryUniqueError, ConfigurationError, InvalidPolicy
from celery_unique.policy.durations import parse_duration
from celery_unique.policy.fields import (
    CONFLICT_STRATEGIES,
    DIMENSIONS,
    IDENTITY_STRATEGIES,
    OPTION_OF,
)
from celery_unique.policy.layers import resolve, take_call_options
from celery_unique.policy.ojs import OJS_CONFLICT_STRATEGIES, OJS_FIELDS
from celery_unique.policy.option_names import CALL_ONLY, OPTION_FIELDS, TASK_OPTIONS
from celery_unique.policy.option_names import check_names as check_option_names
from celery_unique.policy.policy import UniquePolicy
from celery_unique.policy.states import GROUPS, STATES
from celery_unique.stores import known_schemes

KINDS = ("type", "value", "unknown", "clash")

#: A message says what to do: it asks for something, or names what was meant.
A_CURE = re.compile(
    r"\b(?:give|use|write|add|leave it out|set (?:True|unique_\w+)|put)\b|did you mean|"
    r"every item is a string|so name the headers",
    re.IGNORECASE,
)


class Case(NamedTuple):
    surface: str  # where it was given
    name: str  # what the error must name
    kind: str  # type, value, unknown or clash
    attempt: Callable[[], Any]
    error: type[CeleryUniqueError]
    shown: str  # for the test's id
    meant: str = ""  # the right name, which the error must give


# -- Wrong values ----------------------------------------------------------------------------------

OBJECT = object()
ANY_TYPE: list[Any] = [1, 1.5, True, b"a", {"a": 1}, OBJECT, range(2), {1}, [None], [["a"]]]

NOT_NAMES: list[Any] = [*ANY_TYPE, (x for x in "ab")]
NOT_DURATIONS: list[Any] = [True, False, b"PT1M", {"hours": 1}, [60], OBJECT, 1j, ("PT1M",)]
WRONG_DURATIONS: list[Any] = [
    0, -1, 0.0, float("nan"), float("inf"), 1e300, 10**400, "", "10m", "600", "PT", "P", "pt1m",
    "PT0S", "-PT1M", "P1001Y", timedelta(0), timedelta(seconds=-1), timedelta.max, "1 hour", "P1H",
]  # fmt: skip


def misspelled(name: str) -> Iterator[str]:
    """Yield a letter lost, doubled, swapped with the next, and another case."""
    middle = max(len(name) // 2, 1)
    yield name[:middle] + name[middle + 1 :]
    yield name[:middle] + name[middle - 1] + name[middle:]
    yield name[: middle - 1] + name[middle : middle + 1] + name[middle - 1] + name[middle + 1 :]
    yield name.upper()
    yield f"{name}s"


def misspellings(names: Any) -> Iterator[tuple[str, str]]:
    """Yield each wrong spelling that is not by chance another right name, with what was meant."""
    for name in names:
        for wrong in dict.fromkeys(misspelled(name)):
            if wrong not in names:
                yield wrong, name


WRONG_VALUES: dict[str, dict[str, list[Any]]] = {
    "keys": {"type": NOT_NAMES, "value": [["args", "args"], ["args", ""], "", [""], "a,b"]},
    "args_keys": {"type": NOT_NAMES, "value": [[], (), set(), "", ["a", "a"], ["a", ""]]},
    "meta_keys": {"type": NOT_NAMES, "value": [[], (), set(), "", ["a", "a"], ["a", ""]]},
    "period": {"type": NOT_DURATIONS, "value": WRONG_DURATIONS},
    "states": {"type": NOT_NAMES, "value": [[], "", "active", ["active"] * 2, ["until_done"]]},
    "on_conflict": {"type": [*ANY_TYPE, ["reject"]], "value": ["", "drop", "raise"]},
    "key": {
        "type": [1, 1.5, True, b"{a}", ["{a}"], {"a": 1}, OBJECT],
        "value": ["", "a", "{}", "{0}", "{a", "a}", "{a b}", "{{a}}", "{a!z}{", "{a:{}}", "{.a}"],
    },
    "max_wait": {"type": NOT_DURATIONS, "value": WRONG_DURATIONS},
    "identity_strategy": {"type": [*ANY_TYPE, ["strict"]], "value": ["", "unique", "caller"]},
}
CHOICES: dict[str, Any] = {
    "keys": DIMENSIONS,
    "states": GROUPS,
    "on_conflict": CONFLICT_STRATEGIES,
    "identity_strategy": IDENTITY_STRATEGIES,
}
#: What must stand beside a field so that only its own value is wrong.
BESIDE: dict[str, dict[str, Any]] = {
    "max_wait": {"on_conflict": "replace"},
    "meta_keys": {"keys": ("args", "meta")},
}


def as_options(fields: dict[str, Any]) -> dict[str, Any]:
    return {OPTION_OF[field]: value for field, value in fields.items()}


def build_policy(fields: dict[str, Any]) -> UniquePolicy:
    return UniquePolicy(**fields)


def resolve_task(fields: dict[str, Any]) -> Any:
    return resolve([{"unique": True, **as_options(fields)}])


def resolve_call(fields: dict[str, Any]) -> Any:
    return resolve([as_options(fields), {"unique": True}])


def resolve_beside_a_policy(fields: dict[str, Any]) -> Any:
    return resolve([{"unique": UniquePolicy(), **as_options(fields)}])


def read_app(**conf: Any) -> Any:
    app = Celery("bad", set_as_current=False)
    app.conf.update(conf)
    return store_url(app, read_settings(app))


SETTING_OF = {option: setting for setting, option in DEFAULT_SETTINGS.items()}


def read_defaults(fields: dict[str, Any]) -> Any:
    return read_app(**{SETTING_OF[option]: value for option, value in as_options(fields).items()})


def wrong_values() -> Iterator[tuple[str, str, Any, str]]:
    for field, kinds in WRONG_VALUES.items():
        for kind, values in kinds.items():
            yield from ((field, kind, value, "") for value in values)
        for wrong, meant in misspellings(CHOICES.get(field, ())):
            yield field, "unknown", wrong, meant
    for wrong, meant in misspellings(STATES):
        yield "states", "unknown", [wrong], meant


SURFACES: dict[str, tuple[Callable[[dict[str, Any]], Any], type[CeleryUniqueError]]] = {
    "policy": (build_policy, InvalidPolicy),
    "task option": (resolve_task, InvalidPolicy),
    "call option": (resolve_call, InvalidPolicy),
    "option beside a policy": (resolve_beside_a_policy, InvalidPolicy),
    "default setting": (read_defaults, ConfigurationError),
}


NAME_OF: dict[str, Callable[[str], str]] = {
    "policy": str,
    "task option": OPTION_OF.__getitem__,
    "call option": OPTION_OF.__getitem__,
    "option beside a policy": OPTION_OF.__getitem__,
    "default setting": lambda field: SETTING_OF[OPTION_OF[field]],
}


def value_cases() -> Iterator[Case]:
    for field, kind, value, meant in wrong_values():
        for surface, (attempt, error) in SURFACES.items():
            name = NAME_OF[surface](field)
            fields = {**BESIDE.get(field, {}), field: value}
            yield Case(surface, name, kind, partial(attempt, fields), error, repr(value), meant)


# -- Documents -------------------------------------------------------------------------------------

OJS_BESIDE: dict[str, dict[str, Any]] = {
    "args_keys": {"keys": ["args"]},
    "meta_keys": {"keys": ["meta"]},
}
NOT_OJS: dict[str, list[Any]] = {
    "keys": [None, "args", {"args"}],
    "args_keys": ["a", {"a"}],
    "meta_keys": ["a", {"a"}],
    "period": [60, 1.5, timedelta(1), "PT1.5H", "PT1,5S", "+PT1M"],
    "states": [None, "until_done", "window", {"active"}],
    "on_conflict": [None, "rerun"],
}


def document_cases() -> Iterator[Case]:
    def case(name: str, kind: str, document: Any, meant: str = "") -> Case:
        attempt = partial(resolve, [{"unique": document}])
        return Case("document", name, kind, attempt, InvalidPolicy, repr(document), meant)

    for field in OJS_FIELDS:
        beside = OJS_BESIDE.get(field, {})
        for kind, values in {**WRONG_VALUES[field], "value of ours": NOT_OJS[field]}.items():
            yield from (case(field, kind.split()[0], {**beside, field: v}) for v in values)
    for wrong, meant in misspellings(OJS_FIELDS):
        yield case(wrong, "unknown", {wrong: []}, meant)
    for wrong, meant in misspellings(OJS_CONFLICT_STRATEGIES):
        yield case("on_conflict", "unknown", {"on_conflict": wrong}, meant)
    for name in ("key", "max_wait", "identity_strategy", "unique", *OPTION_FIELDS):
        yield case(name, "unknown", {name: "{a}"})
    for value in [1, 0, "yes", "", [], OBJECT, UniquePolicy, lambda: None, 1.5, b"x"]:
        yield case("unique", "type", value)
    for fields in CLASHES:
        if fields.keys() <= set(OJS_FIELDS):
            yield case("meta_keys" if "args_keys" not in fields else "args_keys", "clash",
                       {name: [value] if isinstance(value, str) else value
                        for name, value in fields.items()})  # fmt: skip


# -- Names -----------------------------------------------------------------------------------------


def name_cases() -> Iterator[Case]:
    names = sorted(TASK_OPTIONS | CALL_ONLY)
    for wrong, meant in misspellings(names):
        if wrong.startswith(("uniq", "idempot", "identity_s")):
            attempt: Callable[[], Any] = partial(take_call_options, {wrong: 1})
            yield Case("call option", wrong, "unknown", attempt, InvalidPolicy, wrong, meant)
    for wrong, meant in misspellings(sorted(TASK_OPTIONS)):
        if wrong.startswith("unique_"):
            attempt = partial(check_option_names, [wrong], "task shop.pay")
            yield Case("task option", wrong, "unknown", attempt, InvalidPolicy, wrong, meant)
    for name in sorted(CALL_ONLY):
        attempt = partial(check_option_names, [name], "task shop.pay")
        yield Case("task option", name, "unknown", attempt, InvalidPolicy, name)
    for wrong, meant in misspellings((*SETTINGS, *DEFAULT_SETTINGS)):
        attempt = partial(check_setting_names, [wrong])
        yield Case("setting", wrong, "unknown", attempt, ConfigurationError, wrong, meant)


# -- Settings, durations and schemes of URLs -------------------------------------------------------

WRONG_SETTINGS: dict[str, dict[str, list[Any]]] = {
    "unique_store_url": {
        "type": [1, b"redis://", ["redis://"], OBJECT],
        "value": ["", "host", "a:1"],
    },
    "unique_namespace": {"type": [1, b"a", ["a"]], "value": ["{a}", "a b", "a\n", "é", "a" * 101]},
    "unique_on_store_error": {"type": [1, True, ["raise"]], "value": ["", "ignore", "Raise"]},
    "unique_eager": {"type": [0, 1, "yes", "False", "", []], "value": []},
    "unique_key_secret": {"type": [1, ["a"], {"a": 1}, True], "value": ["", b""]},
    "unique_conceal_holder": {"type": [0, 1, "yes", "False", "", []], "value": []},
    "unique_idempotency_scope": {"type": [1, True, ["app"]], "value": ["", "global", "App"]},
}
DURATION_SETTINGS = [name for name, s in SETTINGS.items() if isinstance(s.default, timedelta)]


def setting_cases() -> Iterator[Case]:
    durations = {"type": NOT_DURATIONS, "value": WRONG_DURATIONS}
    for name in SETTINGS:
        for kind, values in WRONG_SETTINGS.get(name, durations).items():
            for value in values:
                attempt = partial(read_app, **{name: value})
                yield Case("setting", name, kind, attempt, ConfigurationError, repr(value))


def duration_cases() -> Iterator[Case]:
    for kind, values in {"type": [*NOT_DURATIONS, None], "value": WRONG_DURATIONS}.items():
        for value in values:
            attempt: Callable[[], Any] = partial(parse_duration, value, "idempotency_ttl")
            yield Case("duration", "idempotency_ttl", kind, attempt, InvalidPolicy, repr(value))
            if value is not None:
                options = {"idempotency_key": "k", "idempotency_ttl": value}
                attempt = partial(take_call_options, options)
                yield Case(
                    "call option", "idempotency_ttl", kind, attempt, InvalidPolicy, repr(value)
                )


def scheme_cases() -> Iterator[Case]:
    for wrong, meant in misspellings(known_schemes()):
        if wrong.lower() not in known_schemes():
            attempt = partial(read_app, unique_store_url=f"{wrong}://me:hunter2@host/0")
            yield Case(
                "scheme",
                "unique_store_url",
                "unknown",
                attempt,
                ConfigurationError,
                wrong,
                f"{meant}://",
            )
    for broker in ("amqp://me:hunter2@host", "sqs://", "filesystem://", "pyamqp://", "kafka://h"):
        for backend in (None, "rpc://", "db+sqlite:///x", "cache+memory://", "file:///tmp/x"):
            attempt = partial(read_app, broker_url=broker, result_backend=backend)
            shown = f"{broker}-{backend}"
            yield Case("scheme", "unique_store_url", "value", attempt, ConfigurationError, shown)


# -- Clashes ---------------------------------------------------------------------------------------

CLASHES: list[dict[str, Any]] = [
    {"key": "{a}", "args_keys": "a"},
    {"key": len, "args_keys": "a"},
    {"keys": "type", "args_keys": "a"},
    {"keys": ["type", "queue"], "args_keys": ["a", "b"]},
    {"keys": "type", "key": "{a}"},
    {"keys": "queue", "key": len},
    {"keys": "args", "meta_keys": "t"},
    {"keys": ["args", "meta"]},
    {"keys": "meta", "meta_keys": None},
    {"max_wait": 60},
    *({"max_wait": 60, "on_conflict": name} for name in ("ignore", "reject", "rerun")),
]


def clash_cases() -> Iterator[Case]:
    for fields in CLASHES:
        for surface, (attempt, error) in SURFACES.items():
            # A default may wait for what a task adds to it.
            if surface == "default setting" and waits_for_a_task(fields):
                continue
            field = next(field for field in reversed(fields) if field != "on_conflict")
            name = field if surface == "policy" else OPTION_OF[field]
            yield Case(surface, name, "clash", partial(attempt, fields), error, repr(fields))
    attempt_ttl = partial(take_call_options, {"idempotency_ttl": 60})
    yield Case("call option", "idempotency_ttl", "clash", attempt_ttl, InvalidPolicy, "ttl alone")
    for option in OPTION_FIELDS:
        value = {"unique_key": "{a}", "unique_for": 1, "unique_max_wait": 1}.get(option)
        value = value or next(iter(CHOICES.get(OPTION_FIELDS[option], ["a"])))
        for layers in (
            [{option: value}],
            [{}, {option: value}],
            [{option: value}, {"unique": False}],
        ):
            attempt_alone = partial(resolve, layers)
            yield Case("task option", option, "clash", attempt_alone, InvalidPolicy, repr(layers))


def waits_for_a_task(fields: dict[str, Any]) -> bool:
    return "max_wait" in fields or (
        "meta" in fields.get("keys", ()) and not fields.get("meta_keys")
    )


CASES = [
    *value_cases(),
    *document_cases(),
    *name_cases(),
    *setting_cases(),
    *duration_cases(),
    *scheme_cases(),
    *clash_cases(),
]


def case_id(case: Case) -> str:
    # Addresses differ from process to process, and ids must not.
    shown = re.sub(r" at 0x\w+", "", case.shown)
    return f"{case.surface}-{case.name}-{case.kind}-{shown[:40]}"


@pytest.mark.parametrize("case", CASES, ids=case_id)
@pytest.mark.filterwarnings("ignore::celery_unique.exceptions.UniquePolicyWarning")
def test_bad_input_is_refused_by_name_with_the_cure(case):
    with pytest.raises(CeleryUniqueError) as raised:
        case.attempt()

    message = str(raised.value)
    assert type(raised.value) is case.error
    assert case.name in message
    assert case.meant in message
    assert A_CURE.search(message)
    assert "hunter2" not in message


#: Surfaces and kinds of wrong that cannot be tried together, and why.
CANNOT_EXIST = {
    ("setting", "clash"): "only the defaults for policies bear on each other: 'default setting'",
    ("duration", "unknown"): "a duration has no names in it",
    ("duration", "clash"): "a duration is one value",
    ("scheme", "type"): "a URL that is no string is a wrong setting, and tried as one",
    ("scheme", "clash"): "a scheme is one word",
}


def test_every_surface_has_every_kind_of_wrong_and_how_many_were_tried(report):
    tried = Counter((case.surface, case.kind) for case in CASES)

    report(f"bad input: {len(CASES)} tried, {dict(Counter(case.kind for case in CASES))}")
    check_pairs(tried, CANNOT_EXIST)
    for name in (*SETTINGS, *DEFAULT_SETTINGS, *OPTION_FIELDS, *OJS_FIELDS):
        assert any(case.name == name for case in CASES), f"nothing wrong was tried for {name}"


def check_pairs(tried: Counter[tuple[str, str]], cannot_exist: dict[tuple[str, str], str]) -> None:
    """Every surface was tried with every kind of wrong, but for those that cannot exist."""
    pairs = {(surface, kind) for surface, _ in tried for kind in KINDS}
    assert pairs - tried.keys() == set(cannot_exist)
    assert {kind for _, kind in tried} == set(KINDS)
    assert all(cannot_exist.values()), "each has a reason"
