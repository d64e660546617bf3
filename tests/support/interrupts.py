"""Raises an exception inside a call where a signal handler could: at a chosen point of its code.

CPython runs signal handlers after a call returns, when a function begins, and at the end of a
loop's round, and nowhere else. A point is one of these in the code under test. A trace function
that raised at any instruction would find states that no signal can cause: a lock between the end
of its ``with`` block and ``__exit__``, for example.
"""

from __future__ import annotations

import dis
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import celery_unique

PACKAGE = str(Path(celery_unique.__file__).parent)

#: A code object and an offset in it.
Point = tuple[CodeType, int]

_CHECKS = frozenset(
    number
    for name, number in dis.opmap.items()
    if name == "RESUME" or name.startswith(("CALL", "JUMP_BACKWARD", "POP_JUMP_BACKWARD"))
)


def of_package(frame: FrameType) -> bool:
    """Whether the code is the library's own."""
    return frame.f_code.co_filename.startswith(PACKAGE)


class Interruption:
    """Watches calls of this thread, and interrupts one of them at a point."""

    def __init__(self, watches: Callable[[FrameType], bool] = of_package) -> None:
        self._watches = watches
        self._codes: dict[CodeType, bytes] = {}
        self._seen: list[Point] = []
        self._at = -1
        self._error: BaseException | None = None
        # Kept here: CPython 3.11 uses a trace function that was removed while it was called.
        self._tracer = self._enter

    def points(self, call: Callable[[], Any]) -> list[Point]:
        """Every point that the call passes, in order; a loop passes its own many times."""
        self._seen, self._at = [], -1
        with self._tracing():
            call()
        return self._seen

    def interrupt(self, at: int, error: BaseException, call: Callable[[], Any]) -> bool:
        """Call, and raise the error at its point of this number. False where it has fewer."""
        self._seen, self._at, self._error = [], at, error
        try:
            with self._tracing():
                call()
        except BaseException as raised:
            if raised is not error and not _is_caused_by(raised, error):
                raise
        finally:
            self._error = None
            del error  # it would keep the frames that it went through, and they it
        return len(self._seen) > at

    @contextmanager
    def _tracing(self) -> Iterator[None]:
        before, quiet = sys.gettrace(), sys.unraisablehook
        sys.unraisablehook = lambda _: None  # interrupted while an object is deleted
        sys.settrace(self._tracer)
        try:
            yield
        finally:
            sys.settrace(before)
            sys.unraisablehook = quiet

    def _enter(self, frame: FrameType, event: str, _: Any) -> Any:
        if not self._watches(frame):
            return None
        frame.f_trace_lines, frame.f_trace_opcodes = False, True
        code = frame.f_code
        operations = self._codes.setdefault(code, code.co_code)
        latest = -1

        def step(frame: FrameType, event: str, _: Any) -> Any:
            nonlocal latest
            if event == "opcode":
                if latest in _CHECKS:
                    self._pass((code, frame.f_lasti))
                latest = operations[frame.f_lasti]
            return step

        return step

    def _pass(self, point: Point) -> None:
        self._seen.append(point)
        if len(self._seen) - 1 == self._at:
            sys.settrace(None)
            assert self._error is not None
            raise self._error


def _is_caused_by(raised: BaseException | None, error: BaseException) -> bool:
    """Whether the library has put the error into one of its own, or raised one on its way."""
    while raised is not None and raised is not error:
        raised = raised.__cause__ or raised.__context__
    return raised is error


def line_of(point: Point) -> tuple[str, int]:
    code, offset = point
    line = 0
    for start, number in dis.findlinestarts(code):
        if start > offset:
            break
        line = number or line
    return code.co_filename, line


def named(point: Point) -> str:
    path, line = line_of(point)
    return f"{Path(path).name}:{line} ({point[0].co_name})"
