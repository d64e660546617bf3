"""Celery's broker in a directory, for real workers without a server.

kombu's own filesystem transport loses messages in two ways that tests would stumble over:

* it makes a message's file before it fills it. A worker that looks in between reads an empty
  file, which ends the worker;
* it remembers the queues it has bound for the whole process, whichever directory they were in. In
  the next test's directory the binding is missing, and what is published goes nowhere.
"""

from __future__ import annotations

import time
import uuid
from pathlib import Path
from typing import Any

from kombu.transport import filesystem, virtual
from kombu.utils.json import dumps


class Channel(filesystem.Channel):
    def _put(self, queue: str, payload: dict[str, Any], **kwargs: Any) -> None:
        name = f"{round(time.monotonic() * 1000)}_{uuid.uuid4()}.{queue}.msg"
        folder = Path(self.data_folder_out)
        # A reader looks for names that end in .msg, so it sees the file once it is complete.
        unfinished = folder / f"{name}.unfinished"
        unfinished.write_text(dumps(payload))
        unfinished.rename(folder / name)


class Transport(filesystem.Transport):
    Channel = Channel

    def __init__(self, client: Any, **kwargs: Any) -> None:
        super().__init__(client, **kwargs)
        self.state = virtual.BrokerState()


def filesystem_settings(directory: Path) -> dict[str, Any]:
    """Celery settings: the broker in ``directory``, results in a SQLite file beside it."""
    queue, control = directory / "queue", directory / "control"
    for folder in (queue, control):
        folder.mkdir(parents=True, exist_ok=True)
    return {
        "broker_url": "filesystem://",
        "broker_transport": "tests.support.filesystem_broker:Transport",
        "broker_transport_options": {
            "data_folder_in": str(queue),
            "data_folder_out": str(queue),
            "control_folder": str(control),
            "polling_interval": 0.02,
        },
        "result_backend": f"db+sqlite:///{directory / 'results.sqlite3'}",
    }
