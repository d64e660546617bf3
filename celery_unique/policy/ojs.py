"""Policies as documents of the Open Job Spec: reading and writing them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from celery_unique.exceptions import InvalidPolicy, one_of, shown, suggestion

from .durations import parse_ojs_duration, to_iso8601
from .fields import CHECKS, CONFLICT_STRATEGIES, DEFAULTS, OPTION_OF, check_choice, label

OJS_FIELDS = ("keys", "args_keys", "meta_keys", "period", "states", "on_conflict")
OJS_CONFLICT_STRATEGIES = ("reject", "replace", "replace_except_schedule", "ignore")
OJS_DEFAULTS: dict[str, Any] = {"keys": ("type",), "on_conflict": "reject"}

#: A document as it was given: its fields in their order and spelling, lists as tuples.
Document = tuple[tuple[str, Any], ...]


def fields_of(document: object) -> dict[str, Any]:
    """Return the fields of a document, with the specification's own defaults for the others."""
    if not isinstance(document, Mapping):
        raise InvalidPolicy(
            f"unique: {shown(document)} is not a policy: give True, False, a UniquePolicy, or a "
            "mapping with the fields of an Open Job Spec UniquePolicy",
            field="unique",
        )
    for name in document:
        if name not in OJS_FIELDS:
            raise _unknown_field(name)
    given = {field: _checked(field, document) for field in OJS_FIELDS if field in document}
    return OJS_DEFAULTS | {field: value for field, value in given.items() if value is not None}


def frozen(document: Mapping[str, Any]) -> Document:
    return tuple(
        (name, tuple(value) if isinstance(value, list) else value)
        for name, value in document.items()
    )


def document_of(fields: Mapping[str, Any], given: Document | None) -> dict[str, Any]:
    """Return the document that was given, or the one of these fields of a policy."""
    if given is not None:
        return {name: _as_json(value) for name, value in given}
    ours = ("key", "max_wait", "identity_strategy", "limit", "max_queue", "group", "merge")
    for field in (*ours, "merge_max_bytes"):
        if fields[field] != DEFAULTS[field]:
            raise _not_expressible(field, fields[field])
    if fields["on_conflict"] not in OJS_CONFLICT_STRATEGIES:
        raise _not_expressible("on_conflict", fields["on_conflict"])
    document = {field: fields[field] for field in OJS_FIELDS if fields[field] is not None}
    if "period" in document:
        document["period"] = to_iso8601(document["period"])
    return {name: _as_json(value) for name, value in document.items()}


def _as_json(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _checked(field: str, document: Mapping[str, Any]) -> Any:
    value = document[field]
    if field == "on_conflict":
        if isinstance(value, str) and value in {*CONFLICT_STRATEGIES} - {*OJS_CONFLICT_STRATEGIES}:
            raise InvalidPolicy(
                f"{label(field)}: the Open Job Spec has no {value!r}: give {OPTION_OF[field]}="
                f"{value!r} beside unique=. Use {one_of(OJS_CONFLICT_STRATEGIES)} in a document",
                field=field,
            )
        return check_choice(field, value, OJS_CONFLICT_STRATEGIES)
    if value is None and field in ("args_keys", "meta_keys", "period"):
        return None  # the specification's own table has null as their default
    if field == "period":
        return parse_ojs_duration(value)
    if not isinstance(value, (list, tuple)):
        raise InvalidPolicy(
            f"{label(field)}: {shown(value)} is not an array: "
            "give a list of strings, as the Open Job Spec requires",
            field=field,
        )
    # The specification's own example has "meta_keys": [] beside keys without "meta".
    unused = field == "meta_keys" and not value and "meta" not in document.get("keys", ())
    return None if unused else CHECKS[field](value)


def _unknown_field(name: object) -> InvalidPolicy:
    if name == "unique":
        cure = " Give the object under 'unique', not the one around it"
    elif name in OPTION_OF or name in OPTION_OF.values():
        cure = f" Give {OPTION_OF.get(str(name), name)}= beside unique=, or use UniquePolicy(...)"
    else:
        cure = f"{suggestion(name, OJS_FIELDS)} Use {one_of(OJS_FIELDS)}"
    return InvalidPolicy(
        f"{shown(name)} is not a field of an Open Job Spec UniquePolicy.{cure}",
        field=name if isinstance(name, str) else None,
    )


def _not_expressible(field: str, value: object) -> InvalidPolicy:
    return InvalidPolicy(
        f"{label(field)}: the Open Job Spec cannot express {shown(value)}. "
        f"Leave {field} out of a policy that is shared as a document",
        field=field,
    )
