"""The answer of the lock store to a call whose message is made meanwhile."""

from __future__ import annotations

from collections.abc import Callable

from .exceptions import StoreUnavailable
from .stores.base import Acquired


class NotAdmitted(Exception):
    """The store has not given the lock: the message that was being made is not sent."""


class NotAnswered(Exception):
    """The store could not be asked for the lock, or did not answer."""

    def __init__(self, error: StoreUnavailable) -> None:
        super().__init__(error)
        self.error = error


class Answer:
    """What the store says to a question that is under way. It is waited for once: whoever asks
    again is told the same, since the connection may be somebody else's by then."""

    def __init__(self, wait: Callable[[], Acquired]) -> None:
        self._wait = wait
        self._error: BaseException | None = None
        self.was_awaited = False
        self.acquired: Acquired | None = None

    def heard(self) -> Acquired:
        if not self.was_awaited:
            self.was_awaited = True
            try:
                self.acquired = self._wait()
            except BaseException as error:
                self._error = error
                raise
        if self.acquired is None:
            assert self._error is not None
            raise self._error
        return self.acquired
