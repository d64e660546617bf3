"""``assert_idempotent``: run a body twice, and interrupted at each of its lines, and compare.

A worker that is killed leaves a task half done, and the broker delivers it again. A body is
idempotent if what it leaves behind is then the same as after one run.
"""

from __future__ import annotations

import difflib
import inspect
import linecache
import pprint
import sys
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, MutableMapping
from contextlib import suppress
from copy import deepcopy
from functools import partial
from itertools import count
from pathlib import Path
from types import BuiltinMethodType, CodeType, FrameType, FunctionType, MethodType
from typing import Any

from celery.exceptions import Retry
from celery.utils import uuid

from celery_unique.exceptions import CeleryUniqueError

#: Up to so many executed lines each is interrupted; of more, each line at its first, second and
#: last execution.
ALL_UP_TO = 500

_CONTAINERS = (list, dict, set, bytearray, deque)


class _Interrupted(BaseException):
    """Ends a body at a checkpoint. No ``except Exception`` catches it, as no worker survives a
    SIGKILL."""


def assert_idempotent(
    task: Any,
    args: Any = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    state: Callable[[], Any] | Collection[Any],
    reset: Callable[[], Any] | None = None,
    checkpoints: Iterable[Callable[..., Any]] = (),
) -> None:
    """Assert that a call of this task leaves the same state when it is run twice, and when it is
    interrupted before any line of its body and then run again, as a redelivered message is.

    ``state`` is a function that returns what is compared, or a list, dict or set. ``reset``
    restores the state from before the first run; without it, the lists, dicts and sets that
    ``state`` and the body read are restored. ``checkpoints`` are functions whose lines count
    besides those of the body.

    All runs of a trial have the same task id, equal arguments, and an empty lock store in memory.
    ``self.retry()`` runs the body again within the run. An exception of the body is raised, with a
    note of the trial.
    """
    read: Callable[[], Any] = state if callable(state) else lambda: state
    trials = _Trials(task, args, kwargs, read, reset, [_body_of(task), *checkpoints])
    once = trials.play("run once", trials.complete)
    trials.compare(once, "run twice", trials.complete, trials.complete)
    executed = trials.executed_lines()
    for checkpoint in _chosen(executed):
        how = f"interrupted before {_place(*executed[checkpoint])}, and run again"
        trials.compare(once, how, partial(trials.interrupted, checkpoint), trials.complete)


class _Trials:
    """Runs of one call, each from the same state."""

    def __init__(
        self,
        task: Any,
        args: Any,
        kwargs: Mapping[str, Any] | None,
        state: Callable[[], Any],
        reset: Callable[[], Any] | None,
        traced: Iterable[Callable[..., Any]],
    ) -> None:
        self._task, self._args, self._kwargs = task, args, kwargs
        self._call = call_text(task, args, kwargs)
        self._state, self._reset = state, reset
        traced = list(traced)
        self._codes = {code for function in traced for code in _codes_of(function)}
        if reset is not None:
            reset()
        self._before = _comparable(state())
        self._restore = reset or _restorer([state, *traced])
        self._task_id = uuid()

    def play(self, how: str, *runs: Callable[[], None]) -> Any:
        """What these runs leave behind."""
        from . import locks_in_memory

        self._restore()
        self._check_restored()
        self._task_id = uuid()
        with locks_in_memory(self._task.app):
            for run in runs:
                try:
                    run()
                except Exception as error:
                    error.add_note(f"Raised by {self._call}, {how}.")
                    raise
        return _comparable(self._state())

    def _check_restored(self) -> None:
        now = self._state()
        if now == self._before:
            return
        cure = (
            "reset= does not restore all that state= returns"
            if self._reset
            else "Pass reset=, a function that restores the state from before the first run: "
            "without it, only the lists, dicts and sets of the test are restored"
        )
        raise CeleryUniqueError(
            f"Cannot run {self._call} again from the beginning: the state is not as before the "
            f"first run. {cure}.\n{_difference(self._before, now)}"
        )

    def complete(self) -> None:
        # Copied: a redelivered message has its arguments as they were sent.
        args, kwargs = deepcopy(self._args), deepcopy(self._kwargs)
        apply: Callable[..., Any] = partial(self._task.apply, args, kwargs, task_id=self._task_id)
        for retries in count():
            try:
                apply(retries=retries, throw=True, unique=False)
                return
            except Retry as retry:  # Celery runs it again only without ``throw``
                if retry.sig is None:
                    raise
                apply = retry.sig.apply

    def interrupted(self, at: int) -> None:
        """Run it up to the executed line of this number."""
        passed = 0

        def pass_line(_code: CodeType, _line: int) -> None:
            nonlocal passed
            passed += 1
            if passed > at:
                raise _Interrupted

        with suppress(_Interrupted):
            _with_lines(self._codes, self.complete, pass_line)

    def executed_lines(self) -> list[tuple[CodeType, int]]:
        lines: list[tuple[CodeType, int]] = []

        def note(code: CodeType, line: int) -> None:
            lines.append((code, line))

        self.play("run once", lambda: _with_lines(self._codes, self.complete, note))
        if not lines:
            raise CeleryUniqueError(
                f"Running {self._call} has executed no line of its body in this thread: there is "
                "nothing to interrupt. Celery does not await an async def and does not iterate "
                "over a generator: let the body run what it makes (asyncio.run)."
            )
        return lines

    def compare(self, expected: Any, how: str, *runs: Callable[[], None]) -> None:
        found = self.play(how, *runs)
        if expected != found:
            raise AssertionError(
                f"{self._call} is not idempotent: {how}, it leaves another state than after "
                f"one run.\n{_difference(expected, found)}"
            )


def _comparable(state: Any) -> Any:
    """A copy, for later."""
    why = "two copies of it are not equal"
    try:
        copied = deepcopy(state)
        if copied == deepcopy(state):
            return copied
    except TypeError as error:  # a generator, a connection
        why = str(error)
    raise CeleryUniqueError(
        f"What state= returns cannot be kept and compared: {why}. Its type is "
        f"{type(state).__name__}: return plain values, for example a list of the rows."
    )


def call_text(task: Any, args: Any, kwargs: Mapping[str, Any] | None) -> str:
    """A call as it is written, for messages."""
    given = [repr(value) for value in args or ()]
    given += [f"{name}={value!r}" for name, value in (kwargs or {}).items()]
    return f"{getattr(task, 'name', task)}({', '.join(given)})"


def _chosen(executed: list[tuple[CodeType, int]]) -> list[int]:
    """The numbers of the executed lines at which a body is interrupted."""
    if len(executed) <= ALL_UP_TO:
        return list(range(len(executed)))
    times: dict[tuple[CodeType, int], list[int]] = {}
    for number, line in enumerate(executed):
        times.setdefault(line, []).append(number)
    return sorted({n for numbers in times.values() for n in (*numbers[:2], numbers[-1])})


# -- lines ----------------------------------------------------------------------------------


def _with_lines(
    codes: set[CodeType], run: Callable[[], Any], pass_line: Callable[[CodeType, int], None]
) -> None:
    """Call ``pass_line`` before each line of this code that ``run`` executes in this thread."""

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        if event == "call":
            return trace if frame.f_code in codes else None
        if event == "line":
            pass_line(frame.f_code, frame.f_lineno)
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        run()
    finally:
        sys.settrace(before)


def _body_of(task: Any) -> Callable[..., Any]:
    """The function as it was written: below automatic retries, and what wraps it."""
    if not hasattr(task, "run"):
        raise CeleryUniqueError(f"assert_idempotent takes a task, not {task!r}.")
    body: Callable[..., Any] = inspect.unwrap(getattr(task, "_orig_run", task.run))
    return body


def _codes_of(function: Callable[..., Any]) -> Iterator[CodeType]:
    """Its own, and that of functions and comprehensions inside of it."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    if code is None:
        raise CeleryUniqueError(
            f"checkpoints= takes functions that are written in Python, not {function!r}."
        )
    waiting = [code]
    while waiting:
        code = waiting.pop()
        yield code
        waiting += [const for const in code.co_consts if isinstance(const, CodeType)]


def _place(code: CodeType, line: int) -> str:
    place = f"line {line} of {Path(code.co_filename).name}"
    text = linecache.getline(code.co_filename, line).strip()
    return f"{place} ({text})" if text else place


def _difference(expected: Any, found: Any) -> str:
    lines = difflib.unified_diff(
        pprint.pformat(expected).splitlines(),
        pprint.pformat(found).splitlines(),
        "expected",
        "found",
        lineterm="",
        n=2,
    )
    return "\n".join(lines) or f"expected {expected!r}, found {found!r}"


# -- state without reset= ---------------------------------------------------------------------


def _restorer(functions: list[Callable[..., Any]]) -> Callable[[], None]:
    """Restores in place the variables and containers that the state and the body read."""
    variables, roots = _read_by(functions)
    modules = {getattr(function, "__module__", None) for function in functions}
    found = list(_reachable([*roots, functions[0]()], modules))
    contents = [(each, _content(each)) for each in found]

    def restore() -> None:
        for rebind in variables:
            rebind()
        for each, content in contents:
            _fill(each, content)

    return restore


def _read_by(functions: list[Callable[..., Any]]) -> tuple[list[Callable[[], None]], list[Any]]:
    """How the variables of functions are bound again, and their values."""
    rebinding: list[Callable[[], None]] = []
    values: list[Any] = []
    waiting: list[Any] = [*functions]
    seen: set[int] = set()
    while waiting:
        function = waiting.pop()
        if isinstance(function, MethodType | BuiltinMethodType):
            values.append(function.__self__)
            function = getattr(function, "__func__", None)
        if not isinstance(function, FunctionType) or id(function) in seen:
            continue
        seen.add(id(function))
        for bind, value in _variables(function):
            if isinstance(value, FunctionType):
                waiting.append(value)
            elif not (inspect.ismodule(value) or inspect.isclass(value)):
                rebinding.append(bind)
                values.append(value)
    return rebinding, values


def _variables(function: FunctionType) -> Iterator[tuple[Callable[[], None], Any]]:
    for cell in function.__closure__ or ():
        try:
            value = cell.cell_contents
        except ValueError:  # not bound yet
            continue
        yield partial(setattr, cell, "cell_contents", value), value
    names = {name for code in _codes_of(function) for name in code.co_names}
    for name in names & function.__globals__.keys():
        value = function.__globals__[name]
        yield partial(function.__globals__.__setitem__, name, value), value


def _reachable(roots: Iterable[Any], modules: set[str | None]) -> Iterator[Any]:
    """The containers that can be reached through containers, tuples, and objects of classes of
    these modules."""
    waiting, seen = list(roots), set()
    while waiting:
        each = waiting.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        own = type(each).__module__ in modules and hasattr(each, "__dict__")
        if isinstance(each, _CONTAINERS) or own:
            yield each
        if isinstance(each, MutableMapping):
            waiting += each.values()
        elif isinstance(each, list | set | tuple | deque):
            waiting += each
        if own:
            waiting += vars(each).values()


def _content(each: Any) -> Any:
    own = dict(vars(each)) if hasattr(each, "__dict__") else None
    return (each.copy() if isinstance(each, _CONTAINERS) else None), own


def _fill(each: Any, content: Any) -> None:
    items, own = content
    if isinstance(each, dict | set):
        each.clear()
        each.update(items)
    elif isinstance(each, list | bytearray):
        each[:] = items
    elif isinstance(each, deque):
        each.clear()
        each.extend(items)
    if own is not None:
        vars(each).clear()
        vars(each).update(own)
