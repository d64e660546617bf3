"""The lock store on one Redis server: each act of the contract is one Lua script."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from time import monotonic
from typing import Any, ClassVar, Literal, NamedTuple, Self, cast

from redis.exceptions import ResponseError

from celery_unique.exceptions import StoreUnavailable, UnreadableRecord
from celery_unique.stores.base import (
    ORPHANS_AT_ONCE,
    Acquired,
    Called,
    Claim,
    Confirmed,
    Finish,
    Finished,
    Guarantee,
    Held,
    Holder,
    Orphan,
    Promotion,
    Push,
    ResultWrite,
    Start,
    Started,
)
from celery_unique.stores.bounded import BoundedDict
from celery_unique.stores.diagnosis import Diagnosis
from celery_unique.stores.record import LETTER_OF, STATE_OF, Mark, Record, State
from celery_unique.stores.record_followers import UNREADABLE, Follower
from celery_unique.stores.record_payloads import line_head

from . import scripts
from .commands import BATCH, Commands, is_about_the_record
from .connections import AnyConnections, Command, Connections
from .layout import Layout, joined_of, record_of
from .scripts import Script
from .url import address_of

logger = logging.getLogger("celery_unique")

#: SCAN repeats a key when the server shrinks its tables, and mostly soon after: a walk skips the
#: keys that are among so many of the last ones.
MOST_SEEN = 100_000
#: Added to the estimate of the server's clock: ``due`` drops what is not due yet, and must not
#: miss what is.
CLOCK_MARGIN_MS = 1000
#: How many time-outs the receipt of a push stays: a publish is repeated within one of them, and
#: withdrawn soon after it.
RECEIPT_TIMEOUTS = 10


class Place(NamedTuple):
    """A database of a server, and the user who is logged in to it."""

    host: str
    port: int
    db: int
    username: str
    unix_path: str


class RedisStore:
    """One hash for each key, changed only by scripts; it expires with its latest deadline."""

    guarantee: Guarantee = "strong"
    mechanism = "one Lua script for each act, run atomically by the Redis server"
    #: How many buffered acts on other keys go in front of an act that is waited for.
    piggyback_limit = 8

    #: Reads the servers from a URL and its options; makes connections to them.
    _read_url: ClassVar[Callable[..., Any]] = staticmethod(address_of)
    _connections_class: ClassVar[type[Any]] = Connections
    _connections: AnyConnections

    #: How far the server's clock was ahead of this machine's in the last reply.
    _server_ahead_ms = 0.0
    #: The due sets that cannot be read and were logged.
    _unreadable_due_sets: ClassVar[set[str]] = set()

    def __init__(
        self, servers: Any, *, namespace: str = "", timeout_s: float = 2.0, key_prefix: str = ""
    ) -> None:
        """``servers``: an `Address`, for a subclass what its ``_read_url`` returns."""
        self._layout = Layout(namespace, key_prefix)
        self._connections = self._connections_class(servers, timeout_s)
        self._commands = Commands(self._connections, self._layout, self.piggyback_limit)
        self._receipt_ms = int(timeout_s * RECEIPT_TIMEOUTS * 1000)
        where = f"{self._connections.label} {self._layout.pattern}"
        self._fingerprint = hashlib.sha256(where.encode()).hexdigest()[:8]

    @classmethod
    def from_url(
        cls,
        url: str,
        *,
        namespace: str = "",
        timeout_s: float = 2.0,
        key_prefix: str = "",
        ssl: Mapping[str, Any] | bool | None = None,
        **options: Any,
    ) -> Self:
        """``ssl`` is as ``broker_use_ssl``; other options are those of redis-py's connections,
        and behind sentinels kombu's."""
        servers = cls._read_url(url, ssl=ssl, **options)
        return cls(servers, namespace=namespace, timeout_s=timeout_s, key_prefix=key_prefix)

    @property
    def begin_transaction(self) -> Callable[..., Callable[[], None]]:
        """Runs commands of the broker as one transaction; only of a store with an address."""
        return cast("Connections", self._connections).begin_transaction

    @property
    def address(self) -> Place | None:
        """Where it connects to; None where that may change: then it pushes no messages."""
        if not isinstance(self._connections, Connections):
            return None
        options = self._connections.address.options
        path = str(options.get("path") or "")
        return Place(
            "" if path else str(options.get("host") or "localhost"),
            0 if path else int(options.get("port") or 6379),
            int(options.get("db") or 0),
            str(options.get("username") or ""),
            path,
        )

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._connections.label}>"

    @property
    def clock_offset_ms(self) -> int:
        return self._commands.clock_offset_ms

    @clock_offset_ms.setter
    def clock_offset_ms(self, offset_ms: int) -> None:
        self._commands.clock_offset_ms = offset_ms

    def fingerprint(self) -> str:
        """The same for every process that uses these locks, and without credentials."""
        return self._fingerprint

    # -- acts of the caller --------------------------------------------------
    def acquire(self, key: str, claim: Claim) -> Acquired:
        command = self._acquire_command(key, claim)
        reply = self._commands.run_one(scripts.ACQUIRE, command, _resend)
        return self._acquired(key, reply, claim)

    def acquire_many(
        self, claims: Sequence[tuple[str, Claim]]
    ) -> list[Acquired | StoreUnavailable]:
        commands = [self._acquire_command(key, claim) for key, claim in claims]
        replies = self._commands.run_all(scripts.ACQUIRE, commands, _resend)
        return self._all_acquired(replies, claims)

    def begin_publish(
        self, pushes: Sequence[tuple[str, Claim, Push]]
    ) -> Callable[[], list[Acquired | StoreUnavailable]]:
        is_plain = all(_is_plain(claim) for _, claim, _ in pushes)
        script = scripts.PUBLISH_PLAIN if is_plain else scripts.PUBLISH
        command_of = self._publish_plain_command if is_plain else self._publish_command
        commands = [command_of(*one) for one in pushes]
        wait = self._commands.begin_all(script, commands[:BATCH], _resend)
        return partial(self._receive_published, wait, pushes, script, commands[BATCH:])

    def _receive_published(
        self,
        wait: Callable[[], list[Any]],
        pushes: Sequence[tuple[str, Claim, Push]],
        script: Script,
        more: list[Command],
    ) -> list[Acquired | StoreUnavailable]:
        replies = wait()
        if more:
            replies += self._run_rest(script, more)
        undecided = [n for n, reply in enumerate(replies) if reply in ([0], [1])]
        if undecided:  # the record of the key has more than the short script reads
            whole = [self._publish_command(*pushes[n]) for n in undecided]
            whole = [
                _resend(command) if replies[n] == [1] else command
                for n, command in zip(undecided, whole, strict=True)
            ]
            for n, reply in zip(undecided, self._run_rest(scripts.PUBLISH, whole), strict=True):
                replies[n] = reply
        acquired: list[Acquired | StoreUnavailable] = []
        for reply, (key, claim, _) in zip(replies, pushes, strict=True):
            if isinstance(reply, int):  # nearly every one
                acquired.append(Acquired("created", None, reply))
            else:
                acquired += self._all_acquired([reply], [(key, claim)])
        return acquired

    def _run_rest(self, script: Script, commands: list[Command]) -> list[Any]:
        """Replies to publishes behind others that have theirs: an error is a reply, too."""
        replies: list[Any] = []
        for first in range(0, len(commands), BATCH):
            batch = commands[first : first + BATCH]
            try:
                replies += self._commands.run_all(script, batch, _resend)
            except StoreUnavailable as error:
                replies += [error] * len(batch)
        return replies

    def _publish_plain_command(self, key: str, claim: Claim, push: Push) -> Command:
        arguments = (
            claim.task_id,
            claim.task_name,
            claim.states,
            push.lease_ms,
            self._receipt_ms,
            push.head,
            push.middle + push.tail,
            claim.parent,
            _flag(claim.again),  # the last one: see _resend
        )
        record = self._layout.names_of(key).record
        names = (record, push.queue, self._layout.receipt_of(key, push.attempt))
        return self._commands.command(scripts.PUBLISH_PLAIN, names, *arguments)

    def _publish_command(self, key: str, claim: Claim, push: Push) -> Command:
        arguments = (
            claim.task_id,
            claim.task_name,
            claim.states,
            push.lease_ms,
            *_claim_arguments(claim),
            _attempt_mark(claim.task_id, push.attempt),
            self._receipt_ms,
            push.head,
            push.middle,
            push.tail,
            *(_merged_values(claim) if claim.merge else ()),
            _flag(claim.again),  # the last one: see _resend
        )
        names = self._layout.names_of(key)
        receipt = self._layout.receipt_of(key, push.attempt)
        if claim.merge:
            keys = (*names, push.queue, receipt, self._layout.payloads_of(key))
            return self._commands.command(scripts.MERGE_PUBLISH, keys, *arguments)
        return self._commands.command(scripts.PUBLISH, (*names, push.queue, receipt), *arguments)

    def _payloads(self, key: str, merges: object) -> tuple[str, ...]:
        """The key that a script needs as well if its task has, or may have, a payload."""
        return (self._layout.payloads_of(key),) if merges else ()

    def _names(self, key: str, merges: object) -> Sequence[str]:
        names = self._layout.names_of(key)
        return (*names, self._layout.payloads_of(key)) if merges else names

    def probe(self, key: str, claim: Claim) -> Acquired | None:
        if not (claim.task_id or claim.join) and _strategy(claim) in _LEAVES_HOLDER:
            names, facts = (self._layout.names_of(key).record,), (claim.states, claim.window_ms)
            command = self._commands.command(scripts.PROBE, names, *facts, claim.parent)
            reply = self._commands.run_one(scripts.PROBE, command)
            if reply is not None:
                return None if reply == 0 else self._acquired(key, reply, claim)
        command = (*self._acquire_command(key, claim)[:-1], "?")
        resend = _resend_probe if claim.merge else None
        reply = self._commands.run_one(scripts.ACQUIRE, command, resend)
        return None if reply is None else self._acquired(key, reply, claim)

    def withdraw(
        self, key: str, task_id: str, attempt: str, mark_ms: int
    ) -> Literal["withdrawn", "active"]:
        arguments = (task_id, _attempt_mark(task_id, attempt), mark_ms)
        more_keys = (self._layout.receipt_of(key, attempt), self._layout.payloads_of(key))
        reply: Literal["withdrawn", "active"]
        reply = self._commands.run(scripts.WITHDRAW, key, *arguments, more_keys=more_keys).decode()
        return reply

    def begin_acquire(self, key: str, claim: Claim) -> Callable[[], Acquired]:
        command = self._acquire_command(key, claim)
        wait = self._commands.begin_all(scripts.ACQUIRE, [command], _resend)
        return lambda: self._acquired(key, wait()[0], claim)

    def begin_acquire_many(
        self, claims: Sequence[tuple[str, Claim]], confirmed: Sequence[Confirmed] = ()
    ) -> Callable[[], list[Acquired | StoreUnavailable]]:
        commands = [self._acquire_command(key, claim) for key, claim in claims]
        confirms = self._commands.piggyback(scripts.CONFIRM, self._confirm_commands(confirmed))
        wait = self._commands.begin_all(scripts.ACQUIRE, commands, _resend, confirms)
        return lambda: self._all_acquired(wait(), claims)

    def _acquired(self, key: str, reply: Any, claim: Claim) -> Acquired:
        if isinstance(reply, Exception):
            self._commands.check([reply])
        try:
            return _acquired(reply, claim)
        except UNREADABLE as error:  # another program may have written the record
            raise self._commands.unreadable(self._layout.name_of(key), error) from error

    def _all_acquired(
        self, replies: list[Any], claims: Sequence[tuple[str, Claim]]
    ) -> list[Acquired | StoreUnavailable]:
        acquired: list[Acquired | StoreUnavailable] = []
        for reply, (key, claim) in zip(replies, claims, strict=True):
            try:
                acquired.append(self._acquired(key, reply, claim))
            except StoreUnavailable as error:
                acquired.append(error)
        return acquired

    def _acquire_command(self, key: str, claim: Claim) -> Command:
        return self._commands.command(
            scripts.MERGE if claim.merge else scripts.ACQUIRE,
            self._names(key, claim.merge),
            claim.task_id,
            claim.task_name,
            claim.states,
            claim.grace_ms,
            *_claim_arguments(claim),  # its last but one is third from the end: see cluster.py
            *(_merged_values(claim) if claim.merge else ()),
            _flag(claim.again),  # the last one: see _resend
        )

    def confirm(self, key: str, task_id: str, lease_ms: int) -> None:
        self.confirm_many([(key, task_id, lease_ms)])

    def confirm_many(self, confirmed: Sequence[Confirmed]) -> None:
        self._commands.buffer.send(scripts.CONFIRM, self._confirm_commands(confirmed))

    def _confirm_commands(self, confirmed: Sequence[Confirmed]) -> list[Command]:
        return [
            self._commands.command(scripts.CONFIRM, self._layout.names_of(key), task_id, lease_ms)
            for key, task_id, lease_ms in confirmed
        ]

    def give_back(self, key: str, task_id: str, mark_ms: int) -> bool:
        arguments = (task_id, mark_ms, line_head(task_id))
        payloads = self._payloads(key, True)
        return bool(self._commands.run(scripts.GIVE_BACK, key, *arguments, more_keys=payloads))

    def unmerge(self, key: str, call_id: str) -> bool:
        arguments, payloads = (call_id, line_head(call_id)), self._payloads(key, True)
        return bool(self._commands.run(scripts.UNMERGE, key, *arguments, more_keys=payloads))

    def help(
        self, key: str, task_id: str, claim_ms: int = 0
    ) -> Literal["go", "again", "published"]:
        reply: Literal["go", "again", "published"]
        reply = self._commands.run(scripts.HELP, key, task_id, claim_ms).decode()
        return reply

    def cancel(self, key: str, task_id: str, mark_ms: int) -> Literal["cancelled", "active"]:
        reply: Literal["cancelled", "active"]
        arguments, payloads = (task_id, mark_ms), self._payloads(key, True)
        reply = self._commands.run(scripts.CANCEL, key, *arguments, more_keys=payloads).decode()
        return reply

    def release(self, key: str, task_id: str | None = None, lease: int = 0) -> int:
        if not task_id:
            try:
                self.read(key)  # stricter than the script, which skips what it does not use
            except UnreadableRecord:
                return self._delete(key)
        return int(self._commands.run(scripts.RELEASE, key, task_id or "", lease))

    def _delete(self, key: str) -> int:
        """Delete everything that is stored of a key, readable or not."""
        names = self._layout.names_of(key)
        stored = (names.record, names.followers, names.marks, self._layout.payloads_of(key))
        deletes = [("DEL", name) for name in stored]
        commands = [*deletes, ("ZREM", names.due, names.record)]
        deleted, *_ = self._commands.exchange(commands, [names.record])
        return int(self._commands.check([deleted])[0])

    # -- acts of the worker --------------------------------------------------
    def start(self, key: str, start: Start) -> Started:
        reply = self._commands.run(
            scripts.START,
            key,
            start.task_id,
            start.delivery,
            start.task_name,
            start.lease_ms,
            start.run_lease_ms,
            start.created_at,
            start.window_ms,
            start.keep,
            start.arguments,
            start.mark_ms,
            more_keys=self._payloads(key, start.merge),
        )
        if isinstance(reply, int):
            return Started("run", reply)
        verdict, *facts = reply
        if verdict == b"run":
            payload = facts[2].decode() if len(facts) > 2 else ""
            return Started("run", facts[0], bool(facts[1]), payload=payload)
        if verdict == b"wait":
            return Started("wait", wait_ms=facts[0] if facts else 0)
        if verdict == b"keys":  # a copy of its message, by a call that merges nothing
            if start.merge:
                return Started("wait")  # a cluster moves the slot, and not all keys can be named
            return self.start(key, replace(start, merge=True))
        mark, by = (fact.decode() for fact in facts or (b"", b""))
        return Started(verdict.decode(), mark=mark, by=by)

    def renew(self, held: Sequence[Held]) -> list[int | StoreUnavailable]:
        commands = [
            self._commands.command(
                scripts.RENEW,
                self._names(one.key, one.merge),
                one.task_id,
                one.delivery,
                one.lease_ms,
                one.run_lease_ms,
                _flag(one.copies),
                one.waits_as,
                one.held_ms,
                _flag(one.returned),
            )
            for one in held
        ]
        replies = self._commands.run_all(scripts.RENEW, commands)
        return [reply if isinstance(reply, StoreUnavailable) else int(reply) for reply in replies]

    def retry(self, key: str, task_id: str, delivery: str, lease_ms: int, copies: bool) -> None:
        # Not fire-and-forget: the message of the retry is published, and its worker would wait.
        arguments = (task_id, delivery, lease_ms, _flag(copies))
        self._commands.run(scripts.RETRY, key, *arguments, more_keys=self._payloads(key, True))

    def finish(self, key: str, finish: Finish) -> Finished:
        arguments = (*_finish_arguments(finish), _flag(finish.again))  # the last one: see _resend
        command = self._commands.command(scripts.FINISH, self._names(key, finish.merge), *arguments)
        return _finished(self._commands.run_one(scripts.FINISH, command, _resend))

    def finish_with_result(self, key: str, finish: Finish, result: ResultWrite) -> Finished:
        names = (*self._layout.names_of(key), result.key, *self._payloads(key, finish.merge))
        command = self._commands.command(
            scripts.FINISH_WITH_RESULT,
            names,
            *_finish_arguments(finish),
            result.head,
            result.tail,
            result.expires_s,
            _flag(result.unless_stored),
            _flag(finish.again),  # the last one: see _resend
        )
        return _finished(self._commands.run_one(scripts.FINISH_WITH_RESULT, command, _resend))

    def settle(self, key: str, finish: Finish, mark_done: bool) -> None:
        command = self._commands.command(
            scripts.SETTLE,
            self._names(key, finish.merge),
            finish.task_id,
            finish.delivery,
            LETTER_OF[finish.state],
            finish.retention_ms,
            finish.mark_ms,
            _flag(mark_done),
            _flag(finish.rejected),
        )
        self._commands.send(scripts.SETTLE, [command])

    def forget(self, key: str, task_id: str) -> None:
        command = self._commands.command(scripts.FORGET, self._layout.names_of(key), task_id)
        self._commands.send(scripts.FORGET, [command])

    # -- followers -----------------------------------------------------------
    def follow(self, key: str, claim: Claim, holder_id: str) -> bool:
        kept_ms = claim.keep_ms or claim.window_ms
        facts = (claim.task_id, claim.task_name, claim.keep, kept_ms, claim.arguments, claim.join)
        return bool(self._commands.run(scripts.FOLLOW, key, *facts, holder_id, claim.created_at))

    def followers(self, key: str, holder_id: str | None = None) -> list[tuple[str, Follower]]:
        reply = self._commands.run(scripts.FOLLOWERS, key, holder_id or "")
        found = []
        with self._commands.reading(key):
            for follower_id, holder, value in zip(*[iter(reply)] * 3, strict=True):
                joined = joined_of(value)
                follower = Follower(holder.decode(), joined.message, not joined.group)
                found.append((joined.joined_at, follower_id.decode(), follower))
        found.sort(key=lambda one: one[:2])
        return [(follower_id, follower) for _, follower_id, follower in found]

    def complete_follower(self, key: str, follower_id: str) -> None:
        self._commands.run(scripts.COMPLETE_FOLLOWER, key, follower_id)

    def due(self, limit: int = 20) -> list[str]:
        """One round trip, up to an estimate of the server's clock that its reply corrects."""
        for _ in range(2):
            until = time.time() * 1000 + self._server_ahead_ms + CLOCK_MARGIN_MS
            ranges = [
                ("ZRANGE", name, "-inf", int(until), "BYSCORE", "LIMIT", 0, limit, "WITHSCORES")
                for name in self._layout.due_sets()
            ]
            clock, *replies = self._commands.exchange([("TIME",), *ranges])
            if isinstance(clock, StoreUnavailable):  # in a cluster: of the server that gets TIME
                now = int(until - CLOCK_MARGIN_MS)
                break
            now = self._commands.now(self._commands.check([clock])[0])
            self._server_ahead_ms = now - time.time() * 1000
            if now <= until:
                break
        names = self._layout.due_sets()
        replies = [self._readable(*one) for one in zip(names, replies, strict=True)]
        answered = [reply for reply in replies if not isinstance(reply, StoreUnavailable)]
        found = [
            (float(score), name)
            for reply in self._commands.check(answered)
            for name, score in zip(reply[::2], reply[1::2], strict=True)
        ]
        if not found:
            self._commands.check(replies)  # what is due on the other servers comes first
        due = [
            self._layout.key_of(name.decode(errors="replace"))
            for at, name in sorted(found)
            if at <= now
        ]
        return [key for key in due if key is not None][:limit]

    def _readable(self, name: str, reply: Any) -> Any:
        """The reply about a due set; empty where another program has used its name."""
        if not isinstance(reply, ResponseError) or not is_about_the_record(reply):
            return reply
        if name not in self._unreadable_due_sets:
            self._unreadable_due_sets.add(name)
            logger.warning(
                "Redis holds something else than a sorted set under %s: followers of keys in "
                "this bucket are not found when their holder dies. Delete it (logged once)",
                name,
            )
        return []

    def reap(self, key: str, reaper: str, claim_ms: int) -> list[Orphan]:
        reply = self._commands.run(scripts.REAP, key, reaper, claim_ms, ORPHANS_AT_ONCE)
        orphans = []
        with self._commands.reading(key):
            for follower_id, holder, fate, value in zip(*[iter(reply)] * 4, strict=True):
                if fate == b"called":
                    called, message = follower_id.decode(), value[1:].decode()
                    again = holder == b"again"
                    orphans.append(Orphan(called, called, message, again, "called"))
                    continue
                joined = joined_of(value)
                facts = (joined.message, not joined.group, fate.decode())
                orphans.append(Orphan(follower_id.decode(), holder.decode(), *facts))
        return orphans

    def promote(
        self, key: str, follower_id: str, reaper: str, grace_ms: int, mark_ms: int
    ) -> Promotion:
        arguments = (follower_id, reaper, grace_ms, mark_ms, line_head(follower_id))
        payloads = self._payloads(key, True)
        reply: Promotion
        reply = self._commands.run(scripts.PROMOTE, key, *arguments, more_keys=payloads).decode()
        return reply

    def parked(self, key: str) -> list[str]:
        return [task_id.decode() for task_id in self._commands.run(scripts.PARKED, key)]

    # -- reading -------------------------------------------------------------
    def read(self, key: str) -> tuple[Record, int]:
        name = self._layout.name_of(key)
        clock, fields = self._commands.exchange([("TIME",), ("HGETALL", name)], [name])
        now = self._commands.now(self._commands.check([clock])[0])
        return self._record(name, fields, now), now

    def _record(self, name: str, fields: Any, now: int) -> Record:
        if isinstance(fields, ResponseError) and is_about_the_record(fields):
            raise self._commands.unreadable(name, fields)
        self._commands.check([fields])
        try:
            return record_of(fields, now)
        except UNREADABLE as error:
            raise self._commands.unreadable(name, error) from error

    def mark(self, key: str, task_id: str) -> Mark | None:
        names = self._layout.names_of(key)
        reads = [("HGET", names.record, f"m:{task_id}"), ("HGET", names.marks, task_id)]
        clock, inline, beside = self._commands.query([("TIME",), *reads], [names.record])
        value = inline or beside
        mark = Mark.unpacked(json.loads(value)) if value else None
        return mark if mark is not None and mark.until > self._commands.now(clock) else None

    def walk(self, batch: int = BATCH, stop_at: float = math.inf) -> Iterator[tuple[str, Record]]:
        """SCAN visits every key of the database, not only locks."""
        seen = recent_keys()
        cursor = 0
        while True:
            scan = ("SCAN", cursor, "MATCH", self._layout.pattern, "COUNT", batch)
            [(position, names)] = self._commands.query([scan])
            yield from self._read_all(self._new_keys(names, seen))
            cursor = int(position)
            if cursor == 0 or monotonic() > stop_at:
                return

    def _new_keys(self, names: list[bytes], seen: BoundedDict[str, None]) -> list[str]:
        found = {self._layout.key_of(name.decode(errors="replace")) for name in names}
        keys = sorted(key for key in found if key is not None and key not in seen)
        for key in keys:
            seen.remember(key, None)
        return keys

    def _read_all(self, keys: Sequence[str]) -> Iterator[tuple[str, Record]]:
        reads = [("HGETALL", self._layout.name_of(key)) for key in keys]
        clock, *hashes = self._commands.exchange([("TIME",), *reads])
        now = self._commands.now(self._commands.check([clock])[0])
        for key, fields in zip(keys, hashes, strict=True):
            try:
                record = self._record(self._layout.name_of(key), fields, now)
            except UnreadableRecord as error:
                record = Record(unreadable=str(error))
            if record:
                yield key, record

    # -- life ----------------------------------------------------------------
    def sweep(self, batch: int = BATCH) -> int:
        """Nothing to do: Redis deletes what has lapsed."""
        return 0

    def ping(self) -> None:
        self._commands.query([("PING",)])

    def diagnose(self) -> Diagnosis:
        return self._connections.diagnose()

    def flush(self, timeout_s: float | None = None) -> None:
        self._commands.buffer.flush(timeout_s)

    def close(self) -> None:
        self._commands.buffer.close()
        self._connections.close()


def recent_keys() -> BoundedDict[str, None]:
    return BoundedDict(MOST_SEEN)


def _flag(value: bool) -> str:
    return "1" if value else ""


def _strategy(claim: Claim) -> str:
    """The strategy, with what only calls need that are parked, or that have a limit."""
    if claim.limit == 1 and claim.on_conflict != "queue":
        return claim.on_conflict
    return f"{claim.on_conflict}:{claim.limit}:{claim.max_queue}:{claim.grace_ms}"


def _merged_values(claim: Claim) -> tuple[str | int, ...]:
    return line_head(claim.task_id), claim.merge, claim.merge_max_bytes


#: Acts whose last argument says that they are repeated.
_KNOWS_AGAIN = frozenset(
    name
    for script in (
        *(scripts.ACQUIRE, scripts.PUBLISH, scripts.PUBLISH_PLAIN),
        *(scripts.MERGE, scripts.MERGE_PUBLISH, scripts.FINISH, scripts.FINISH_WITH_RESULT),
    )
    for name in (script.sha, script.body)
)

#: Strategies, without a limit, under which a call that conflicts changes nothing of the task that
#: blocks it.
_LEAVES_HOLDER = ("ignore", "reject")


def _is_plain(claim: Claim) -> bool:
    """Whether the short script is enough, unless the record of the key has more than one task."""
    return _strategy(claim) in _LEAVES_HOLDER and not (
        claim.keep
        or claim.join
        or claim.delay_ms
        or claim.window_ms
        or claim.keep_ms
        or claim.arguments
        or claim.canvas
    )


def _resend(command: Command) -> Command:
    """A call whose reply was lost may have been admitted: it must not be its own duplicate. So may
    an end have been recorded, which is then no other delivery's."""
    return (*command[:-1], "1") if command[1] in _KNOWS_AGAIN else command


def _resend_probe(command: Command) -> Command:
    """A merged call whose reply was lost may have added its values: once is enough."""
    return (*command[:-1], "?1")


def _attempt_mark(task_id: str, attempt: str) -> str:
    """The id of the mark of a publish attempt that was withdrawn.

    A mark of its own: the task's mark is dropped once another call uses the task's id.
    """
    return f"{task_id}/{attempt}"


def _claim_arguments(claim: Claim) -> tuple[str | int, ...]:
    """What acquire and publish receive of a claim, behind the lease."""
    return (
        claim.window_ms,
        claim.delay_ms,
        claim.keep,
        claim.arguments,
        claim.keep_ms,
        _strategy(claim),
        claim.parent,
        claim.max_wait_ms,
        claim.join,
        "c" if claim.canvas else "",
    )


def _finish_arguments(finish: Finish) -> tuple[str | int, ...]:
    return (
        finish.task_id,
        finish.delivery,
        LETTER_OF[finish.state],
        finish.retention_ms,
        _flag(finish.settle_later),
        finish.mark_ms,
        finish.run_lease_ms,
        finish.token or "",
        _flag(finish.rejected),
    )


def _finished(reply: int | list[Any]) -> Finished:
    if isinstance(reply, int):
        return Finished("ended", duplicates=reply)
    verdict, *facts = reply
    if not facts:
        return Finished(verdict.decode())
    finished = Finished("ended", bool(facts[0]), facts[1], bool(facts[2]))
    if len(facts) > 3:
        parts = zip(*[iter(facts[3])] * 3, strict=True)
        finished.called = tuple(Called(i.decode(), m.decode(), bool(a)) for i, a, m in parts)
    return finished


def _outcome_of_duplicate(claim: Claim) -> Literal["rejected", "duplicate"]:
    return "duplicate" if claim.on_conflict in ("ignore", "rerun", "queue") else "rejected"


def _acquired(reply: Any, claim: Claim) -> Acquired:
    if isinstance(reply, int):
        return Acquired("created", None, reply)
    if isinstance(reply, bytes) and claim.merge:  # it is merged, as nearly every such call
        created_at, lease, now, eta, letter, task_id = reply.split(b" ", 5)
        since, state = int(created_at), STATE_OF[letter.decode()]
        holder = Holder(task_id.decode(), state, since, since + int(lease), "", int(eta))
        return Acquired("merged", holder, int(now))
    if isinstance(reply, bytes):  # the holder waits, as that of nearly every duplicate
        created_at, lease, now, task_id = reply.split(b" ", 3)
        since = int(created_at)
        holder = Holder(task_id.decode(), State.AVAILABLE, since, since + int(lease))
        return Acquired(_outcome_of_duplicate(claim), holder, int(now))
    if isinstance(reply[0], int):
        now, eta, after, *replaced = reply
        ids = sorted((each[1:].decode(), each[:1] == b"c") for each in replaced)
        followers = tuple(task_id for task_id, in_canvas in ids if in_canvas)
        replaced_ids = tuple(task_id for task_id, _ in ids)
        return Acquired("created", None, now, replaced_ids, after.decode(), eta, followers)
    task_id, letter, created_at, lease, arguments, now, joined, eta, abandoned, *position = reply
    holder = Holder(
        task_id.decode(),
        STATE_OF[letter.decode()],
        created_at,
        lease,
        arguments.decode(),
        eta,
        bool(abandoned),
    )
    if position:
        outcome_in_lane: Literal["queued", "full"] = joined.decode()
        return Acquired(outcome_in_lane, holder if task_id else None, now, position=position[0])
    outcome: Literal["rejected", "duplicate", "joined", "ended", "merged"]
    outcome = _outcome_of_duplicate(claim)
    if joined:
        outcome = joined.decode()
    return Acquired(outcome, holder, now)
