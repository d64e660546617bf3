"""Awaitable calls, for programs with an event loop: ``await aio.apply_async(task, ...)``.

A call runs in one of a few threads of this module, as if the caller made it: with its context
variables, Celery's current app and, in a worker, the current task. The event loop waits for no
server, and a store or broker that does not reply occupies these threads only.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import Context, copy_context
from dataclasses import dataclass
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, overload

from celery import current_app
from celery._state import _task_stack, get_current_worker_task

from . import locks
from .publish import apply_many as batches

if TYPE_CHECKING:
    from typing import ParamSpec, TypeVar, Unpack

    from .installation.task import UniqueTask
    from .installation.types import UniqueSignature
    from .policy.option_types import CallOptions
    from .publish.results import UniqueResult

    P = ParamSpec("P")
    R = TypeVar("R")

__all__ = ["apply_async", "apply_many", "delay", "lookup", "release"]

logger = logging.getLogger("celery_unique")

#: Fewer than the connections that Celery keeps to a broker (``broker_pool_limit``, 10).
THREADS = 8
#: After this time without the beginning of a call, the thread in charge waits for a server.
PATIENCE_S = 0.02
#: A loop that has not resumed the caller after this time is busy with something else.
RESUMES_WITHIN_S = 0.001


@overload
async def apply_async(
    task: UniqueTask[..., R] | UniqueSignature[R],
    args: tuple[Any, ...] | list[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    **options: Unpack[CallOptions],
) -> UniqueResult[R]: ...
@overload
async def apply_async(
    task: Any,
    args: tuple[Any, ...] | list[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    **options: Unpack[CallOptions],
) -> Any: ...
async def apply_async(
    task: Any,
    args: tuple[Any, ...] | list[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    **options: Unpack[CallOptions],
) -> Any:
    """``task.apply_async(args, kwargs, **options)``, of a task, a signature or a canvas."""
    return await _in_thread("apply_async", lambda: task.apply_async(args, kwargs, **options))


async def delay(task: UniqueTask[P, R], *args: P.args, **kwargs: P.kwargs) -> UniqueResult[R]:
    """``task.delay(*args, **kwargs)``."""
    return await _in_thread("delay", lambda: task.delay(*args, **kwargs))


def _awaitable(function: Callable[P, R]) -> Callable[P, Coroutine[Any, Any, R]]:
    @wraps(function)
    async def awaitable(*args: P.args, **kwargs: P.kwargs) -> R:
        return await _in_thread(function.__name__, lambda: function(*args, **kwargs))

    return awaitable


lookup = _awaitable(locks.lookup)
release = _awaitable(locks.release)


async def apply_many(signatures: Iterable[Any]) -> list[Any]:
    """As :func:`celery_unique.apply_many`."""
    signatures = list(signatures)  # an iterator of the caller belongs to its thread
    return await _in_thread("apply_many", lambda: batches.apply_many(signatures))


# -- threads ---------------------------------------------------------------------------------


@dataclass(slots=True)
class _Call:
    """A call, and what its caller has in its own thread."""

    function: Callable[[], Any]
    context: Context
    app: Any
    task: Any
    request: Any
    future: Future[Any]
    resumed: threading.Event

    def run(self) -> None:
        if not self.future.set_running_or_notify_cancel():
            self.resumed.set()
            return
        self.app.set_current()
        if self.task is not None:
            _task_stack.push(self.task)
            self.task.request_stack.push(self.request)
        try:
            self.future.set_result(self.context.run(self.function))
        except BaseException as error:  # noqa: BLE001 raised to the caller
            self.future.set_exception(error)
        finally:
            if self.task is not None:
                self.task.request_stack.pop()
                _task_stack.pop()
            # Its traceback has this frame, and so itself: a cycle, which would be collected in the
            # thread of the loop and stop it for milliseconds.
            del self


class _Threads:
    """The threads of one process.

    The interpreter runs one thread at a time, and a loop waits for its turn like every other. So
    one thread is in charge of the calls, and makes them one after the other. While it waits for a
    server, another one takes over, and it ends with its call.
    """

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(THREADS, thread_name_prefix="celery_unique.aio")
        self._lock = threading.Lock()
        self._calls: deque[_Call] = deque()
        self._begun = 0
        self._busy = 0
        self._in_charge: object = None
        self._watching: asyncio.AbstractEventLoop | None = None

    def submit(self, function: Callable[[], R], resumed: threading.Event) -> Future[R]:
        task = get_current_worker_task()
        call = _Call(
            function,
            copy_context(),
            current_app._get_current_object(),
            task,
            None if task is None else task.request,
            Future(),
            resumed,
        )
        with self._lock:
            self._calls.append(call)
            if self._in_charge is None:
                self._begin()
            elif self._watching is None or self._watching.is_closed():
                self._watch(asyncio.get_running_loop(), self._begun)
        return call.future

    def _begin(self) -> None:
        self._busy += 1
        self._in_charge = thread = object()
        self._executor.submit(self._work, thread)

    def _watch(self, loop: asyncio.AbstractEventLoop, begun: int) -> None:
        self._watching = loop
        loop.call_later(PATIENCE_S, self._add_thread, loop, begun)

    def _add_thread(self, loop: asyncio.AbstractEventLoop, begun: int) -> None:
        """Begin another thread if no call was begun since."""
        with self._lock:
            if not self._calls:
                self._watching = None
                return
            if self._begun == begun and self._busy < THREADS:
                self._begin()
            self._watch(loop, self._begun)

    def _work(self, thread: object) -> None:
        while (call := self._next(thread)) is not None:
            call.run()
            # Let the loop run now, and not only after the interpreter's interval. Calls that end
            # while it waits for its turn would all be resumed in one of its rounds.
            call.resumed.wait(RESUMES_WITHIN_S)

    def _next(self, thread: object) -> _Call | None:
        with self._lock:
            if self._in_charge is thread:
                if self._calls:
                    self._begun += 1
                    return self._calls.popleft()
                self._in_charge = None
            self._busy -= 1
            return None


_threads: _Threads | None = None


def _forget_threads() -> None:
    global _threads
    _threads = None


# A child process has none of its parent's threads.
os.register_at_fork(after_in_child=_forget_threads)


async def _in_thread(what: str, function: Callable[[], R]) -> R:
    global _threads
    if _threads is None:
        _threads = _Threads()
    resumed = threading.Event()
    future = _threads.submit(function, resumed)
    try:
        return await asyncio.wrap_future(future)
    except asyncio.CancelledError:
        if not future.cancelled():
            future.add_done_callback(partial(_report_abandoned, what))
        raise
    finally:
        resumed.set()
        del future, function  # not a cycle: the future has the error, whose traceback has them


def _report_abandoned(what: str, future: Future[Any]) -> None:
    """A thread cannot be interrupted: the call was made, or failed, with no caller to notify."""
    error = future.exception()
    if error is not None:
        logger.warning("%s failed after its caller was cancelled: %s", what, error)
    else:
        logger.info("%s completed after its caller was cancelled: %s", what, future.result())
