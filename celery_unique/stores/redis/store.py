"""The lock store on Redis: the contract's acts as calls of Lua scripts."""

from __future__ import annotations

import hashlib
import json
import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from time import monotonic
from typing import Any, Literal

from redis.exceptions import ResponseError

from celery_unique.exceptions import StoreUnavailable, UnreadableRecord
from celery_unique.stores.base import (
    Acquired,
    Claim,
    Confirmed,
    Finish,
    Finished,
    Guarantee,
    Held,
    Holder,
    Start,
    Started,
)
from celery_unique.stores.record import LETTER_OF, STATE_OF, Mark, Record
from celery_unique.stores.record_followers import UNREADABLE

from . import diagnosis, scripts
from .commands import BATCH, is_about_the_record
from .connections import Command, Connections, Exchanging
from .followers import RedisFollowing
from .layout import Layout, record_of
from .url import Address, address_of
from .write_behind import WriteBehindBuffer


class RedisStore(RedisFollowing):
    """One hash for each key, changed by scripts only, expiring with its latest deadline."""

    guarantee: Guarantee = "strong"
    mechanism = "one Lua script for each act, run atomically by the Redis server"

    def __init__(
        self,
        address: Address,
        *,
        namespace: str = "",
        timeout_s: float = 2.0,
        key_prefix: str = "",
        connections: Exchanging | None = None,
    ) -> None:
        self.clock_offset_ms = 0
        self._address = address
        self._layout = Layout(namespace, key_prefix)
        self._connections: Exchanging = connections or Connections(address, timeout_s)
        self._one_way = WriteBehindBuffer(self._connections)
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
        **client_options: Any,
    ) -> RedisStore:
        """``ssl`` is as ``broker_use_ssl``; other options are those of redis-py's connections."""
        address = address_of(url, ssl=ssl, **client_options)
        return cls(address, namespace=namespace, timeout_s=timeout_s, key_prefix=key_prefix)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._connections.label}>"

    def fingerprint(self) -> str:
        """The same for every process that uses these locks, and without credentials."""
        return self._fingerprint

    # -- acts of the caller --------------------------------------------------
    def acquire(self, key: str, claim: Claim) -> Acquired:
        replies = self._run_all(scripts.ACQUIRE, [self._acquire_command(key, claim)], _again)
        return self._acquired(key, self._checked(replies)[0], claim)

    def acquire_many(
        self, claims: Sequence[tuple[str, Claim]]
    ) -> list[Acquired | StoreUnavailable]:
        commands = [self._acquire_command(key, claim) for key, claim in claims]
        return self._all_acquired(self._run_all(scripts.ACQUIRE, commands, _again), claims)

    def begin_acquire(self, key: str, claim: Claim) -> Callable[[], Acquired]:
        command = self._acquire_command(key, claim)
        wait = self._begin_all(scripts.ACQUIRE, [command], _again)
        return lambda: self._acquired(key, self._checked(wait())[0], claim)

    def begin_acquire_many(
        self, claims: Sequence[tuple[str, Claim]], confirmed: Sequence[Confirmed] = ()
    ) -> Callable[[], list[Acquired | StoreUnavailable]]:
        commands = [self._acquire_command(key, claim) for key, claim in claims]
        confirms = self._acts(scripts.CONFIRM, self._confirm_commands(confirmed))
        wait = self._begin_all(scripts.ACQUIRE, commands, _again, confirms)
        return lambda: self._all_acquired(wait(), claims)

    def _acquired(self, key: str, reply: Any, claim: Claim) -> Acquired:
        with self._reading(key):
            return _acquired(reply, claim)

    def _all_acquired(
        self, replies: list[Any], claims: Sequence[tuple[str, Claim]]
    ) -> list[Acquired | StoreUnavailable]:
        acquired: list[Acquired | StoreUnavailable] = []
        for reply, (key, claim) in zip(replies, claims, strict=True):
            try:
                acquired.append(self._acquired(key, self._checked([reply])[0], claim))
            except StoreUnavailable as error:
                acquired.append(error)
        return acquired

    def _acquire_command(self, key: str, claim: Claim) -> Command:
        return self._command(
            scripts.ACQUIRE,
            key,
            claim.task_id,
            claim.task_name,
            claim.states,
            claim.grace_ms,
            claim.window_ms,
            claim.delay_ms,
            claim.keep,
            claim.arguments,
            claim.keep_ms,
            claim.on_conflict,
            claim.parent,
            claim.max_wait_ms,
            claim.join,
            "c" if claim.canvas else "",
            _flag(claim.again),  # stays the last one: a resent acquire sets it, see _again
        )

    def follow(self, key: str, claim: Claim, holder_id: str) -> bool:
        kept_ms = claim.keep_ms or claim.window_ms
        facts = (claim.task_id, claim.task_name, claim.keep, kept_ms, claim.arguments, claim.join)
        return bool(self._run(scripts.FOLLOW, key, *facts, holder_id))

    def confirm(self, key: str, task_id: str, lease_ms: int) -> None:
        self.confirm_many([(key, task_id, lease_ms)])

    def confirm_many(self, confirmed: Sequence[Confirmed]) -> None:
        self._one_way.send(scripts.CONFIRM, self._confirm_commands(confirmed))

    def _confirm_commands(self, confirmed: Sequence[Confirmed]) -> Iterator[Command]:
        return (self._command(scripts.CONFIRM, *one) for one in confirmed)

    def give_back(self, key: str, task_id: str, mark_ms: int) -> bool:
        return bool(self._run(scripts.GIVE_BACK, key, task_id, mark_ms))

    def help(
        self, key: str, task_id: str, claim_ms: int = 0
    ) -> Literal["go", "again", "published"]:
        reply: Literal["go", "again", "published"]
        reply = self._run(scripts.HELP, key, task_id, claim_ms).decode()
        return reply

    def cancel(self, key: str, task_id: str, mark_ms: int) -> Literal["cancelled", "active"]:
        reply: Literal["cancelled", "active"]
        reply = self._run(scripts.CANCEL, key, task_id, mark_ms).decode()
        return reply

    def release(self, key: str, task_id: str | None = None) -> int:
        if not task_id:
            try:
                self.read(key)  # stricter than a script, which would leave what it does not use
            except UnreadableRecord:
                return self._delete(key)
        return int(self._run(scripts.RELEASE, key, task_id or ""))

    def _delete(self, key: str) -> int:
        """Everything that is stored of a key, whatever it is."""
        names = self._layout.names_of(key)
        deleted, *_ = self._exchange(
            [
                ("DEL", names.record),
                ("DEL", names.followers),
                ("DEL", names.marks),
                ("ZREM", names.due, names.record),
            ],
            None,
            self._one_way.earlier([names.record]),
        )
        return int(self._checked([deleted])[0])

    # -- acts of the worker --------------------------------------------------
    def start(self, key: str, start: Start) -> Started:
        verdict, *facts = self._run(
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
        )
        if verdict == b"run":
            return Started("run", facts[0], bool(facts[1]))
        mark, by = (fact.decode() for fact in facts or (b"", b""))
        return Started(verdict.decode(), mark=mark, by=by)

    def renew(self, held: Sequence[Held]) -> list[int | StoreUnavailable]:
        commands = [
            self._command(
                scripts.RENEW,
                one.key,
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
        replies = self._run_all(scripts.RENEW, commands)
        return [reply if isinstance(reply, StoreUnavailable) else int(reply) for reply in replies]

    def retry(self, key: str, task_id: str, delivery: str, lease_ms: int, copies: bool) -> None:
        # Not one way: the message of the retry is out, and whoever gets it would have to wait.
        self._run(scripts.RETRY, key, task_id, delivery, lease_ms, _flag(copies))

    def finish(self, key: str, finish: Finish) -> Finished:
        verdict, *facts = self._run(
            scripts.FINISH,
            key,
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
        if verdict == b"not_yours":
            return Finished("not_yours")
        return Finished("ended", bool(facts[0]), facts[1], bool(facts[2]))

    def settle(self, key: str, finish: Finish, mark_done: bool) -> None:
        self._send(
            scripts.SETTLE,
            key,
            finish.task_id,
            finish.delivery,
            LETTER_OF[finish.state],
            finish.retention_ms,
            finish.mark_ms,
            _flag(mark_done),
            _flag(finish.rejected),
        )

    def forget(self, key: str, task_id: str) -> None:
        self._send(scripts.FORGET, key, task_id)

    # -- reading -------------------------------------------------------------
    def read(self, key: str) -> tuple[Record, int]:
        name = self._layout.name_of(key)
        about = self._one_way.earlier([name])
        clock, fields = self._exchange([("TIME",), ("HGETALL", name)], None, about)
        now = self._now(self._checked([clock])[0])
        return self._record(name, fields, now), now

    def _record(self, name: str, fields: Any, now: int) -> Record:
        if isinstance(fields, ResponseError) and is_about_the_record(fields):
            raise self._unreadable(name, fields)
        self._checked([fields])
        try:
            return record_of(fields, now)
        except UNREADABLE as error:
            raise self._unreadable(name, error) from error

    def mark(self, key: str, task_id: str) -> Mark | None:
        names = self._layout.names_of(key)
        reads = [("HGET", names.record, f"m:{task_id}"), ("HGET", names.marks, task_id)]
        clock, inline, beside = self._ask([("TIME",), *reads], [names.record])
        value = inline or beside
        mark = Mark(*json.loads(value)[:3]) if value else None
        return mark if mark is not None and mark.until > self._now(clock) else None

    def walk(self, batch: int = BATCH, stop_at: float = math.inf) -> Iterator[tuple[str, Record]]:
        """SCAN passes by every key of the database, those of others too."""
        seen = Recent()  # SCAN may tell of a key more than once
        cursor = 0
        while True:
            scan = ("SCAN", cursor, "MATCH", self._layout.pattern, "COUNT", batch)
            [(position, names)] = self._ask([scan])
            yield from self._read_all(self._new_keys(names, seen))
            cursor = int(position)
            if cursor == 0 or monotonic() > stop_at:
                return

    def _new_keys(self, names: list[bytes], seen: Recent) -> list[str]:
        found = {self._layout.key_of(name.decode(errors="replace")) for name in names}
        keys = sorted(key for key in found if key is not None and key not in seen)
        seen.update(keys)
        return keys

    def _read_all(self, keys: Sequence[str]) -> Iterator[tuple[str, Record]]:
        reads = [("HGETALL", self._layout.name_of(key)) for key in keys]
        clock, *hashes = self._exchange([("TIME",), *reads], None, None)
        now = self._now(self._checked([clock])[0])
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
        self._ask([("PING",)])

    def diagnose(self) -> diagnosis.Diagnosis:
        return diagnosis.diagnosis_of(self._connections.exchange(diagnosis.QUESTIONS))

    def flush(self, timeout_s: float | None = None) -> None:
        self._one_way.flush(timeout_s)

    def close(self) -> None:
        self._one_way.close()
        self._connections.close()


def _flag(value: bool) -> str:
    return "1" if value else ""


def _again(command: Command) -> Command:
    """An acquire whose reply was lost may have been carried out: not its own duplicate."""
    is_acquire = command[1] in (scripts.ACQUIRE.sha, scripts.ACQUIRE.body)
    return (*command[:-1], "1") if is_acquire else command


def _acquired(reply: Any, claim: Claim) -> Acquired:
    if isinstance(reply, int):
        return Acquired("created", None, reply)
    if isinstance(reply[0], int):
        now, eta, after, *replaced = reply
        ids = sorted((each[1:].decode(), each[:1] == b"c") for each in replaced)
        followers = tuple(task_id for task_id, in_canvas in ids if in_canvas)
        replaced_ids = tuple(task_id for task_id, _ in ids)
        return Acquired("created", None, now, replaced_ids, after.decode(), eta, followers)
    task_id, letter, created_at, lease, arguments, now, joined, eta, abandoned = reply
    holder = Holder(
        task_id.decode(),
        STATE_OF[letter.decode()],
        created_at,
        lease,
        arguments.decode(),
        eta,
        bool(abandoned),
    )
    outcome: Literal["rejected", "duplicate", "joined", "ended"]
    outcome = "duplicate" if claim.on_conflict in ("ignore", "rerun") else "rejected"
    if joined:
        outcome = joined.decode()
    return Acquired(outcome, holder, now)


#: SCAN tells of a key again when the server shrinks its tables, and mostly soon after.
MOST = 100_000


class Recent:
    """As a set, of the last ones that were added."""

    def __init__(self) -> None:
        self._keys: OrderedDict[str, None] = OrderedDict()

    def __contains__(self, key: str) -> bool:
        return key in self._keys

    def update(self, keys: Iterable[str]) -> None:
        self._keys.update(dict.fromkeys(keys))
        while len(self._keys) > MOST:
            self._keys.popitem(last=False)
