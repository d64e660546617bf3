"""What other libraries get wrong: every behaviour, with a real worker on Redis.

Where another file proves a row of the comparison, `PROVED_ELSEWHERE` names its tests, and
`PROVED_HERE` those of this file.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Iterator
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
import redis
from celery import Celery

from celery_unique import UniqueKeyError, lookup
from celery_unique.config.app_state import state_of
from tests.stores.racing import Racers
from tests.support import RedisServer, Worker
from tests.workers.apps.shop import make_shop, runs
from tests.workers.calling_racers import publish_racer

TESTS = Path(__file__).parents[1]

#: Every shape of canvas, on every pool and result backend.
MATRIX = "test_shape_comes_to_what_it_does_without_uniqueness"

#: Row -> file -> tests.
PROVED_ELSEWHERE: dict[str, dict[str, list[str]]] = {
    "concurrent identical calls, over a thousand rounds": {
        "workers/test_races_public_api.py": [
            "test_of_calls_made_at_once_one_is_published_and_the_others_name_it",
        ],
        "stores/test_races.py": [
            "test_every_round_has_one_winner_whom_all_losers_name",
        ],
    },
    "chord or group with two equal members": {
        "workers/canvas/test_canvas.py": [MATRIX],
        "workers/canvas/shapes.py": [
            "group_of_equals",
            "chord_with_equal_header_members",
        ],
    },
    "chord member that already runs elsewhere": {
        "workers/canvas/test_canvas.py": [MATRIX],
        "workers/canvas/shapes.py": ["chord_with_a_header_member_that_runs"],
    },
    "first link of a chain is a duplicate": {
        "workers/canvas/test_canvas.py": [MATRIX],
        "workers/canvas/shapes.py": ["chain_with_a_duplicate_head"],
    },
    "second link of a chain is a duplicate": {
        "workers/canvas/test_canvas.py": [MATRIX],
        "workers/canvas/shapes.py": ["chain_with_a_duplicate_in_the_middle"],
    },
    "link= on a duplicate": {
        "workers/canvas/test_canvas.py": [MATRIX],
        "workers/canvas/shapes.py": ["link", "link_error_with_a_failing_holder"],
    },
    "the broker is down at publish": {
        "integration/test_publish_failures.py": [
            "test_a_broker_that_is_not_there_leaves_no_lock",
            "test_a_publish_that_raises_gives_the_lock_back_and_raises_on",
        ],
    },
    "pool child or worker killed with SIGKILL": {
        "workers/faults/test_crashes.py": [
            "test_key_of_an_early_acknowledged_task_is_free_within_the_run_lease_of_a_sigkill",
            "test_late_acknowledged_task_of_a_killed_worker_runs_again_and_nothing_beside_it",
        ],
        "workers/test_killed_tasks.py": [
            "test_a_killed_child_frees_the_key",
        ],
        "workers/canvas/test_faults.py": [
            "test_all_of_fifty_chords_complete_whose_members_follow_a_killed_task",
        ],
    },
    "redelivery with the same id": {
        "workers/faults/test_redelivery.py": [
            "test_late_acknowledged_task_longer_than_the_visibility_timeout_runs_once",
            "test_early_acknowledged_task_that_waits_behind_another_runs_once",
            "test_task_whose_connection_to_rabbitmq_broke_runs_once",
        ],
    },
    "Ignore, Reject, replace": {
        "workers/test_task_ends.py": [
            "test_an_ignored_task_gives_its_key_back",
        ],
        "workers/test_task_orders.py": [
            "test_a_rejected_task_gives_its_key_back",
            "test_a_replacement_that_is_not_unique_inherits_the_lock",
            "test_a_replacement_with_a_key_of_its_own_takes_that_in_exchange",
        ],
    },
    "revoked in the queue, terminated, expired": {
        "workers/faults/test_revoke.py": [
            "test_revoke_of_a_waiting_task_frees_its_key_at_once",
        ],
        "workers/test_unstarted_tasks.py": [
            "test_a_task_that_was_revoked_in_the_queue_frees_its_key_when_it_is_reached",
            "test_an_expired_task_frees_its_key",
        ],
        "workers/test_killed_tasks.py": [
            "test_a_terminated_task_frees_the_key",
        ],
    },
    "the hard time limit": {
        "workers/test_killed_tasks.py": [
            "test_the_hard_time_limit_frees_the_key",
        ],
    },
    "retry, autoretry_for": {
        "workers/test_task_ends.py": [
            "test_a_retry_keeps_the_key_until_its_own_end",
        ],
        "workers/test_task_orders.py": [
            "test_an_automatic_retry_keeps_the_key",
        ],
    },
    "a lock lapses and its old owner ends": {
        "integration/test_signals.py": [
            "test_a_task_whose_lock_lapsed_while_it_ran_does_not_free_the_next_holders",
        ],
        "workers/faults/test_crashes.py": [
            "test_worker_that_was_frozen_past_its_lease_leaves_the_new_holder_alone",
        ],
    },
    "the lock store is down at the call": {
        "integration/test_publish_failures.py": [
            "test_a_store_that_is_down_gives_a_clear_error_in_bounded_time",
            "test_with_publish_on_store_error_the_call_is_published_without_a_lock",
        ],
    },
    "a call right after get()": {
        "workers/test_next_call_after_get.py": [
            "test_right_after_get_the_next_call_is_admitted",
        ],
    },
    "two apps in one process, two stores": {
        "integration/test_installing.py": [
            "test_two_apps_of_one_process_have_a_store_each",
        ],
    },
    "the exception pickles": {
        "integration/test_results.py": [
            "test_a_rejection_pickles_with_all_its_facts",
        ],
    },
    "Redis commands for a new call and for a duplicate": {
        "integration/test_round_trips.py": [
            "test_a_new_call_is_one_blocking_round_trip",
            "test_a_duplicate_is_one_blocking_round_trip",
        ],
    },
    # What they take is counted in round trips: make bench has the times.
    "a duplicate call takes": {
        "integration/test_round_trips.py": [
            "test_a_duplicate_is_one_blocking_round_trip",
            "test_a_rejected_duplicate_is_one_blocking_round_trip",
        ],
    },
    "a no-op unique task, call to result": {
        "integration/test_round_trips.py": [
            "test_a_run_is_one_round_trip_to_start_and_one_to_finish",
            "test_nobody_waits_for_the_confirmation",
        ],
    },
}

PROVED_HERE: dict[str, list[str]] = {
    "50 concurrent identical calls, 10 processes": [
        "test_fifty_concurrent_calls_of_ten_processes_run_once"
    ],
    "f(1) and f(x=1); a default; the order of arguments": ["test_the_same_work_is_one_task"],
    "1 and '1'; a string that looks like two arguments": ["test_other_work_is_another_task"],
    "UUID, datetime, Decimal, bytes arguments": [
        "test_rich_arguments_are_sent_and_their_key_is_given_back"
    ],
    "an argument that cannot be serialised": [
        "test_an_argument_that_cannot_be_sent_is_a_clear_error_and_leaves_no_lock"
    ],
    "the task mutates its argument": [
        "test_a_task_that_changes_its_argument_still_gives_its_key_back"
    ],
    "tuple argument, dict with int keys": [
        "test_arguments_that_the_wire_changes_do_not_keep_the_key"
    ],
    "send_task by name twice, then delay": ["test_two_calls_by_name_and_one_of_the_task_run_once"],
    "direct call": ["test_calling_a_task_as_a_function_takes_no_lock"],
}
PROVED = {
    **PROVED_ELSEWHERE,
    **{row: {"workers/test_peers.py": tests} for row, tests in PROVED_HERE.items()},
}


@pytest.mark.parametrize("row", PROVED)
def test_what_proves_a_row_is_there(row):
    for file, tests in PROVED[row].items():
        names = set(re.findall(r"^def (\w+)", (TESTS / file).read_text(), re.MULTILINE))

        assert names.issuperset(tests), f"gone from {file}: {set(tests) - names}"


# -- the stage: one worker for all that follows ------------------------------------------------


@pytest.fixture(scope="module")
def conf(redis_server: RedisServer) -> dict[str, str]:
    return {"broker_url": redis_server.fresh_url(), "result_backend": redis_server.fresh_url()}


@pytest.fixture(scope="module")
def worker(conf: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    log = tmp_path_factory.mktemp("peers") / "worker.log"
    worker = Worker(
        "tests.workers.apps.shop",
        log_path=log,
        concurrency=2,
        env={"SHOP": json.dumps(conf)},
    )
    yield worker.start()
    worker.kill()


@pytest.fixture(scope="module")
def app(conf: dict[str, str], worker: Worker) -> Celery:
    return make_shop(**conf)


@pytest.fixture(scope="module")
def without_worker(redis_server: RedisServer) -> Celery:
    """Messages of this app stay where they are."""
    return make_shop(broker_url=redis_server.fresh_url(), result_backend=redis_server.fresh_url())


@pytest.fixture(scope="module")
def pair(without_worker: Celery) -> Any:
    @without_worker.task(name="shop.pair", unique=True, shared=False)
    def pair(x: Any, y: Any = 2) -> None: ...

    return pair


# -- which calls are the same work ------------------------------------------------------------


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (lambda f: f.delay(1), lambda f: f.delay(x=1)),
        (lambda f: f.delay(10), lambda f: f.delay(10, 2)),
        (lambda f: f.delay(x=11, y=3), lambda f: f.delay(y=3, x=11)),
        (lambda f: f.delay({"a": {"b": 1, "c": 2}}), lambda f: f.delay({"a": {"c": 2, "b": 1}})),
    ],
    ids=["position or name", "default left out or given", "order of keywords", "nested order"],
)
def test_the_same_work_is_one_task(pair, first, second):
    holder = first(pair)

    again = second(pair)

    assert (again.id, again.deduplicated) == (holder.id, True)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (lambda f: f.delay(20), lambda f: f.delay("20")),
        (lambda f: f.delay("1_y-2"), lambda f: f.delay(1, 2)),
        (lambda f: f.delay(True), lambda f: f.delay("True")),
    ],
    ids=["number or string", "a string that looks like two arguments", "truth or string"],
)
def test_other_work_is_another_task(pair, first, second):
    holder = first(pair)

    assert second(pair).id != holder.id


# -- arguments, from the call to the end ------------------------------------------------------

RICH = {
    "UUID": uuid.uuid4(),
    "datetime": datetime.now(UTC),
    "Decimal": Decimal("1.10"),
    "bytes": b"\x00\xff",
}


@pytest.mark.parametrize("name", RICH)
def test_rich_arguments_are_sent_and_their_key_is_given_back(app, name):
    look = app.tasks["shop.look"]

    result = look.delay(RICH[name])

    assert result.get(timeout=20) == name
    assert lookup(look, (RICH[name],)) is None
    assert look.delay(RICH[name]).outcome == "created"


@pytest.mark.parametrize("value", [(1, (2, 3)), {1: "a", 2: {3: "b"}}], ids=["tuple", "int keys"])
def test_arguments_that_the_wire_changes_do_not_keep_the_key(app, value):
    look = app.tasks["shop.look"]

    look.delay(value).get(timeout=20)

    assert lookup(look, (value,)) is None


def test_a_task_that_changes_its_argument_still_gives_its_key_back(app):
    change = app.tasks["shop.change"]
    order = {"id": 7, "lines": [1, 2]}

    change.delay(order).get(timeout=20)

    assert lookup(change, (order,)) is None
    assert change.delay(order).outcome == "created"


def test_an_argument_that_cannot_be_sent_is_a_clear_error_and_leaves_no_lock(without_worker):
    store = state_of(without_worker).store
    before = {key for key, _ in store.walk()}

    with pytest.raises(UniqueKeyError, match="'value'"):
        without_worker.tasks["shop.look"].delay(object())

    assert {key for key, _ in store.walk()} == before


# -- how often a body runs ----------------------------------------------------------------------


def test_two_calls_by_name_and_one_of_the_task_run_once(app, worker):
    results = [
        app.send_task("shop.count", (1_000,), queue="held back"),
        app.send_task("shop.count", kwargs={"shop_id": 1_000}),
        app.tasks["shop.count"].delay(1_000),
    ]
    with redis.Redis.from_url(app.conf.broker_url) as broker:
        broker.lmove("held back", "celery", "RIGHT", "LEFT")

    assert {result.get(timeout=20) for result in results} == {1}
    assert runs(app, 1_000) == 1


@pytest.mark.slow
def test_fifty_concurrent_calls_of_ten_processes_run_once(redis_server, start_worker, report):
    conf = {"broker_url": redis_server.fresh_url(), "result_backend": redis_server.fresh_url()}
    with Racers(processes=10) as racers:
        rounds = racers.race(publish_racer, conf, rounds=20)

    app = make_shop(**conf)
    start_worker("tests.workers.apps.shop", concurrency=2, env={"SHOP": json.dumps(conf)})
    for calls in rounds:
        [task_id] = {task_id for call in calls for task_id in call.answer}
        assert app.AsyncResult(task_id).get(timeout=30) == 1

    ran = [runs(app, number) for number in range(len(rounds))]
    report(f"50 concurrent calls of 10 processes: {len(rounds)} rounds, ran {sum(ran)} times")
    assert ran == [1] * len(rounds)


def test_calling_a_task_as_a_function_takes_no_lock(app):
    assert app.tasks["shop.rebuild"](2_000) == 2_000

    assert lookup("shop.rebuild", (2_000,), app=app) is None
