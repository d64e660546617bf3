"""How acts reach the server: scripts by their hash, with what waits to be told in front of them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from redis.exceptions import NoScriptError, ResponseError

from celery_unique.exceptions import StoreUnavailable, UnreadableRecord
from celery_unique.stores.record_followers import UNREADABLE, unreadable

from .connections import Again, Command, Exchanging
from .layout import Layout
from .scripts import Script
from .write_behind import RECORD, Taken, WriteBehindBuffer

#: Commands sent at once before their replies are read.
BATCH = 500


class RedisActing:
    """What every part of the store does its acts with."""

    #: How many one-way acts about other keys go along with an act that somebody waits for.
    takes_along = 8

    clock_offset_ms = 0
    _layout: Layout
    _connections: Exchanging
    _one_way: WriteBehindBuffer

    def _now(self, clock: list[bytes]) -> int:
        return int(clock[0]) * 1000 + int(clock[1]) // 1000 + self.clock_offset_ms

    def _command(self, script: Script, key: str, *arguments: str | int) -> Command:
        return (
            "EVALSHA",
            script.sha,
            4,
            *self._layout.names_of(key),
            self.clock_offset_ms,
            *arguments,
        )

    def _run(self, script: Script, key: str, *arguments: str | int) -> Any:
        return self._checked(self._run_all(script, [self._command(script, key, *arguments)]))[0]

    def _run_all(
        self, script: Script, commands: Sequence[Command], again: Again | None = None
    ) -> list[Any]:
        """One round trip for each batch; another one where the server lost the script.

        What a part of the store did not answer is a StoreUnavailable in place of its reply.
        """
        earlier = self._one_way.earlier(_records(commands), self.takes_along)
        if len(commands) <= BATCH:
            replies = self._exchange(commands, again, earlier)
        else:
            replies = []
            for first in range(0, len(commands), BATCH):
                replies += self._exchange(commands[first : first + BATCH], again, earlier)
        return self._with_unknown_script(script, commands, replies, again)

    def _begin_all(
        self,
        script: Script,
        commands: Sequence[Command],
        again: Again,
        in_front: Taken | None = None,
    ) -> Callable[[], list[Any]]:
        """``_run_all`` of at most a batch in two steps: what is returned waits for the replies."""
        earlier = self._one_way.earlier(_records(commands), self.takes_along)
        if in_front:
            earlier += in_front
            in_front.clear()
        number = len(earlier)
        try:
            wait = self._connections.begin([*(act.command for act in earlier), *commands], again)
        except BaseException:
            self._one_way.put_back(earlier)
            raise

        def heard() -> list[Any]:
            try:
                replies = wait()
            except BaseException:
                self._one_way.put_back(earlier)
                raise
            if earlier:
                self._one_way.heard(earlier, replies[:number])
            return self._with_unknown_script(script, commands, replies[number:], again)

        return heard

    def _with_unknown_script(
        self,
        script: Script,
        commands: Sequence[Command],
        replies: list[Any],
        again: Again | None = None,
    ) -> list[Any]:
        while missing := [n for n, reply in enumerate(replies) if isinstance(reply, NoScriptError)]:
            # The first one brings the script along and the server keeps it: SCRIPT FLUSH, a
            # restart and a fail-over cost one more round trip, once, and in a cluster one for
            # each server.
            missing = missing[:BATCH]
            left = [commands[n] for n in missing]
            left[0] = script.whole(left[0])
            for n, reply in zip(missing, self._connections.exchange(left, again), strict=True):
                replies[n] = reply
        for n, reply in enumerate(replies):
            if isinstance(reply, ResponseError):
                if not is_about_the_record(reply):
                    raise self._connections.unavailable(reply) from reply
                replies[n] = self._unreadable(commands[n][RECORD], reply)
        return replies

    def _unreadable(self, name: str, why: str | Exception) -> UnreadableRecord:
        """``name``: that of the record."""
        if isinstance(why, ResponseError):
            why = str(why).partition(" script:")[0]
        key = self._layout.key_of(name) or name
        return unreadable(key, why, f"Redis at {self._connections.label}")

    @contextmanager
    def _reading(self, key: str) -> Iterator[None]:
        """Around what makes sense of a reply: the record behind it may be anything."""
        try:
            yield
        except UNREADABLE as error:
            raise self._unreadable(self._layout.name_of(key), error) from error

    def _exchange(
        self, commands: Sequence[Command], again: Again | None, earlier: Taken | None
    ) -> list[Any]:
        """The replies to these commands; ``earlier`` is sent in front of them."""
        if not earlier:
            return self._connections.exchange(commands, again)
        number = len(earlier)
        all_of_them = [*(act.command for act in earlier), *commands]
        try:
            replies = self._connections.exchange(all_of_them, again)
        except BaseException:
            self._one_way.put_back(earlier)
            raise
        self._one_way.heard(earlier, replies[:number])
        return replies[number:]

    def _ask(self, commands: Sequence[Command], about: Sequence[str] = ()) -> list[Any]:
        """The replies to commands that read; ``about``: the records whose news must be in them."""
        return self._checked(self._exchange(commands, None, self._one_way.earlier(about)))

    def _checked(self, replies: list[Any]) -> list[Any]:
        """Raises what is an error in place of a reply."""
        for reply in replies:
            if isinstance(reply, ResponseError):
                raise self._connections.unavailable(reply) from reply
            if isinstance(reply, StoreUnavailable):
                raise reply
        return replies

    def _send(self, script: Script, key: str, *arguments: str | int) -> None:
        self._one_way.send(script, [self._command(script, key, *arguments)])

    def _acts(self, script: Script, commands: Iterable[Command]) -> Taken | None:
        """One-way acts that go along with something else; by themselves where nothing may."""
        if not self.takes_along:
            self._one_way.send(script, commands)
            return None
        return self._one_way.acts(script, commands)


def is_about_the_record(error: ResponseError) -> bool:
    """Whether a script failed over what is stored, and not the server over something else.

    Redis 6.2 names the place in front of what a command has said, newer ones behind it.
    """
    text = str(error)
    if "WRONGTYPE" in text:
        return True
    if type(error) is not ResponseError or "user_script" not in text or "killed" in text:
        return False
    if re.search(r"@user_script: \d+: -?[A-Z]{2,}", text):
        return False
    return text.startswith(("ERR ", "user_script"))


def _records(commands: Sequence[Command]) -> list[str]:
    return [command[RECORD] for command in commands]
