"""From a call and its policy to the identity of the call, its canonical text and its key.

`identity` collects what makes the call unique (by its arguments, or by the idempotency key of the
caller), `canonical_text` writes it as one text (``celery unique why`` shows it), and `key_of` of
``digest`` hashes that text. ``docs/reference/key-format.md`` is the normative description.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from functools import lru_cache
from typing import Any, NamedTuple

from celery_unique.exceptions import IdempotencyKeyRequired, UniqueKeyError, one_of
from celery_unique.policy.durations import milliseconds
from celery_unique.policy.layers import BESIDE_KEY
from celery_unique.policy.option_names import CALL_ONLY, IDEMPOTENCY_SCOPES
from celery_unique.policy.policy import UniquePolicy, warn_once

from .arguments import (
    HEADER_CURE,
    VALUE_CURE,
    all_arguments,
    chosen_arguments,
    cure,
    no_key,
    plain_header,
    text_of_plain,
    visible_arguments,
)
from .call import Call
from .canonical import NotCanonical, canonical
from .digest import digest, key_of
from .unique_key import own_key

DEFAULT_TTL = timedelta(hours=24)
_LONGEST_IDEMPOTENCY_KEY = 255


@dataclass(slots=True)
class Identity:
    """The key of a call, and the policy under which it is acquired."""

    key: str
    policy: UniquePolicy
    #: Fingerprint of task and arguments: distinguishes a repeated call from other work with the
    #: same idempotency key.
    arguments: str = ""
    #: How long from its creation the finished task is kept; 0: while the window lasts.
    keep_ms: int = 0


def identify(
    call: Call,
    policy: UniquePolicy,
    secret: bytes | None = None,
    scope: str = "task",
    ttl: timedelta | None = None,
) -> Identity:
    if call.idempotency_key is None:
        return Identity(key_of(text_of(call, policy), secret), policy)
    found = idempotency_identity(call, scope=scope, meta_keys=policy.meta_keys)
    return Identity(
        key_of(canonical_text(found, call.task_name), secret),
        policy,
        _fingerprint(call, secret),
        milliseconds(ttl or DEFAULT_TTL),
    )


def _fingerprint(call: Call, secret: bytes | None) -> str:
    # With the task's name: in the scope of the app, the same key on another task is other work.
    arguments = arguments_fingerprint(call, secret=secret)
    return hashlib.sha256(f"{call.task_name} {arguments}".encode()).hexdigest()[:32]


# -- what makes a call unique -------------------------------------------------------------------


def identity(call: Call, policy: UniquePolicy) -> dict[str, Any]:
    """Return what makes `call` unique under `policy`, as plain JSON values (OJS 4.1)."""
    found: dict[str, Any] = {"type": call.task_name}
    if "queue" in policy.keys:
        found["queue"] = call.queue
    if policy.group is not None:
        found = {"group": _own_key(call, policy.group, "unique_group")}
    elif policy.key is not None:
        found["key"] = _own_key(call, policy.key)
    elif "args" in policy.keys:
        names = policy.args_keys
        if names is None:
            found["args"] = all_arguments(call, policy.merge)
        else:
            found["args"] = chosen_arguments(call, names)
    if "meta" in policy.keys:
        found["meta"] = {name: _header(call, name) for name in policy.meta_keys or ()}
    return found


def idempotency_identity(
    call: Call, *, scope: str = "task", meta_keys: tuple[str, ...] | None = None
) -> dict[str, Any]:
    """Return what makes `call` unique by its idempotency key, within its task, the whole app, or
    the run of the task that makes the call.

    With `meta_keys` the named headers are part of it: each tenant has keys of its own.
    """
    key = call.idempotency_key
    if not isinstance(key, str) or not 0 < len(key) <= _LONGEST_IDEMPOTENCY_KEY:
        raise no_key(
            call,
            f"idempotency_key must be a string of 1 to {_LONGEST_IDEMPOTENCY_KEY} characters",
            "idempotency_key",
        )
    if scope not in IDEMPOTENCY_SCOPES:
        raise ValueError(f"scope is {one_of(IDEMPOTENCY_SCOPES)}, not {scope!r}")
    found: dict[str, Any] = {"idempotency_key": key}
    if scope != "app":
        found["type"] = call.task_name
    if scope == "run":
        found["run"] = _run_of(call)
    if meta_keys:
        found["meta"] = {name: _header(call, name) for name in meta_keys}
    return found


def _run_of(call: Call) -> str:
    if call.run_id is None:
        raise no_key(
            call,
            "its idempotency_key has the scope 'run', and no task is running that makes the call. "
            "Make the call in the body of a task, or pass idempotency_scope='task'",
            "idempotency_scope",
        )
    return call.run_id


def _own_key(call: Call, unique_key: Callable[..., Any] | str, option: str = "unique_key") -> str:
    arguments = visible_arguments(call)
    try:
        return own_key(unique_key, arguments, known=call.signature is not None, option=option)
    except UniqueKeyError as error:
        raise no_key(call, str(error), error.argument) from error.__cause__


def _header(call: Call, name: str) -> Any:
    if name not in call.meta:
        raise no_key(
            call,
            f"unique_meta names the header {name!r}, which neither the call's headers nor its "
            "stamps nor the current request has. Pass it in headers=",
            name,
        )
    return plain_header(call, name, call.meta[name])


# -- as text -----------------------------------------------------------------------------------


def text_of(call: Call, policy: UniquePolicy) -> str:
    """Return the canonical text of the identity of `call`, by the short way if it is plain."""
    text = text_of_plain(call, policy)
    return canonical_text(identity(call, policy), call.task_name) if text is None else text


def canonical_text(identity: Mapping[str, Any], task_name: str | None = None) -> str:
    """Return the canonical text of an identity: RFC 8785, strings NFC, integers of any size.

    `task_name` is for an error, where the identity itself has none.
    """
    return _text(identity, task_name or identity.get("type"), VALUE_CURE)


def arguments_fingerprint(call: Call, *, secret: str | bytes | None = None) -> str:
    """Return a digest of all arguments: equal for a repeated call with the same key."""
    text = _text({"args": all_arguments(call)}, call.task_name, cure(call))
    return digest(text, secret)


def _text(identity: Mapping[str, Any], task_name: str | None, cure: str) -> str:
    try:
        return canonical(dict(identity))
    except NotCanonical as error:
        # The wrong part is searched only now, so that good calls do not pay for it.
        found = _culprit(identity)
        name, label, reason = found[:3] if found else (None, "the identity", str(error))
        cure = found.cure or cure if found else cure
        whose = f"{task_name} gets no" if task_name else "No"
        raise UniqueKeyError(
            f"{whose} unique key: {label} {reason}. {cure}", argument=name
        ) from None


_MEMBERS = {"args": "argument", "meta": "header"}
#: The cure for a part of an identity that has no text, where it is not an argument.
_CURES = {
    "meta": HEADER_CURE,
    "key": "Change unique_key so that the string it returns can be encoded as UTF-8",
    "group": "Change unique_group so that the text it makes can be encoded as UTF-8",
    "idempotency_key": "Pass an idempotency_key that can be encoded as UTF-8",
}
_LABELS = {
    "key": "the string that unique_key returned",
    "group": "the text that unique_group makes",
}


class _Culprit(NamedTuple):
    name: str
    label: str
    reason: str
    cure: str | None  # None: that of an argument


def _culprit(identity: Mapping[str, Any]) -> _Culprit | None:
    for dimension, name, label, part in _parts(identity):
        try:
            canonical(part)
        except NotCanonical as error:
            return _Culprit(name, label, str(error), _CURES.get(dimension))
    return None


def _parts(identity: Mapping[str, Any]) -> Iterator[tuple[str, str, str, dict[str, Any]]]:
    # Each part stays inside as many objects as it was, since depth is one of the reasons.
    for dimension, value in identity.items():
        if dimension in _MEMBERS and isinstance(value, dict):
            for name, member in value.items():
                label = f"{_MEMBERS[dimension]} {name!r}"
                yield dimension, name, label, {dimension: {name: member}}
        label = _LABELS.get(dimension, repr(dimension))
        yield dimension, dimension, label, {dimension: value}


# -- calls with an idempotency key --------------------------------------------------------------


#: A caller's key replaces the arguments, works on every task, unique or not, and decides the
#: states (`_kept_after_success`): a window beside it is not one without states.
_WITH_KEY = {
    "unique": True,
    "unique_on": None,
    "unique_key": None,
    "unique_group": None,
    "unique_limit": None,
    "unique_states": "until_success",
    BESIDE_KEY: True,
}
#: What a caller's key decides, whatever other options the call has.
_DECIDED_BY_KEY = {
    "unique_for": "the key is kept for idempotency_ttl: give that instead",
    "unique_states": "the key is held until its task fails or idempotency_ttl has passed",
    "unique_on": "the key replaces the arguments, all of which are compared",
    "unique_key": "the key replaces the arguments, all of which are compared",
    "unique_group": "the key replaces the group",
    "unique_limit": "the same key is the same operation, which runs once",
    "unique_max_queue": "the same key is the same operation, which is not parked",
}


def with_key(call_options: Mapping[str, Any]) -> Mapping[str, Any]:
    """The options of a call with an idempotency key, which makes any task unique.

    Its options for headers and conflicts still count: the keys of tenants stay separate.
    """
    if "idempotency_key" not in call_options:
        return call_options
    _warn_of_what_the_key_decides(call_options)
    given = {name: value for name, value in call_options.items() if name not in CALL_ONLY}
    if given.get("unique") in (None, False):
        given.pop("unique", None)
    return {**_WITH_KEY, **given}


def _warn_of_what_the_key_decides(call_options: Mapping[str, Any]) -> None:
    """Only the call's own options: those of the task are for its calls without a key."""
    for name, why in _DECIDED_BY_KEY.items():
        if call_options.get(name) is not None:
            warn_once(
                ("beside a key", name),
                f"{name} has no effect in a call with an idempotency_key, which always wins: {why}",
            )


def check_key(name: str, call_options: Mapping[str, Any], scope: str, run_id: str | None) -> None:
    """Refuse an idempotency key that no call could have."""
    if "idempotency_key" in call_options:
        key = call_options["idempotency_key"]
        call = Call(task_name=name, idempotency_key=key, run_id=run_id)
        scope = call_options.get("idempotency_scope", scope)
        canonical_text(idempotency_identity(call, scope=scope))


def policy_for(
    policy: UniquePolicy | None, name: str, call_options: Mapping[str, Any]
) -> UniquePolicy | None:
    """The policy under which the call is unique; None where it is not.

    A call's idempotency key always wins; without one the strategy decides.
    """
    if policy is not None and "idempotency_key" in call_options:
        return _kept_after_success(policy)
    if policy is None or policy.identity_strategy == "strict":
        return policy
    if policy.identity_strategy == "caller_provided":
        raise IdempotencyKeyRequired(name)
    return None  # always_unique


@lru_cache(maxsize=1024)
def _kept_after_success(policy: UniquePolicy) -> UniquePolicy:
    """The task's own policy, held until the task has failed or its time to live has passed.

    No window: a live task's key never lapses before the task finishes. And neither rerun nor
    queue: the same key is the same operation, which does not run twice.
    """
    fields = {**policy.as_fields(), "states": "until_success", "period": None}
    fields |= {"limit": 1, "max_queue": None, "group": None}
    if policy.on_conflict in ("rerun", "queue"):
        fields["on_conflict"] = "ignore"
    return UniquePolicy(**fields)
