from __future__ import annotations

import threading
from pathlib import Path
from queue import Empty

from kombu import Connection

from tests.support import filesystem_settings


def connect(directory: Path) -> Connection:
    settings = filesystem_settings(directory)
    return Connection(
        transport=settings["broker_transport"],
        transport_options=settings["broker_transport_options"],
    )


def publish(directory: Path, numbers: range) -> None:
    with connect(directory) as connection:
        queue = connection.SimpleQueue("numbers")
        for number in numbers:
            queue.put(number)


def test_a_reader_never_meets_an_unfinished_message(tmp_path):
    publisher = threading.Thread(target=publish, args=(tmp_path, range(500)))
    received = 0

    publisher.start()
    with connect(tmp_path) as connection:
        channel = connection.channel()
        while received < 500:
            was_publishing = publisher.is_alive()
            try:
                channel._get("numbers")  # kombu's own transport fails here, about once in 100
                received += 1
            except Empty:
                if not was_publishing:
                    break

    assert received == 500


def test_a_second_directory_in_the_same_process_gets_its_messages(tmp_path):
    for name in ("first", "second"):
        publish(tmp_path / name, range(1))

    assert len(list((tmp_path / "second" / "queue").iterdir())) == 1
