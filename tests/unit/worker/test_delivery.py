"""The release of a lock that is left to the write of the result, and what happens if that fails."""

from __future__ import annotations

import inspect
import json
from types import SimpleNamespace
from typing import Any

import pytest
from celery import Celery, states
from celery.backends.redis import RedisBackend
from kombu.messaging import Producer
from kombu.transport.redis import Channel

from celery_unique.config.leases import Leases
from celery_unique.exceptions import StoreUnavailable
from celery_unique.header import HEADER, LockHeader
from celery_unique.publish import stored_meta
from celery_unique.stores.base import LONGEST_TEXT, Claim, Finish, Finished, ResultWrite, Start
from celery_unique.stores.memory import MemoryStore
from celery_unique.stores.record import State
from celery_unique.worker.deliveries import Deliveries
from celery_unique.worker.delivery import Delivery, DeliveryState, End
from celery_unique.worker.lock_client import WorkerLockClient

KEY = "1:00"
LEASES = Leases(
    queue_ms=60_000, run_ms=60_000, grace_ms=1_000, retention_ms=1, visibility_ms=60_000
)
HERE = ("there", 6379, 2, "", "")


class ResultStore(MemoryStore):
    """A store at the place of the results."""

    address: Any = HERE

    def __init__(self) -> None:
        super().__init__()
        self.written: list[ResultWrite] = []
        self.is_away = False
        self.has_result = False

    def finish_with_result(self, key: str, finish: Finish, result: ResultWrite) -> Finished:
        if self.is_away:
            raise StoreUnavailable("away")
        if result.unless_stored and self.has_result:
            return Finished("stored")
        self.written.append(result)
        return self.finish(key, finish)


class Worker:
    """One task that runs, and the backend of its result."""

    def __init__(self, url: str = "redis://there:6379/2", **conf: Any) -> None:
        app = Celery("deferred", set_as_current=False, broker="memory://", backend=url)
        app.conf.update(conf)
        stored_meta.carry_in(app)
        self.backend: Any = app.backend
        self.store = ResultStore()
        self.store.acquire(KEY, Claim("a", "shop.rebuild", "pswrt", grace_ms=60_000))
        self.store.confirm(KEY, "a", 60_000)
        token = self.store.start(KEY, _start()).token
        client = WorkerLockClient(app, self.store, self.store, LEASES)
        parts: dict[type, Any] = {WorkerLockClient: client, Deliveries: Deliveries()}
        app_state: Any = SimpleNamespace(
            app=app, part=parts.__getitem__, parts=parts, leases=LEASES
        )
        self.task = SimpleNamespace(
            name="shop.rebuild",
            acks_late=False,
            backend=self.backend,
            ignore_result=False,
            store_errors_even_if_ignored=False,
        )
        header = LockHeader("a", KEY, delivery="here/1/boot/1", token=token)
        self.delivery = Delivery(app_state, header, self.task)
        self.request: Any = SimpleNamespace(
            id="a",
            unique_delivery=self.delivery,
            children=[],
            **dict.fromkeys(("callbacks", "errbacks", "chain", "chord", "group")),
            ignore_result=None,
            retries=0,
        )

    def has_stored(self, reads: Reads, *found: str | Exception) -> None:
        """A result is stored, and Celery finds this when it reads it."""
        self.store.has_result = True
        reads.found[:] = found

    def recorded(self) -> list[State]:
        self.store.flush()
        return [task.stored_state for task in self.store.read(KEY)[0].tasks.values()]

    def store_result(self, value: Any, state: str = states.SUCCESS) -> None:
        self.backend.store_result("a", value, state, request=self.request)


def _start() -> Start:
    return Start("a", "here/1/boot/1", "shop.rebuild", 60_000, 60_000)


class Reads:
    """The states that Celery finds when it reads a result, in place of a server; how many it has
    read."""

    def __init__(self) -> None:
        self.found: list[str | Exception] = []
        self.number = 0

    def read(self) -> dict[str, Any]:
        self.number += 1
        found = self.found.pop(0) if self.found else states.PENDING
        if isinstance(found, Exception):
            raise found
        return {"status": found}


@pytest.fixture
def reads(monkeypatch):
    reads = Reads()
    monkeypatch.setattr(RedisBackend, "_get_task_meta_for", lambda *_: reads.read())
    return reads


@pytest.fixture
def plain_writes(monkeypatch, reads):
    """What Celery itself writes, in place of a server."""
    written: list[tuple[Any, ...]] = []
    monkeypatch.setattr(RedisBackend, "_set", lambda self, *args: written.append(args))
    return written


@pytest.fixture
def worker(plain_writes):
    return Worker()


@pytest.mark.parametrize(
    ("end", "stored", "final"),
    [
        (End.SUCCESS, states.SUCCESS, State.COMPLETED),
        (End.FAILURE, states.FAILURE, State.DISCARDED),
        # A result that cannot be serialised.
        (End.SUCCESS, states.FAILURE, State.DISCARDED),
    ],
)
def test_the_key_is_released_with_the_result_in_the_state_that_is_stored(
    worker, plain_writes, end, stored, final
):
    duplicate = Claim("b", "shop.rebuild", "pswrt", grace_ms=60_000)
    worker.store.acquire(KEY, duplicate)

    assert worker.delivery.defer(end, worker.request)
    assert worker.recorded() == [State.ACTIVE]
    worker.store_result(7 if stored == states.SUCCESS else ValueError("no"), stored)

    assert worker.recorded() == []
    assert (worker.delivery.state, worker.delivery.outcome) == (DeliveryState.FINISHED, final)
    [write] = worker.store.written
    meta = json.loads(f"{write.head}{worker.delivery.duplicates}{write.tail}")
    assert (meta["status"], meta[HEADER]["duplicates"]) == (stored, 1)
    assert write.key == "celery-task-meta-a"
    assert write.expires_s == worker.backend.expires
    assert plain_writes == []


def test_a_result_that_cannot_be_encoded_leaves_the_release_to_the_next_one(worker):
    worker.delivery.defer(End.SUCCESS, worker.request)

    with pytest.raises(Exception, match="serializable"):
        worker.store_result(object())
    assert worker.recorded() == [State.ACTIVE]
    worker.store_result(TypeError("no"), states.FAILURE)

    assert worker.delivery.outcome is State.DISCARDED
    assert worker.recorded() == []


def test_a_user_s_result_may_be_any_text(worker):
    worker.delivery.defer(End.SUCCESS, worker.request)

    worker.store_result('"duplicates": "duplicates-"')

    [write] = worker.store.written
    meta = json.loads(f"{write.head}0{write.tail}")
    assert meta["result"] == '"duplicates": "duplicates-"'


def test_without_the_store_celery_writes_the_result_and_the_finish_is_retried(
    worker, plain_writes, monkeypatch
):
    retried: list[str] = []
    queue = worker.delivery.client.retry_queue
    monkeypatch.setattr(queue, "retry", lambda key, *_, **__: retried.append(key))
    worker.store.is_away = True
    worker.delivery.defer(End.SUCCESS, worker.request)

    worker.store_result(7)

    [(_key, text, *_)] = plain_writes
    assert json.loads(text)[HEADER]["duplicates"] == 0
    assert type(text) is str
    assert retried == [KEY]
    assert worker.delivery.deferred is None


def test_what_is_stored_is_not_read_where_nothing_can_be(worker, reads):
    worker.delivery.defer(End.SUCCESS, worker.request)

    worker.store_result(7)

    assert [write.unless_stored for write in worker.store.written] == [True]
    assert reads.number == 0


@pytest.mark.parametrize("why", ["retried", "delivered again", "has set a state"])
def test_celery_reads_what_may_be_stored(worker, reads, why):
    worker.request.retries = int(why == "retried")
    worker.delivery.header.again = why == "delivered again"
    if why == "has set a state":
        worker.store_result({"done": 1}, "PROGRESS")
        reads.number = 0
    worker.delivery.defer(End.SUCCESS, worker.request)

    worker.store_result(7)

    assert [write.unless_stored for write in worker.store.written] == [False]
    assert reads.number == 1


@pytest.mark.parametrize("final", [states.SUCCESS, states.FAILURE])
def test_a_stored_success_is_not_replaced(worker, reads, plain_writes, final):
    worker.has_stored(reads, states.SUCCESS)
    worker.delivery.defer(End.SUCCESS, worker.request)

    worker.store_result(7 if final == states.SUCCESS else ValueError("no"), final)

    assert worker.store.written == plain_writes == []
    # The end of the task releases the key: see release_signals.
    assert worker.delivery.deferred is End.SUCCESS
    assert worker.recorded() == [State.ACTIVE]


@pytest.mark.parametrize("stored", [states.STARTED, "PROGRESS", states.FAILURE])
def test_any_other_stored_state_is_replaced(worker, reads, plain_writes, stored):
    worker.has_stored(reads, stored)
    worker.delivery.defer(End.SUCCESS, worker.request)

    worker.store_result(7)

    assert [write.unless_stored for write in worker.store.written] == [False]
    assert (worker.recorded(), plain_writes, reads.number) == ([], [], 1)


def test_a_stored_success_is_not_replaced_without_the_store_either(
    worker, reads, plain_writes, monkeypatch
):
    monkeypatch.setattr(worker.delivery.client.retry_queue, "retry", lambda *_, **__: None)
    worker.store.is_away = True
    # The connection breaks: Celery writes again, and that reads again.
    worker.has_stored(reads, ConnectionError("broken"), states.SUCCESS)
    worker.backend.retry_policy = {"max_retries": 1, "interval_start": 0}
    worker.backend.connection_errors = (ConnectionError,)
    worker.delivery.defer(End.SUCCESS, worker.request)

    worker.store_result(7)

    assert (plain_writes, reads.number) == ([], 2)


def test_a_result_that_is_too_long_for_one_act_is_not_written_over_a_success(
    worker, reads, plain_writes
):
    worker.has_stored(reads, states.SUCCESS)
    worker.delivery.defer(End.SUCCESS, worker.request)

    worker.store_result("x" * LONGEST_TEXT)

    assert worker.store.written == plain_writes == []


def test_a_result_that_is_too_long_for_one_act_is_written_after_the_release(worker, plain_writes):
    worker.delivery.defer(End.SUCCESS, worker.request)

    worker.store_result("x" * LONGEST_TEXT)

    assert worker.recorded() == worker.store.written == []
    assert len(plain_writes) == 1


def test_a_release_that_was_made_meanwhile_is_not_made_twice(worker, plain_writes):
    worker.delivery.defer(End.SUCCESS, worker.request)
    worker.delivery.end_body(End.SUCCESS, backstop=True)

    worker.store_result(7)

    assert worker.store.written == []
    assert len(plain_writes) == 1
    assert worker.recorded() == []


def test_a_result_that_is_not_final_releases_nothing(worker):
    worker.delivery.defer(End.SUCCESS, worker.request)

    worker.store_result({"pid": 1}, states.STARTED)

    assert worker.recorded() == [State.ACTIVE]
    assert worker.delivery.deferred is End.SUCCESS


@pytest.mark.parametrize("name", ["callbacks", "errbacks", "chain", "chord", "group"])
def test_what_continues_the_task_is_sent_after_the_release(worker, name):
    setattr(worker.request, name, ["next"])

    assert not worker.delivery.defer(End.SUCCESS, worker.request)


@pytest.mark.parametrize("end", [end for end in End if end not in (End.SUCCESS, End.FAILURE)])
def test_an_end_without_a_stored_result_is_not_deferred(worker, end):
    assert not worker.delivery.defer(end, worker.request)


def test_a_task_whose_id_continues_is_not_deferred(worker):
    worker.delivery.continues_in_ms = 0

    assert not worker.delivery.defer(End.SUCCESS, worker.request)


@pytest.mark.parametrize("acks_late", [False, True])
def test_a_retry_of_a_late_message_may_exist_twice(worker, acks_late):
    """The message that sent the retry is acknowledged after that: it can come back, and would run
    again after the end of the retry."""
    worker.task.acks_late = acks_late

    worker.delivery.end_body(End.RETRY)

    worker.store.flush()
    assert worker.store.read(KEY)[0].tasks["a"].copies is acks_late


@pytest.mark.parametrize("even_errors", [False, True])
def test_an_ignored_result_is_not_waited_for(worker, even_errors):
    worker.task.ignore_result = True
    worker.task.store_errors_even_if_ignored = even_errors

    assert not worker.delivery.defer(End.SUCCESS, worker.request)
    assert worker.delivery.defer(End.FAILURE, worker.request) is even_errors


@pytest.mark.parametrize(
    ("url", "conf"),
    [
        ("redis://there:6379/1", {}),
        ("redis://there:6380/2", {}),
        ("redis://elsewhere:6379/2", {}),
        ("redis://anna:secret@there:6379/2", {}),
        ("redis+socket:///there?virtual_host=2", {}),
        ("redis://there:6379/2", {"result_serializer": "pickle"}),
        ("cache+memory://", {}),
    ],
)
def test_another_place_or_form_of_the_results_is_not_written_by_the_store(plain_writes, url, conf):
    worker = Worker(url, **conf)

    assert not worker.delivery.defer(End.SUCCESS, worker.request)


def test_a_subclass_of_celery_s_backend_is_not_written_by_the_store(worker):
    class Own(RedisBackend):
        pass

    backend = stored_meta.carry(Own(url="redis://there:6379/2", app=worker.delivery.client.app))
    worker.task.backend = backend

    assert not worker.delivery.defer(End.SUCCESS, worker.request)


def test_a_store_that_writes_no_results_is_not_deferred_to(worker):
    worker.store.address = None

    assert not worker.delivery.defer(End.SUCCESS, worker.request)


@pytest.mark.versions
def test_what_is_relied_on_of_celery_and_kombu_is_there():
    """These are not documented: the release with the result, and the publish, hook into them."""
    assert list(inspect.signature(RedisBackend._set).parameters)[:3] == ["self", "key", "value"]
    assert set(inspect.signature(RedisBackend._set).parameters) <= {
        "self",
        "key",
        "value",
        "expires",
    }
    assert "self._set" in inspect.getsource(RedisBackend.set)
    store_result = inspect.getsource(RedisBackend._store_result)
    assert "self.encode(meta)" in store_result
    assert "self._get_result_meta(" in store_result
    assert "self._get_task_meta_for(task_id)" in store_result
    assert "super()" not in store_result
    parameters = list(inspect.signature(Channel._put).parameters)
    assert parameters == ["self", "queue", "message", "kwargs"]
    # Replaces its connection after any exception: a duplicate must not raise from _put.
    assert list(inspect.signature(Producer.__exit__).parameters)[:3] == [
        "self",
        "exc_type",
        "exc_val",
    ]
