"""Runs the store's commands and scripts, with buffered acts in front of them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from redis.exceptions import NoScriptError, ResponseError

from celery_unique.exceptions import StoreUnavailable, UnreadableRecord
from celery_unique.stores.record_followers import UNREADABLE, unreadable

from .connections import AnyConnections, Command, Resend
from .layout import Layout
from .scripts import Script
from .write_behind import BATCH, RECORD, Piggyback, WriteBehindBuffer


class Commands:
    """Sends scripts by hash, and the text of one that the server does not have.

    ``piggyback_limit``: how many buffered acts on other records a script carries.
    """

    def __init__(self, connections: AnyConnections, layout: Layout, piggyback_limit: int) -> None:
        self.clock_offset_ms = 0
        self.buffer = WriteBehindBuffer(connections)
        self._connections = connections
        self._layout = layout
        self._piggyback_limit = piggyback_limit

    def now(self, clock: list[bytes]) -> int:
        """The server's time in milliseconds, from the reply to TIME."""
        return int(clock[0]) * 1000 + int(clock[1]) // 1000 + self.clock_offset_ms

    def command(self, script: Script, key: str, *arguments: str | int) -> Command:
        names = self._layout.names_of(key)
        return ("EVALSHA", script.sha, len(names), *names, self.clock_offset_ms, *arguments)

    # -- scripts ---------------------------------------------------------------

    def run(self, script: Script, key: str, *arguments: str | int) -> Any:
        return self.check(self.run_all(script, [self.command(script, key, *arguments)]))[0]

    def run_all(
        self, script: Script, commands: Sequence[Command], resend: Resend | None = None
    ) -> list[Any]:
        """One round trip for each batch, and another one where the server lost the script.

        Where a part of the store is unavailable, its replies are StoreUnavailable errors.
        """
        if len(commands) <= BATCH:
            return self.begin_all(script, commands, resend)()
        replies = []
        for first in range(0, len(commands), BATCH):
            replies += self.begin_all(script, commands[first : first + BATCH], resend)()
        return replies

    def begin_all(
        self,
        script: Script,
        commands: Sequence[Command],
        resend: Resend | None = None,
        in_front: Piggyback | None = None,
    ) -> Callable[[], list[Any]]:
        """``run_all`` of at most a batch in two steps: the returned function waits for replies."""
        earlier = self.buffer.take((each[RECORD] for each in commands), self._piggyback_limit)
        if in_front:
            earlier += in_front
            in_front.clear()
        wait = self._begin(commands, resend, earlier)
        return lambda: self._with_missing_script(script, commands, wait(), resend)

    def send(self, script: Script, commands: Iterable[Command]) -> None:
        """Fire-and-forget."""
        self.buffer.send(script, commands)

    def piggyback(self, script: Script, commands: Iterable[Command]) -> Piggyback | None:
        """Acts for ``begin_all``; sent by themselves where a script carries none."""
        if self._piggyback_limit:
            return self.buffer.piggyback(script, commands)
        self.buffer.send(script, commands)
        return None

    def _with_missing_script(
        self,
        script: Script,
        commands: Sequence[Command],
        replies: list[Any],
        resend: Resend | None = None,
    ) -> list[Any]:
        while missing := [n for n, reply in enumerate(replies) if isinstance(reply, NoScriptError)]:
            # The first command brings the script and the server keeps it: SCRIPT FLUSH, a restart
            # and a fail-over cost one more round trip, in a cluster one for each server.
            again = [commands[n] for n in missing]
            again[0] = script.whole(again[0])
            for n, reply in zip(missing, self._connections.exchange(again, resend), strict=True):
                replies[n] = reply
        for n, reply in enumerate(replies):
            if isinstance(reply, ResponseError):
                if not is_about_the_record(reply):
                    raise self._connections.unavailable(reply) from reply
                replies[n] = self.unreadable(commands[n][RECORD], reply)
        return replies

    # -- plain commands --------------------------------------------------------

    def query(self, commands: Sequence[Command], records: Sequence[str] = ()) -> list[Any]:
        """Run commands that read; ``records``: those whose buffered acts must precede them."""
        return self.check(self.exchange(commands, records))

    def exchange(self, commands: Sequence[Command], records: Sequence[str] = ()) -> list[Any]:
        """As ``query``, with errors in place of replies."""
        return self._begin(commands, None, self.buffer.take(records))()

    def _begin(
        self, commands: Sequence[Command], resend: Resend | None, earlier: Piggyback
    ) -> Callable[[], list[Any]]:
        if not earlier:
            return self._connections.begin(commands, resend)
        number = len(earlier)
        try:
            wait = self._connections.begin([*(act.command for act in earlier), *commands], resend)
        except BaseException:
            self.buffer.requeue(earlier)
            raise

        def receive() -> list[Any]:
            try:
                replies = wait()
            except BaseException:
                self.buffer.requeue(earlier)
                raise
            self.buffer.record_replies(earlier, replies[:number])
            return replies[number:]

        return receive

    # -- errors ----------------------------------------------------------------

    def check(self, replies: list[Any]) -> list[Any]:
        """Raise the first error among the replies."""
        for reply in replies:
            if isinstance(reply, ResponseError):
                raise self._connections.unavailable(reply) from reply
            if isinstance(reply, StoreUnavailable):
                raise reply
        return replies

    def unreadable(self, name: str, why: str | Exception) -> UnreadableRecord:
        """``name``: that of the record."""
        if isinstance(why, ResponseError):
            why = str(why).partition(" script:")[0]
        key = self._layout.key_of(name) or name
        return unreadable(key, why, f"Redis at {self._connections.label}")

    @contextmanager
    def reading(self, key: str) -> Iterator[None]:
        """Around code that parses a reply: another program may have written the record."""
        try:
            yield
        except UNREADABLE as error:
            raise self.unreadable(self._layout.name_of(key), error) from error


def is_about_the_record(error: ResponseError) -> bool:
    """Whether a script failed because of what is stored, not because the server refused.

    Redis 6.2 puts the place in front of a command's own error, newer servers behind it.
    """
    text = str(error)
    if "WRONGTYPE" in text:
        return True
    if type(error) is not ResponseError or "user_script" not in text or "killed" in text:
        return False
    if re.search(r"@user_script: \d+: -?[A-Z]{2,}", text):
        return False
    return text.startswith(("ERR ", "user_script"))
