"""The moment at which an acknowledgement is sent.

Celery notes that a message is acknowledged, and leaves the sending to its event loop: to the
next turn of it, which in a solo worker may come after another task. What must not happen
before that waits here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Acknowledgement:
    """Of one message; made before Celery sends it."""

    def __init__(self, message: Any) -> None:
        self._message = message
        self._then: list[Callable[[], None]] = []
        #: Sent, or failed to be.
        self.is_over = False
        message.ack, message.reject = self._noticing(message.ack), self._noticing(message.reject)

    @property
    def failed(self) -> bool:
        """The broker did not receive it, and will deliver the message again."""
        return self.is_over and not self._message.acknowledged

    def then(self, act: Callable[[], None]) -> None:
        """Run this as soon as it is sent, or has failed."""
        self._then.append(act)
        if self.is_over:  # meanwhile: the thread that pops an act runs it
            self._run_acts()

    def _noticing(self, send: Callable[..., Any]) -> Callable[..., Any]:
        def send_and_run(*args: Any, **kwargs: Any) -> Any:
            try:
                return send(*args, **kwargs)
            finally:
                del self._message.ack, self._message.reject  # the class's own are back
                self.is_over = True
                self._run_acts()

        return send_and_run

    def _run_acts(self) -> None:
        while self._then:
            try:
                act = self._then.pop(0)
            except IndexError:
                return
            act()
