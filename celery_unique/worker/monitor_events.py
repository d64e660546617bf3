"""Celery events about unique tasks, for Flower and other monitors.

A duplicate was never published, so no worker would report it: the worker that ran its holder
does, once the holder has ended and the store has returned how many there were.
Every row has an id of its own. An event under the holder's id would overwrite the holder's
state, and one from a client would look like another worker.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import uuid
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from celery_unique.header import DeliveryName, LockHeader
from celery_unique.keys.digest import short_key

logger = logging.getLogger("celery_unique")


#: Monitors show a task with this event in the state DUPLICATE.
DUPLICATE = "task-duplicate"
#: How many rows one holder gets by default; the next row says how many more there were.
ROWS = 20
#: How many holders may wait for a broker that does not answer.
WAITING = 1000
#: How long a process that ends waits for what is still to be sent.
LAST_WAIT_S = 1.0


def shown_as_unique(key: str) -> str:
    """What a monitor shows as the result of a unique task that has none yet."""
    return f"unique, key {short_key(key)}"


@dataclass(frozen=True, slots=True)
class Duplicates:
    """The calls that one holder has answered."""

    task_name: str
    holder_id: str
    key: str
    hostname: str
    number: int
    most_rows: int = ROWS

    def rows(self) -> Iterator[dict[str, Any]]:
        """One event for each, up to the limit, and one for all the others."""
        held = f"task {self.holder_id} held its key {short_key(self.key)}"
        for number in range(1, min(self.number, self.most_rows) + 1):
            yield self._row(str(number), f"not published: {held}")
        if self.number > self.most_rows:
            more = self.number - self.most_rows
            yield self._row("more", f"and {more} more not published: {held}")

    def _row(self, which: str, text: str) -> dict[str, Any]:
        return {
            # The same again if an end is reported twice, which happens: not one more row then.
            "uuid": str(uuid.uuid5(_NAMESPACE, f"{self.holder_id}/{which}")),
            "name": self.task_name,
            "parent_id": self.holder_id,
            "result": text,
            "args": "",
            "kwargs": "",
            # When the worker was notified. When the call was made, only its caller knows.
            "received": time.time(),
        }


_NAMESPACE = uuid.UUID("5f7e1b7e-6a55-4e0c-9a3d-0d1f2c8b6f4a")


class DuplicateEvents:
    """Sends the rows from a thread of its own: no task and no result waits for them."""

    def __init__(self, app: Any) -> None:
        self._app = app
        self.most_rows = ROWS
        self._start_anew()
        os.register_at_fork(after_in_child=self._start_anew)

    def _start_anew(self) -> None:
        # A forked child has no thread, and its parent sends what is the parent's.
        self._waiting: deque[Duplicates] = deque()
        self._mutex = threading.Lock()
        self._thread: threading.Thread | None = None

    def send(self, header: LockHeader, task_name: str, number: int) -> None:
        """The holder has ended, and this many calls were duplicates of it."""
        if not number or not header.watched:
            return
        hostname = DeliveryName.parse(header.delivery).worker
        duplicates = Duplicates(
            task_name, header.task_id, header.key, hostname, number, self.most_rows
        )
        with self._mutex:
            if len(self._waiting) >= WAITING:
                logger.warning("the broker does not answer: monitors miss duplicates")
                return
            self._waiting.append(duplicates)
            # Not alive: a signal came before it was started, and no other call would start it.
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(
                    target=self._work, name="celery_unique.events", daemon=True
                )
                self._thread.start()

    def flush(self, timeout_s: float = LAST_WAIT_S) -> None:
        """Wait until everything is sent, but not for long."""
        thread = self._thread
        if thread is not None:
            thread.join(timeout_s)

    def _work(self) -> None:
        while True:
            with self._mutex:
                if not self._waiting:
                    self._thread = None
                    return
                duplicates = self._waiting.popleft()
            try:
                self._send(duplicates)
            except Exception as error:  # noqa: BLE001  whatever the broker's client raises
                logger.warning(
                    "monitors miss the %d duplicates of task %s: %s",
                    duplicates.number,
                    duplicates.holder_id,
                    error,
                )

    def _send(self, duplicates: Duplicates) -> None:
        with self._app.events.default_dispatcher(hostname=duplicates.hostname) as dispatcher:
            # One message for all of them, as the worker sends its own events.
            dispatcher.buffer_group = frozenset({"task"})
            dispatcher.buffer_limit = self.most_rows + 2
            for row in duplicates.rows():
                dispatcher.send(DUPLICATE, **row)
            dispatcher.flush()
