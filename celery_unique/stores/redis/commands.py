"""Runs the store's commands and scripts, and buffers fire-and-forget acts."""

from __future__ import annotations

import math
import os
import re
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from time import monotonic
from typing import Any, NamedTuple

from redis.exceptions import NoPermissionError, NoScriptError, ResponseError

from celery_unique.exceptions import StoreUnavailable, UnreadableRecord
from celery_unique.stores.circuit_breaker import PushRefused
from celery_unique.stores.fire_and_forget import FireAndForgetQueue, logger
from celery_unique.stores.record_followers import UNREADABLE, unreadable

from .connections import AnyConnections, Command, Resend
from .layout import Layout
from .scripts import BY_SHA, MERGE_PUBLISH, PUBLISH, PUBLISH_PLAIN, Script

#: Commands sent before their replies are read.
BATCH = 500
#: The position of the record's name in a command.
RECORD = 3
#: That of the queue, in a command that pushes a message.
QUEUE = {PUBLISH_PLAIN.sha: 4, PUBLISH.sha: 7, MERGE_PUBLISH.sha: 7}
#: What a script puts in front of the server's error about the queue.
QUEUE_REFUSED = "QUEUE "


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

    def command(self, script: Script, names: Sequence[str], *arguments: str | int) -> Command:
        """``names``: of the keys that the script uses, that of the record first."""
        return ("EVALSHA", script.sha, len(names), *names, self.clock_offset_ms, *arguments)

    # -- scripts ---------------------------------------------------------------

    def run(
        self, script: Script, key: str, *arguments: str | int, more_keys: tuple[str, ...] = ()
    ) -> Any:
        command = self.command(script, (*self._layout.names_of(key), *more_keys), *arguments)
        return self.run_one(script, command)

    def run_one(self, script: Script, command: Command, resend: Resend | None = None) -> Any:
        """The reply to one command; raises StoreUnavailable for an error."""
        if not self.buffer.is_empty:
            return self.check(self.run_all(script, [command], resend))[0]
        replies = self._connections.exchange([command], resend)
        if isinstance(replies[0], Exception):
            replies = self.check(self._repaired(script, [command], replies, resend))
        return replies[0]

    def run_all(
        self, script: Script, commands: Sequence[Command], resend: Resend | None = None
    ) -> list[Any]:
        """One round trip for each batch, and another one where the server lost the script.

        Where a part of the store is unavailable, its replies are StoreUnavailable errors.
        """
        replies = []
        for first in range(0, len(commands), BATCH):
            batch = commands[first : first + BATCH] if len(commands) > BATCH else commands
            exchange = partial(self._exchange, batch, resend, self._earlier(batch))
            replies += self._receive(exchange, script, batch, resend)
        return replies

    def begin_all(
        self,
        script: Script,
        commands: Sequence[Command],
        resend: Resend | None = None,
        in_front: Piggyback | None = None,
    ) -> Callable[[], list[Any]]:
        """``run_all`` of at most a batch in two steps: the returned function waits for replies."""
        earlier = self._earlier(commands)
        if in_front:
            earlier = earlier or Piggyback(self.buffer)
            earlier += in_front
            in_front.clear()
        if not earlier:
            wait = self._connections.begin(commands, resend)
            return partial(self._receive, wait, script, commands, resend)
        try:
            wait = self._connections.begin(earlier.before(commands), resend)
        except BaseException:
            self.buffer.requeue(earlier)
            raise
        wait = partial(self._receive_behind, earlier, wait)
        return partial(self._receive, wait, script, commands, resend)

    def _earlier(self, commands: Sequence[Command]) -> Piggyback | None:
        """Buffered acts that are sent in front; None, as mostly, where there are none."""
        if self.buffer.is_empty:
            return None
        return self.buffer.take([each[RECORD] for each in commands], self._piggyback_limit)

    def send(self, script: Script, commands: Iterable[Command]) -> None:
        """Fire-and-forget."""
        self.buffer.send(script, commands)

    def piggyback(self, script: Script, commands: Iterable[Command]) -> Piggyback | None:
        """Acts for ``begin_all``; sent by themselves where a script carries none."""
        if self._piggyback_limit:
            return self.buffer.piggyback(script, commands)
        self.buffer.send(script, commands)
        return None

    def _receive(
        self,
        wait: Callable[[], list[Any]],
        script: Script,
        commands: Sequence[Command],
        resend: Resend | None,
    ) -> list[Any]:
        replies = wait()
        if [reply for reply in replies if isinstance(reply, ResponseError)]:
            return self._repaired(script, commands, replies, resend)
        return replies

    def _repaired(
        self,
        script: Script,
        commands: Sequence[Command],
        replies: list[Any],
        resend: Resend | None,
    ) -> list[Any]:
        """The replies, with an error of this library in place of one of the server; a script that
        the server does not have is sent to it."""
        while missing := [n for n, reply in enumerate(replies) if isinstance(reply, NoScriptError)]:
            # The first command brings the script and the server keeps it: SCRIPT FLUSH, a restart
            # and a fail-over cost one more round trip, in a cluster one for each server.
            again = [commands[n] for n in missing]
            absent = {command[1]: n for n, command in reversed(list(enumerate(again)))}
            for sha, n in absent.items():  # a batch may have merged calls among others
                again[n] = BY_SHA.get(sha, script).whole(again[n])
            for n, reply in zip(missing, self._connections.exchange(again, resend), strict=True):
                replies[n] = reply
        for n, reply in enumerate(replies):
            if isinstance(reply, ResponseError):
                replies[n] = self._error(commands[n], reply)
        return replies

    # -- plain commands --------------------------------------------------------

    def query(self, commands: Sequence[Command], records: Sequence[str] = ()) -> list[Any]:
        """Run commands that read; ``records``: those whose buffered acts must precede them."""
        return self.check(self.exchange(commands, records))

    def exchange(self, commands: Sequence[Command], records: Sequence[str] = ()) -> list[Any]:
        """As ``query``, with errors in place of replies."""
        earlier = None if self.buffer.is_empty else self.buffer.take(records)
        if earlier:
            # With the text of their scripts: a read cannot be repeated for one that is lacking.
            earlier[:] = [act.whole() for act in earlier]
        return self._exchange(commands, None, earlier)

    def _exchange(
        self, commands: Sequence[Command], resend: Resend | None, earlier: Piggyback | None
    ) -> list[Any]:
        if not earlier:
            return self._connections.exchange(commands, resend)
        exchange = partial(self._connections.exchange, earlier.before(commands), resend)
        return self._receive_behind(earlier, exchange)

    def _receive_behind(self, earlier: Piggyback, wait: Callable[[], list[Any]]) -> list[Any]:
        """The replies without those to piggybacked acts."""
        number = len(earlier)
        try:
            replies = wait()
        except BaseException:
            self.buffer.requeue(earlier)
            raise
        self.buffer.record_replies(earlier, replies[:number])
        return replies[number:]

    # -- errors ----------------------------------------------------------------

    def check(self, replies: list[Any]) -> list[Any]:
        """Raise the first error among the replies."""
        for reply in replies:
            if isinstance(reply, ResponseError):
                raise self._connections.unavailable(reply) from reply
            if isinstance(reply, StoreUnavailable):
                raise reply
        return replies

    def _error(self, command: Command, reply: ResponseError) -> StoreUnavailable:
        text = str(reply)
        if command[1] in QUEUE and (
            # Or without rights on one of the keys, or ended by SCRIPT KILL before its first write.
            text.startswith(QUEUE_REFUSED)
            or isinstance(reply, NoPermissionError)
            or "killed" in text
        ):
            queue, why = command[QUEUE[command[1]]], text.removeprefix(QUEUE_REFUSED)
            problem = ResponseError(f"refused to push to the queue {queue}: {why}")
            error = self._connections.unavailable(problem)
            return PushRefused(str(error), store=error.store)
        if is_about_the_record(reply):
            return self.unreadable(command[RECORD], reply)
        return self._connections.unavailable(reply)

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


# -- fire-and-forget acts ----------------------------------------------------

#: How long the thread waits for more acts before it sends. One act costs nearly as much as a
#: batch. A caller that meets an unconfirmed lock meanwhile tries again after 2 and after 7 ms, and
#: a task that has started by then needs no confirmation.
GATHER_S = 0.005
#: How long an act is repeated while the store is unavailable. By then its lock has lapsed.
PATIENCE_S = 3600.0
#: Between two attempts; the last one repeats.
PAUSES_S = (0.1, 0.2, 0.5, 1.0)
#: How long a caller waits for acts on the same record that the thread is sending.
IN_FLIGHT_S = 0.05
#: When the thread is woken again if it has not come: a signal may have interrupted the first
#: call, and a needless one does no harm.
WAKE_AGAIN_S = 1.0


class Act(NamedTuple):
    script: Script
    command: Command
    give_up_at: float

    def whole(self) -> Act:
        """With the text of its script, for a server that may not have it."""
        return self._replace(command=self.script.whole(self.command))


class Piggyback(list[Act]):
    """Acts sent in front of another command, whose sender reports their replies or requeues them.

    If the sender is interrupted before that, they are requeued when this is deleted.
    """

    def __init__(self, buffer: WriteBehindBuffer, acts: Iterable[Act] = ()) -> None:
        self._buffer = buffer
        super().__init__(acts)

    def before(self, commands: Sequence[Command]) -> list[Command]:
        return [*(act.command for act in self), *commands]

    def __del__(self) -> None:
        if self:
            self._buffer.requeue(self)


_buffers: weakref.WeakSet[WriteBehindBuffer] = weakref.WeakSet()


class WriteBehindBuffer:
    """Buffers acts, and returns without waking the server.

    Each may run late or twice without harm, so an act without a reply is sent again: it is lost
    only with its process. Commands that are waited for carry buffered acts in front of them
    (``take``), so that a process reads its own writes, and one that makes call after call hardly
    needs the thread.
    """

    def __init__(self, connections: AnyConnections) -> None:
        self._connections = connections
        self._queue = FireAndForgetQueue(connections.timeout_s)
        self._reset()
        _buffers.add(self)

    def _reset(self) -> None:
        # Entered in one step: a signal in ``Condition.__enter__`` could leave it locked for ever.
        self._mutex = threading.RLock()
        self._changed = threading.Condition(self._mutex)
        self._waiting: OrderedDict[str, list[Act]] = OrderedDict()  # by record
        self._in_flight: set[str] = set()  # records on which the thread is sending acts
        self._carried: dict[int, int] = {}  # piggybacks under way, by id, and whose thread's
        self._woken_at = -math.inf  # when the thread was woken that has yet to take what waits
        self._is_closed = False
        self._hurry = False  # flush waits

    def send(self, script: Script, commands: Iterable[Command]) -> None:
        acts = self._acts(script, commands)
        with self._mutex:
            for act in acts:
                self._waiting.setdefault(act.command[RECORD], []).append(act)
        self._wake()

    def piggyback(self, script: Script, commands: Iterable[Command]) -> Piggyback:
        """New acts, for a caller that sends them in front of its own commands."""
        return Piggyback(self, self._acts(script, commands))

    def _acts(self, script: Script, commands: Iterable[Command]) -> list[Act]:
        self._is_closed = False
        give_up_at = monotonic() + PATIENCE_S
        return [Act(script, command, give_up_at) for command in commands]

    def _wake(self) -> None:
        now = monotonic()
        with self._mutex:
            wake = now - self._woken_at > WAKE_AGAIN_S
            if wake:
                self._woken_at = now
        if wake:
            self._queue.put(self._send_waiting)

    @property
    def is_empty(self) -> bool:
        return not (self._waiting or self._in_flight)

    def take(self, records: Iterable[str], others: int = 0) -> Piggyback:
        """Take the buffered acts on these records, which must precede the caller's commands, and
        as many on other records as make ``others``, which save the thread work."""
        taken = Piggyback(self)
        with self._mutex:
            records = [one for one in records if one in self._waiting or one in self._in_flight]
            if not self._in_flight.isdisjoint(records):
                # On another connection, where they could be overtaken. Bounded: an unresponsive
                # server has its own time-outs.
                self._changed.wait_for(lambda: self._in_flight.isdisjoint(records), IN_FLIGHT_S)
            # Deleted once they are in the list: after a signal in between they are sent twice.
            for record in records:
                if record in self._waiting:
                    taken += self._waiting[record]
                    del self._waiting[record]
            while self._waiting and len(taken) < others:
                record = next(iter(self._waiting))
                taken += self._waiting[record]
                del self._waiting[record]
            if taken:
                self._carried[id(taken)] = threading.get_ident()
        return taken

    def record_replies(self, acts: Piggyback, replies: Sequence[Any]) -> None:
        """Requeue piggybacked acts that have to be sent again."""
        # With their scripts, or the next command that carries them could get the same reply.
        unknown = [act.whole() for act in _with_reply(NoScriptError, acts, replies)]
        self._requeue([*unknown, *_with_reply(StoreUnavailable, acts, replies)])
        self._release(acts)
        _log_refused(replies)

    def requeue(self, acts: Piggyback) -> None:
        """Buffer acts that got no reply, in front of later ones."""
        self._requeue(acts)
        self._release(acts)

    def _release(self, acts: Piggyback) -> None:
        with self._mutex:
            self._carried.pop(id(acts), None)
            self._changed.notify_all()
        acts.clear()  # last: interrupted before, they are requeued when it is deleted

    def _requeue(self, acts: Sequence[Act]) -> None:
        if acts:
            self._put_in_front(acts)
            self._wake()

    def _put_in_front(self, acts: Sequence[Act]) -> None:
        with self._mutex:
            for act in reversed(acts):
                self._waiting.setdefault(act.command[RECORD], []).insert(0, act)

    def flush(self, timeout_s: float | None = None) -> None:
        began, own = monotonic(), threading.get_ident()
        with self._mutex:
            self._hurry = True
            self._changed.notify_all()
            # Those of this thread are in front of a command whose reply it has yet to read.
            others = {each for each, thread in self._carried.items() if thread != own}
            limit_s = 2 * self._connections.timeout_s if timeout_s is None else timeout_s
            if not self._changed.wait_for(lambda: others.isdisjoint(self._carried), limit_s):
                raise StoreUnavailable(
                    f"acts that another thread sends to the lock store did not finish within"
                    f" {limit_s:g} s"
                )
        if timeout_s is not None:
            timeout_s = max(0.0, began + timeout_s - monotonic())
        self._queue.flush(timeout_s)

    def close(self) -> None:
        self._queue.drain(self._connections.timeout_s)
        self._is_closed = True

    # -- in the thread ---------------------------------------------------------

    def _send_waiting(self) -> None:
        if self._queue.is_current():
            with self._mutex:
                self._changed.wait_for(lambda: self._hurry, GATHER_S)
                self._hurry = False
        self._woken_at = -math.inf
        tries = 0
        while acts := self._take_batch():
            left: Sequence[Act] = ()
            try:
                left = self._send(acts, first=tries == 0)
            finally:
                with self._mutex:
                    self._put_in_front(left)
                    self._in_flight.difference_update(act.command[RECORD] for act in acts)
                    self._changed.notify_all()
            if left:
                # With acts that were added meanwhile, which may be for another server.
                time.sleep(PAUSES_S[min(tries, len(PAUSES_S) - 1)])
                tries += 1
            else:
                tries = 0

    def _take_batch(self) -> list[Act]:
        taken: list[Act] = []
        with self._mutex:
            while self._waiting and len(taken) < BATCH:
                record, acts = self._waiting.popitem(last=False)
                self._in_flight.add(record)
                taken += acts
        return taken

    def _send(self, acts: list[Act], first: bool) -> list[Act]:
        """Send the acts; returns those without a reply that are to be sent again."""
        replies: list[Any]
        try:
            replies = self._connections.exchange([act.command for act in acts])
        except StoreUnavailable as error:
            replies = [error] * len(acts)
        _log_refused(replies)
        left = self._to_send_again(acts, replies, first)
        if unknown := _with_reply(NoScriptError, acts, replies):
            # One act of each script brings its text. In a cluster that serves the acts on the
            # same server; the others are repeated once more.
            whole = {act.script.sha: index for index, act in reversed(list(enumerate(unknown)))}
            for index in whole.values():
                unknown[index] = unknown[index].whole()
            left += self._send(unknown, first)
        return left

    def _to_send_again(self, acts: list[Act], replies: list[Any], first: bool) -> list[Act]:
        unanswered = _with_reply(StoreUnavailable, acts, replies)
        if not unanswered:
            return []
        error = next(reply for reply in replies if isinstance(reply, StoreUnavailable))
        # Neither in a caller's thread nor for ever: the leases cover it.
        patient = self._queue.is_current() and not self._is_closed
        left = [act for act in unanswered if patient and monotonic() < act.give_up_at]
        if len(left) < len(unanswered):
            logger.warning("fire-and-forget act on the lock store failed: %s", error)
        elif first:
            logger.warning(
                "%d fire-and-forget acts wait for the unavailable lock store: %s", len(left), error
            )
        return left


def _with_reply(kind: type[Exception], acts: Sequence[Act], replies: Sequence[Any]) -> list[Act]:
    """NoScriptError: the server restarted, was flushed, or is another one. StoreUnavailable: it
    did not reply, while others may have."""
    return [act for act, reply in zip(acts, replies, strict=True) if isinstance(reply, kind)]


def _log_refused(replies: Iterable[Any]) -> None:
    for reply in replies:
        if isinstance(reply, ResponseError) and not isinstance(reply, NoScriptError):
            logger.warning("fire-and-forget act on the lock store was refused: %s", reply)


def _reset_in_child() -> None:
    """The parent has the thread, and sends what it has buffered."""
    for buffer in _buffers:
        buffer._reset()


os.register_at_fork(after_in_child=_reset_in_child)
