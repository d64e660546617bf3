"""What a person sees of unique tasks in Flower: a real worker, real Flower, a real browser."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from celery import Celery

from celery_unique.publish.stored_meta import StoredUnique
from celery_unique.worker.monitor_events import ROWS
from tests.support import RedisServer, Worker, eventually
from tests.support.browser import keep_screenshot
from tests.support.flower import Flower
from tests.workers.apps.watched import sign, watched_app

pytestmark = [pytest.mark.slow]

APP = "tests.workers.apps.watched"
WAIT_S = 60


@dataclass
class Called:
    """What is remembered of a result, which would keep its subscription in Redis."""

    id: str
    unique_key: str


@dataclass
class Story:
    """What happened, and who tells of it."""

    app: Celery
    flower: Flower
    worker: Worker
    holder: Called
    crowd: Called
    failed: Called
    superseded: Called
    replacement: Called

    def page(self, task_id: str) -> str:
        return self.flower.url(f"/task/{task_id}")

    def rows_of(self, holder: Called) -> list[dict[str, Any]]:
        rows = self.flower.tasks(state="DUPLICATE", limit="100").values()
        return [row for row in rows if row["parent_id"] == holder.id]

    def task(self, called: Called) -> dict[str, Any]:
        task: dict[str, Any] = self.flower.get(f"/api/task/info/{called.id}")
        return task


@pytest.fixture(scope="module")
def story(redis_server: RedisServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Story]:
    directory = tmp_path_factory.mktemp("flower")
    url = redis_server.fresh_url()
    env = {"WATCHED_REDIS": url}
    worker = Worker(
        APP, log_path=directory / "worker.log", concurrency=2, env=env, args=["-E"], name="shop"
    )
    flower = Flower(APP, log_path=directory / "flower.log", env=env)
    app = watched_app(url, task_send_sent_event=True)
    try:
        worker.start(timeout=WAIT_S)
        flower.start(worker.hostname)
        yield happen(app, flower, worker)
    finally:
        flower.stop()
        worker.kill()
        gc.collect()  # results unsubscribe when they go, which needs the server
        app.close()


def happen(app: Celery, flower: Flower, worker: Worker) -> Story:
    """A holder with more duplicates than are shown, a task that is superseded before it runs,
    one that goes on running, and a failure with two duplicates."""
    tasks = app.tasks
    rebuild, charge = tasks["shop.rebuild_index"], tasks["shop.charge_card"]
    crowd = rebuild.delay("paris")
    for _ in range(ROWS + 5):
        assert rebuild.delay("paris").id == crowd.id
    sign(app, "paris")
    crowd.get(timeout=WAIT_S)
    # The first waits where no worker takes it, until the second is in its place.
    superseded, replacement = (
        tasks["shop.send_digest"].apply_async(
            ("ann", text), queue=queue, unique_on_conflict="replace"
        )
        for text, queue in (("first", "held back"), ("second", "celery"))
    )
    app.signs.lmove("held back", "celery", "RIGHT", "LEFT")
    replacement.get(timeout=WAIT_S)
    holder = rebuild.delay("berlin")
    failed = charge.delay("order 7")
    for _ in range(2):
        assert charge.delay("order 7").id == failed.id
    sign(app, "order 7")
    failed.get(timeout=WAIT_S, propagate=False)
    results = (holder, crowd, failed, superseded, replacement)
    story = Story(app, flower, worker, *(Called(each.id, each.unique_key) for each in results))
    wait_until_told(story)
    return story


def wait_until_told(story: Story) -> None:
    def told() -> bool:
        states = {name: task["state"] for name, task in story.flower.tasks(limit="100").items()}
        return (
            states.get(story.crowd.id) == "SUCCESS"
            and states.get(story.failed.id) == "FAILURE"
            and states.get(story.superseded.id) == "REVOKED"
            and states.get(story.replacement.id) == "SUCCESS"
            and list(states.values()).count("DUPLICATE") == ROWS + 1 + 2
            and states.get(story.holder.id) == "STARTED"
        )

    eventually(told, timeout=WAIT_S, interval=0.2, message="Flower was not told everything")


def test_a_unique_task_that_runs_shows_its_shortened_key(story):
    task = story.task(story.holder)

    assert task["state"] == "STARTED"
    assert task["result"] == f"unique, key {story.holder.unique_key[:14]}"
    assert story.holder.unique_key not in str(task)


def test_duplicates_are_rows_under_their_holder_up_to_a_limit(story):
    rows = story.rows_of(story.crowd)

    assert len(rows) == ROWS + 1
    assert len({row["uuid"] for row in rows} | {story.crowd.id}) == ROWS + 2
    assert {row["name"] for row in rows} == {"shop.rebuild_index"}
    assert {row["worker"] for row in rows} == {story.worker.hostname}
    texts = sorted({row["result"] for row in rows})
    held = f"task {story.crowd.id} held its key {story.crowd.unique_key[:14]}"
    assert texts == [f"and 5 more not published: {held}", f"not published: {held}"]


def test_the_holder_keeps_its_own_state_and_names_its_duplicates(story):
    task = story.task(story.crowd)

    assert task["state"] == "SUCCESS"
    assert task["result"] == "'index of paris'"
    assert set(task["children"]) == {row["uuid"] for row in story.rows_of(story.crowd)}


def test_the_result_backend_has_the_same_number(story):
    stored = story.app.AsyncResult(story.crowd.id).unique

    assert stored == StoredUnique(story.crowd.unique_key[:14], "created", ROWS + 5)


def test_the_duplicates_of_a_task_that_failed_are_shown_too(story):
    assert story.task(story.failed)["state"] == "FAILURE"
    assert len(story.rows_of(story.failed)) == 2


def test_a_superseded_task_is_revoked_and_says_by_whom(story):
    task = story.task(story.superseded)

    assert task["state"] == "REVOKED"
    assert task["result"] == f"superseded by task {story.replacement.id}"


@pytest.mark.parametrize("way", ["async-apply", "send-task"])
def test_a_call_through_flower_is_a_unique_call(story, way):
    shop, path = f"called by {way}", f"/api/task/{way}/shop.rebuild_index"
    ran = int(story.app.signs.get("ran shop.rebuild_index"))

    first = story.flower.post(path, args=[shop])["task-id"]
    again = story.flower.post(path, args=[shop])["task-id"]
    by_name = story.flower.post(path, kwargs={"shop_id": shop})["task-id"]
    from_python = story.app.tasks["shop.rebuild_index"].delay(shop)

    assert again == by_name == from_python.id == first
    assert from_python.deduplicated
    sign(story.app, shop)
    assert from_python.get(timeout=WAIT_S) == f"index of {shop}"
    assert int(story.app.signs.get("ran shop.rebuild_index")) == ran + 1
    holder = Called(first, from_python.unique_key)
    eventually(lambda: len(story.rows_of(holder)) == 3, timeout=WAIT_S, interval=0.2)


def test_no_other_worker_appears(story):
    assert story.flower.workers() == {story.worker.hostname: True}


def test_a_person_finds_duplicates_in_the_list_and_goes_on_to_their_holder(story, browser):
    from selenium.webdriver.common.by import By

    browser.get(story.flower.url("/tasks"))
    table = eventually(
        lambda: [
            row.text
            for row in browser.find_elements(By.CSS_SELECTOR, "#tasks-table tbody tr")
            if "DUPLICATE" in row.text
        ],
        timeout=WAIT_S,
        interval=0.2,
        ignoring=Exception,
    )
    assert all("shop.rebuild_index" in text or "shop.charge_card" in text for text in table)
    keep_screenshot(browser, "flower-tasks")

    row = story.rows_of(story.failed)[0]
    browser.set_window_size(1280, 1180)  # the whole page, down to its link to the holder
    browser.get(story.page(row["uuid"]))
    page = browser.find_element(By.ID, "task-page")
    assert "DUPLICATE" in page.text
    assert f"not published: task {story.failed.id} held its key" in page.text
    keep_screenshot(browser, "flower-duplicate")

    link = page.find_element(By.LINK_TEXT, story.failed.id)
    # At once: the page scrolls smoothly, and a click meets what is passing by.
    browser.execute_script(
        "arguments[0].scrollIntoView({block: 'center', behavior: 'instant'})", link
    )
    link.click()
    eventually(lambda: browser.current_url == story.page(story.failed.id), timeout=WAIT_S)
    text = eventually(
        lambda: browser.find_element(By.ID, "task-page").text, timeout=WAIT_S, ignoring=Exception
    )
    assert "FAILURE" in text
    assert "the card was refused" in text
    keep_screenshot(browser, "flower-holder")


def test_a_person_sees_why_a_task_was_superseded_and_that_a_task_is_unique(story, browser):
    from selenium.webdriver.common.by import By

    browser.get(story.page(story.superseded.id))
    text = browser.find_element(By.ID, "task-page").text
    assert "REVOKED" in text
    assert f"superseded by task {story.replacement.id}" in text
    keep_screenshot(browser, "flower-superseded")

    browser.get(story.page(story.holder.id))
    text = browser.find_element(By.ID, "task-page").text
    assert "STARTED" in text
    assert f"unique, key {story.holder.unique_key[:14]}" in text
    keep_screenshot(browser, "flower-running")
