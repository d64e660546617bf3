"""What identifies a call: its arguments, or the idempotency key that the caller brings."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from datetime import timedelta
from functools import lru_cache
from typing import Any

from .calls import Call
from .exceptions import IdempotencyKeyRequired
from .keys import arguments_fingerprint, canonical_text, idempotency_identity, key_of, text_of
from .leases import milliseconds
from .option_names import CALL_ONLY
from .policy import UniquePolicy, warn_once
from .settings import UniqueSettings
from .values import value

DEFAULT_TTL = timedelta(hours=24)


@value
class Identity:
    """The key of a call and the policy it is asked for under."""

    key: str
    policy: UniquePolicy
    #: Fingerprint of task and arguments, to tell a repeated call from other work that
    #: brings the same idempotency key.
    arguments: str = ""
    #: How long from its creation the ended task answers; 0: while the window lasts.
    keep_ms: int = 0


#: A caller's key stands for the arguments, works on every task, unique or not, and decides the
#: states (`_kept_after_success`): a window beside it is not one without states.
_WITH_KEY = {
    "unique": True,
    "unique_on": None,
    "unique_key": None,
    "unique_states": "until_success",
}


def with_key(call_options: Mapping[str, Any]) -> Mapping[str, Any]:
    """The options of a call, under which a task that is not unique is so by the caller's key.

    What is said of headers and conflicts counts all the same: a tenant's keys stay apart.
    """
    if "idempotency_key" not in call_options:
        return call_options
    _warn_of_what_the_key_decides(call_options)
    given = {name: value for name, value in call_options.items() if name not in CALL_ONLY}
    if given.get("unique") in (None, False):
        given.pop("unique", None)
    return {**_WITH_KEY, **given}


#: What a caller's key decides, whatever the call says of it besides.
_DECIDED_BY_KEY = {
    "unique_for": "how long the key answers is idempotency_ttl: give that instead",
    "unique_states": "the key is held until its task fails or idempotency_ttl has passed",
    "unique_on": "the key stands for the arguments, all of which are compared",
    "unique_key": "the key stands for the arguments, all of which are compared",
}


def _warn_of_what_the_key_decides(call_options: Mapping[str, Any]) -> None:
    """Of the call's own options alone: those of the task are for its calls without a key."""
    for name, why in _DECIDED_BY_KEY.items():
        if call_options.get(name) is not None:
            warn_once(
                ("beside a key", name),
                f"{name} has no effect in a call with an idempotency_key, which always wins: {why}",
            )


def check_key(name: str, call_options: Mapping[str, Any]) -> None:
    """Refuse an idempotency key that no call could have."""
    if "idempotency_key" in call_options:
        call = Call(task_name=name, idempotency_key=call_options["idempotency_key"])
        canonical_text(idempotency_identity(call))


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
    """The task's own policy, held until the task has failed or its time to live is over.

    No window: a live task's key never lapses before the task ends. And no rerun: the same
    key is the same wish, which is not carried out twice.
    """
    fields = {**policy.as_fields(), "states": "until_success", "period": None}
    if policy.on_conflict == "rerun":
        fields["on_conflict"] = "ignore"
    return UniquePolicy(**fields)


def identify(
    call: Call, policy: UniquePolicy, settings: UniqueSettings, ttl: timedelta | None = None
) -> Identity:
    secret = settings.key_secret
    if call.idempotency_key is None:
        return Identity(key_of(text_of(call, policy), secret), policy)
    found = idempotency_identity(call, scope=settings.idempotency_scope, meta_keys=policy.meta_keys)
    return Identity(
        key_of(canonical_text(found, call.task_name), secret),
        policy,
        _fingerprint(call, secret),
        milliseconds(ttl or DEFAULT_TTL),
    )


def _fingerprint(call: Call, secret: bytes | None) -> str:
    # The task's name too: in the scope of the app, the same key on another task is
    # other work.
    arguments = arguments_fingerprint(call, secret=secret)
    return hashlib.sha256(f"{call.task_name} {arguments}".encode()).hexdigest()[:32]
