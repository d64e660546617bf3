"""One call and its duplicates, as somebody finds out about them at a shell."""

from __future__ import annotations

import json

import pytest

from celery_unique import manifest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


def test_why_was_my_call_dropped(desk):
    send = desk.app.send_task
    first = send("shop.rebuild_index", kwargs={"shop_id": 7}, unique=True)
    again = send("shop.rebuild_index", kwargs={"shop_id": 7}, unique=True)
    desk.store.flush()
    assert again.deduplicated

    told = desk.unique("why", "shop.rebuild_index", "--args", "[7]")
    free = desk.unique("why", "shop.rebuild_index", "--args", "[8]", "--json")
    listed = desk.unique("list", "--task", "shop.rebuild_index", "--args", "[7]", "--json")

    assert told.code == 0
    assert 'made from    {"args":{"shop_id":7},"type":"shop.rebuild_index"}' in told.out
    assert f"of the task that holds its key ({first.id})" in told.out
    assert "absorbed    1 call, the last " in told.out
    assert (
        f"celery -A tests.workers.apps.operated unique release --key {first.unique_key}" in told.out
    )
    assert free.code == 1
    assert free.json()["call"] == {
        "outcome": "created",
        "task_id": None,
        "text": "is published: its key is free",
    }
    assert [row["task_id"] for row in listed.json_lines()] == [first.id]


def test_the_manifest_is_that_of_the_app(desk):
    done = desk.unique("manifest")

    assert done.code == 0
    assert json.loads(done.out) == manifest(desk.app)


def test_without_an_app_the_command_says_what_is_missing(desk):
    done = desk.unique("list", installed=False)

    assert done.code == 2
    assert "celery_unique.install(app)" in done.err
