"""The settings: flat ``unique_*`` names on ``app.conf``, checked when they are read.

The settings page of the documentation is checked against `SETTINGS`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NamedTuple

from celery_unique.exceptions import (
    ConfigurationError,
    InvalidPolicy,
    UniqueSettingsWarning,
    nearest,
    one_of,
    shown,
    suggestion,
    warn_user,
)
from celery_unique.policy.durations import parse_duration
from celery_unique.policy.fields import BOUNDS, CHECKS
from celery_unique.policy.option_names import IDEMPOTENCY_SCOPES, OPTION_FIELDS
from celery_unique.policy.policy import UniquePolicy

__all__ = [
    "DEFAULT_SETTINGS",
    "SETTINGS",
    "Setting",
    "UniqueSettings",
    "check_setting_names",
    "read_settings",
    "warn_unknown_settings",
]


# -- One check for each kind of value --------------------------------------------------------------


def _duration(name: str, value: object) -> timedelta:
    try:
        return parse_duration(value, name)
    except InvalidPolicy as error:
        raise ConfigurationError(str(error), setting=name) from None


def _flag(name: str, value: object) -> bool:
    if isinstance(value, bool):
        return value
    raise ConfigurationError(
        f"{name}: {shown(value)} is not a switch: set True or False", setting=name
    )


def _count(name: str, value: object) -> int:
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    raise ConfigurationError(
        f"{name}: {shown(value)} is not a number: give a whole number, 0 or more", setting=name
    )


def _guard(name: str, value: object) -> bool | str:
    if isinstance(value, bool) or (isinstance(value, str) and value == "late"):
        return value
    raise ConfigurationError(
        f"{name}: {shown(value)} is not known: set True (every task), 'late' (every task with "
        "acks_late) or False",
        setting=name,
    )


def _one_of(*choices: str) -> Callable[[str, object], str]:
    def check(name: str, value: object) -> str:
        if isinstance(value, str) and value in choices:
            return value
        raise ConfigurationError(
            f"{name}: {shown(value)} is not known.{suggestion(value, choices)} "
            f"Use {one_of(choices)}",
            setting=name,
        )

    return check


def _url(name: str, value: object) -> str:
    if isinstance(value, str):
        if "://" in value:
            return value
        value = value.rpartition("@")[2]  # the part before may be a password
    raise ConfigurationError(
        f"{name}: {shown(value)} is not a URL: write one such as 'redis://localhost:6379/1'",
        setting=name,
    )


def _namespace(name: str, value: object) -> str:
    # Braces would end the hash tag that keeps a key's data on one node of a Redis cluster.
    if isinstance(value, str) and re.fullmatch(r"[\w.:/@+-]{0,100}", value, re.ASCII):
        return value
    raise ConfigurationError(
        f"{name}: {shown(value)} cannot be part of a store's keys: use at most 100 letters, "
        "digits and any of _ . : / @ + -",
        setting=name,
    )


def _secret(name: str, value: object) -> bytes:
    secret = value.encode() if isinstance(value, str) else value
    if isinstance(secret, bytes) and secret:
        return secret
    # The message shows the type alone, whatever the value is.
    wrong = "it is empty" if secret == b"" else f"{type(value).__name__} is not str or bytes"
    raise ConfigurationError(
        f"{name}: {wrong}: give a long random text, the same to every process, or leave it out",
        setting=name,
    )


def _codec(name: str, value: object) -> Any:
    if isinstance(value, str):
        from celery.utils.imports import symbol_by_name  # slow to import

        try:
            value = symbol_by_name(value)
        except Exception as error:
            raise ConfigurationError(
                f"{name}: {shown(value)} cannot be imported ({error}): give the path of an object, "
                "such as 'shop.crypto:codec'",
                setting=name,
            ) from error
    if isinstance(value, type) or not all(
        callable(getattr(value, method, None)) for method in ("encode", "decode")
    ):
        raise ConfigurationError(
            f"{name}: {shown(value)} has no methods encode(bytes) and decode(bytes): give an "
            "object that has them, or the path of one, such as 'shop.crypto:codec'",
            setting=name,
        )
    return value


# -- The settings ----------------------------------------------------------------------------------


class Setting(NamedTuple):
    """One setting, with its texts in the documentation."""

    check: Callable[[str, object], Any]
    default: Any
    meaning: str
    change_when: str
    shown_default: str = ""


SETTINGS: dict[str, Setting] = {
    "unique_store_url": Setting(
        _url,
        None,
        "The lock store.",
        "The broker is not Redis, or locks shall not share its Redis.",
        "the broker if it is Redis, else the result backend if it is Redis",
    ),
    "unique_namespace": Setting(
        _namespace,
        "",
        "Part of every key in the store.",
        "Several apps or stages share one store and have tasks of the same name.",
        "empty",
    ),
    "unique_queue_lease": Setting(
        _duration,
        timedelta(hours=24),
        "How long a key stays held while its message waits in the broker.",
        "Messages wait longer than a day, or a purged queue shall free its keys sooner.",
        "24 hours",
    ),
    "unique_run_lease": Setting(
        _duration,
        timedelta(seconds=60),
        "How long a running task counts as alive after its worker last renewed its lease.",
        "A key must be free sooner after a worker was killed, or workers stall for longer.",
        "60 seconds",
    ),
    "unique_publish_grace": Setting(
        _duration,
        timedelta(seconds=30),
        "How long a caller may take from acquiring the lock to publishing.",
        "The broker is slow to accept messages.",
        "30 seconds, or the whole time of Celery's publish retries if that is longer",
    ),
    "unique_check_after": Setting(
        _duration,
        timedelta(seconds=60),
        "How long a holder has waited when a duplicate checks whether it has ended or is lost.",
        "A key without a task must be free sooner, or checks shall be rarer.",
        "60 seconds",
    ),
    "unique_retention": Setting(
        _duration,
        timedelta(days=1),
        "How long a finished task is remembered if its policy has terminal states and no window.",
        "A task shall stay done for longer, and giving it unique_for is not wanted.",
        "1 day",
    ),
    "unique_store_timeout": Setting(
        _duration,
        timedelta(seconds=2),
        "The longest one act on the store may take, connecting and retries included.",
        "Callers must not wait that long, or the store is far away.",
        "2 seconds",
    ),
    "unique_gate_timeout": Setting(
        _duration,
        timedelta(milliseconds=250),
        "The longest a worker waits for the store before it starts a task.",
        "The store is far away.",
        "250 milliseconds",
    ),
    "unique_on_store_error": Setting(
        _one_of("raise", "publish"),
        "raise",
        "What a call does when the store is unavailable: raise, or publish without a lock.",
        "A duplicate does less harm than a call that fails.",
        "raise",
    ),
    "unique_enabled": Setting(
        _flag,
        True,
        "Whether calls are unique. False is the kill switch: every call is published plain.",
        "Something is wrong, and calls must be published without locks until it is found.",
        "True",
    ),
    "unique_dry_run": Setting(
        _flag,
        False,
        "Whether duplicates are published anyway: locks are acquired, conflicts are only reported.",
        "The library is new in a system, and what it would skip shall be seen first.",
        "False",
    ),
    "unique_beat": Setting(
        _flag,
        False,
        "Whether a tick of a periodic task is published once, however many beats run.",
        "Several beats shall run, so that one may fail.",
        "False",
    ),
    "unique_atomic_publish": Setting(
        _flag,
        True,
        "Whether a call is admitted and its message pushed in one act, where the lock store is the "
        "broker's own Redis database.",
        "Another program changes how kombu pushes messages.",
        "True",
    ),
    "unique_guard": Setting(
        _guard,
        False,
        "Which tasks are guarded in workers: two deliveries of one task id never run at the same "
        "time, and a delivery of an id that has finished is dropped. `True`: every task; "
        '`"late"`: every task with `acks_late`. A task\'s own `unique_guard` wins.',
        "The broker delivers messages twice, and tasks without a key must not run twice.",
        "False",
    ),
    "unique_eager": Setting(
        _flag,
        False,
        "Whether eager calls acquire locks.",
        "A test suite with task_always_eager shall see duplicates.",
        "False",
    ),
    "unique_key_secret": Setting(
        _secret,
        None,
        "Makes the digest of a key an HMAC, so that it cannot be guessed from arguments.",
        "Arguments are few and secret, and others can read the store.",
        "none",
    ),
    "unique_follower_codec": Setting(
        _codec,
        None,
        "Encrypts what the store keeps of calls: messages of duplicates that join the holder and "
        "of parked calls, and merged values.",
        "Arguments are secret, and others can read the store or its backups.",
        "none",
    ),
    "unique_conceal_holder": Setting(
        _flag,
        False,
        "Whether the holder is concealed from a duplicate.",
        "Callers are not trusted with the ids of each other's tasks.",
        "False",
    ),
    "unique_monitor_rows": Setting(
        _count,
        20,
        "How many duplicates of one holder Flower and other monitors get a row of; the others are "
        "one more row.",
        "The rows of duplicates hide those of tasks, or each of them shall be seen.",
        "20",
    ),
    "unique_idempotency_scope": Setting(
        _one_of(*IDEMPOTENCY_SCOPES),
        "task",
        "Whether an idempotency key belongs to its task, to the whole app, or to the run of the "
        "task that makes the call.",
        "Keys come from outside and name one operation, whichever task does it.",
        "task",
    ),
}

#: ``unique_default_for`` and so on: the setting, and the option it is the default of.
DEFAULT_SETTINGS = {
    f"unique_default_{option.removeprefix('unique_')}": option for option in OPTION_FIELDS
}


@dataclass(frozen=True, slots=True, kw_only=True)
class UniqueSettings:
    """The settings of one app, checked. Fields are the names without ``unique_``."""

    store_url: str | None = field(default=None, repr=False)  # may hold a password
    namespace: str = ""
    queue_lease: timedelta = timedelta(hours=24)
    run_lease: timedelta = timedelta(seconds=60)
    publish_grace: timedelta = timedelta(seconds=30)
    check_after: timedelta = timedelta(seconds=60)
    retention: timedelta = timedelta(days=1)
    store_timeout: timedelta = timedelta(seconds=2)
    gate_timeout: timedelta = timedelta(milliseconds=250)
    on_store_error: str = "raise"
    enabled: bool = True
    dry_run: bool = False
    beat: bool = False
    atomic_publish: bool = True
    guard: bool | str = False
    eager: bool = False
    key_secret: bytes | None = field(default=None, repr=False)
    follower_codec: Any = field(default=None, repr=False)
    conceal_holder: bool = False
    monitor_rows: int = 20
    idempotency_scope: str = "task"
    #: ``unique_default_*`` by the name of the option they are the default of.
    app_defaults: Mapping[str, Any] = field(default_factory=dict, hash=False)


def loaded_conf(app: Any) -> Any:
    """Return the app's configuration, loaded: reading a key loads it."""
    app.conf.get("broker_url")
    return app.conf


def read_settings(app: Any) -> UniqueSettings:
    """Read and check the settings of a Celery app; a wrong one is a ConfigurationError."""
    conf = loaded_conf(app)
    values = {}
    for name, setting in SETTINGS.items():
        # Not app.add_defaults: Celery gives those precedence over the user's configuration.
        value = conf.get(name)
        values[name.removeprefix("unique_")] = (
            setting.default if value is None else setting.check(name, value)
        )
    return UniqueSettings(**values, app_defaults=_read_defaults(conf))


def _read_defaults(conf: Any) -> dict[str, Any]:
    defaults = {}
    for name, option in DEFAULT_SETTINGS.items():
        value = conf.get(name)
        if value is not None:
            defaults[option] = _checked_default(name, option, value)
    _refuse_clashing(defaults)
    return defaults


def _checked_default(name: str, option: str, value: object) -> Any:
    try:
        return CHECKS[OPTION_FIELDS[option]](value)
    except InvalidPolicy as error:
        raise ConfigurationError(f"{name}: {error}", setting=name) from None


def _refuse_clashing(defaults: Mapping[str, Any]) -> None:
    # A bound alone is no clash: it is for the tasks that replace, park or merge.
    fields = {OPTION_FIELDS[name]: value for name, value in defaults.items()}
    for bound in BOUNDS:
        fields.pop(bound, None)
    # As in a layer of options, names bring their dimension into the key; and a dimension may
    # wait for the names that a task gives.
    if "meta_keys" in fields:
        fields.setdefault("keys", ("type", "args", "meta"))
    elif "meta" in fields.get("keys", ()):
        fields["meta_keys"] = ("given by the task",)
    try:
        UniquePolicy(**fields)
    except InvalidPolicy as error:
        name = next(n for n, o in DEFAULT_SETTINGS.items() if OPTION_FIELDS[o] == error.field)
        raise ConfigurationError(f"{name}: {error}", setting=name) from None


# -- Names that nothing reads ----------------------------------------------------------------------

_NAMES = (*SETTINGS, *DEFAULT_SETTINGS)
_warned: set[str] = set()


def check_setting_names(names: Iterable[str]) -> None:
    """Raise ConfigurationError for a name that is not a setting."""
    for name in names:
        if name not in _NAMES:
            near = _nearest(name) or _nearest(f"unique_{name}")
            meant = f" Did you mean {near!r}?" if near else ""
            raise ConfigurationError(
                f"{name} is not a setting.{meant} Use {one_of(_begun_by(name) or _NAMES)}",
                setting=name,
            )


def warn_unknown_settings(app: Any) -> None:
    """Warn of ``unique_*`` names that nothing reads, since Celery accepts any name."""
    conf = loaded_conf(app)
    for name in list(conf.keys()):
        message = _what_is_wrong(str(name), conf.prefix or "")
        if message and name not in _warned:
            _warned.add(name)
            warn_user(message, UniqueSettingsWarning)


def _what_is_wrong(name: str, prefix: str) -> str:
    """Return the warning for a name in the configuration, empty if nothing is wrong with it."""
    lower = name.lower()
    prefixed = bool(prefix) and lower.startswith(prefix.lower())
    bare = lower[len(prefix) :] if prefixed else lower.removeprefix("celery_")
    if not bare.startswith("unique_"):
        return ""
    read = prefixed or name == bare
    if read and bare in _NAMES:
        return ""
    near = _nearest(bare)
    # With a namespace there are settings of others too (Django's): a bare name that resembles
    # none of ours is theirs.
    if prefix and not read and near is None:
        return ""
    cure = f" Did you mean {_spelled(near, prefix)!r}?" if near else f" Use {_listed(bare, prefix)}"
    return f"{name} is not a setting, and nothing reads it.{cure}"


def _nearest(name: str) -> str | None:
    # A common beginning, as unique_default, is not a misspelling of one of them.
    return None if _begun_by(name) else nearest(name, _NAMES)


def _begun_by(name: str) -> list[str]:
    begun = [each for each in _NAMES if each.startswith(f"{name}_")]
    return begun if len(begun) > 1 else []


def _listed(name: str, prefix: str) -> str:
    return one_of([_spelled(each, prefix) for each in _begun_by(name) or _NAMES])


def _spelled(name: str, prefix: str) -> str:
    """Return a setting's name as it is written in this namespace."""
    return prefix + name.upper() if prefix.isupper() else prefix + name
