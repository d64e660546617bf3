"""What became of each message of kombu's on Redis, read from the server's append-only file.

The file has every write in the order in which the server applied it, also those whose client was
killed before it read the reply. kombu takes a message out of its list with one command (``BRPOP``,
which the file shows as ``RPOP``), and records it in ``unacked`` with the next one: a process that
is killed in between takes the message with it, whatever task it was for.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.redis import RedisServer

#: For a server whose file is read afterwards: never rewritten, and the disk is not waited for.
JOURNAL_ARGS = ("--appendfsync", "no", "--auto-aof-rewrite-percentage", "0")


@dataclass
class MessageLife:
    """One message: its copies have the same delivery tag, and one record."""

    task_id: str
    in_queue: int = 0
    recorded: bool = False
    #: Copies that were popped and not recorded.
    unrecorded: int = 0
    #: Its record was removed by an acknowledgement before its task had ended.
    acknowledged_early: bool = False
    events: list[str] = field(default_factory=list)

    @property
    def is_swallowed(self) -> bool:
        """Its last copy was popped by a process that did not record it."""
        return self.unrecorded > 0 and not self.in_queue and not self.recorded


@dataclass
class RedisJournal:
    """The messages of one queue in one database."""

    server: RedisServer
    database: int
    queue: str
    #: A hash is written under such a name when the task has ended: prefix, and the task's id.
    ended_prefix: str

    def messages(self) -> dict[str, MessageLife]:
        """Task id -> its message."""
        by_tag: dict[str, MessageLife] = {}
        queues: dict[str, list[str]] = {}
        ended: set[str] = set()
        for transaction in self._transactions():
            restores = any(name in ("LPUSH", "RPUSH") for name, *_ in transaction)
            for name, key, *values in transaction:
                if key == self.queue or key.startswith(f"{self.queue}\x06\x16"):
                    self._in_queue(name, queues.setdefault(key, []), values, by_tag)
                elif key == "unacked" and name == "HSET":
                    life = by_tag[values[0]]
                    life.recorded = True
                    life.unrecorded -= 1
                    life.events.append("recorded")
                elif key == "unacked" and name == "HDEL":
                    for tag in values:
                        life = by_tag[tag]
                        life.recorded = False
                        if not restores:
                            life.acknowledged_early |= life.task_id not in ended
                        life.events.append("restored" if restores else "acknowledged")
                elif key.startswith(self.ended_prefix):
                    ended.add(key.removeprefix(self.ended_prefix))
        return {life.task_id: life for life in by_tag.values()}

    def _in_queue(
        self, name: str, queue: list[str], values: list[str], by_tag: dict[str, MessageLife]
    ) -> None:
        if name in ("LPUSH", "RPUSH"):
            for text in values:
                message = json.loads(text)
                tag = message["properties"]["delivery_tag"]
                life = by_tag.setdefault(tag, MessageLife(message["headers"]["id"]))
                life.in_queue += 1
                life.events.append("pushed")
                queue.insert(0 if name == "LPUSH" else len(queue), tag)
        elif name == "RPOP":
            life = by_tag[queue.pop()]
            life.in_queue -= 1
            life.unrecorded += 1
            life.events.append("popped")
        else:
            raise AssertionError(f"unexpected command on the list of messages: {name}")

    def _transactions(self) -> Iterator[list[list[str]]]:
        """The commands on this database, in groups that were applied as one."""
        database, group = 0, None
        for command in self._commands():
            name = command[0] = command[0].upper()
            if name == "SELECT":
                database = int(command[1])
            elif name == "MULTI":
                group = []
            elif name == "EXEC":
                if group:
                    yield group
                group = None
            elif database == self.database and len(command) > 1:
                if group is None:
                    yield [command]
                else:
                    group.append(command)

    def _commands(self) -> Iterator[list[str]]:
        assert self.server.directory is not None
        for path in sorted(self.server.directory.rglob("*.incr.aof")):
            yield from _parsed(path)


def _parsed(path: Path) -> Iterator[list[str]]:
    with path.open("rb") as file:
        while line := file.readline():
            if line.startswith(b"#"):
                continue
            parts = []
            for _ in range(int(line[1:])):
                length = int(file.readline()[1:])
                parts.append(file.read(length + 2)[:-2].decode(errors="replace"))
            yield parts
