"""The app of the canvas tests: every task twice, unique and not."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from celery import Celery, Task, signature
from celery.exceptions import Ignore

from tests.support.props import Props

KINDS = {"unique": True, "plain": False}

Define = Callable[..., Any]


CONF = {
    "result_extended": True,
    "result_expires": 600,
    # Chords on backends that cannot count are polled for.
    "result_chord_retry_interval": 0.2,
}


def prepare(*, django_database: str = "", **settings: Any) -> dict[str, Any]:
    if django_database:
        set_up_django(Path(django_database))
    # Fifty greenlets that publish at once need more than kombu's ten: it takes the lack of one
    # for a lost broker, and a message that it was just receiving is lost with that.
    transport = {"max_connections": 200, **settings.get("broker_transport_options", {})}
    return {**settings, "broker_transport_options": transport}


def define(app: Celery, task: Define, props: Props) -> None:
    app.set_current()  # groups and chords look it up
    for kind, unique in KINDS.items():
        _define(app, task, kind, unique, props)
    _define_helpers(app, task, props)


def _define(app: Celery, task: Define, kind: str, unique: bool, props: Props) -> None:
    """Both kinds of each task; the tag is its key."""
    options: dict[str, Any] = {"unique": True, "unique_on": "tag"} if unique else {}

    @task(name=f"{kind}.work", **options)
    def work(tag: str, value: Any = 1) -> Any:
        props.enter(f"{kind}-{tag}")
        return value

    @task(name=f"{kind}.fail", **options)
    def fail(tag: str) -> None:
        props.enter(f"{kind}-{tag}")
        raise ValueError("it failed")

    @task(name=f"{kind}.retry", bind=True, **options)
    def retry(self: Task, tag: str) -> str:
        props.enter(f"{kind}-{tag}")
        if self.request.retries < 1:
            raise self.retry(countdown=0.2)
        return "at last"

    @task(name=f"{kind}.replace", bind=True, **options)
    def replace(self: Task, tag: str) -> Any:
        props.enter(f"{kind}-{tag}")
        return self.replace(signature("echo", ("replaced",), app=app))

    @task(name=f"{kind}.spawn", bind=True, **options)
    def spawn(self: Task, tag: str) -> str:
        """Calls another task, which is a child of it."""
        props.enter(f"{kind}-{tag}")
        app.tasks["echo"].delay("child")
        return "parent"

    @task(name=f"{kind}.hold", **options)
    def hold(tag: str) -> str:
        props.wait_for_word(tag, run=props.enter(f"{kind}-{tag}"))
        return "held"

    @task(name=f"{kind}.limited", time_limit=1, **options)
    def limited(tag: str) -> None:
        props.enter(f"{kind}-{tag}")
        props.wait_for_word(tag)

    @task(name=f"{kind}.hold_late", acks_late=True, **options)
    def hold_late(tag: str) -> str:
        props.wait_for_word(tag, run=props.enter(f"{kind}-{tag}"))
        return "held"

    @task(name=f"{kind}.ignore_first", **options)
    def ignore_first(tag: str) -> str:
        if props.enter(f"{kind}-{tag}") == 1:
            raise Ignore
        return "the second"

    last: dict[str, Any] = {**options, "unique_on_conflict": "rerun"} if unique else {}

    @task(name=f"{kind}.rerun", **last)
    def rerun(tag: str, value: Any = 1) -> Any:
        """Each run waits for a word of its own."""
        props.wait_for_word(tag, run=props.enter(f"{kind}-{tag}"))
        props.redis.rpush(f"values:{tag}", json.dumps(value))
        return value

    newest: dict[str, Any] = {**options, "unique_on_conflict": "replace"} if unique else {}

    @task(name=f"{kind}.newest", **newest)
    def newest_wins(tag: str, value: Any = 1) -> Any:
        props.enter(f"{kind}-{tag}")
        props.redis.rpush(f"values:{tag}", json.dumps(value))
        if value == "fails":
            raise ValueError("it failed")
        return value

    @task(name=f"{kind}.once", unique_states="until_success" if unique else None, **options)
    def once(tag: str, value: Any = 1) -> Any:
        """Still a duplicate's holder after its end."""
        props.enter(f"{kind}-{tag}")
        return value


def _define_helpers(app: Celery, task: Define, props: Props) -> None:
    @task(name="echo")
    def echo(*values: Any) -> Any:
        return values[-1]

    @task(name="total")
    def total(values: list[Any]) -> Any:
        return sorted(map(str, values))

    @task(name="note")
    def note(value: Any, where: str) -> None:
        props.redis.rpush(f"noted:{where}", json.dumps(value))

    @task(name="note_error")
    def note_error(failed_id: str) -> None:
        props.redis.rpush(f"noted:{failed_id}", json.dumps("an error"))

    @task(name="stamps", bind=True)
    def stamps(self: Task, value: Any, where: str = "") -> Any:
        """What it is stamped with; noted, where the test asks for it."""
        found = self.request.stamps
        if where:
            props.redis.rpush(f"noted:{where}", json.dumps(found))
        return found

    @task(name="where", bind=True)
    def where(self: Task, value: Any) -> list[Any]:
        """Who called it: the ids that the trail is made of."""
        return [self.request.root_id, self.request.parent_id]


def set_up_django(database: Path) -> None:
    import django
    from django.conf import settings

    settings.configure(
        INSTALLED_APPS=["django_celery_results"],
        DATABASES={
            "default": {
                "ENGINE": "django.db.backends.sqlite3",
                "NAME": str(database),
                "OPTIONS": {"timeout": 30, "transaction_mode": "IMMEDIATE"},
            }
        },
        USE_TZ=True,
    )
    django.setup()
