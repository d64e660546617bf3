"""The app of the demo. No server: messages are files, results and locks are SQLite."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import broker  # noqa: F401  messages appear whole
from celery import Celery
from celery.signals import after_task_publish

import celery_unique

DIRECTORY = Path(os.environ["CELERY_UNIQUE_DEMO"])
MESSAGES = DIRECTORY / "messages"
PUBLISHED = DIRECTORY / "published"
RUNS = DIRECTORY / "runs"
#: Until this file is there, rebuild_index and charge keep running.
ENOUGH = DIRECTORY / "enough"

MESSAGES.mkdir(exist_ok=True)
WINDOW_S = 2

app = Celery("shop", broker="filesystem://", backend=f"db+sqlite:///{DIRECTORY}/results.sqlite3")
app.conf.update(
    broker_transport_options={
        "data_folder_in": str(MESSAGES),
        "data_folder_out": str(MESSAGES),
        "control_folder": str(DIRECTORY / "control"),
        "polling_interval": 0.02,
    },
    unique_store_url=f"sqlite:///{DIRECTORY}/locks.sqlite3",
)
celery_unique.install(app)


def note(path: Path, *words: object) -> None:
    """Append one line, whole: several processes write here at once."""
    line = " ".join(map(str, words)) + "\n"
    with path.open("ab", buffering=0) as file:
        file.write(line.encode())


def work() -> None:
    while not ENOUGH.exists():
        time.sleep(0.01)


@after_task_publish.connect
def note_published(sender: Any = None, headers: Any = None, **_: Any) -> None:
    if sender != "hello":
        note(PUBLISHED, sender, headers["id"])


@app.task(name="hello")
def hello() -> None:
    """Not unique: a process that has called it is connected to the broker."""


@app.task(name="rebuild_index", unique=True)
def rebuild_index(shop_id: int, full: bool = False) -> str:
    note(RUNS, "rebuild_index")
    work()
    return f"index of shop {shop_id}"


@app.task(name="charge", unique=True, unique_on_conflict="reject")
def charge(order_id: int) -> str:
    note(RUNS, "charge")
    work()
    return f"order {order_id} charged"


@app.task(name="send_digest", unique=True, unique_for=WINDOW_S, unique_states="window")
def send_digest(user_id: int) -> str:
    note(RUNS, "send_digest")
    return f"digest to user {user_id}"


@app.task(name="import_feed", unique=True)
def import_feed(feed_id: int) -> None:
    note(RUNS, "import_feed")
    raise ConnectionError(f"feed {feed_id} is unavailable")
