"""The admin's pages of locks, as the site answers."""

from __future__ import annotations

import re
from typing import Any

import pytest

from celery_unique.operations.search import WALK_SECONDS
from tests.django.inside import inside_django
from tests.django.people import (
    LIST,
    RELEASE,
    another_store,
    client_of,
    empty_store,
    hold,
    hold_ended,
    result_of,
    staff,
    store,
    text_of,
)

SEE = "view_lock"
FREE = "release_lock"
STOP = "revoke_lock"
REVOKE = f"{LIST}revoke/"

HTML = "<script>alert('x')</script><b>&amp;"
ESCAPED = "&lt;script&gt;alert(&#x27;x&#x27;)&lt;/script&gt;&lt;b&gt;&amp;amp;"


def rows_of(page: str) -> list[str]:
    """The ids of the holders, in the order of the rows."""
    return re.findall(r'<(?:a|span) class="field-holder[^>]*>([^<]*)', page)


@inside_django
def test_the_list_tells_of_every_lock():
    empty_store()
    hold("shop.rebuild", "first", active="celery@box", duplicates=3, window_ms=3_600_000)
    client = client_of(staff(SEE))

    page = text_of(client.get(LIST))

    row = page[page.index("<tbody>") : page.index("</tbody>")]
    cells = re.findall(r'class="field-(\w+)[^>]*>([^<]*)<', row)
    shown = dict(cells)
    assert re.fullmatch(r"\ds", shown.pop("age"))
    assert re.fullmatch(r"59m|1h", shown.pop("lease"))
    assert re.fullmatch(r"window (59m|1h)", shown.pop("window"))
    assert shown == {
        "task": "shop.rebuild",
        "state": "active",
        "holder": "first",
        "duplicates": "3",
        "worker": "celery@box",
    }
    assert re.search(r"\b1 lock\b", page)


@inside_django
def test_a_task_that_has_ended_and_keeps_its_key_is_shown_as_such():
    key = hold_ended()
    client = client_of(staff(SEE))

    unasked = text_of(client.get(LIST))
    listed = text_of(client.get(LIST, {"state": "ended"}))
    alone = text_of(client.get(f"{LIST}{key}/change/"))

    assert rows_of(unasked) == []
    assert 'href="?state=ended">1 finished task keeps its key<' in unasked
    assert rows_of(text_of(client.get(LIST, {"q": key}))) == ["ended"]
    assert rows_of(text_of(client.get(LIST, {"state": "all"}))) == ["ended"]
    assert rows_of(listed) == ["ended"]
    assert "live" not in listed.lower()  # the task is not
    assert "Kept for" in alone
    assert "calls are duplicates until then" in alone
    assert "When it ends" not in alone
    assert "Renewed" not in alone


@inside_django
def test_the_list_is_on_the_admins_first_page_for_those_who_may_see_it():
    assert LIST in text_of(client_of(staff(SEE)).get("/admin/"))
    assert LIST not in text_of(client_of(staff()).get("/admin/"))


@inside_django
def test_search_finds_names_ids_workers_keys_and_idempotency_keys():
    from tests.django.shop.tasks import plain

    empty_store()
    key = hold("shop.rebuild", "a-first-id", active="celery@north")
    hold("shop.digest", "b-second-id")
    bought = plain.apply_async((1,), idempotency_key="order <7>")
    client = client_of(staff(SEE))

    def found(text: str) -> list[str]:
        return rows_of(text_of(client.get(LIST, {"q": text})))

    assert found("REBUILD") == ["a-first-id"]
    assert found("second") == ["b-second-id"]
    assert found("north") == ["a-first-id"]
    assert found(key) == found(key[:20]) == ["a-first-id"]
    assert found("order <7>") == [bought.id]
    assert found("order") == []
    assert found("nothing like it") == []


@inside_django
def test_filters_narrow_by_task_state_and_age_and_count_what_there_is():
    empty_store()
    hold("shop.rebuild", "runs", active="celery@box")
    hold("shop.rebuild", "waits")
    hold("shop.digest", "digests")
    client = client_of(staff(SEE))

    def found(**query: str) -> list[str]:
        return rows_of(text_of(client.get(LIST, query)))

    page = text_of(client.get(LIST))
    assert "shop.rebuild (2)" in page
    assert "available (2)" in page
    assert found(task="shop.rebuild") == ["runs", "waits"]
    assert found(task="shop.rebuild", state="active") == ["runs"]
    assert found(state="no such state") == ["runs", "waits", "digests"]
    assert found(age="1m") == []

    store().clock_offset_ms = 2 * 60_000
    try:
        assert found(age="1m") == ["runs", "waits", "digests"]
        assert found(age="1h") == []
    finally:
        store().clock_offset_ms = 0


@inside_django
def test_columns_sort_both_ways():
    empty_store()
    hold("b", "one", duplicates=1)
    hold("a", "two", duplicates=5)
    hold("c", "three")
    client = client_of(staff(SEE))

    def found(order: str) -> list[str]:
        return rows_of(text_of(client.get(LIST, {"o": order})))

    assert found("") == found("created") == ["one", "two", "three"]
    assert found("-created") == ["three", "two", "one"]
    assert found("task") == ["two", "one", "three"]
    assert found("-duplicates") == ["two", "one", "three"]
    assert found("no such column") == ["one", "two", "three"]


@inside_django
def test_pages_hold_a_hundred_and_the_last_one_answers_for_those_beyond():
    from celery_unique.testing.store_contract.factories import claim, fresh_key

    empty_store()
    store().acquire_many([(fresh_key(), claim(f"id{n:03}", grace_ms=600_000)) for n in range(250)])
    client = client_of(staff(SEE))

    pages = [rows_of(text_of(client.get(LIST, {"p": str(n)}))) for n in (1, 2, 3, 4)]

    assert [len(page) for page in pages] == [100, 100, 50, 50]
    assert pages[2] == pages[3]
    assert len({task_id for page in pages for task_id in page}) == 250


@inside_django
@pytest.mark.parametrize(
    ("current", "last", "shown"),
    [
        (1, 1, []),
        (2, 5, [1, 2, 3, 4, 5]),
        (10, 20, [1, 2, None, 8, 9, 10, 11, 12, None, 19, 20]),
        (20, 20, [1, 2, None, 18, 19, 20]),
    ],
)
def test_far_pages_are_left_out(current: int, last: int, shown: list[int | None]) -> None:
    from django.http import QueryDict

    from celery_unique.contrib.django.admin_page import page_links
    from celery_unique.operations.search import PER_PAGE, Found

    links = page_links(QueryDict("task=a&p=7"), Found(matched=last * PER_PAGE, page=current))

    assert [link and int(link.text) for link in links] == shown
    assert [link.text for link in links if link and link.selected] == [str(current)] * bool(shown)
    for link in filter(None, links):
        assert link.url == "?task=a" + (f"&p={link.text}" if link.text != "1" else "")


@inside_django
def test_a_walk_that_runs_out_of_time_says_so_and_a_whole_key_is_found_all_the_same():
    from celery_unique.config.app_state import state_of
    from celery_unique.contrib.django.celery_app import project_app
    from celery_unique.operations import search as listing

    empty_store()
    keys = [hold("shop.rebuild", f"id{n}") for n in range(5)]
    runtime = state_of(project_app())

    cut = listing.find_page(runtime, listing.Wanted(), seconds=-1)
    whole = listing.find_page(runtime, listing.Wanted(), seconds=60)
    one = listing.find_page(runtime, listing.Wanted(text=keys[3]))

    assert (cut.complete, cut.seen) == (False, 1)
    assert (whole.complete, whole.seen, whole.matched) == (True, 5, 5)
    assert [lock.task_id for lock in one.locks] == ["id3"]


@inside_django
def test_the_page_of_one_lock_tells_all_of_it():
    empty_store()
    key = hold("shop.rebuild", "first", active="celery@box", duplicates=2, window_ms=3_600_000)
    client = client_of(staff(SEE))

    page = text_of(client.get(f"{LIST}{key}/change/"))

    for part in (
        "shop.rebuild",
        "active",
        "first",
        "celery@box",
        "Window ends in",
        "Last duplicate",
        key,
    ):
        assert part in page
    assert 'value="Release"' not in page


@inside_django
def test_calls_that_are_parked_under_a_key_are_counted():
    from tests.django.people import claim

    empty_store()
    key = hold("shop.rebuild", "first")
    for task_id in ("second", "third"):
        store().acquire(key, claim(task_id, on_conflict="queue", join=f"message of {task_id}"))
    client = client_of(staff(SEE))

    assert "(2 parked)" in text_of(client.get(LIST))
    page = text_of(client.get(f"{LIST}{key}/change/"))
    assert "Calls that wait for their turn under this key." in page


@inside_django
def test_a_parked_call_is_found_by_its_id_with_its_position():
    from tests.django.people import claim

    empty_store()
    key = hold("shop.rebuild", "first")
    hold("shop.other", "another")
    for task_id in ("second", "third"):
        store().acquire(key, claim(task_id, on_conflict="queue", join=f"message of {task_id}"))
    client = client_of(staff(SEE))

    found = text_of(client.get(LIST, {"q": "third"}))
    assert "(2 parked, the call at position 2)" in found
    assert "another" not in found
    page = text_of(client.get(f"{LIST}{key}/change/"))
    assert page.index("Parked calls (2), by position") < page.index("second") < page.index("third")


@inside_django
def test_parked_calls_are_shown_although_no_task_holds_their_key():
    from tests.django.people import claim

    empty_store()
    key = hold("shop.rebuild", "first")
    store().acquire(key, claim("second", on_conflict="queue", join="message of second"))
    store().release(key)
    client = client_of(staff(SEE, FREE, STOP))

    listed = text_of(client.get(LIST))
    assert "(1 parked)" in listed
    assert 'class="action-select"' not in listed
    page = text_of(client.get(f"{LIST}{key}/change/"))
    assert "No task holds this key" in page
    assert "second" in page
    assert 'value="Release"' not in page


@inside_django
@pytest.mark.parametrize("zone", ["UTC", "Pacific/Kiritimati"])
def test_an_eta_at_the_end_of_all_dates_is_shown(zone):
    import time
    from datetime import UTC, datetime

    from django.utils import timezone

    empty_store()
    last = datetime(9999, 12, 31, 23, 59, tzinfo=UTC).timestamp()
    key = hold("shop.rebuild", "first", delay_ms=int((last - time.time()) * 1000))
    client = client_of(staff(SEE))

    with timezone.override(zone):
        for address in (LIST, f"{LIST}{key}/change/"):
            assert "first" in text_of(client.get(address))


@inside_django
def test_a_lock_that_is_gone_leads_back_to_the_list():
    empty_store()
    client = client_of(staff(SEE))

    for key in (f"1:{'0' * 64}", "nonsense", "1:<script>"):
        response = client.get(f"{LIST}{key}/change/", follow=True)

        assert response.redirect_chain == [(LIST, 302)]
        assert "its key is free" in text_of(response)


@inside_django
def test_holders_are_linked_to_their_stored_results():
    empty_store()
    key = hold("shop.rebuild", "linked")
    hold("shop.rebuild", "without a result")
    pk = result_of("linked", task_args='"(7,)"', task_kwargs="\"{'note': 'x'}\"")
    seer, other = staff(SEE), staff(SEE)
    from django.contrib.auth.models import Permission

    seer.user_permissions.add(Permission.objects.get(codename="view_taskresult"))
    url = f"/admin/django_celery_results/taskresult/{pk}/change/"

    page = text_of(client_of(seer).get(LIST))
    lock = text_of(client_of(seer).get(f"{LIST}{key}/change/"))

    assert f'href="{url}">linked</a>' in page
    assert '<span class="field-holder detail">without a result</span>' in page
    assert f'<a href="{url}">linked</a>' in lock
    assert "(7,), {&#x27;note&#x27;: &#x27;x&#x27;}" in lock
    assert url not in text_of(client_of(other).get(LIST)), "who may not see results gets no link"
    assert "(7,)" not in text_of(client_of(other).get(f"{LIST}{key}/change/"))


@inside_django
def test_releasing_asks_first_and_then_frees_the_key():
    from django.contrib.admin.models import LogEntry

    from celery_unique.reporting import unique_released

    empty_store()
    key = hold("shop.rebuild", "first")
    other = hold("shop.rebuild", "second")
    user = staff(SEE, FREE)
    client = client_of(user)
    received = []

    def hear(sender: str, task_id: str, **_: object) -> None:
        received.append((sender, task_id))

    unique_released.connect(hear)
    asked = client.post(RELEASE, {"lock": [f"{key} first"]})
    assert "Are you sure?" in text_of(asked)
    assert "will not be stopped" in text_of(asked)
    assert not store().read(key)[0].tasks["first"].released

    done = client.post(RELEASE, {"lock": [f"{key} first"], "confirm": "yes"}, follow=True)

    assert "Released 1 lock." in text_of(done)
    assert rows_of(text_of(done)) == ["second"]
    assert store().read(key)[0].tasks["first"].released
    assert not store().read(other)[0].tasks["second"].released
    assert received == [("shop.rebuild", "first")]
    entry = LogEntry.objects.filter(user=user).get()
    assert (entry.object_repr, entry.change_message) == ("shop.rebuild [first]", "Released.")


@inside_django
def test_a_lock_that_changed_hands_meanwhile_is_not_released():
    empty_store()
    key = hold("shop.rebuild", "new holder")
    client = client_of(staff(SEE, FREE))

    done = client.post(
        RELEASE, {"lock": [f"{key} old holder", "nonsense"], "confirm": "yes"}, follow=True
    )

    assert "2 locks had ended or changed hands" in text_of(done)
    assert not store().read(key)[0].tasks["new holder"].released


@inside_django
def test_only_a_post_with_permission_and_token_releases():
    empty_store()
    key = hold("shop.rebuild", "first")
    form = {"lock": [f"{key} first"], "confirm": "yes"}
    allowed = staff(SEE, FREE)

    from django.test import Client

    refusals = {
        "a GET": client_of(allowed).get(RELEASE, form).status_code,
        "no token": client_of(allowed, forged=True).post(RELEASE, form).status_code,
        "a wrong token": client_of(allowed, forged=True)
        .post(RELEASE, {**form, "csrfmiddlewaretoken": "x" * 64})
        .status_code,
        "may only see": client_of(staff(SEE)).post(RELEASE, form).status_code,
        "may release and not see": client_of(staff(FREE)).post(RELEASE, form).status_code,
        "may do neither": client_of(staff()).post(RELEASE, form).status_code,
        "not logged in": Client().post(RELEASE, form).status_code,
    }

    assert refusals == {
        "a GET": 405,
        "no token": 403,
        "a wrong token": 403,
        "may only see": 403,
        "may release and not see": 403,
        "may do neither": 403,
        "not logged in": 302,  # to the login page
    }
    assert not store().read(key)[0].tasks["first"].released


@inside_django
def test_revoking_asks_first_and_then_keeps_a_waiting_task_from_running():
    from django.contrib.admin.models import LogEntry

    empty_store()
    waits = hold("shop.rebuild", "waits")
    runs = hold("shop.rebuild", "runs", active="celery@box")
    form = {"lock": [f"{waits} waits", f"{runs} runs", f"{waits} another"]}
    user = staff(SEE, STOP)
    client = client_of(user)

    page = text_of(client.get(LIST))
    asked = text_of(client.post(REVOKE, form))
    assert "Revoke the selected tasks" in page
    assert "Release the selected" not in page
    assert "is not stopped" in asked
    assert store().read(waits)[0].tasks["waits"].state == "w"

    done = text_of(client.post(REVOKE, {**form, "confirm": "yes"}, follow=True))

    assert "Revoked 1 task that waited. The keys are free." in done
    assert "1 task had started, and a revoke stops none." in done
    assert "1 lock had ended or changed hands." in done
    assert rows_of(done) == ["runs"]
    assert store().read(waits)[0].tasks == {}
    assert store().mark(waits, "waits").kind == "revoked"
    assert not store().read(runs)[0].tasks["runs"].released
    entry = LogEntry.objects.filter(user=user).get()
    assert (entry.object_repr, entry.change_message) == ("shop.rebuild [waits]", "Revoked.")


@inside_django
def test_only_a_post_with_permission_and_token_revokes():
    empty_store()
    key = hold("shop.rebuild", "first")
    form = {"lock": [f"{key} first"], "confirm": "yes"}
    allowed = staff(SEE, STOP)

    refusals = {
        "a GET": client_of(allowed).get(REVOKE, form).status_code,
        "no token": client_of(allowed, forged=True).post(REVOKE, form).status_code,
        "may only release": client_of(staff(SEE, FREE)).post(REVOKE, form).status_code,
        "may revoke and not see": client_of(staff(STOP)).post(REVOKE, form).status_code,
        "may not release": client_of(allowed).post(RELEASE, form).status_code,
    }

    assert set(refusals.values()) == {403, 405}
    assert refusals["a GET"] == 405
    assert "first" in store().read(key)[0].tasks


@inside_django
def test_without_its_broker_nothing_is_revoked_and_the_page_says_so():
    from tests.django.shop.celery import app

    empty_store()
    key = hold("shop.rebuild", "first")
    app.conf.broker_write_url = "redis://127.0.0.1:1/0"
    try:
        reply = client_of(staff(SEE, STOP)).post(
            REVOKE, {"lock": [f"{key} first"], "confirm": "yes"}
        )
    finally:
        del app.conf.changes["broker_write_url"]

    assert reply.status_code == 503
    assert "The broker is unavailable" in text_of(reply)
    assert "first" in store().read(key)[0].tasks


@inside_django
def test_who_may_not_see_locks_sees_none():
    empty_store()
    key = hold("shop.rebuild", "first")

    for address in (LIST, f"{LIST}{key}/change/"):
        assert client_of(staff()).get(address).status_code == 403
    for address in (LIST, f"{LIST}{key}/change/"):
        page = text_of(client_of(staff(SEE)).get(address))
        assert 'name="lock"' not in page, "no form to release with"


@inside_django
def test_whatever_stands_in_a_lock_is_shown_as_text():
    empty_store()
    from django.contrib.auth.models import User

    key = hold(HTML, f"id {HTML}", active=f"celery@{HTML.replace('/', '')}")
    result_of(f"id {HTML}", task_args=f"\"('{HTML}',)\"", task_kwargs='"{}"')
    user = User.objects.create_superuser("everything")
    client = client_of(user)

    pages = [
        text_of(client.get(LIST)),
        text_of(client.get(LIST, {"q": HTML, "task": HTML})),
        text_of(client.get(f"{LIST}{key}/change/")),
        text_of(client.post(RELEASE, {"lock": [f"{key} id {HTML}"]})),
        text_of(
            client.post(RELEASE, {"lock": [f"{key} id {HTML}"], "confirm": "yes"}, follow=True)
        ),
        text_of(client.get("/admin/")),  # the log of what was done
    ]

    for page in pages:
        assert "alert('x')" not in page
        assert "<b>&" not in page
    for page in pages[:4]:
        assert ESCAPED in page
    assert f"(&#x27;{ESCAPED}&#x27;,)" in pages[2]


@inside_django
def test_a_store_that_cannot_be_asked_is_a_page_that_says_so():
    client = client_of(staff(SEE, FREE))
    with another_store("redis://:hunter2@127.0.0.1:1/0"):
        answers = [
            client.get(LIST),
            client.get(f"{LIST}1:{'0' * 64}/change/"),
            client.post(RELEASE, {"lock": [f"1:{'0' * 64} x"], "confirm": "yes"}),
        ]

    for answer in answers:
        assert answer.status_code == 503
        assert "cannot be reached" in text_of(answer)
        assert "hunter2" not in text_of(answer)


def page_through_many_locks() -> dict[str, Any]:
    """Called inside: what two pages of a hundred thousand locks showed, and took."""
    import resource
    import time

    from celery_unique.testing.store_contract.factories import claim, fresh_key

    empty_store()
    for first in range(0, 100_000, 1000):
        ids = range(first, first + 1000)
        store().acquire_many([(fresh_key(), claim(f"id{n:06}", grace_ms=600_000)) for n in ids])
    client = client_of(staff(SEE, FREE))
    peak_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began = time.monotonic()
    searched = text_of(client.get(LIST, {"q": "id0999"}))
    seconds = time.monotonic() - began
    deep = text_of(client.get(LIST, {"p": "100"}))
    grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak_kib
    empty_store()
    return {"searched": searched, "deep": deep, "seconds": seconds, "grown_mib": grown_kib / 1024}


@pytest.mark.slow
def test_a_hundred_thousand_locks_are_listed_in_bounded_time_and_memory(django_process, report):
    saw = django_process.call(__name__, "page_through_many_locks")

    report(
        f"admin list of 100,000 locks: a page in {saw['seconds']:.1f} s, "
        f"{saw['grown_mib']:.0f} MiB more memory at the most"
    )
    # A machine too slow for that many says so on the page.
    assert "100 of 100000" in saw["searched"] or "stopped at its time limit" in saw["searched"]
    assert len(rows_of(saw["deep"])) == 100 or "stopped at its time limit" in saw["deep"]
    assert saw["seconds"] < 2 * WALK_SECONDS
    assert saw["grown_mib"] < 100
