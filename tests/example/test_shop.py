"""The example shop at work: its HTTP answers, and its page in a browser.

One shop on files and SQLite is shared by the tests; one more has Redis, by its one setting.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest
from selenium.common.exceptions import StaleElementReferenceException
from selenium.webdriver import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from tests.example.conftest import Shop
from tests.support import RedisServer
from tests.support.browser import keep_screenshot
from tests.support.server import free_port
from tests.support.waiting import eventually

pytestmark = pytest.mark.slow

CARD = "[data-tasks*=%s]"
DESKTOP, PHONE = (1280, 1000), (390, 844)


@pytest.fixture(scope="module")
def shop(open_shop: Callable[..., Shop]) -> Shop:
    return open_shop()


@pytest.fixture(scope="module")
def redis_shop(open_shop: Callable[..., Shop], redis_server: RedisServer) -> Shop:
    return open_shop(redis_server.fresh_url(), "--flower-port", str(free_port()))


class Page:
    """The shop's page, as a visitor sees it."""

    def __init__(self, browser: Any, shop: Shop) -> None:
        self.browser = browser
        self.shop = shop
        browser.get(shop.url)
        self.find("#start-over").click()  # what other tests did is not shown

    def find(self, selector: str) -> Any:
        return self.browser.find_element(By.CSS_SELECTOR, selector)

    def all(self, selector: str) -> list[Any]:
        return self.browser.find_elements(By.CSS_SELECTOR, selector)

    def counts(self, task: str) -> dict[str, int]:
        places = self.all(f"{CARD % task} [data-count]")
        return {place.get_attribute("data-count"): int(place.text) for place in places}

    def wait_for_counts(self, task: str, **expected: int) -> None:
        eventually(
            lambda: self.counts(task) == expected,
            timeout=60,
            interval=0.2,
            message=f"{task}: {self.counts(task)}",
        )

    def texts(self, selector: str) -> list[str]:
        """At one moment: the page replaces its lists while it is looked at."""
        script = "return [...document.querySelectorAll(arguments[0])].map((e) => e.textContent)"
        texts: list[str] = self.browser.execute_script(script, selector)
        return texts

    def look(self, size: tuple[int, int], scheme: str = "light") -> None:
        width, height = size
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        feature = {"name": "prefers-color-scheme", "value": scheme}
        self.browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})


@pytest.fixture
def visit(browser: Any) -> Iterator[Callable[[Shop], Page]]:
    yield lambda shop: Page(browser, shop)
    browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
    browser.get("about:blank")  # nothing asks the shop any more


# -- Pressing ten times ----------------------------------------------------------------------------


def press_ten_times(page: Page) -> None:
    mails = page.shop.mails()
    page.look(DESKTOP)
    button = page.find("#order")

    for _ in range(10):
        button.click()

    page.wait_for_counts("confirm_order", calls=10, duplicates=9, runs=1)
    chips = page.texts(f"{CARD % 'confirm_order'} .calls li")
    assert sorted(chip.split(" ", 1)[1] for chip in chips) == ["duplicate"] * 9 + ["new"]
    done = f"{CARD % 'confirm_order'} ul.runs li"
    eventually(lambda: page.texts(done)[0].startswith("done"), timeout=60)
    assert len(page.texts(done)) == 1
    assert page.shop.mails() == mails + 1
    status = page.find(f"{CARD % 'confirm_order'} [role=status]")
    assert "10 calls, 9 duplicates, 1 run" in status.get_attribute("textContent")


def test_a_button_pressed_ten_times_runs_one_task_and_shows_nine_duplicates(shop, visit):
    page = visit(shop)

    press_ten_times(page)

    for name, size in (("desktop", DESKTOP), ("phone", PHONE)):
        for scheme in ("light", "dark"):
            page.look(size, scheme)
            script = "document.querySelector(arguments[0]).scrollIntoView({block: 'center'})"
            if size == PHONE:
                page.browser.execute_script(script, ".counts")
            keep_screenshot(page.browser, f"shop-{name}-{scheme}")


@pytest.mark.server
def test_with_redis_by_one_setting_it_is_the_same(redis_shop, visit):
    page = visit(redis_shop)

    press_ten_times(page)

    assert "Redis" in page.find(".where").text
    flower = page.find("nav a[href*=':']").get_attribute("href")
    page.browser.get(flower)
    eventually(lambda: "Flower" in page.browser.title, timeout=60)


def test_ten_presses_of_every_other_button(shop, visit):
    eventually(lambda: shop.events("run", "nightly_report"), timeout=60)
    page = visit(shop)

    for task in ("sync_stock", "reindex_product", "nightly_report", "count_views"):
        page.find(f"{CARD % task} button[value='10']").click()
    page.find(f"{CARD % 'choose_offer'} button[value='2']").click()
    page.find(f"{CARD % 'print_label'} button[value='5']").click()

    # One run, ten saves; a machine that stalls for seconds between two saves has two.
    runs = f"{CARD % 'reindex_product'} ul.runs code"
    eventually(lambda: any("(10)" in text for text in page.texts(runs)), timeout=60)
    saves = page.counts("reindex_product")
    assert saves["calls"] == saves["replaced"] + saves["runs"] == 10
    assert saves["runs"] <= 2
    # Beat was earlier, in this minute or in the one before: the run that answers for these
    # duplicates is shown with them.
    reports = eventually(
        lambda: (
            (seen := page.counts("nightly_report"))["calls"] >= 10 and seen["runs"] >= 1 and seen
        ),
        timeout=60,
    )
    assert reports["calls"] - reports["duplicates"] <= reports["runs"] <= 2
    bodies = f"{CARD % 'choose_offer'} ul.runs li"
    eventually(
        lambda: sum("of 3 offers" in text for text in page.texts(bodies)) == 2,
        timeout=60,
        message=f"{page.texts(bodies)}",
    )
    # Two chords of three offers; the choices that follow are shown, and not counted.
    offers = page.counts("choose_offer")
    assert offers["calls"] == 6
    assert offers["runs"] == 6 - offers["duplicates"]
    # One that runs and one that follows; or one, if all ten came before it began.
    synced = eventually(
        lambda: (
            (seen := page.counts("sync_stock"))["calls"] == 10
            and seen["runs"] == 10 - seen["spared"]
            and not page.all(f"{CARD % 'sync_stock'} li.running")
            and seen
        ),
        timeout=60,
    )
    assert 1 <= synced["runs"] <= 2
    # One run with the products of all views; two, if the machine stalls for seconds between them.
    views = f"{CARD % 'count_views'} ul.runs li"
    eventually(
        lambda: (
            (seen := page.counts("count_views"))["calls"] == seen["merged"] + seen["runs"] == 10
            and not page.all(f"{CARD % 'count_views'} li.running")
        ),
        timeout=60,
        message=f"{page.texts(views)}",
    )
    eventually(lambda: sum(map(views_in, page.texts(views))) == 10, timeout=60)
    # Every label is printed, one after the other.
    eventually(
        lambda: (
            (seen := page.counts("print_label"))["calls"] == seen["runs"] == 5
            and seen["queued"] >= 1
            and not page.all(f"{CARD % 'print_label'} li.running")
        ),
        timeout=60,
        message=f"{page.texts(CARD % 'print_label')}",
    )


def views_in(text: str) -> int:
    """ "done in 0.0 s: 10 views of 1 products ..." -> 10"""
    return int(text.partition(" views of ")[0].rpartition(" ")[2])


def test_beat_calls_the_report_and_its_duplicates_are_shown(shop, visit):
    page = visit(shop)

    chips = f"{CARD % 'nightly_report'} .calls li"
    eventually(lambda: any("beat" in text for text in page.texts(chips)), timeout=90)


# -- The page itself -------------------------------------------------------------------------------


def test_html_in_an_argument_is_shown_as_text(shop, visit):
    page = visit(shop)
    evil = "<img src=x onerror=document.title='owned'><b>bold</b>"
    field = page.find("#description")
    field.clear()
    field.send_keys(evil)

    page.find(f"{CARD % 'reindex_product'} button[value='1']").click()

    code = f"{CARD % 'reindex_product'} ul.runs code"
    eventually(lambda: any("<b>bold</b>" in text for text in page.texts(code)), timeout=60)
    eventually(lambda: any("<b>bold" in text for text in page.texts("#shelf td")), timeout=60)
    page.browser.refresh()
    assert page.find("#description").get_attribute("value") == evil
    assert page.all("main b, main .cards img") == []
    assert "owned" not in page.browser.title


def test_no_request_goes_to_another_host(shop, visit):
    page = visit(shop)
    script = "return performance.getEntriesByType('resource').map((entry) => entry.name)"

    asked = eventually(
        lambda: (
            (urls := page.browser.execute_script(script))
            and any("/activity/" in url for url in urls)
            and any("shop.css" in url for url in urls)
            and urls
        ),
        timeout=60,
    )

    assert [url for url in asked if not url.startswith(shop.url)] == []


def test_everything_is_reached_and_pressed_without_a_mouse(shop, visit):
    page = visit(shop)
    page.browser.execute_script("document.activeElement.blur(); window.scrollTo(0, 0)")
    controls = page.all("a, button, input, select, summary")
    # What is focused, its accessible name, and whether one can see that it is focused.
    script = """
        const e = document.activeElement, s = getComputedStyle(e);
        return [e, (e.labels?.[0] ?? e).textContent.trim(), s.outlineStyle !== 'none'];
    """
    reached = []
    for _ in range(len(controls) + 10):
        ActionChains(page.browser).send_keys(Keys.TAB).perform()
        element, name, visible = page.browser.execute_script(script)
        reached.append(element)
        assert name, element.get_attribute("outerHTML")
        assert visible or element.tag_name == "body", element.get_attribute("outerHTML")

    assert {control.id for control in controls} <= {element.id for element in reached}

    order = page.find("#order")
    while page.browser.switch_to.active_element != order:
        ActionChains(page.browser).send_keys(Keys.TAB).perform()
    ActionChains(page.browser).send_keys(Keys.ENTER, Keys.SPACE).perform()

    page.wait_for_counts("confirm_order", calls=2, duplicates=1, runs=1)


@pytest.mark.parametrize("width", [360, 768, 1280])
def test_nothing_is_wider_than_the_screen(shop, visit, width):
    page = visit(shop)
    page.look((width, 800))
    for summary in page.all("summary"):
        page.browser.execute_script("arguments[0].parentElement.open = true", summary)

    measured = page.browser.execute_script(
        "return [document.documentElement.scrollWidth, document.documentElement.clientWidth]"
    )

    assert measured[0] <= measured[1]


def test_a_link_leads_to_the_locks_on_the_admin_page(shop, visit):
    shop.order("locked")
    page = visit(shop)

    page.find("nav a").click()
    page.find("#id_username").send_keys("shop")
    page.find("#id_password").send_keys("shop", Keys.ENTER)

    eventually(
        lambda: "shop.tasks.confirm_order" in page.find("body").text,
        ignoring=StaleElementReferenceException,  # the page before it, while this one loads
        timeout=60,
    )
    keep_screenshot(page.browser, "shop-admin-locks")
    refused = [
        entry for entry in page.browser.get_log("browser") if "Content Security" in entry["message"]
    ]
    assert refused == []


# -- Its HTTP answers, for programs ----------------------------------------------------------------


def test_every_answer_to_an_order(shop):
    for last in range(4):  # on a busy machine the work may be done before it is asked about
        key = f'"8e03978e-40d5-43e8-bc93-6894a57f932{last}"'
        new = shop.order(key)
        at_work = shop.order(key)
        if at_work.status != 200:
            break
    assert (new.status, at_work.status) == (202, 409)
    assert at_work.body["task"] == new.body["task"]
    assert at_work.headers["Retry-After"] == "1"

    done = eventually(lambda: (answer := shop.order(key)).status == 200 and answer, timeout=60)
    assert done.body["task"] == new.body["task"]
    assert done.body["order"] > 0
    assert shop.ask(new.headers["Location"].lstrip("/")).body == done.body
    assert shop.order(key).body == done.body

    assert shop.order(key, quantity=2).status == 422
    assert shop.order(None).status == 400
    assert shop.order("k" * 256).status == 400
    assert shop.order('"open').status == 400
    assert (
        len(
            [
                run
                for run in shop.events("run", "confirm_order")
                if done.body["task"] == run["task_id"]
            ]
        )
        == 1
    )


# Last: it ends the shop that the others share.
def test_a_child_that_dies_ends_the_shop_and_shows_its_log(shop):
    commands = [psutil.Process(pid) for pid in shop.process.children()]
    [beat] = [child for child in commands if "beat" in child.cmdline()]

    beat.kill()

    eventually(lambda: not shop.process.is_running(), timeout=60)
    assert shop.process.exit_code == 1
    assert "beat ended with code -9" in shop.process.log()
