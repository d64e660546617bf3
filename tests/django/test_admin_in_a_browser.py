"""The admin's pages of locks in Chromium, with the keyboard alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import quote

import pytest
from selenium.common.exceptions import WebDriverException
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from tests.django.people import LIST, RELEASE
from tests.django.site import DjangoSite
from tests.support import eventually
from tests.support.browser import keep_screenshot

PEOPLE = "tests.django.people"
HTML = '<img src=x onerror="window.hacked = 1"><script>window.hacked = 1</script>'


@pytest.fixture
def visit(browser: Any, site: DjangoSite) -> Callable[[str, str], Any]:
    """``visit(session, path)``: the page as the user of that session sees it."""

    def open_page(session: str, path: str) -> Any:
        browser.set_script_timeout(60)
        browser.get(f"{site.url}/admin/login/")
        browser.delete_all_cookies()
        browser.add_cookie({"name": "sessionid", "value": session})
        browser.get(f"{site.url}{path}")
        loaded(browser, path.partition("?")[0])
        return browser

    return open_page


def loaded(browser: Any, path: str) -> None:
    """Wait for the page: a busy machine's driver may still show the one before."""
    script = "return document.readyState == 'complete' && decodeURI(location.pathname)"
    eventually(
        lambda: browser.execute_script(script) == path,
        timeout=60,
        ignoring=WebDriverException,
        message=f"{path} is not shown",
    )


@contextmanager
def of_size(browser: Any, width: int, height: int) -> Iterator[None]:
    """Others use the same window, and rely on its size."""
    before = browser.get_window_size()
    browser.set_window_size(width, height)
    yield
    browser.set_window_size(before["width"], before["height"])


def text(browser: Any, selector: str) -> str:
    return str(browser.find_element(By.CSS_SELECTOR, selector).text)


def press_on(browser: Any, selector: str, key: str) -> None:
    """A key on an element that TAB reaches from where "Skip to main content" leads."""
    element = browser.find_element(By.CSS_SELECTOR, selector)
    browser.execute_script("document.getElementById('content-start').focus()")
    for _ in range(30):
        if browser.switch_to.active_element == element:
            break
        browser.switch_to.active_element.send_keys(Keys.TAB)
    assert browser.switch_to.active_element == element, f"{selector} is out of the keyboard's reach"
    element.send_keys(key)


def post(browser: Any, body: str, *, token: bool) -> int:
    """The answer's status to a form that a script of the page sends."""
    script = """
        const [address, body, token, done] = arguments;
        const own = document.querySelector('[name=csrfmiddlewaretoken]').value;
        fetch(address, {
            method: 'POST', redirect: 'manual',
            headers: {'Content-Type': 'application/x-www-form-urlencoded'},
            body: token ? body + '&csrfmiddlewaretoken=' + own : body,
        }).then(answer => done(answer.status));
    """
    return int(browser.execute_async_script(script, RELEASE, body, token))


@pytest.mark.slow
def test_a_lock_is_listed_looked_at_and_released_without_a_mouse(visit, django_process):
    keys = django_process.call(PEOPLE, "hold_what_a_shop_has")
    session = django_process.call(PEOPLE, "superuser_session")
    task_id, key = next(iter(keys.items()))

    browser = visit(session, LIST)
    rows = browser.find_elements(By.CSS_SELECTOR, "#result_list tbody tr")
    assert len(rows) == 5, text(browser, "body")
    assert all(part in rows[0].text for part in ("shop.tasks.rebuild_index", "active", task_id))
    with of_size(browser, 1280, 720):
        keep_screenshot(browser, "django-admin-locks")

    press_on(browser, "#result_list tbody tr th a", Keys.ENTER)
    loaded(browser, f"{LIST}{key}/change/")
    assert "celery@web1" in text(browser, "#content")
    keep_screenshot(browser, "django-admin-lock")

    browser.get(browser.current_url.partition(key)[0])
    loaded(browser, LIST)
    press_on(browser, "#result_list tbody tr input.action-select", Keys.SPACE)
    assert "1 of 5 selected" in text(browser, ".action-counter")
    press_on(browser, ".actions button", Keys.ENTER)
    loaded(browser, RELEASE)
    assert "will not be stopped" in text(browser, "#content")
    with of_size(browser, 1280, 520):
        keep_screenshot(browser, "django-admin-release")
    assert not django_process.call(PEOPLE, "is_released", key=key, task_id=task_id)

    press_on(browser, "#content input[type=submit]", Keys.ENTER)
    loaded(browser, LIST)
    assert text(browser, ".messagelist") == "Released 1 lock."
    assert len(browser.find_elements(By.CSS_SELECTOR, "#result_list tbody tr")) == 4
    assert django_process.call(PEOPLE, "is_released", key=key, task_id=task_id)


@pytest.mark.slow
def test_every_column_is_seen_at_1280_pixels(visit, django_process):
    django_process.call(PEOPLE, "hold_long_names")
    session = django_process.call(PEOPLE, "superuser_session")
    # The cells that reach beyond what shows the table.
    script = """
        const results = document.querySelector('.results');
        const edge = results.getBoundingClientRect().right;
        return [...results.querySelectorAll('th, td')]
            .filter((cell) => cell.getBoundingClientRect().right > edge + 1)
            .map((cell) => cell.textContent.trim());
    """

    browser = visit(session, LIST)
    with of_size(browser, 1280, 720):
        assert browser.find_elements(By.CSS_SELECTOR, "#nav-sidebar"), "it takes its place"
        cut_off = browser.execute_script(script)
        keep_screenshot(browser, "django-admin-long-names")

    assert cut_off == []


@pytest.mark.slow
def test_a_user_without_the_permission_is_refused(visit, django_process):
    keys = django_process.call(PEOPLE, "hold_what_a_shop_has")
    task_id, key = next(iter(keys.items()))
    may_see = django_process.call(PEOPLE, "session_of", permissions=["view_lock"])
    may_not = django_process.call(PEOPLE, "session_of", permissions=[])

    browser = visit(may_see, LIST)
    assert len(browser.find_elements(By.CSS_SELECTOR, "#result_list tbody tr")) == 5
    assert browser.find_elements(By.CSS_SELECTOR, ".actions, .action-select") == []
    form = f"confirm=yes&lock={quote(f'{key} {task_id}')}"
    assert post(browser, form, token=True) == 403

    browser = visit(may_not, LIST)
    assert "403 Forbidden" in text(browser, "body")
    assert not django_process.call(PEOPLE, "is_released", key=key, task_id=task_id)


@pytest.mark.slow
def test_a_forged_request_is_refused(visit, django_process, site):
    keys = django_process.call(PEOPLE, "hold_what_a_shop_has")
    task_id, key = next(iter(keys.items()))
    session = django_process.call(PEOPLE, "superuser_session")
    form = f"confirm=yes&lock={quote(f'{key} {task_id}')}"

    browser = visit(session, LIST)
    assert post(browser, form, token=False) == 403

    # A page of another site that sends the form as soon as it is opened.
    page = (
        f'<form method="post" action="{site.url}{RELEASE}"><input name="confirm" value="yes">'
        f'<input name="lock" value="{key} {task_id}"></form>'
        "<script>document.forms[0].submit()</script>"
    )
    browser.get(f"data:text/html,{quote(page)}")
    loaded(browser, RELEASE)
    assert "CSRF verification failed" in text(browser, "body")
    assert not django_process.call(PEOPLE, "is_released", key=key, task_id=task_id)

    # The same form with the page's own token is accepted: it was the token that was missing.
    browser = visit(session, LIST)
    assert post(browser, form, token=True) == 0  # a redirect, which fetch does not show
    assert django_process.call(PEOPLE, "is_released", key=key, task_id=task_id)


@pytest.mark.slow
def test_html_in_names_ids_and_arguments_is_text(visit, django_process):
    key = django_process.call(PEOPLE, "hold_html", text=HTML)
    session = django_process.call(PEOPLE, "superuser_session")

    for path in (LIST, f"{LIST}?q={quote(HTML)}&task={quote(HTML)}", f"{LIST}{key}/change/"):
        browser = visit(session, path)

        assert HTML in text(browser, "#content")
        assert browser.execute_script("return window.hacked") is None
        assert browser.find_elements(By.CSS_SELECTOR, "#content img[src=x]") == []
    assert f"('{HTML}',)" in text(browser, "#content")
    keep_screenshot(browser, "django-admin-html-is-text")
