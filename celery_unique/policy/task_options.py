"""The policies of tasks, from their own options, annotations and the app's defaults."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from celery import Task

from celery_unique.exceptions import InvalidPolicy, shown, suggestion
from celery_unique.keys.unique_key import misfit

from .layers import PolicyLayers
from .option_names import LEFT_OVER, TASK_OPTIONS, check_names, check_near_names, is_near_miss
from .policy import UniquePolicy, warn_once

#: Attribute of a task's class with the options of its decorator: Celery writes annotations over
#: the attributes of the same names.
OWN_OPTIONS = "_celery_unique_options"
#: Marks a class that wraps the ``__call__`` of the task's own class.
IN_FRONT = "_celery_unique_in_front"
_IGNORED = "_celery_unique_ignored"
#: Options of annotations and app defaults that would make any decorator valid ...
_STILL_TO_COME = {
    "unique": True,
    "unique_on_conflict": "replace",
    "unique_meta": "any",
    "unique_states": "until_done",
}
#: ... but one with an option that belongs to another strategy.
_STRATEGY_OF = {"unique_max_queue": "queue", "unique_merge": "merge"}
_PREFIXES = ("unique_", "idempotency_")


@dataclass(slots=True)
class _Known:
    task: Any
    defaults: Mapping[str, Any]
    layers: PolicyLayers
    signature: inspect.Signature | None
    unguarded: InvalidPolicy | None


class TaskPolicies:
    """The policies of one app's tasks, each merged once."""

    def __init__(self) -> None:
        self._known: dict[str, _Known] = {}

    def of(
        self, name: str, task: Any, call_options: Mapping[str, Any], defaults: Mapping[str, Any]
    ) -> tuple[UniquePolicy | None, inspect.Signature | None]:
        """The policy of one call, None where it is not unique, and the task's signature."""
        known = self._known.get(name)
        if known is None or known.task is not task or known.defaults is not defaults:
            known = self._learn(name, task, defaults)
        policy = known.layers.policy
        if call_options:
            try:
                policy = known.layers.for_call(call_options)
            except InvalidPolicy as error:
                raise _of_task(name, error) from None
        if policy is not None and known.unguarded is not None:
            raise known.unguarded.with_traceback(None)
        if policy is not None and call_options:
            check_policy(name, policy, known.signature)
        return policy, known.signature

    def is_guarded(
        self, name: str, task: Any, setting: bool | str, defaults: Mapping[str, Any]
    ) -> bool:
        """Whether messages of this task that have no key are guarded, in a worker with this
        setting ``unique_guard``."""
        if name.startswith("celery.") or _unguarded(name, type(task)) is not None:
            return False
        given = guard_option(name, layers_of(task))
        if given is not None:
            return given
        policy, _ = self.of(name, task, {}, defaults)
        if policy is not None and policy.identity_strategy == "always_unique":
            return True
        return bool(task.acks_late) if setting == "late" else bool(setting)

    def _learn(self, name: str, task: Any, defaults: Mapping[str, Any]) -> _Known:
        layers = _layers(name, lambda: layers_of(task) if task is not None else [], defaults)
        signature = signature_of(task) if task is not None else None
        if layers.policy is not None:
            check_policy(name, layers.policy, signature)
        unguarded = _unguarded(name, type(task))
        self._known[name] = known = _Known(task, defaults, layers, signature, unguarded)
        return known


def _layers(
    name: str,
    layers: Callable[[], list[dict[str, Any]]],
    defaults: Mapping[str, Any] | None = None,
) -> PolicyLayers:
    try:
        return PolicyLayers(layers(), defaults=defaults, task=name)
    except InvalidPolicy as error:
        raise _of_task(name, error) from None


def _of_task(name: str, error: InvalidPolicy) -> InvalidPolicy:
    """The error of an option, with the task's name."""
    return InvalidPolicy(f"{name}: {error}", field=error.field)


def guard_option(name: str, layers: Iterable[Mapping[str, Any]]) -> bool | None:
    """``unique_guard`` of a task: the highest layer that gives it decides, None if none does."""
    for layer in layers:
        value = layer.get("unique_guard")
        if isinstance(value, bool):
            return value
        if value is not None:
            raise InvalidPolicy(
                f"{name}: unique_guard={shown(value)} is not a switch: give the task True or False"
                + (", or set unique_guard='late' for the app" if value == "late" else ""),
                field="unique_guard",
            )
    return None


def signature_of(task: Any) -> inspect.Signature | None:
    try:
        return inspect.signature(task.run)
    except (TypeError, ValueError):  # a body written in C may have none
        return None


def layers_of(task: Any) -> list[dict[str, Any]]:
    """The task's own options, then those of annotations."""
    leaf = class_of(task)
    if _IGNORED in leaf.__dict__:
        return []
    own = leaf.__dict__.get(OWN_OPTIONS)
    if own is None:  # bound before install: both are attributes now
        return [_static_options(leaf.__mro__)]
    attributes = options_of_class(leaf)
    annotations = {name: value for name, value in attributes.items() if name not in own}
    given = _given_by(leaf)
    check_names(annotations, "task_annotations")
    return [given, annotations]


def class_of(task: Any) -> type:
    """The class that Celery has made for the task, or that its author has written."""
    cls = type(task)
    return cls.__mro__[1] if IN_FRONT in cls.__dict__ else cls


def _given_by(leaf: type) -> dict[str, Any]:
    own = leaf.__dict__.get(OWN_OPTIONS, {})
    check_near_names(own, "task")
    return {**_static_options(leaf.__mro__[1:]), **own}


def _static_options(classes: tuple[type, ...]) -> dict[str, Any]:
    """Options among class attributes, read from ``__dict__``: as an attribute of the task, a
    function would be a bound method."""
    found: dict[str, Any] = {}
    for cls in reversed(classes):
        found.update(_options_in(cls))
    given = _not_none(found)
    check_names(given, "task")
    return given


def options_of_class(cls: type) -> dict[str, Any]:
    return _not_none(_options_in(cls))


def _not_none(found: Mapping[str, Any]) -> dict[str, Any]:
    # UniqueTask declares every option as None: "not given".
    return {name: value for name, value in found.items() if value is not None}


def _options_in(cls: type) -> dict[str, Any]:
    return {
        name: _plain(value)
        for name, value in vars(cls).items()
        if name in TASK_OPTIONS or (name.startswith(_PREFIXES) and not _is_method(value))
    }


def _is_method(value: Any) -> bool:
    """Whether it is a function, property, class method or the like: with a name that is no option,
    it belongs to the class."""
    return hasattr(type(value), "__get__")


def options_among(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of this library among those of ``@app.task``, right or wrong."""
    return {name: value for name, value in options.items() if _is_ours(name)}


def _is_ours(name: str) -> bool:
    return name in TASK_OPTIONS or name.startswith(_PREFIXES) or is_near_miss(name)


def remember_options(cls: type) -> None:
    """Keep the options of a task's class before annotations are written over them."""
    if OWN_OPTIONS not in cls.__dict__:
        setattr(cls, OWN_OPTIONS, options_of_class(cls))


def _plain(value: Any) -> Any:
    return value.__func__ if isinstance(value, staticmethod) else value


def check_definition(task: Any, defaults: Mapping[str, Any]) -> None:
    """Fail where the task is defined, not at its first call."""
    _check_made(task, _layers(task.name, lambda: layers_of(task), defaults))
    _check_guard(task.name, type(task), layers_of(task))


def check_decorator(name: str, fun: Any, options: Mapping[str, Any], base: type) -> None:
    """Refuse options that are wrong whatever annotations and app defaults there are."""
    own = options_among(options)

    def layers() -> list[dict[str, Any]]:
        check_near_names(own, "task")
        given = {**_static_options(base.__mro__), **own}
        needed = [_STRATEGY_OF[option] for option in _STRATEGY_OF if given.get(option) is not None]
        if needed:
            return [given, {**_STILL_TO_COME, "unique_on_conflict": needed[-1]}]
        return [given, _STILL_TO_COME]

    policy = _layers(name, layers).policy
    _check_guard(name, base, [own])
    if (own.get("unique") or getattr(base, "unique", None)) and (error := _unguarded(name, base)):
        raise error
    if policy is not None and (policy.argument_names or callable(policy.key) or policy.merge):
        check_policy(name, policy, _signature_of_function(fun, bool(options.get("bind"))))


def _signature_of_function(fun: Any, bind: bool) -> inspect.Signature | None:
    try:
        signature = inspect.signature(fun)
    except (TypeError, ValueError):  # as above
        return None
    parameters = list(signature.parameters.values())
    return signature.replace(parameters=parameters[1:]) if bind else signature


def is_wrong_by_itself(task: Any) -> bool:
    """Whether the task's own options are wrong, whatever annotations there are."""
    try:
        _check_made(task, _layers(task.name, lambda: [_given_by(class_of(task))]))
    except InvalidPolicy:
        return True
    return False


def ignore_options(task: Any) -> None:
    """Ignore the task's options, which are not meant for this library."""
    setattr(class_of(task), _IGNORED, True)


def _check_made(task: Any, layers: PolicyLayers) -> None:
    if layers.policy is not None:
        check_policy(task.name, layers.policy, signature_of(task))
        _check_strategy(task)
        given = {name: getattr(task, name, None) for name in LEFT_OVER}
        left = [option for option, value in given.items() if value is not None]
        warn_of_left_over(task.name, task, left)


def _check_strategy(task: Any) -> None:
    error = _unguarded(task.name, type(task))
    if error is not None:
        raise error
    if task.Strategy != Task.Strategy:
        warn_once(
            ("strategy", task.name),
            f"{task.name} has a Strategy of its own. If that does not end in Celery's "
            "(celery.worker.strategy.default), its messages do not pass this library, and nothing "
            "releases its keys",
        )


def _unguarded(name: str, cls: type) -> InvalidPolicy | None:
    """The error of a task of celery-batches, or of a copy of it: it collects messages and runs them
    together, and Celery sees neither start nor end of one of them."""
    if getattr(cls, "Strategy", None) in (None, Task.Strategy) or not hasattr(cls, "flush_every"):
        return None
    return InvalidPolicy(
        f"{name}: its messages are collected and run together (Batches), so that nothing sees the "
        "end of one of them, and its key would stay taken. Make the task unique that adds to the "
        "batch, or call this one without it: unique=False",
        field="unique",
    )


def _check_guard(name: str, cls: type, layers: Iterable[Mapping[str, Any]]) -> None:
    if guard_option(name, layers) and _unguarded(name, cls) is not None:
        raise InvalidPolicy(
            f"{name}: unique_guard=True has no effect on a task whose messages are collected and "
            "run together (Batches): nothing sees the end of one of them. Leave it out, or guard "
            "the task that adds to the batch",
            field="unique_guard",
        )


def warn_of_left_over(name: str, task: Any, options: Iterable[str]) -> None:
    """Warn of options of other libraries, which have no effect; not with their own base class, as
    in an app that migrates."""
    for option in LEFT_OVER.keys() & options:
        library, becomes = LEFT_OVER[option]
        package = library.replace("-", "_")
        if any(cls.__module__.partition(".")[0] == package for cls in type(task).__mro__):
            continue
        warn_once(
            ("left over", name, option),
            f"{name}: {option} is an option of {library}, and has no effect on a unique task: "
            f"{becomes}. See 'From {library}' in docs/howto/migrate.md",
        )


def check_policy(name: str, policy: UniquePolicy, signature: inspect.Signature | None) -> None:
    if signature is None:
        return
    parameters = signature.parameters
    if callable(policy.key):
        wrong = misfit(policy.key, parameters)
        if wrong is not None:
            raise InvalidPolicy(f"{name}: {wrong}", field="key")
    for argument in policy.merge or ():
        _check_merged(name, argument, parameters)
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return
    for argument in policy.argument_names:
        if argument not in parameters:
            field = "group" if policy.group else "args_keys" if policy.key is None else "key"
            raise _no_argument(name, argument, parameters, field)


def _no_argument(
    name: str, argument: str, parameters: Mapping[str, inspect.Parameter], field: str
) -> InvalidPolicy:
    return InvalidPolicy(
        f"{name} has no argument {argument!r}.{suggestion(argument, sorted(parameters))} "
        f"Name one of: {', '.join(parameters) or '(none)'}.",
        field=field,
    )


#: Annotations of parameters that take no list, as types and as the text of one.
_NO_LISTS = (str, bytes, int, float, bool, dict, set, frozenset)
_NO_LIST_NAMES = {kind.__name__ for kind in _NO_LISTS} | {"Mapping", "Dict", "Set", "FrozenSet"}


def _check_merged(name: str, argument: str, parameters: Mapping[str, inspect.Parameter]) -> None:
    """``unique_merge`` names parameters that take lists, as far as the signature shows."""
    parameter = parameters.get(argument)
    if parameter is None:
        if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
            return
        raise _no_argument(name, argument, parameters, "merge")
    wrong = ""
    annotation: Any = parameter.annotation
    origin = getattr(annotation, "__origin__", annotation)
    default = parameter.default
    if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
        wrong = f"it is written {parameter}"
    elif origin in _NO_LISTS or (
        isinstance(origin, str) and origin.partition("[")[0].strip() in _NO_LIST_NAMES
    ):
        wrong = f"its annotation is {getattr(origin, '__name__', origin)}"
    elif default is not parameter.empty and not isinstance(default, (list, tuple, type(None))):
        wrong = f"its default is of type {type(default).__name__}"
    if wrong:
        raise InvalidPolicy(
            f"{name}: unique_merge names {argument!r}, which takes no list: {wrong}. Name a "
            "parameter that takes a list, whose values may be appended to one another",
            field="merge",
        )
