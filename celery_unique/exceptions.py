"""Every error and warning of this library, and the functions that word them.

::

    CeleryUniqueError(Exception)
    ├── InvalidPolicy(ValueError)      an option or a policy field is wrong
    ├── UniqueKeyError(ValueError)     no key can be made from this call
    ├── DuplicateTask                  the key is held, and ``on_conflict`` is ``reject``
    ├── IdempotencyKeyRequired         the task requires an ``idempotency_key``
    ├── IdempotencyKeyConflict         that ``idempotency_key`` was used for other work
    ├── StoreUnavailable               the lock store is unavailable
    │   └── UnreadableRecord           the record of one key cannot be read
    ├── BatchInterrupted               ``apply_many`` could make only some of its calls
    └── ConfigurationError             a setting is wrong, or one is missing

A message names the cure; the facts are attributes.  The key is an attribute only: it is made from
the arguments of a call, so it stays out of ``str()``, ``repr()`` and thereby out of logs.

Two warnings, both ``UserWarning``, are for what is valid and likely wrong:
``UniquePolicyWarning`` and ``UniqueSettingsWarning``.

``args`` holds the positional arguments of the constructor, because Celery's JSON result backends
store ``args`` and call the class with them again: an error raised in a task body comes back to the
caller of ``get()`` as the same class with the same message.
"""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Iterable
from typing import Any

__all__ = [
    "BatchInterrupted",
    "CeleryUniqueError",
    "ConfigurationError",
    "DuplicateTask",
    "IdempotencyKeyConflict",
    "IdempotencyKeyRequired",
    "InvalidPolicy",
    "StoreUnavailable",
    "UniqueKeyError",
    "UniquePolicyWarning",
    "UniqueSettingsWarning",
    "UnreadableRecord",
]

# Up to the last @, since a password may hold any of / ? # unescaped.
_URL_CREDENTIALS = re.compile(r"""(?P<scheme>[A-Za-z][\w+.-]*://)[^\s'"]*@""")
_PASSWORD_PARAMETER = re.compile(
    r"(?P<name>[?&](?:password|passwd|pwd|secret)=)[^&\s#]+", re.IGNORECASE
)


def conceal_passwords(text: str) -> str:
    """Replace the user part of every URL in `text`, and password parameters, by ``***``."""
    text = _URL_CREDENTIALS.sub(r"\g<scheme>***@", text)
    return _PASSWORD_PARAMETER.sub(r"\g<name>***", text)


class CeleryUniqueError(Exception):
    """The base of all errors of this library."""

    ojs_code = "internal_error"
    retryable = False

    def to_ojs(self) -> dict[str, Any]:
        """Return the error as the Open Job Spec's error object."""
        details = {name: value for name, value in self._details().items() if value is not None}
        return {
            "error": {
                "code": self.ojs_code,
                "message": str(self),
                "retryable": self.retryable,
                "details": details,
            }
        }

    def _details(self) -> dict[str, Any]:
        return {}

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self)!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        # The default calls the class with `args`, which cannot carry keyword-only facts.
        return _restore, (type(self), self.args), self.__dict__


def _restore(cls: type[CeleryUniqueError], args: tuple[Any, ...]) -> CeleryUniqueError:
    return cls.__new__(cls, *args)


class InvalidPolicy(CeleryUniqueError, ValueError):
    """An option or a policy field is wrong; `field` is its name."""

    ojs_code = "invalid_request"

    def __init__(self, message: str, *, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field

    def _details(self) -> dict[str, Any]:
        return {"field": self.field}


class UniqueKeyError(CeleryUniqueError, ValueError):
    """No key can be made from this call; `argument` is the cause."""

    ojs_code = "invalid_request"

    def __init__(self, message: str, *, argument: str | None = None) -> None:
        super().__init__(message)
        self.argument = argument

    def _details(self) -> dict[str, Any]:
        return {"argument": self.argument}


#: How a `DuplicateTask` of a call begins its reason that found ``unique_max_queue`` parked ones.
LANE_IS_FULL = "its lane is full"


class DuplicateTask(CeleryUniqueError):
    """The key is held by another task and the call was not published.

    `task_id` and `state` are the holder's, or None where `unique_conceal_holder` is set.
    `reason` is why a call with another strategy than ``reject`` was rejected.
    """

    ojs_code = "duplicate"

    def __init__(
        self,
        task_name: str,
        task_id: str | None = None,
        state: str | None = None,
        reason: str | None = None,
        by_idempotency_key: bool = False,
        *,
        key: str | None = None,
    ) -> None:
        by_key = (True,) if by_idempotency_key else ()
        super().__init__(task_name, task_id, state, reason, *by_key)
        self.task_name = task_name
        self.task_id = task_id
        self.state = state
        self.reason = reason
        self.key = key

    @property
    def by_idempotency_key(self) -> bool:
        """Whether the key is the call's idempotency key."""
        return len(self.args) > 4

    def __str__(self) -> str:
        state = f" in state {self.state}" if self.state else ""
        holder = f"task {self.task_id}{state} holds" if self.task_id else "another task holds"
        reason = f" ({self.reason})" if self.reason else ""
        return (
            f"{self.task_name} was not published: {holder} its unique key{reason}. {self._cure()}"
        )

    def _cure(self) -> str:
        if self.reason is not None and LANE_IS_FULL in self.reason:
            return "Call again once some have run, or raise unique_max_queue or unique_limit"
        # The caller's key wins over unique=False.
        by_key = self.by_idempotency_key
        new_work = "take a new idempotency_key for new work"
        anyway = "with unique=False to publish anyway"
        if self.task_id is None:  # a concealed holder's result is concealed, too
            otherwise = new_work if by_key else f"call {anyway}"
            return f"Wait for that task to finish, or {otherwise}"
        if self.state in ("completed", "discarded", "cancelled"):
            what = "idempotency key's time" if by_key else "window or its idempotency key's time"
            wait = f"Wait until its {what} has passed"
        else:
            wait = "Wait for that task to finish"
        return (
            f"{wait}, or call with unique_on_conflict='ignore' to get its result, "
            f"or {new_work if by_key else anyway}"
        )

    def _details(self) -> dict[str, Any]:
        return {
            "existing_job_id": self.task_id,
            "existing_job_state": self.state,
            "uniqueness_key": self.key,
            "job_type": self.task_name,
            "reason": self.reason,
        }


class IdempotencyKeyRequired(CeleryUniqueError):
    """The task's identity strategy is ``caller_provided`` and the call has no key."""

    ojs_code = "invalid_request"

    def __init__(self, task_name: str) -> None:
        super().__init__(task_name)
        self.task_name = task_name

    def __str__(self) -> str:
        return (
            f"{self.task_name} has identity_strategy='caller_provided', so every call needs "
            "its own key: call apply_async(..., idempotency_key='...')"
        )

    def _details(self) -> dict[str, Any]:
        return {"argument": "idempotency_key", "job_type": self.task_name}


class IdempotencyKeyConflict(CeleryUniqueError):
    """The idempotency key was used before, for another call."""

    ojs_code = "invalid_request"

    def __init__(self, task_name: str, *, key: str | None = None) -> None:
        super().__init__(task_name)
        self.task_name = task_name
        self.key = key

    def __str__(self) -> str:
        return (
            f"{self.task_name} was not published: its idempotency_key was used before for a call "
            "with another task or other arguments. Send the same call again, or take a new key "
            "for new work"
        )

    def _details(self) -> dict[str, Any]:
        return {
            "argument": "idempotency_key",
            "job_type": self.task_name,
            "uniqueness_key": self.key,
        }


class StoreUnavailable(CeleryUniqueError):
    """The lock store could not be reached, or did not reply within `unique_store_timeout`
    (`unique_gate_timeout` where a worker starts a task)."""

    ojs_code = "backend_error"
    retryable = True

    def __init__(self, message: str, *, store: str | None = None) -> None:
        super().__init__(conceal_passwords(message))
        self.store = None if store is None else conceal_passwords(store)

    def _details(self) -> dict[str, Any]:
        return {"store": self.store}


class UnreadableRecord(StoreUnavailable):
    """The record of one key cannot be read: another program wrote it, or an incompatible release.
    Only calls and tasks of this key are concerned."""

    retryable = False

    def __init__(self, message: str, *, store: str | None = None, key: str | None = None) -> None:
        super().__init__(message, store=store)
        self.key = key

    def _details(self) -> dict[str, Any]:
        return {**super()._details(), "uniqueness_key": self.key}


class BatchInterrupted(CeleryUniqueError):
    """`apply_many` could make only some of its calls; `__cause__` is the error.

    `results` are those of the calls that were made, in their places, with None for the others.
    """

    ojs_code = "backend_error"
    retryable = True

    def __init__(self, message: str, *, results: list[Any] | None = None) -> None:
        super().__init__(conceal_passwords(message))
        self.results = results or []

    def _details(self) -> dict[str, Any]:
        made = [getattr(result, "id", None) for result in self.results]
        return {"job_ids": made}


class ConfigurationError(CeleryUniqueError):
    """A setting is wrong or missing; `setting` is its name."""

    ojs_code = "backend_error"

    def __init__(self, message: str, *, setting: str | None = None) -> None:
        super().__init__(conceal_passwords(message))
        self.setting = setting

    def _details(self) -> dict[str, Any]:
        return {"setting": self.setting}


class UniquePolicyWarning(UserWarning):
    """A policy is valid and unusual, and likely a mistake."""


class UniqueSettingsWarning(UserWarning):
    """A setting has a name that nothing reads."""


_LONGEST_VALUE = 80
_OUR_PREFIX = "unique_"


def shown(value: object) -> str:
    """Return the repr of a wrong value, shortened."""
    try:
        text = repr(value)
    except Exception:  # noqa: BLE001  a user's __repr__, while another error is handled
        text = f"<{type(value).__name__}>"
    return text if len(text) <= _LONGEST_VALUE else f"{text[:_LONGEST_VALUE]}..."


def one_of(names: Iterable[str]) -> str:
    """Return ``'a', 'b' or 'c'``."""
    *most, last = [repr(name) for name in names]
    return f"{', '.join(most)} or {last}" if most else last


def nearest(wrong: object, names: Iterable[str]) -> str | None:
    """Return the name that is most like `wrong`, if any is."""
    import difflib  # only errors need it

    if not isinstance(wrong, str):
        return None
    # The common prefix makes no two names alike.
    ours = wrong.lower().startswith(_OUR_PREFIX)
    by_text = {_comparable(name, ours): name for name in names}
    near = difflib.get_close_matches(_comparable(wrong, ours), by_text, n=1)
    return by_text[near[0]] if near else None


def _comparable(name: str, without_prefix: bool) -> str:
    name = name.lower()
    return name.removeprefix(_OUR_PREFIX) if without_prefix else name


def suggestion(wrong: object, names: Iterable[str]) -> str:
    """Return `` Did you mean 'this'?`` with the name nearest to `wrong`, or nothing."""
    near = nearest(wrong, names)
    return f" Did you mean {near!r}?" if near else ""


def install_command(*extras: str) -> str:
    """Return the command that installs these extras, quoted: brackets are patterns in zsh."""
    return f'pip install "celery-unique-tasks[{",".join(extras)}]"'


def warn_user(message: str, category: type[Warning]) -> None:
    """Warn at the line of the first caller outside this package and Celery."""
    frame, level = sys._getframe(), 1
    while frame.f_back is not None and _is_ours(frame.f_globals.get("__name__", "")):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)


def _is_ours(module: str) -> bool:
    return module.partition(".")[0] in ("celery_unique", "celery", "dataclasses")
