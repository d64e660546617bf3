"""The Open Job Spec's own conformance cases for unique jobs, level 4.

The steps are written here in our own words and run on every store. Where the specification's files
lie beside the project (``shared/ojs/*.json``), they are run as data as well.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from celery import Celery

from celery_unique import DuplicateTask, lookup
from celery_unique.publish.conflicts import STRATEGIES
from tests.support import eventually
from tests.support.app import advance, flush, messages, value_of, working

# The cases leave "pending" or others out of their states, and are warned about it.
pytestmark = pytest.mark.filterwarnings("ignore::celery_unique.exceptions.UniquePolicyWarning")


class JobServer:
    """An OJS backend as the cases see it, in front of a Celery app."""

    def __init__(self, app: Celery) -> None:
        self.app = app
        self._body_may_end = threading.Event()
        self._stack = ExitStack()
        self._calls: dict[str, tuple[Any, Any]] = {}

    def __enter__(self) -> JobServer:
        return self

    def __exit__(self, *exc: object) -> None:
        self._body_may_end.set()
        self._stack.close()

    def enqueue(
        self, job_type: str, args: list[Any], unique: dict[str, Any], queue: str
    ) -> tuple[int, dict[str, Any]]:
        task = self._task(job_type)
        try:
            result = task.apply_async(args, queue=self._queue(queue), unique=unique)
        except DuplicateTask as rejected:
            return 409, rejected.to_ojs()
        self._calls[result.id] = (result, args)
        return 200 if result.deduplicated else 201, self.job(result.id)

    def job(self, task_id: str) -> dict[str, Any]:
        flush(self.app)
        result, args = self._calls[task_id]
        lock = lookup(key=result.unique_key, app=self.app)
        assert lock is not None
        state = lock.state if lock.task_id == task_id else "cancelled"
        return {"job": {"id": task_id, "type": lock.task_name, "state": state, "args": args}}

    def fetch(self, queue: str) -> str:
        """A worker takes the queue's first job, and does not end it yet."""
        [waiting] = messages(self.app, self._queue(queue))
        self._stack.enter_context(working(self.app, queues=[self._queue(queue)]))
        eventually(lambda: self.job(waiting.id)["job"]["state"] == "active")
        return waiting.id

    def ack(self, task_id: str) -> str:
        self._body_may_end.set()
        value_of(self._calls[task_id][0])
        self._stack.close()  # nothing else was fetched, so nothing else may run
        return "completed"

    def _task(self, job_type: str) -> Any:
        if job_type not in self.app.tasks:

            @self.app.task(name=job_type)
            def body(payload: Any) -> None:
                self._body_may_end.wait(20)

        return self.app.tasks[job_type]

    def _queue(self, name: str) -> str:
        return f"{self.app.main}-{name}"


@pytest.fixture
def server(app: Celery) -> Iterator[JobServer]:
    with JobServer(app) as server:
        yield server


Enqueue = Callable[..., tuple[int, dict[str, Any]]]


@pytest.fixture
def enqueue(server: JobServer) -> Enqueue:
    def enqueue_one(payload: dict[str, Any], **unique: Any) -> tuple[int, dict[str, Any]]:
        policy = {"keys": ["type", "args"], **unique}
        return server.enqueue("conformance.job", [payload], policy, "conformance")

    return enqueue_one


LIVE = ["available", "active", "retryable", "scheduled"]


def test_a_rejected_duplicate_leaves_the_original_available(server, enqueue):
    _, first = enqueue({"order": 1}, on_conflict="reject", states=LIVE)

    status, error = enqueue({"order": 1}, on_conflict="reject", states=LIVE)

    assert status == 409
    assert error["error"]["message"]
    assert server.job(first["job"]["id"]) == first


def test_an_ignored_duplicate_answers_with_the_original(server, enqueue):
    status, first = enqueue({"user": 1}, on_conflict="ignore", states=LIVE)
    assert status == 201

    status, again = enqueue({"user": 1}, on_conflict="ignore", states=LIVE)

    assert (status, again) == (200, first)
    assert server.job(first["job"]["id"])["job"]["state"] == "available"


def test_after_its_period_a_job_can_be_enqueued_again(server, enqueue):
    assert enqueue({"batch": 1}, on_conflict="reject", period="PT2S")[0] == 201
    assert enqueue({"batch": 1}, on_conflict="reject", period="PT2S")[0] == 409

    advance(server.app, 3)

    assert enqueue({"batch": 1}, on_conflict="reject", period="PT2S")[0] == 201


def test_the_same_type_with_other_arguments_is_another_job(enqueue):
    states = ["available", "active"]
    assert enqueue({"user": 1, "do": "mail"}, on_conflict="reject", states=states)[0] == 201
    assert enqueue({"do": "mail", "user": 1}, on_conflict="reject", states=states)[0] == 409

    assert enqueue({"user": 2, "do": "mail"}, on_conflict="reject", states=states)[0] == 201


def test_a_completed_job_does_not_block_where_only_available_counts(server, enqueue):
    _, first = enqueue({"payment": 1}, on_conflict="reject", states=["available"])
    assert server.fetch("conformance") == first["job"]["id"]
    assert server.ack(first["job"]["id"]) == "completed"

    assert enqueue({"payment": 1}, on_conflict="reject", states=["available"])[0] == 201


# -- the specification's files, as data ------------------------------------------------

FILES = sorted((Path(__file__).parents[3] / "shared" / "ojs").glob("*.json"))
CASES = [json.loads(file.read_text()) for file in FILES]


def strategies(case: dict[str, Any]) -> set[str]:
    bodies = [step["body"] for step in case["steps"] if step["intent"] == "enqueue"]
    return {body["options"]["unique"].get("on_conflict", "reject") for body in bodies}


#: A strategy that is not there yet brings its cases with it.
APPLICABLE = [case for case in CASES if strategies(case) <= set(STRATEGIES)]


class CaseRun:
    """One case: its steps in order, with references from a step to earlier ones."""

    def __init__(self, server: JobServer) -> None:
        self._server = server
        self._bodies: dict[str, Any] = {}

    def step(self, step: dict[str, Any]) -> None:
        advance(self._server.app, step.get("delay_ms", 0) / 1000)
        status, body = getattr(self, "_" + step["intent"].replace("-", "_"))(step)
        self._bodies[step["id"]] = body
        expected = step["assertions"]
        assert status == expected["status"], step["description"]
        for path, value in expected["body"].items():
            self._check(found(body, path), value, f"{step['id']} {path}")

    def _enqueue(self, step: dict[str, Any]) -> tuple[int, Any]:
        body = step["body"]
        options = body["options"]
        return self._server.enqueue(body["type"], body["args"], options["unique"], options["queue"])

    def _get_job(self, step: dict[str, Any]) -> tuple[int, Any]:
        return 200, self._server.job(self._resolved(step["path"]).rpartition("/")[2])

    def _fetch(self, step: dict[str, Any]) -> tuple[int, Any]:
        [queue] = step["body"]["queues"]
        task_id = self._server.fetch(queue)
        return 200, {"jobs": [self._server.job(task_id)["job"]]}

    def _ack(self, step: dict[str, Any]) -> tuple[int, Any]:
        return 200, {"state": self._server.ack(self._resolved(step["body"]["job_id"]))}

    def _resolved(self, text: str) -> str:
        def value(match: re.Match[str]) -> str:
            _, step, _, _, *path = match[1].split(".")
            return str(found(self._bodies[step], "$." + ".".join(path)))

        return re.sub(r"\{\{(.*?)\}\}", value, text)

    def _check(self, seen: Any, expected: Any, where: str) -> None:
        if expected == "string:uuidv7":
            assert UUID(seen), where  # Celery's ids are version 4
        elif expected == "string:non_empty":
            assert isinstance(seen, str), where
            assert seen, where
        else:
            wanted = self._resolved(expected) if isinstance(expected, str) else expected
            assert seen == wanted, where


def found(document: Any, path: str) -> Any:
    """What ``$.jobs[0].id`` names."""
    for name, index in re.findall(r"\.(\w+)|\[(\d+)\]", path):
        document = document[name] if name else document[int(index)]
    return document


if APPLICABLE:

    @pytest.mark.parametrize("case", APPLICABLE, ids=lambda case: case["test_id"])
    def test_conformance_case(server, case):
        run = CaseRun(server)

        for step in case["steps"]:
            run.step(step)
