"""An app whose locks are on a cluster, behind sentinels, behind TLS, or in MariaDB."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from celery import Celery

import celery_unique
from celery_unique.config.app_state import state_of
from tests.support.app import flush, make_app, value_of, working

URLS = ["cluster_url", "sentinel_url", "mariadb_url"]


@pytest.fixture(params=[pytest.param(url, marks=pytest.mark.server) for url in URLS])
def app(request: pytest.FixtureRequest) -> Iterator[Celery]:
    app = make_app(request.getfixturevalue(request.param))
    yield app
    state_of(app).store.close()


def test_a_call_its_duplicate_and_the_next_one(app):
    @app.task(unique=True, name=f"{app.main}.rebuild")
    def rebuild(shop_id: int) -> int:
        return shop_id

    first = rebuild.delay(7)
    again = rebuild.delay(shop_id=7)
    with working(app):
        value = value_of(first, 30)
        following = rebuild.delay(7)
        last = value_of(following, 30)
    flush(app)

    assert (again.id, again.deduplicated) == (first.id, True)
    assert (value, last) == (7, 7)
    assert not following.deduplicated
    assert celery_unique.lookup(rebuild, (7,), app=app) is None


@pytest.mark.server
def test_a_brokers_tls_is_that_of_its_locks(tls_redis_server):
    with tls_redis_server.client() as admin:
        admin.execute_command("ACL", "SETUSER", "shop", "on", ">geheim", "~*", "+@all")
    port = tls_redis_server.port
    app = Celery("shop", broker=f"rediss://shop:geheim@127.0.0.1:{port}/1", set_as_current=False)
    app.conf.broker_use_ssl = {"ssl_cert_reqs": "required", **tls_redis_server.tls_options()}
    celery_unique.install(app)

    @app.task(unique=True, name="shop.rebuild")
    def rebuild(shop_id: int) -> None: ...

    first, again = rebuild.delay(7), rebuild.delay(7)

    lock: Any = celery_unique.lookup(rebuild, (7,), app=app)
    assert (again.id, lock.task_id) == (first.id, first.id)
    state_of(app).store.close()
