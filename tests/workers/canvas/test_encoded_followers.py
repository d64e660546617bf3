"""With ``unique_follower_codec`` no argument of a call is in the lock store in clear text."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from celery import Celery, chain, chord

import celery_unique
from celery_unique.config.app_state import state_of
from celery_unique.exceptions import ConfigurationError
from celery_unique.followers.call import FollowerCall
from tests.support import RedisServer, eventually
from tests.support.stage import Stage
from tests.workers.canvas import codecs
from tests.workers.canvas.shapes import Cast

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

SECRET = "4929-1234-5678-9012"
CODEC = "tests.workers.canvas.codecs:fernet"


@pytest.fixture
def make_stage(own_canvas_stage: Callable[..., Stage]) -> Callable[..., Stage]:
    def make(store_url: str, **settings: Any) -> Stage:
        return own_canvas_stage(unique_store_url=store_url, unique_run_lease=3, **settings)

    return make


def redis_contents(server: RedisServer) -> bytes:
    """Every value of the server, whatever its type."""
    client = server.client()
    return (
        b"\n".join(client.dump(name) or b"" for name in client.scan_iter())
        + repr([client.hgetall(name) for name in client.scan_iter(_type="hash")]).encode()
    )


def sqlite_contents(path: Path) -> bytes:
    with sqlite3.connect(path) as connection:
        return "\n".join(connection.iterdump()).encode()


@pytest.mark.parametrize("kind", ["redis", "sqlite"])
@pytest.mark.parametrize("codec", [CODEC, None], ids=["encoded", "in clear text"])
def test_arguments_of_followers_are_in_the_store_only_without_a_codec(
    make_stage, start_server, tmp_path, kind, codec
):
    if kind == "redis":
        server = start_server(RedisServer)
        url, contents = server.url, lambda: redis_contents(server)
    else:
        path = tmp_path / "locks.sqlite3"
        url, contents = f"sqlite:///{path}", lambda: sqlite_contents(path)
    stage = make_stage(url, **({"unique_follower_codec": codec} if codec else {}))
    c = Cast(stage.app, "unique")
    holder = c.work.delay(c.tag, SECRET)
    result = chord([c.work.s(c.tag, SECRET), c.echo.s(5)], c.total.s())()
    linked = c.work.apply_async((c.tag, SECRET), link=c.note_here)
    assert linked.outcome == "joined"

    assert (SECRET.encode() in contents()) is (codec is None)

    stage.start_worker()
    assert result.get(timeout=60) == sorted([SECRET, "5"])
    assert [holder.get(timeout=60), linked.get(timeout=60)] == [SECRET, SECRET]
    assert c.runs == 1


def test_a_superseded_member_is_encoded_too(make_stage, start_server):
    server = start_server(RedisServer)
    stage = make_stage(server.url, unique_follower_codec=CODEC)
    stage.start_worker()
    c = Cast(stage.app, "unique")
    c.rerun.delay(c.tag, 0)
    eventually(lambda: c.runs, timeout=60)
    result = chain(c.rerun.si(c.tag, SECRET), c.echo.s())()
    c.rerun.delay(c.tag, 2)
    stage.workers[0].wait_for_log(rf"joined \S+\[{result.parent.id}\] to ", 60)

    assert SECRET.encode() not in redis_contents(server)

    c.let_go()
    assert result.get(timeout=60) == 2


def test_a_worker_without_the_key_reports_and_one_with_it_completes(make_stage, start_server):
    """What cannot be decoded stays where it is: it is neither dropped nor completed wrongly."""
    server = start_server(RedisServer)
    stage = make_stage(server.url, unique_follower_codec=CODEC)
    c = Cast(stage.app, "unique")
    c.work.delay(c.tag, SECRET)
    result = chain(c.work.si(c.tag, SECRET), c.echo.s())()
    worker = stage.start_worker(
        settings={"unique_follower_codec": "tests.workers.canvas.codecs:another"}
    )
    worker.wait_for_log(rf"cannot read the message of task {result.parent.id}", 60)
    worker.stop()

    stage.start_worker()

    assert result.get(timeout=60) == SECRET


def test_what_was_stored_before_the_codec_was_set_is_read():
    app = Celery("shop", broker="memory://", set_as_current=False)
    celery_unique.install(app, unique_follower_codec=codecs.fernet)

    @app.task(name="work", unique=True)
    def work(value: str) -> None: ...

    work.delay(SECRET)
    work.apply_async((SECRET,), task_id="follower")
    runtime = state_of(app)
    [(key, _)] = runtime.store.walk()
    [(_, follower)] = runtime.store.followers(key)
    call = FollowerCall.loads(app, follower.message, codecs.fernet)
    assert call.args == [SECRET]
    assert FollowerCall.loads(app, call.dumps(), codecs.fernet).args == [SECRET]
    with pytest.raises(ConfigurationError, match="no unique_follower_codec"):
        FollowerCall.loads(app, follower.message)


@pytest.mark.parametrize(
    ("codec", "told"),
    [
        ("nowhere.at_all:codec", "cannot be imported"),
        ("json", "has no methods encode"),
        (object(), "has no methods encode"),
        (codecs.FernetCodec, "has no methods encode"),
        (codecs.Failing(), "encode failed"),
        (codecs.Texts(), "must be bytes"),
    ],
)
def test_a_wrong_codec_is_an_error_at_the_call_and_nothing_is_published(codec, told):
    app = Celery("shop", broker="memory://", set_as_current=False)
    celery_unique.install(app)
    app.conf.unique_follower_codec = codec

    @app.task(name="work", unique=True)
    def work(value: str) -> None: ...

    with pytest.raises(ConfigurationError, match=told) as raised:
        work.apply_async((SECRET,), link=work.si("other"))

    assert raised.value.setting == "unique_follower_codec"
    assert SECRET not in str(raised.value)
