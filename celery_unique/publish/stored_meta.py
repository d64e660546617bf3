"""What the result backend keeps of a unique task, beside its result.

The facts go into the meta that Celery writes anyway, in the same write. Backends that keep
the whole meta (Redis, files, caches, ``rpc://``) need nothing else. The database backend
keeps columns: of these, ``stamps`` is for facts that come with a message. A reader
that does not know this library sees one more field, or one more stamp.

Where the lock store is the Redis server of the results, the store writes the result in the act that
releases the key: the result cannot be read while the key is held, nor is the key free before. The
delivery travels with the meta (``_DeferredMeta``) and the encoded text (``_DeferredText``) through
Celery to the write, so that nothing has to be reset if a signal interrupts.

Celery reads what is stored before it stores a result, since it never replaces a success. Where
nothing can be stored yet (no retry, no second delivery, no state that the task has set), the act
looks whether there is a result in place of that read. If there is one, nothing is changed, and
Celery's own check and write follow.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any
from uuid import uuid4

from celery import states
from celery.app.task import Context

from celery_unique.followers.complete import reason_of
from celery_unique.header import HEADER, LockHeader
from celery_unique.keys.digest import SHORT_KEY
from celery_unique.stores.base import LONGEST_TEXT, ResultWrite
from celery_unique.stores.record import State

logger = logging.getLogger("celery_unique")

#: On the request of a task that was superseded: the id that replaced it.
SUPERSEDED_BY = "unique_superseded_by"

#: On the request of a task that has stored a state before its end.
HAS_STATE = "unique_has_state"

_CARRIES = "_celery_unique_carries"
_DEFERS = "_celery_unique_defers"
#: In an encoded result, until the store has replaced it by the number of duplicates.
_DUPLICATES = f"duplicates-{uuid4().hex}"
_QUOTED = f'"{_DUPLICATES}"'
#: What the store records of a task whose result is stored in this state.
_STATE_OF = {states.SUCCESS: State.COMPLETED, states.FAILURE: State.DISCARDED}
#: Celery's columns for an extended result, as far as a table may lack them.
_COLUMNS = frozenset({"name", "args", "kwargs", "worker", "retries", "queue", "stamps"})


@dataclass(frozen=True, slots=True)
class StoredUnique:
    """``result.unique``: what is stored of a unique task beside its result."""

    #: The beginning of the key, enough to distinguish it.
    key: str
    #: What became of the call that published the task, as ``result.outcome``.
    outcome: str = "created"
    #: How many calls it had answered when it ended; None before that.
    duplicates: int | None = None
    #: The id that replaced it.
    superseded_by: str | None = None


def read(meta: Mapping[str, Any]) -> StoredUnique | None:
    """The facts in a stored meta; those of a newer release are left out."""
    stored = meta.get(HEADER)
    if not isinstance(stored, Mapping) or not isinstance(stored.get("key"), str):
        return None
    known = {name: stored[name] for name in StoredUnique.__dataclass_fields__ if name in stored}
    return StoredUnique(**known)


def facts_of(request: Any) -> dict[str, Any] | None:
    """What is to be stored with the result of this request; None where it is not unique."""
    delivery = getattr(request, "unique_delivery", None)  # in a worker
    if delivery is not None:
        header = delivery.header
    else:
        header = LockHeader.from_message(getattr(request, HEADER, None))
        if header is None or header.task_id != request.id:
            return None
    facts: dict[str, Any] = {"key": header.key[:SHORT_KEY], "outcome": header.outcome or "created"}
    duplicates = getattr(delivery, "duplicates", None)
    if duplicates is not None:
        facts["duplicates"] = duplicates
    superseded_by = getattr(delivery, "superseded_by", request.__dict__.get(SUPERSEDED_BY))
    if superseded_by is not None:
        facts["superseded_by"] = superseded_by
    return facts


def carry(backend: Any) -> Any:
    """Make this backend store the facts of unique tasks, and return it."""
    if backend is None or _CARRIES in backend.__dict__:
        return backend
    backend.__dict__[_CARRIES] = True
    if _is_database(backend):
        _carry_in_column(backend)
    else:
        _carry_in_meta(backend)
    return backend


class _DeferredMeta(dict[str, Any]):
    """The meta of a result whose write releases the key of this delivery."""

    delivery: Any = None


class _DeferredText(str):
    """The same, encoded."""

    __slots__ = ("delivery", "state", "unread")

    delivery: Any
    state: State
    #: Celery has not read what is stored before.
    unread: bool

    @classmethod
    def of(cls, text: str, delivery: Any, state: str) -> _DeferredText:
        deferred = cls(text)
        deferred.delivery, deferred.state = delivery, _STATE_OF[state]
        deferred.unread = False
        return deferred

    def with_duplicates(self, duplicates: int) -> str:
        return self.replace(_QUOTED, str(duplicates))


def address_of(backend: Any) -> tuple[str, int, int, str, str] | None:
    """Host, port, database, user and socket of a backend whose results a store at the same place
    may write; None of any other backend."""
    if _DEFERS not in backend.__dict__:
        return None
    given = backend.connparams.get
    if given("credential_provider") is not None:
        return None
    path = str(given("path") or "")
    host, port = ("", 0) if path else (str(given("host")), int(given("port")))
    return host, port, int(given("db") or 0), str(given("username") or ""), path


def _defer_to_write(backend: Any) -> None:
    """Let the store write the result of a delivery whose release is deferred.

    Only of Celery's own class: another one may write elsewhere, or in another form.
    """
    redis = sys.modules.get("celery.backends.redis")
    if redis is None or type(backend) is not redis.RedisBackend:
        return
    if backend.serializer != "json" or getattr(backend, "compression", None):
        return
    if type(backend.encode({})) is not str:  # a serializer of the user's own under that name
        return
    encode, write = backend.encode, backend._set
    store, get_task_meta = backend._store_result, backend._get_task_meta_for
    backend.__dict__[_DEFERS] = True

    def store_deferred(
        task_id: str, result: Any, state: str, *args: Any, request: Any = None, **options: Any
    ) -> Any:
        delivery = getattr(request, "unique_delivery", None)
        own = store
        if state in _STATE_OF and delivery is not None and delivery.has_no_result:
            own = partial(type(backend)._store_result, _WithoutResults(backend, delivery, state))
        return own(task_id, result, state, *args, request=request, **options)

    def encode_deferred(data: Any) -> Any:
        text = encode(data)
        if type(data) is not _DeferredMeta:
            return text
        if text.count(_QUOTED) != 1:
            data[HEADER]["duplicates"] = 0
            text = encode(data)
        return _DeferredText.of(text, data.delivery, data["status"])

    def write_deferred(key: Any, value: Any, *expires: Any) -> Any:
        if type(value) is not _DeferredText:
            return write(key, value, *expires)
        delivery = value.delivery
        head, quoted, tail = value.partition(_QUOTED)
        expires_s = expires[0] if expires and expires[0] is not None else backend.expires
        is_one_act = quoted and len(value) <= LONGEST_TEXT

        def finish(*, backstop: bool = False) -> bool:
            if not is_one_act or delivery.deferred is None:
                return False
            result = ResultWrite(_text(key), int(expires_s or 0), head, tail, value.unread)
            written: bool = delivery.finish_with_result(value.state, result, backstop=backstop)
            return written

        if finish():
            return None
        if value.unread:
            # Celery's own check, which it has not made. The end of the task releases its key.
            stored = get_task_meta(delivery.header.task_id)["status"]
            value.unread = False
            if stored == states.SUCCESS:
                return None
            # A final state may be that of the first attempt, whose reply was lost.
            if finish(backstop=stored in states.READY_STATES):
                return None
        if delivery.deferred is not None and not is_one_act:
            delivery.end_body(delivery.deferred)
        return write(key, value.with_duplicates(delivery.duplicates or 0), *expires)

    backend.encode, backend._set = encode_deferred, write_deferred
    backend._store_result = store_deferred


class _WithoutResults:
    """A result backend in which nothing is stored, for Celery's ``_store_result``: the write finds
    out whether that is true."""

    def __init__(self, backend: Any, delivery: Any, state: str) -> None:
        self._backend = backend
        self._delivery = delivery
        self._state = state

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def encode(self, data: Any) -> _DeferredText:
        text = self._backend.encode(data)
        if type(text) is not _DeferredText:
            text = _DeferredText.of(text, self._delivery, self._state)
        text.unread = True
        return text

    def _get_task_meta_for(self, _task_id: str) -> dict[str, Any]:
        return {"status": states.PENDING, "result": None}


def _text(key: str | bytes) -> str:
    return key.decode() if isinstance(key, bytes) else key


def carry_in(app: Any) -> None:
    """Do so with every backend that this app makes, or has made."""
    get_backend = app._get_backend
    app._get_backend = lambda: carry(get_backend())
    carry(app._backend_cache)
    carry(getattr(app._local, "backend", None))


def _carry_in_meta(backend: Any) -> None:
    get_meta = backend._get_result_meta

    def get_result_meta(
        result: Any, state: str, traceback: Any, request: Any, *args: Any, **options: Any
    ) -> dict[str, Any]:
        meta: dict[str, Any] = get_meta(result, state, traceback, request, *args, **options)
        facts = facts_of(request)
        if facts is None:
            return meta
        delivery = getattr(request, "unique_delivery", None)
        if state not in _STATE_OF:
            request.__dict__[HAS_STATE] = True
        elif getattr(delivery, "deferred", None) is not None:
            deferred = _DeferredMeta(meta)
            deferred[HEADER] = {**facts, "duplicates": _DUPLICATES}
            deferred.delivery = delivery
            return deferred
        return {**meta, HEADER: facts}

    backend._get_result_meta = get_result_meta
    _defer_to_write(backend)


def mark_superseded(
    app: Any, task_id: str, by: str, options: Mapping[str, Any], key: str | None = None
) -> None:
    """Store REVOKED for a replaced task, so that its result need not wait for its message.

    The worker that receives the message drops it, and sends the event and the signal.
    """
    if options.get("ignore_result"):
        return
    task = options.get("task_type")
    backend = task.backend if task is not None else app.backend
    reason = reason_of("superseded", by)
    try:
        request = _superseded_request(task_id, by, key) if key is not None else None
        backend.mark_as_revoked(task_id, reason, request=request, store_result=True)
    except Exception:
        # The replacement is published, and the call returns it whatever becomes of the old
        # result. The worker stores that again when it receives the message.
        logger.warning("the result of superseded task %s is not stored yet", task_id, exc_info=True)


def _superseded_request(task_id: str, by: str, key: str) -> Context:
    """As much of a request as is needed for what is stored beside the result."""
    request = Context({"id": task_id, HEADER: LockHeader(task_id, key).as_message()})
    request.__dict__[SUPERSEDED_BY] = by
    return request


# -- the database backend ------------------------------------------------------------


def _is_database(backend: Any) -> bool:
    database = sys.modules.get("celery.backends.database")  # imports SQLAlchemy
    return database is not None and isinstance(backend, database.DatabaseBackend)


def _carry_in_column(backend: Any) -> None:
    """Up to Celery 5.6 there is no column for stamps, and nothing is kept."""
    from celery.backends.database.models import TaskExtended

    if not hasattr(TaskExtended, "stamps"):
        return
    update, store, get = backend._update_result, backend._store_result, backend._get_task_meta_for
    looked: list[bool] = []

    def has_column() -> bool:
        if not looked:
            looked.append(_has_columns(backend, TaskExtended.__table__))
            if looked[0]:
                # The same table, with all of its columns; without result_extended Celery
                # leaves all but this one empty.
                backend.task_cls = TaskExtended
        return looked[0]

    def store_result(*args: Any, **options: Any) -> Any:
        has_column()
        return store(*args, **options)

    def get_task_meta_for(*args: Any, **options: Any) -> Any:
        has_column()
        return get(*args, **options)

    def update_result(row: Any, *args: Any, request: Any = None, **options: Any) -> None:
        update(row, *args, request=request, **options)
        facts = facts_of(request)
        if facts is not None and has_column():
            row.stamps = _with_stamp(backend, row.stamps, facts)

    backend._update_result = update_result
    backend._store_result = store_result
    backend._get_task_meta_for = get_task_meta_for


def _has_columns(backend: Any, table: Any) -> bool:
    """Asked once in a process: a table that an older Celery has made may lack them."""
    import sqlalchemy

    with backend.ResultSession() as session:
        inspector = sqlalchemy.inspect(session.connection())
        there = inspector.get_columns(table.name, schema=table.schema)
    return {column["name"] for column in there} >= _COLUMNS


def _with_stamp(backend: Any, stored: bytes | None, facts: dict[str, Any]) -> bytes:
    """The column as Celery writes it, with one stamp more."""
    stamps = backend.decode(stored) if stored else {}
    names = [name for name in stamps.get("stamped_headers") or () if name != HEADER]
    stamped = {**(stamps.get("stamps") or {}), HEADER: facts}
    text = backend.encode({"stamped_headers": [*names, HEADER], "stamps": stamped})
    return text if isinstance(text, bytes) else text.encode()
