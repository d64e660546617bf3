"""Every option, field and setting, with every kind of wrong value.

Generated from the library's own tables, so that a new field or setting is tried as soon as it
exists. ``test_bad_input_public`` tries them.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

from celery_unique.config.settings import (
    DEFAULT_SETTINGS,
)
from celery_unique.policy.fields import (
    CONFLICT_STRATEGIES,
    DIMENSIONS,
    IDENTITY_STRATEGIES,
    OPTION_OF,
)
from celery_unique.policy.ojs import OJS_CONFLICT_STRATEGIES, OJS_FIELDS
from celery_unique.policy.option_names import OPTION_FIELDS
from celery_unique.policy.policy import UniquePolicy
from celery_unique.policy.states import GROUPS, STATES

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
    "label": {
        "type": [1, 1.5, True, b"{a}", ["{a}"], {"a": 1}, OBJECT],
        "value": ["", " ", "{}", "{0}", "{a", "a}", "{a b}", "{a!z}{", "{a:{}}", "{.a}"],
    },
    "limit": {"type": [1.5, True, "3", b"3", [3], {"a": 1}, OBJECT], "value": [0, -1]},
    "max_queue": {"type": [1.5, True, "3", b"3", [3], {"a": 1}, OBJECT], "value": [0, -1]},
    "group": {
        "type": [1, 1.5, True, b"a", ["a"], {"a": 1}, OBJECT],
        "value": ["", "{}", "{0}", "{a", "a}", "{a b}", "{a!z}{", "{a:{}}", "{.a}"],
    },
    "merge": {"type": NOT_NAMES, "value": [[], (), set(), "", ["a", "a"], ["a", ""]]},
    "merge_max_bytes": {
        "type": [1.5, True, "1", b"1", [1], {"a": 1}, OBJECT],
        "value": [0, -1],
    },
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
    "max_queue": {"on_conflict": "queue"},
    "merge": {"on_conflict": "merge"},
    "merge_max_bytes": {"on_conflict": "merge", "merge": "a"},
    "meta_keys": {"keys": ("args", "meta")},
}


def as_options(fields: dict[str, Any]) -> dict[str, Any]:
    return {OPTION_OF[field]: value for field, value in fields.items()}


SETTING_OF = {option: setting for setting, option in DEFAULT_SETTINGS.items()}


def wrong_values() -> Iterator[tuple[str, str, Any, str]]:
    """Yield field, kind of wrong, value, and what was meant."""
    for field, kinds in WRONG_VALUES.items():
        for kind, values in kinds.items():
            yield from ((field, kind, value, "") for value in values)
        for wrong, meant in misspellings(CHOICES.get(field, ())):
            yield field, "unknown", wrong, meant
    for wrong, meant in misspellings(STATES):
        yield "states", "unknown", [wrong], meant


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
    "on_conflict": [None, "rerun", "queue"],
}


def wrong_documents() -> Iterator[tuple[str, str, Any, str]]:
    """Yield what is wrong in it, kind of wrong, document, and what was meant."""
    for field in OJS_FIELDS:
        beside = OJS_BESIDE.get(field, {})
        for kind, values in {**WRONG_VALUES[field], "value of ours": NOT_OJS[field]}.items():
            yield from ((field, kind.split()[0], {**beside, field: v}, "") for v in values)
    for wrong, meant in misspellings(OJS_FIELDS):
        yield wrong, "unknown", {wrong: []}, meant
    for wrong, meant in misspellings(OJS_CONFLICT_STRATEGIES):
        yield "on_conflict", "unknown", {"on_conflict": wrong}, meant
    for name in ("key", "max_wait", "identity_strategy", "unique", *OPTION_FIELDS):
        yield name, "unknown", {name: "{a}"}, ""
    for value in [1, 0, "yes", "", [], OBJECT, UniquePolicy, lambda: None, 1.5, b"x"]:
        yield "unique", "type", value, ""
    for fields in CLASHES:
        if fields.keys() <= set(OJS_FIELDS):
            name = "args_keys" if "args_keys" in fields else "meta_keys"
            listed = {field: [v] if isinstance(v, str) else v for field, v in fields.items()}
            yield name, "clash", listed, ""


# -- Settings --------------------------------------------------------------------------------------

WRONG_SETTINGS: dict[str, dict[str, list[Any]]] = {
    "unique_store_url": {
        "type": [1, b"redis://", ["redis://"], OBJECT],
        "value": ["", "host", "a:1"],
    },
    "unique_namespace": {"type": [1, b"a", ["a"]], "value": ["{a}", "a b", "a\n", "é", "a" * 101]},
    "unique_on_store_error": {"type": [1, True, ["raise"]], "value": ["", "ignore", "Raise"]},
    "unique_atomic_publish": {"type": [0, 1, "yes", "False", "", []], "value": []},
    "unique_enabled": {"type": [0, 1, "yes", "False", "", []], "value": []},
    "unique_guard": {"type": [0, 1, [], ["late"]], "value": ["", "yes", "Late", "early"]},
    "unique_monitor_rows": {"type": [True, 1.5, "20", []], "value": [-1]},
    "unique_beat": {"type": [0, 1, "yes", "False", "", []], "value": []},
    "unique_dry_run": {"type": [0, 1, "yes", "False", "", []], "value": []},
    "unique_eager": {"type": [0, 1, "yes", "False", "", []], "value": []},
    "unique_key_secret": {"type": [1, ["a"], {"a": 1}, True], "value": ["", b""]},
    "unique_conceal_holder": {"type": [0, 1, "yes", "False", "", []], "value": []},
    "unique_idempotency_scope": {"type": [1, True, ["app"]], "value": ["", "global", "App"]},
}
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
    {"max_queue": 5},
    *({"max_queue": 5, "on_conflict": name} for name in ("ignore", "reject", "rerun", "replace")),
    {"args_keys": "a", "group": "g"},
    {"keys": "type", "group": "g"},
    {"keys": ["type", "queue"], "group": "g"},
    {"key": "{a}", "group": "g"},
    {"on_conflict": "replace", "merge": "a"},
]


def waits_for_a_task(fields: dict[str, Any]) -> bool:
    return (
        "max_wait" in fields
        or "max_queue" in fields
        or ("meta" in fields.get("keys", ()) and not fields.get("meta_keys"))
    )
