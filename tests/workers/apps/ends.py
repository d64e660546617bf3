"""Tasks that end in every way a task can end.

Each takes a tag: the argument that makes its key, and the name under which the test
talks to the running body.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from celery import Celery, Task, chain
from celery.exceptions import Ignore, Reject
from celery.worker.request import Request

from tests.support.props import Props
from tests.support.stage import RETRIED

Define = Callable[..., Any]


#: What a task is told to raise that is no ordinary exception.
EXITS = {"SystemExit": SystemExit, "KeyboardInterrupt": KeyboardInterrupt}


CONF: dict[str, Any] = {}


def define(app: Celery, task: Define, props: Props) -> None:
    app.loader.on_task_init = _fail_before_the_task
    for part in (_ordinary_ends, _retries, _replacements, _orders, _killed, _classes):
        part(app, task, props)


def _fail_before_the_task(task_id: str, task: Task) -> None:
    """A failure of Celery's own, such as a result backend that does not take STARTED."""
    if str((task.request.args or [""])[0]).startswith("broken-"):
        raise RuntimeError("before the task")


def _ordinary_ends(app: Celery, task: Define, props: Props) -> None:
    @task(name="succeed", unique=True)
    def succeed(tag: str) -> str:
        props.enter(tag)
        return tag

    @task(name="fail", unique=True)
    def fail(tag: str) -> None:
        props.enter(tag)
        raise ValueError(tag)

    @task(name="return_object", unique=True)
    def return_object(tag: str) -> object:
        props.enter(tag)
        return object()

    @task(name="return_object_once", unique=True, unique_states="until_success")
    def return_object_once(tag: str) -> object:
        props.enter(tag)
        return object()

    @task(name="hold", unique=True)
    def hold(tag: str) -> str:
        props.wait_for_word(tag, run=props.enter(tag))
        return tag

    @task(name="hold_late", unique=True, acks_late=True)
    def hold_late(tag: str) -> str:
        props.wait_for_word(tag, run=props.enter(tag))
        return tag

    @task(name="fail_late", unique=True, acks_late=True)
    def fail_late(tag: str) -> None:
        props.enter(tag)
        raise ValueError(tag)

    @task(
        name="fail_late_and_dead_letter",
        unique=True,
        acks_late=True,
        acks_on_failure_or_timeout=False,
    )
    def fail_late_and_dead_letter(tag: str) -> None:
        props.enter(tag)
        raise ValueError(tag)

    @task(name="mutate", unique=True)
    def mutate(tag: str, items: list[str], options: dict[str, Any]) -> int:
        props.enter(tag)
        items.append("more")
        options["more"] = True
        return len(items)

    @task(name="index_of_tenant", unique=True, unique_meta="tenant")
    def index_of_tenant(tag: str) -> str:
        return tag

    @task(name="call_for_tenant")
    def call_for_tenant(tag: str) -> str:
        """The key of a call that takes its tenant from the headers of the running task."""
        return str(app.tasks["index_of_tenant"].delay(tag).unique_key)

    @task(name="plain")
    def plain(tag: str) -> str:
        props.enter(f"plain-{tag}")
        props.wait_for_word(f"plain-{tag}")
        return tag


class RetriedElsewhere(Task):
    """Its retries wait until the test gives them to the worker: what is true of a task that waits
    for its retry can be looked at for as long as that takes."""

    abstract = True

    def signature_from_request(self, *args: Any, **options: Any) -> Any:
        return super().signature_from_request(*args, **{**options, "queue": RETRIED})


def _retries(app: Celery, task: Define, props: Props) -> None:
    @task(name="retry_once", bind=True, unique=True, base=RetriedElsewhere)
    def retry_once(self: Task, tag: str, countdown: float = 0) -> int:
        if props.enter(tag) == 1:
            raise self.retry(countdown=countdown)
        return int(self.request.retries)

    @task(name="retry_and_linger", bind=True, unique=True)
    def retry_and_linger(self: Task, tag: str) -> int:
        if props.enter(tag) == 1:
            again = self.retry(countdown=0, throw=False)
            time.sleep(0.1)  # the message of the retry arrives meanwhile
            raise again
        return int(self.request.retries)

    @task(name="retry_once_late", bind=True, unique=True, acks_late=True, base=RetriedElsewhere)
    def retry_once_late(self: Task, tag: str, countdown: float = 0) -> int:
        if props.enter(tag) == 1:
            raise self.retry(countdown=countdown)
        return int(self.request.retries)

    @task(
        name="retry_by_itself",
        unique=True,
        base=RetriedElsewhere,
        autoretry_for=(ConnectionError,),
        retry_kwargs={"countdown": 1},
    )
    def retry_by_itself(tag: str) -> str:
        if props.enter(tag) == 1:
            raise ConnectionError(tag)
        return tag

    @task(name="retry_with_headers", bind=True, unique=True, base=RetriedElsewhere)
    def retry_with_headers(self: Task, tag: str) -> int:
        """Gives the retry headers of its own, in place of those of its message."""
        if props.enter(tag) == 1:
            raise self.retry(countdown=0, headers={"tenant": "a"})
        return int(self.request.retries)

    @task(name="retry_in_vain", bind=True, unique=True, max_retries=2)
    def retry_in_vain(self: Task, tag: str) -> None:
        props.enter(tag)
        raise self.retry(countdown=0, exc=ValueError(tag))

    @task(name="retry_quietly", bind=True, unique=True, base=RetriedElsewhere)
    def retry_quietly(self: Task, tag: str) -> str:
        """The first run succeeds, and its id goes on all the same."""
        if props.enter(tag) == 1:
            self.retry(countdown=1, throw=False)
            return "the first"
        return "the second"

    @task(name="retry_quietly_and_fail", bind=True, unique=True, base=RetriedElsewhere)
    def retry_quietly_and_fail(self: Task, tag: str) -> str:
        if props.enter(tag) == 1:
            self.retry(countdown=1, throw=False)
            raise ValueError(tag)
        return "the second"

    @task(name="retry_unpublishable", bind=True, unique=True)
    def retry_unpublishable(self: Task, tag: str) -> None:
        """The message of the retry cannot be written, so there is none."""
        props.enter(tag)
        raise self.retry(args=[object()], countdown=0)


def _replacements(app: Celery, task: Define, props: Props) -> None:
    @task(name="other", unique=True)
    def other(tag: str) -> str:
        props.enter(f"other-{tag}")
        props.wait_for_word(f"other-{tag}")
        return f"other {tag}"

    @task(name="replace", bind=True, unique=True, unique_on="tag")
    def replace(self: Task, tag: str, by: str) -> Any:
        if props.enter(tag) > 1:
            props.wait_for_word(tag)
            return f"itself {tag}"
        tasks = app.tasks
        replacement = {
            "plain": tasks["plain"].s(tag),
            "unique": tasks["other"].s(tag),
            "itself": tasks["replace"].s(tag, by),
            "chain": chain(tasks["succeed"].s(f"first-{tag}"), tasks["plain"].si(tag)),
            "map": tasks["succeed"].map([f"mapped-{tag}"]),
            "unpublishable": tasks["plain"].s(object()),
        }[by]
        return self.replace(replacement)


def _orders(app: Celery, task: Define, props: Props) -> None:
    @task(name="ignore", unique=True)
    def ignore(tag: str) -> None:
        props.enter(tag)
        raise Ignore

    @task(name="reject", unique=True, acks_late=True)
    def reject(tag: str) -> None:
        props.enter(tag)
        raise Reject("no good", requeue=False)

    @task(name="reject_once", unique=True, acks_late=True)
    def reject_once(tag: str) -> str:
        if props.enter(tag) == 1:
            raise Reject("not now", requeue=False)
        return tag

    @task(name="reject_once_in_window", unique=True, unique_states="window", acks_late=True)
    def reject_once_in_window(tag: str) -> str:
        """Its policy keeps an ended task recorded."""
        if props.enter(tag) == 1:
            raise Reject("not now", requeue=False)
        return tag

    @task(name="reject_when_told", unique=True, acks_late=True)
    def reject_when_told(tag: str) -> str:
        if props.enter(tag) == 1:
            props.wait_for_word(tag)
            raise Reject("not now", requeue=False)
        return tag

    @task(
        name="fail_once_and_dead_letter",
        unique=True,
        acks_late=True,
        acks_on_failure_or_timeout=False,  # up to 5.6
        acks_on_failure=False,
    )
    def fail_once_and_dead_letter(tag: str) -> str:
        if props.enter(tag) == 1:
            raise ValueError(tag)
        return tag

    @task(name="reject_early", unique=True)
    def reject_early(tag: str, requeue: bool) -> None:
        """Its message is acknowledged already, so requeueing does nothing."""
        props.enter(tag)
        raise Reject("no good", requeue=requeue)

    @task(name="succeed_and_requeue", bind=True, unique=True, acks_late=True)
    def succeed_and_requeue(self: Task, tag: str) -> None:
        """Leaves what a worker leaves that dies between result and acknowledgement."""
        props.enter(tag)
        self.backend.mark_as_done(self.request.id, tag)
        raise Reject("delivered again", requeue=True)

    @task(name="requeue_once", unique=True, acks_late=True)
    def requeue_once(tag: str) -> str:
        if props.enter(tag) == 1:
            raise Reject("not now", requeue=True)
        props.wait_for_word(tag)
        return tag


class LimitedOnce(Request):
    """Its second delivery is not to be killed as well, however long the test takes."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        if self.delivery_info["redelivered"]:
            self.time_limits = (600, None)


def _killed(app: Celery, task: Define, props: Props) -> None:
    @task(name="soft_limit", unique=True, soft_time_limit=0.5)
    def soft_limit(tag: str) -> None:
        props.enter(tag)
        props.wait_for_word(tag)

    # Each of them waits, and is killed meanwhile.
    options: dict[str, dict[str, Any]] = {
        "hard_limit": {"time_limit": 1},
        "hard_limit_late": {"time_limit": 1, "acks_late": True},
        "hard_limit_requeued": {
            "time_limit": 1,
            "acks_late": True,
            "acks_on_failure_or_timeout": False,  # up to 5.6
            "acks_on_timeout": False,
            "Request": LimitedOnce,
        },
        "lose": {},
        "lose_late": {"acks_late": True},
        "lose_requeued": {"acks_late": True, "reject_on_worker_lost": True},
        "lose_retried": {
            "retry_on_worker_lost": True,
            "default_retry_delay": 1,
            "base": RetriedElsewhere,
        },
        "lose_late_retried": {
            "acks_late": True,
            "retry_on_worker_lost": True,
            "default_retry_delay": 1,
            "base": RetriedElsewhere,
        },
    }
    for name, option in options.items():

        def body(tag: str) -> str:
            props.wait_for_word(tag, run=props.enter(tag))
            return tag

        task(body, name=name, unique=True, **option)

    for name, late in (("leave", False), ("leave_late", True)):

        def leave(tag: str, how: str) -> str:
            if props.enter(tag) == 1:
                raise EXITS[how](tag)
            return tag

        task(leave, name=name, unique=True, unique_on="tag", acks_late=late)


class BeforeStart(RetriedElsewhere):
    abstract = True

    def before_start(self, task_id: str, args: Any, kwargs: Any) -> None:
        tag, how = args
        if self.app.props.enter(tag) > 1:
            return
        if how == "retry":
            raise self.retry(countdown=1)
        raise {"fail": ValueError(tag), "reject": Reject(tag), "ignore": Ignore(tag)}[how]


class OwnCall(Task):
    """Does something of its own after ``run``: the body ends where this does."""

    abstract = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        result = super().__call__(*args, **kwargs)
        self.app.props.enter(f"after-{args[0]}")
        self.app.props.wait_for_word(args[0])
        return result


def _classes(app: Celery, task: Define, props: Props) -> None:
    for name, late in (("stopped_before", False), ("stopped_before_late", True)):

        @task(name=name, base=BeforeStart, unique=True, unique_on="tag", acks_late=late)
        def stopped_before(tag: str, how: str) -> str:
            return tag

    @task(name="own_call", base=OwnCall, unique=True)
    def own_call(tag: str) -> str:
        props.enter(tag)
        return tag

    @task(name="call_directly", unique=True)
    def call_directly(tag: str) -> str:
        """Calls other tasks as functions, which is nobody's business but its own."""
        props.enter(tag)
        app.tasks["succeed"](f"inner-{tag}")
        app.tasks["succeed"].apply((f"inner-{tag}",))
        props.wait_for_word(tag)
        return tag
