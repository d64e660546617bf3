"""A caller that asks all the time."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import Any, Self

from tests.support import eventually
from tests.support.stage import Stage


@dataclass(frozen=True, slots=True)
class Answer:
    at: float
    outcome: str
    task_id: str


class Caller:
    """Calls one task again and again, from a thread, until it is told to stop.

    A call that was admitted is published like any other, so that later calls are its duplicates.
    """

    def __init__(self, stage: Stage, task: str, *args: Any, pause_s: float = 0.02) -> None:
        self.answers: list[Answer] = []
        self._task = stage.app.tasks[task]
        self._args = args
        self._pause_s = pause_s
        self._stop = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._work, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(10)
        if self._error is not None:
            raise self._error

    def _work(self) -> None:
        try:
            while not self._stop.wait(self._pause_s):
                result = self._task.apply_async(self._args)
                self.answers.append(Answer(time.time(), result.outcome, result.id))
        except BaseException as error:
            self._error = error

    def lasted_s(self) -> float:
        return self.answers[-1].at - self.answers[0].at if self.answers else 0.0

    @property
    def admitted(self) -> list[Answer]:
        return [answer for answer in self.answers if answer.outcome != "deduplicated"]

    def wait_for_admission(self, timeout: float = 30.0) -> Answer:
        """As long as that because a busy machine must not matter: a key that does not lapse with
        its run lease stays taken for a queue lease, which is a day."""
        return eventually(
            lambda: self.admitted,
            timeout=timeout,
            message=f"none of the calls was admitted ({len(self.answers)} made)",
        )[0]
