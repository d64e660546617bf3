"""The time that one act has, connecting, waiting for others and retries included."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

Result = TypeVar("Result")

BETWEEN_ACTS_S = 0.25


class Deadline(threading.local):
    """When the act of this thread must be over."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._at: float | None = None

    @contextmanager
    def running(self) -> Iterator[None]:
        self.restart()
        try:
            yield
        finally:
            self._at = None

    def restart(self) -> None:
        self._at = time.monotonic() + self._timeout_s

    def remaining(self) -> float:
        """Seconds that are left; between acts, when a pool tidies up, a moment."""
        return BETWEEN_ACTS_S if self._at is None else max(0.0, self._at - time.monotonic())

    def passed(self) -> bool:
        return self._at is not None and self._at <= time.monotonic()


def call_within(
    seconds: float, call: Callable[[], Result], late: Callable[[Result], Any]
) -> Result:
    """Call in a thread of its own; TimeoutError when it takes longer than that.

    For what cannot be told how long it may take: resolving a name, libpq's
    connect. A result that comes too late is given to ``late``.
    """
    attempt = _Attempt(call, late)
    thread = threading.Thread(target=attempt.run, name="celery_unique connect", daemon=True)
    try:
        thread.start()
    except RuntimeError:  # no new threads while the interpreter shuts down
        return call()
    if not attempt.over.wait(seconds) and attempt.give_up():
        raise TimeoutError(f"no connection within {seconds:.3g} s")
    if attempt.error is not None:
        raise attempt.error
    return attempt.result  # type: ignore[no-any-return]


class _Attempt:
    def __init__(self, call: Callable[[], Any], late: Callable[[Any], Any]) -> None:
        self._call = call
        self._late = late
        self._mutex = threading.Lock()
        self._given_up = False
        self.over = threading.Event()
        self.result: Any = None
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            self.result = self._call()
        except BaseException as error:  # noqa: BLE001  raised again by the thread that waits
            self.error = error
        with self._mutex:
            self.over.set()
            too_late = self._given_up
        if too_late and self.error is None:
            self._late(self.result)

    def give_up(self) -> bool:
        with self._mutex:
            self._given_up = not self.over.is_set()
            return self._given_up
