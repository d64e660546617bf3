"""Merges the layers of options into one policy.

Layers, from the highest: the call, the task, `task_annotations`, and the app's defaults
(``unique_default_*``). Each field is decided by itself by the highest layer that gives it.

- ``unique`` as a policy or a mapping gives *all* fields at its layer; options beside it, and in
  layers above, replace single fields of it.
- An option that is given as None resets the field to the library's default.
- A field from below yields to one from above that it cannot be combined with: ``unique_key``
  over ``unique_on`` (and the reverse), ``unique_by`` without ``args`` or ``meta`` over names for
  them, a conflict strategy that postpones nothing over ``unique_max_wait``, one that parks nothing
  over ``unique_max_queue``, one that merges nothing over ``unique_merge``, ``unique_group`` over
  all that names a key (and the reverse). In one layer the same two are a clash.
- ``unique_on`` and ``unique_key`` bring ``args`` into the key, ``unique_meta`` brings ``meta``,
  unless ``unique_by`` beside them excludes it: that is a clash.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from celery_unique.exceptions import InvalidPolicy, one_of, shown, suggestion

from . import ojs
from .durations import parse_duration
from .fields import BOUNDS, CHECKS, DEFAULTS, DIMENSIONS, POSTPONING
from .option_names import (
    CALL_ONLY,
    IDEMPOTENCY_SCOPES,
    OPTION_FIELDS,
    TASK_OPTIONS,
    check_near_names,
    is_near_miss,
    may_be_an_option,
)
from .policy import UniquePolicy, warn_of_ignored_arguments, warn_of_window_alone

Options = Mapping[str, Any]

#: Options of Celery itself: one comparison shows that a call has none of ours.
OPTIONS_OF_CELERY = frozenset(
    {
        *("add_to_parent", "chain", "chord", "compression", "countdown", "delivery_mode", "eta"),
        *("exchange", "expires", "group_id", "group_index", "headers", "ignore_result"),
        *("immediate", "link", "link_error", "mandatory", "parent_id", "priority", "producer"),
        *("queue", "result_cls", "root_id", "routing_key", "serializer", "shadow"),
        *("soft_time_limit", "task_id", "task_type", "time_limit"),
    }
)


def take_call_options(options: dict[str, Any]) -> dict[str, Any]:
    """Take this library's options out of those of ``apply_async``, and return them."""
    if options.keys() <= OPTIONS_OF_CELERY:
        return {}
    stamps = options.get("stamped_headers") or ()
    ours = [
        name
        for name in options
        if may_be_an_option(name) or (is_near_miss(name) and name not in stamps)
    ]
    if not ours:
        return {}
    check_near_names(ours, "call")
    taken = {name: options.pop(name) for name in ours}
    return _with_checked_idempotency(taken) if CALL_ONLY.intersection(taken) else taken


def _with_checked_idempotency(taken: dict[str, Any]) -> dict[str, Any]:
    """Drop options that are None, so that "given" is "present" from here on."""
    taken = {
        name: value for name, value in taken.items() if name in TASK_OPTIONS or value is not None
    }
    for name, instead in (("idempotency_ttl", ", or use unique_for"), ("idempotency_scope", "")):
        if name in taken and "idempotency_key" not in taken:
            raise InvalidPolicy(
                f"{name} has no effect without idempotency_key: give both{instead}", field=name
            )
    scope = taken.get("idempotency_scope", "task")
    if scope not in IDEMPOTENCY_SCOPES:
        raise InvalidPolicy(
            f"idempotency_scope: {shown(scope)} is not known."
            f"{suggestion(scope, IDEMPOTENCY_SCOPES)} Use {one_of(IDEMPOTENCY_SCOPES)}",
            field="idempotency_scope",
        )
    if "idempotency_ttl" in taken:
        taken["idempotency_ttl"] = parse_duration(taken["idempotency_ttl"], "idempotency_ttl")
    return taken


#: Among the options of a call with an idempotency key: the same key is the same operation with the
#: same values, so that there is nothing to merge.
BESIDE_KEY = "beside an idempotency key"


def _without_merge(options: Options) -> Options:
    kept = {name: v for name, v in options.items() if not name.startswith("unique_merge")}
    return {**kept, "unique_on_conflict": "ignore"}


class _Merged(NamedTuple):
    """Layers as far as they are merged."""

    fields: dict[str, Any]
    unique: bool | None = None  # None: in no layer
    #: An option, with its value, that has no effect without ``unique``.
    idle: tuple[str, Any] | None = None
    #: A document that leaves the keys to the Open Job Spec, where no option has given them.
    without_keys: Options | None = None
    #: Whether a layer gives the states.
    says_states: bool = False


class PolicyLayers:
    """The layers below a call, merged once; a wrong option raises InvalidPolicy here."""

    __slots__ = ("_merged", "_spare", "_task", "policy")

    #: The policy of a call that gives no options.
    policy: UniquePolicy | None

    def __init__(
        self,
        layers: Sequence[Options],
        *,
        defaults: Options | None = None,
        task: str | None = None,
    ) -> None:
        self._task = task  # for warnings
        app_wide = _fields_given(defaults or {})
        # The app's bounds are for tasks that postpone, park or merge, and no error on the others.
        self._spare = {name: app_wide.pop(name) for name in BOUNDS if name in app_wide}
        self._merged = _Merged(_merge({}, app_wide), says_states="states" in app_wide)
        for layer in reversed(layers):
            self._merged = _add(self._merged, layer)
        self.policy = self._build(self._merged)

    def for_call(self, options: Options) -> UniquePolicy | None:
        """Return the policy of a call with these options above the layers."""
        # idempotency_key, its scope and its ttl are not fields of the policy.
        if not any(name in TASK_OPTIONS for name in options):
            return self.policy
        if BESIDE_KEY in options:
            below = self._merged.fields.get("on_conflict")
            if options.get("unique_on_conflict", below) == "merge":
                options = _without_merge(options)
        return self._build(_add(self._merged, options))

    def _build(self, merged: _Merged) -> UniquePolicy | None:
        if merged.idle is not None:
            raise _without_effect(merged)
        if merged.unique is None:
            return None
        fields = merged.fields
        if self._spare:
            strategy = fields.get("on_conflict")
            fitting = {name: v for name, v in self._spare.items() if strategy in BOUNDS[name]}
            fields = {**fitting, **fields}
        # Built for unique=False as well: a switch turned off does not hide a wrong option.
        policy = UniquePolicy(**fields)
        if not merged.unique:
            return None
        if merged.without_keys is not None and "args" not in policy.keys:
            warn_of_ignored_arguments(merged.without_keys, self._task)
        if self._task is not None and policy.period is not None and not merged.says_states:
            warn_of_window_alone(self._task, policy.period)
        return policy


def _without_effect(merged: _Merged) -> InvalidPolicy:
    name, value = merged.idle or ("", None)
    value_of_unique = "set nowhere" if merged.unique is None else "False"
    return InvalidPolicy(
        f"{name}={shown(value)} has no effect, since unique is {value_of_unique}: add unique=True",
        field=name,
    )


def _add(below: _Merged, layer: Options) -> _Merged:
    """Put one layer on top."""
    unique, fields = layer.get("unique"), below.fields
    without_keys, says_states = below.without_keys, below.says_states
    if unique is not None and not isinstance(unique, bool):
        is_policy = isinstance(unique, UniquePolicy)
        policy = unique if is_policy else UniquePolicy(**ojs.fields_of(unique))
        without_keys = None if is_policy or "keys" in unique else unique
        unique, fields, says_states = True, policy.as_fields(), policy.says_states
    says_states = says_states or layer.get("unique_states") is not None
    fields = _merge(fields, _fields_given(layer))
    if "unique_by" in layer:
        without_keys = None
    if unique is not None:
        # Options are allowed beside unique=False, so that a task can be switched off and on.
        return _Merged(fields, unique, None, without_keys, says_states)
    idle = below.idle or (None if below.unique else _idle(layer))
    return _Merged(fields, below.unique, idle, without_keys, says_states)


def _idle(layer: Options) -> tuple[str, Any] | None:
    return next(
        ((name, layer[name]) for name in OPTION_FIELDS if layer.get(name) is not None), None
    )


def _fields_given(layer: Options) -> dict[str, Any]:
    """Return the layer's options as checked policy fields; None becomes the default."""
    return {
        field: DEFAULTS[field] if layer[option] is None else CHECKS[field](layer[option])
        for option, field in OPTION_FIELDS.items()
        if option in layer
    }


def _merge(below: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    if not given:
        return below
    if given.get("group") is not None and "keys" in given:
        raise InvalidPolicy(
            "group (unique_group) clashes with keys (unique_by): the group is the key: give no "
            "unique_by",
            field="group",
        )
    inherited = {field: value for field, value in below.items() if field not in given}
    for field in _fields_that_yield(given):
        inherited.pop(field, None)
    merged = {**inherited, **given}
    if "keys" not in given:
        keys = below.get("keys", DEFAULTS["keys"])
        if given.get("group") is not None:
            keys = (*DEFAULTS["keys"], *(name for name in keys if name == "meta"))
        merged["keys"] = _keys_with_implied(keys, given)
    return merged


def _fields_that_yield(given: dict[str, Any]) -> Iterable[str]:
    if given.get("key") is not None:
        yield "args_keys"
    if given.get("args_keys") is not None:
        yield "key"
    if "args" not in given.get("keys", DIMENSIONS):
        yield from ("args_keys", "key")
    if "meta" not in given.get("keys", DIMENSIONS):
        yield "meta_keys"
    strategy = given.get("on_conflict", "merge")
    if strategy not in POSTPONING:
        yield "max_wait"
    if strategy != "queue" and "on_conflict" in given:
        yield "max_queue"
    if given.get("group") is not None:
        yield from ("args_keys", "key")
    elif any(given.get(name) is not None for name in ("args_keys", "key", "keys")):
        yield "group"
    if strategy != "merge":
        yield from ("merge", "merge_max_bytes")


def _keys_with_implied(keys: tuple[str, ...], given: dict[str, Any]) -> tuple[str, ...]:
    wanted = set(keys)
    if given.get("args_keys") is not None or given.get("key") is not None:
        wanted.add("args")
    if given.get("meta_keys") is not None:
        wanted.add("meta")
    elif "meta_keys" in given:
        wanted.discard("meta")
    return tuple(name for name in DIMENSIONS if name in wanted)
