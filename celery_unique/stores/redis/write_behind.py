"""Acts that nobody waits for: a thread sends those of a moment together, and hears the replies."""

from __future__ import annotations

import math
import os
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from time import monotonic
from typing import Any, NamedTuple

from redis.exceptions import NoScriptError, ResponseError

from celery_unique.exceptions import StoreUnavailable
from celery_unique.stores.fire_and_forget import FireAndForgetQueue as Acts
from celery_unique.stores.fire_and_forget import logger

from .connections import Command, Exchanging
from .scripts import Script

#: How long the thread waits for more before it sends. A row of calls is told in one go: each alone
#: would cost as much as all of them. Whoever meets an unconfirmed lock meanwhile looks again after
#: 2 and after 7 ms, and a task that has started by then needs no confirmation.
GATHER_S = 0.005
#: Sent at once before their replies are read.
BATCH = 500
#: How long an act is tried again while the store does not answer. By then its lock has lapsed.
PATIENCE_S = 3600.0
#: Between two attempts; the last one repeats.
PAUSES_S = (0.1, 0.2, 0.5, 1.0)
#: How long somebody waits for what the thread is just sending about the same record.
ABREAST_S = 0.05
#: When the thread is called once more that has not come: a signal may have kept the first call
#: from it, and calling it for nothing does no harm.
CALL_AGAIN_S = 1.0
#: Where a command names the record that it is about.
RECORD = 3


class Act(NamedTuple):
    script: Script
    command: Command
    give_up_at: float

    def whole(self) -> Act:
        """With the text of its script, for a server that may not know it."""
        return self._replace(command=self.script.whole(self.command))


class Taken(list[Act]):
    """Acts that go along with somebody's own, who says what was ``heard`` or puts them back. Who
    was interrupted before that drops them: they wait again then."""

    def __init__(self, sender: WriteBehindBuffer, acts: Iterable[Act] = ()) -> None:
        self._sender = sender
        super().__init__(acts)

    def __del__(self) -> None:
        if self:
            self._sender.put_back(self)


_senders: weakref.WeakSet[WriteBehindBuffer] = weakref.WeakSet()


class WriteBehindBuffer:
    """Puts the act into a queue and returns: the caller does not even wake the server.

    Each may be carried out late or twice without harm, so what got no reply is sent again: an
    act is lost only with its process. Acts that somebody waits for take along what waits here
    (``earlier``): so a process finds what it has told the store itself, and one that makes call
    after call hardly needs the thread.
    """

    def __init__(self, connections: Exchanging) -> None:
        self._connections = connections
        self._thread = Acts(connections.timeout_s)
        self._begin()
        _senders.add(self)

    def _begin(self) -> None:
        # Entered in one step: a signal in ``Condition.__enter__`` could leave it taken for ever.
        self._mutex = threading.RLock()
        self._changed = threading.Condition(self._mutex)
        self._waiting: OrderedDict[str, list[Act]] = OrderedDict()  # by record
        self._under_way: set[str] = set()  # the records that the thread is telling about
        self._called_at = -math.inf  # when the thread was called that is yet to take what waits
        self._is_closed = False
        self._hurry = False  # somebody waits after all

    def send(self, script: Script, commands: Iterable[Command]) -> None:
        acts = self._made(script, commands)
        with self._mutex:
            for act in acts:
                self._waiting.setdefault(act.command[RECORD], []).append(act)
        self._call()

    def acts(self, script: Script, commands: Iterable[Command]) -> Taken:
        """For who sends them along with something else."""
        return Taken(self, self._made(script, commands))

    def _made(self, script: Script, commands: Iterable[Command]) -> list[Act]:
        self._is_closed = False
        give_up_at = monotonic() + PATIENCE_S
        return [Act(script, command, give_up_at) for command in commands]

    def _call(self) -> None:
        now = monotonic()
        with self._mutex:
            call = now - self._called_at > CALL_AGAIN_S
            if call:
                self._called_at = now
        if call:
            self._thread.put(self._send_waiting)

    def earlier(self, records: Iterable[str], others: int = 0) -> Taken:
        """What waits to be told about these records, for who sends it now, in front of an act of
        its own; and so many acts about others, which then need not be sent by the thread."""
        taken = Taken(self)
        if not (self._waiting or self._under_way):
            return taken
        with self._mutex:
            records = [one for one in records if one in self._waiting or one in self._under_way]
            if not self._under_way.isdisjoint(records):
                # On another connection, where it could be overtaken. Not for long: a server that
                # does not answer has time-outs of its own.
                self._changed.wait_for(lambda: self._under_way.isdisjoint(records), ABREAST_S)
            # Deleted once they are in the list: a signal in between lets them be sent twice.
            for record in records:
                if record in self._waiting:
                    taken += self._waiting[record]
                    del self._waiting[record]
            while self._waiting and len(taken) < others:
                record = next(iter(self._waiting))
                taken += self._waiting[record]
                del self._waiting[record]
        return taken

    def heard(self, acts: Taken, replies: Sequence[Any]) -> None:
        """These were sent with something else: what the server has said to them."""
        # Whole, or whoever takes them along next could be told the same.
        unknown = [act.whole() for act in _unknown(acts, replies)]
        self._put_in_front([*unknown, *_unanswered(acts, replies)])
        acts.clear()
        _say_refused(replies)

    def put_back(self, acts: Taken) -> None:
        """These had no reply: they stand again before what was told since."""
        self._put_in_front(acts)
        acts.clear()

    def _put_in_front(self, acts: Sequence[Act]) -> None:
        if not acts:
            return
        with self._mutex:
            for act in reversed(acts):
                self._waiting.setdefault(act.command[RECORD], []).insert(0, act)
        self._call()

    def flush(self, timeout_s: float | None = None) -> None:
        with self._mutex:
            self._hurry = True
            self._changed.notify_all()
        self._thread.flush(timeout_s)

    def close(self) -> None:
        self._thread.drain(self._connections.timeout_s)
        self._is_closed = True

    def _send_waiting(self) -> None:
        if self._thread.is_current():
            with self._mutex:
                self._changed.wait_for(lambda: self._hurry, GATHER_S)
                self._hurry = False
        self._called_at = -math.inf
        tries = 0
        while acts := self._taken():
            left: Sequence[Act] = ()
            try:
                left = self._send(acts, first=tries == 0)
            finally:
                with self._mutex:
                    for act in reversed(left):
                        self._waiting.setdefault(act.command[RECORD], []).insert(0, act)
                    self._under_way.difference_update(act.command[RECORD] for act in acts)
                    self._changed.notify_all()
            if left:
                # With what has come meanwhile, which may be another server's.
                time.sleep(PAUSES_S[min(tries, len(PAUSES_S) - 1)])
                tries += 1
            else:
                tries = 0

    def _taken(self) -> list[Act]:
        taken: list[Act] = []
        with self._mutex:
            while self._waiting and len(taken) < BATCH:
                record, acts = self._waiting.popitem(last=False)
                self._under_way.add(record)
                taken += acts
        return taken

    def _send(self, acts: list[Act], first: bool) -> list[Act]:
        """Those that no server answered, and that are to be sent again."""
        commands = [act.command for act in acts]
        replies: list[Any]
        try:
            replies = self._connections.exchange(commands)
        except StoreUnavailable as error:
            replies = [error] * len(acts)
        _say_refused(replies)
        left = self._to_be_sent_again(acts, replies, first)
        if unknown := _unknown(acts, replies):
            # One of each script brings it along for the others. In a cluster that is for those
            # of the same server, and the others ask again.
            whole = {act.script.sha: index for index, act in reversed(list(enumerate(unknown)))}
            for index in whole.values():
                unknown[index] = unknown[index].whole()
            left += self._send(unknown, first)
        return left

    def _to_be_sent_again(self, acts: list[Act], replies: list[Any], first: bool) -> list[Act]:
        unanswered = _unanswered(acts, replies)
        if not unanswered:
            return []
        error = next(reply for reply in replies if isinstance(reply, StoreUnavailable))
        # Not in the thread of a caller, nor for ever: their leases make up for it.
        patient = self._thread.is_current() and not self._is_closed
        left = [act for act in unanswered if patient and monotonic() < act.give_up_at]
        if len(left) < len(unanswered):
            logger.warning("A one-way act on the lock store failed: %s", error)
        elif first:
            logger.warning(
                "%d one-way acts wait until the lock store answers: %s", len(left), error
            )
        return left


def _unknown(acts: Sequence[Act], replies: Sequence[Any]) -> list[Act]:
    """Those whose script the server does not know: it was restarted or flushed, or is another."""
    both = zip(acts, replies, strict=True)
    return [act for act, reply in both if isinstance(reply, NoScriptError)]


def _unanswered(acts: Sequence[Act], replies: Sequence[Any]) -> list[Act]:
    """Those whose server did not answer, where others did."""
    both = zip(acts, replies, strict=True)
    return [act for act, reply in both if isinstance(reply, StoreUnavailable)]


def _say_refused(replies: Iterable[Any]) -> None:
    for reply in replies:
        if isinstance(reply, ResponseError) and not isinstance(reply, NoScriptError):
            logger.warning("A one-way act on the lock store was refused: %s", reply)


def _forget_in_child() -> None:
    """The parent has the thread, and sends what it has queued."""
    for sender in _senders:
        sender._begin()


os.register_at_fork(after_in_child=_forget_in_child)
