"""The doctor finds what is planted, and nothing where all is well. With real workers."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from celery_unique import lookup
from celery_unique.config.app_state import state_of
from celery_unique.stores.base import Claim
from tests.support import RedisServer, Worker, eventually, filesystem_settings
from tests.support.server import find_program, free_port
from tests.workers.operating.desk import ANSWERS_WITHIN_S, Desk, Done

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def good_server() -> Iterator[RedisServer]:
    """Writes to disk, evicts nothing. Its tests change that, and change it back."""
    with RedisServer(append_only=True) as server:
        yield server


@pytest.fixture(scope="module")
def sound(good_server: RedisServer, directory: Path) -> Iterator[Desk]:
    """All is well here: a worker, the same store for all."""
    # No worker consumes the queue of digests.
    routes = {"task_routes": {"shop.send_digest": {"queue": "slow"}}}
    desk = Desk(good_server.url, good_server.url, directory, routes)
    desk.start_worker("sound")
    yield desk
    desk.close()


@pytest.fixture
def start_wrong(sound: Desk) -> Iterator[Callable[..., Worker]]:
    """A second worker with something wrong about it, for one test."""
    started: list[Worker] = []

    def start(**wrong: Any) -> Worker:
        started.append(sound.start_worker("wrong", queues=["elsewhere"], **wrong))
        return started[-1]

    yield start
    for worker in started:
        worker.kill()


def examine(desk: Desk, **options: Any) -> Done:
    return desk.examine(**options)


def found(done: Done) -> list[tuple[str, str]]:
    """Check and level of everything that is wrong."""
    findings = done.json()["findings"]
    return [(one["check"], one["level"]) for one in findings if one["level"] != "note"]


def message(done: Done, check: str) -> str:
    """What is said of it, and what to do."""
    [one] = [one for one in done.json()["findings"] if one["check"] == check]
    assert one["cure"]
    return f"{one['message']} -> {one['cure']}"


# -- all is well -----------------------------------------------------------------------------


def test_nothing_is_found_where_all_is_well(sound):
    result = sound.app.send_task("shop.rebuild_index", (1,), unique=False)  # a queue that works
    waiting = sound.app.send_task(
        "shop.rebuild_index", kwargs={"shop_id": 2}, unique=True, countdown=600
    )
    eventually(lambda: waiting.id in held_ids(sound), timeout=30, message="not received")

    for _ in range(3):  # a worker on a busy machine may be too late
        done = sound.unique("doctor", "--timeout", ANSWERS_WITHIN_S)
        if "workers replied" in done.out:
            break

    assert done.code == 0, done.out
    assert done.lines[-1] == "Nothing is wrong."
    assert "warning" not in done.out
    assert "error" not in done.out
    for right in (
        "the lock store answers",
        "1 of 1 workers replied",
        "1 of 1 workers use this store and namespace",
        "1 of 1 workers make the same keys",
        "1 of 1 workers renew their leases",
        "no task has lost its worker",
        "no waiting task is known to have lost its message",
    ):
        assert right in done.out
    assert result.id
    waiting.revoke()


def held_ids(desk: Desk) -> set[str]:
    replies = desk.app.control.broadcast("unique_held", reply=True, timeout=5, limit=1) or []
    return {held["task_id"] for reply in replies for one in reply.values() for held in one["held"]}


# -- inspect unique_held -----------------------------------------------------------------------


@pytest.mark.versions
def test_inspect_unique_held_lists_what_a_worker_holds(sound):
    running = sound.app.send_task("shop.import_all", kwargs={"name": "seen"}, unique=True)
    later = sound.app.send_task(
        "shop.rebuild_index", kwargs={"shop_id": 3}, unique=True, countdown=600
    )
    eventually(lambda: {running.id, later.id} <= held_ids(sound), timeout=30, message="not held")
    eventually(
        lambda: lock_state(sound, running.unique_key) == "active", timeout=30, message="not started"
    )

    done = sound.run("inspect", "unique_held", "--json", "--timeout", ANSWERS_WITHIN_S)

    assert done.code == 0, done.err
    [told] = json.loads(done.lines[0]).values()
    held = {one["task_id"]: one for one in told["held"]}
    assert held[running.id]["state"] == "started"
    assert held[running.id]["key"] == running.unique_key
    assert held[running.id]["task"] == "shop.import_all"
    assert held[running.id]["delivery_lease_s"] == 60
    assert held[running.id]["lease_s"] == 86400  # acks_late: its message can come back
    assert held[later.id]["state"] == "held"
    assert held[later.id]["delivery_lease_s"] is None
    assert told["held_in_all"] == len(told["held"]) >= 2
    assert told["store"] == sound.store.fingerprint()
    assert told["namespace"] == ""
    assert told["key_version"] == "1"
    assert told["library"]
    assert told["renewal"]["every_s"] == 20
    assert told["renewal"]["failures_in_a_row"] == 0
    later.revoke()
    assert "unique_held" in sound.run("inspect", "--list").out


def lock_state(desk: Desk, key: str) -> str | None:
    lock = lookup(key=key, app=desk.app)
    return lock.state if lock else None


# -- eight troubles, and some more -------------------------------------------------------------


def test_it_finds_a_server_that_evicts(sound, good_server):
    with good_server.client() as client:
        client.config_set("maxmemory", "500mb")
        client.config_set("maxmemory-policy", "allkeys-lru")
        try:
            done = examine(sound)
        finally:
            client.config_set("maxmemory-policy", "noeviction")
            client.config_set("maxmemory", "0")

    assert done.code == 1
    assert found(done) == [("eviction", "error")]
    assert "noeviction" in message(done, "eviction")


def test_it_finds_clocks_that_differ(sound):
    faketime = find_program("faketime", install_command="apt-get install faketime")

    done = examine(sound, before=[faketime, "-f", "+90s"])

    assert done.code == 0
    assert found(done)[0] == ("clock", "warning")
    first = done.json()["findings"][0]
    assert "this machine's clock is 90." in first["message"]
    assert "ahead of the lock store's" in first["message"]
    assert "NTP" in first["cure"]


def test_it_finds_a_worker_with_another_store(sound, start_wrong, good_server):
    worker = start_wrong(conf={"unique_store_url": good_server.url_of(5)})

    done = examine(sound)

    assert done.code == 1
    assert found(done) == [("store", "error")]
    assert f"worker {worker.hostname} uses another lock store" in message(done, "store")


def test_one_store_by_two_addresses_is_one_store(sound, start_wrong, good_server):
    """Neither the doctor nor the worker takes ``localhost`` for another server."""
    url = good_server.url.replace("127.0.0.1", "localhost")
    assert url != good_server.url
    worker = start_wrong(conf={"unique_store_url": url})
    result = sound.app.send_task(
        "shop.rebuild_index", kwargs={"shop_id": 9}, unique=True, queue="elsewhere"
    )
    eventually(lambda: lock_state(sound, result.unique_key) is None, timeout=30, message="not run")

    done = examine(sound)

    assert (done.code, found(done)) == (0, [])
    notes = [one["message"] for one in done.json()["findings"] if one["check"] == "store"]
    assert notes == [f"worker {worker.hostname} reaches this lock store by another address"]
    assert f"[{result.id}] succeeded" in worker.log()
    assert "another store" not in worker.log()
    again = examine(sound)
    assert again.json()["store"]["identity"] == done.json()["store"]["identity"]
    assert all(key != "0:" + "0" * 64 for key, _ in sound.store.walk())  # it is no lock


def test_a_warning_exits_with_0_unless_told_otherwise(sound):
    faketime = find_program("faketime", install_command="apt-get install faketime")
    ahead = [faketime, "-f", "+90s"]

    codes = {
        level: sound.unique("doctor", "--json", "--fail-on", level, before=ahead)
        for level in ("error", "warning", "never")
    }
    in_words = sound.unique("doctor", before=ahead)

    assert {level: done.code for level, done in codes.items()} == {
        "error": 0,
        "warning": 1,
        "never": 0,
    }
    assert in_words.code == 0
    told = codes["error"].json()
    assert (told["healthy"], told["errors"]) == (False, 0)
    assert told["warnings"] == len(found(codes["error"])) >= 1
    assert in_words.lines[-1] in ("1 warning.", f"{told['warnings']} warnings.")
    wrong = sound.unique("doctor", "--fail-on", "note")
    assert wrong.code == 2


def test_it_finds_a_worker_with_another_namespace_and_old_keys(sound, start_wrong):
    worker = start_wrong(conf={"unique_namespace": "test"}, key_version="0")

    done = examine(sound)

    assert done.code == 1
    assert found(done) == [("namespace", "error"), ("key-version", "error")]
    assert f"worker {worker.hostname} makes keys of version 0" in message(done, "key-version")


def test_it_finds_a_worker_that_does_not_renew(sound, start_wrong):
    worker = start_wrong(conf={"unique_run_lease": 2})
    sound.app.send_task("shop.stop_renewing", queue="elsewhere")
    eventually(lambda: is_late(sound, worker), timeout=30, interval=0.3, message="it renews")

    done = examine(sound)

    assert done.code == 1
    assert found(done) == [("renewing", "error")]
    assert f"worker {worker.hostname} does not renew" in message(done, "renewing")


def is_late(desk: Desk, worker: Worker) -> bool:
    replies = desk.app.control.broadcast(
        "unique_held", reply=True, timeout=5, limit=1, destination=[worker.hostname]
    )
    [reply] = replies or [{}]
    renewal = reply.get(worker.hostname, {}).get("renewal", {})
    return bool((renewal.get("last_round_s_ago") or renewal.get("running_for_s", 0)) > 4)


def test_it_finds_a_worker_without_the_library(sound, start_wrong):
    worker = start_wrong(installed=False)

    done = examine(sound)

    assert done.code == 1
    assert found(done) == [("plugin", "error")]
    assert f"worker {worker.hostname} runs without this library" in message(done, "plugin")


def test_it_finds_a_task_whose_worker_has_died(sound, start_wrong):
    worker = start_wrong(conf={"unique_run_lease": 2})
    result = sound.app.send_task(
        "shop.import_all", kwargs={"name": "orphan"}, unique=True, queue="elsewhere"
    )
    eventually(
        lambda: lock_state(sound, result.unique_key) == "active", timeout=30, message="not started"
    )
    worker.kill()
    eventually(lambda: has_lapsed(sound, result), timeout=30, message="its lease lives on")

    done = examine(sound)

    assert done.code == 0
    assert found(done) == [("abandoned", "warning")]
    told = message(done, "abandoned")
    assert f"shop.import_all[{result.id}] on {worker.hostname}" in told
    assert "unique release --task-id ID" in told
    assert sound.unique("release", "--task-id", result.id, "--yes").code == 0


def has_lapsed(desk: Desk, result: Any) -> bool:
    record, now = desk.store.read(result.unique_key)
    return record.tasks[result.id].delivery_lease <= now


def test_it_finds_a_lock_whose_message_was_purged_and_release_frees_it(sound):
    """The documented step after a purge; what a worker holds keeps its key."""
    lost = sound.app.send_task("shop.send_digest", kwargs={"user_id": 1}, unique=True)
    kept = sound.app.send_task(
        "shop.rebuild_index", kwargs={"shop_id": 4}, unique=True, countdown=600
    )
    eventually(lambda: kept.id in held_ids(sound), timeout=30, message="not received")
    # Not taken for lost while it is in its queue, however long nobody consumes it.
    eventually(lambda: is_old_enough(sound, lost), timeout=30, message="the clock stands still")
    before = sound.unique("release", "--lost", "--yes", "--timeout", ANSWERS_WITHIN_S)
    purge = sound.run("purge", "--force", "--queues", "slow")

    done = examine(sound)
    freed = sound.unique("release", "--lost", "--yes", "--json", "--timeout", ANSWERS_WITHIN_S)

    assert before.code == 1, before.out
    assert "Purged 1 message" in purge.out
    assert done.code == 0
    assert found(done) == [("lost", "warning")]
    assert f"shop.send_digest[{lost.id}]" in message(done, "lost")
    assert "unique release --lost" in message(done, "lost")
    assert (freed.json()["matched"], freed.json()["released"]) == (1, 1)
    assert lock_state(sound, lost.unique_key) is None
    assert lock_state(sound, kept.unique_key) == "scheduled"
    kept.revoke()


def is_old_enough(desk: Desk, result: Any) -> bool:
    record, now = desk.store.read(result.unique_key)
    return now - record.tasks[result.id].created_at > 2500


def test_it_finds_a_store_that_does_not_answer(sound):
    conf = {"unique_store_url": f"redis://127.0.0.1:{free_port()}/0"}

    done = examine(sound, conf=conf)

    assert done.code == 3
    assert found(done)[0] == ("store", "error")
    assert "cannot be reached" in done.json()["findings"][0]["message"]
    for command in ("list", "stats"):
        other = sound.unique(command, conf=conf)
        assert other.code == 3
        assert other.err.startswith("Error: The lock store, Redis at 127.0.0.1:")


def test_it_finds_a_memory_store_with_several_processes(good_server, directory):
    desk = Desk(good_server.url_of(7), "memory://", directory)
    desk.start_worker("memory")
    try:
        done = examine(desk)
    finally:
        desk.close()

    assert done.code == 1
    assert found(done) == [("reach", "error")]
    assert "memory://" in message(done, "reach")


def test_it_finds_locks_of_an_older_key_version_and_a_server_without_a_disk(desk):
    from tests.workers.operating.crowd import _claim, _member

    member = _member(0)
    desk.store.acquire("0:" + "ab" * 32, _claim(member))

    done = examine(desk)

    assert done.code == 0
    assert found(done) == [
        ("persistence", "warning"),
        ("workers", "warning"),
        ("key-version", "warning"),
    ]
    assert "no worker replied" in message(done, "workers")
    state_of(desk.app).store.release("0:" + "ab" * 32)


def test_it_says_that_the_broker_does_not_answer(desk):
    done = examine(desk, conf={"broker_url": f"redis://127.0.0.1:{free_port()}/0"})

    assert done.code == 1
    assert ("broker", "error") in found(done)


def test_a_broker_of_files_has_remote_control_and_nothing_there_is_known_to_be_lost(
    good_server, directory
):
    conf = {**filesystem_settings(directory), "result_backend": "cache+memory://"}
    desk = Desk("filesystem://", good_server.url_of(7), directory, conf)
    result = desk.app.send_task("shop.rebuild_index", kwargs={"shop_id": 7}, unique=True)
    with desk.app.connection_for_write() as connection:
        connection.default_channel.queue_purge("operated")
    try:
        desk.start_worker("files", queues=["other"])
        done = examine(desk)
        eventually(
            lambda: "filesystem" in desk.unique("release", "--lost", "--yes", "--json").out,
            timeout=30,
            message="not old enough",
        )
        lost = desk.unique("release", "--lost", "--yes", "--json")
    finally:
        desk.close()

    assert done.code == 0, done.out
    assert len(done.json()["workers"]) == 1
    assert (lost.code, lost.json()["released"], lost.json()["unknown"]) == (3, 0, 1)
    assert "filesystem" in lost.json()["reasons"][0]["reason"]
    assert result.id


def test_sqs_with_predefined_queues_is_no_dead_broker(good_server, directory, monkeypatch):
    """Celery has no remote control there, and its reply queue is none of those that are defined."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "id")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    queues = {"operated": {"url": f"http://127.0.0.1:{free_port()}/0/operated"}}
    options = {"region": "eu-west-1", "predefined_queues": queues}
    conf = {"broker_transport_options": options}
    desk = Desk("sqs://", good_server.url_of(8), directory, conf)
    desk.store.acquire(
        "1:" + "cd" * 32, Claim("waiting", "shop.rebuild_index", "pw", grace_ms=60_000)
    )
    desk.store.confirm("1:" + "cd" * 32, "waiting", 60_000)
    try:
        done = examine(desk)
        eventually(
            lambda: "sqs" in desk.unique("release", "--lost", "--yes", "--json").out,
            timeout=30,
            message="not old enough",
        )
        lost = desk.unique("release", "--lost", "--yes", "--json")
    finally:
        desk.close()

    assert (done.code, found(done)) == (0, [])
    [note] = [one for one in done.json()["findings"] if one["check"] == "workers"]
    assert note["level"] == "note"
    assert "sqs" in note["message"]
    assert "remote control" in note["message"]
    assert (lost.code, lost.json()["unknown"]) == (3, 1)
    assert "sqs" in lost.json()["reasons"][0]["reason"]
