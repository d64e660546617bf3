"""The admin's list of locks: its query, its links and its rows."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from django.core.paginator import Paginator

from celery_unique.operations.search import AGES, ANY, ENDED, Found, Wanted
from celery_unique.operations.select import brief
from celery_unique.policy.states import TERMINAL
from celery_unique.publish.stale_holders.lock_view import LockView
from celery_unique.stores.record import State

from .admin_results import ResultLink

#: More tasks than these are found by a search.
MOST_TASKS = 50


class Link(NamedTuple):
    """A choice: its name, its address, and whether it is the current one."""

    text: str
    url: str
    selected: bool


class Header(NamedTuple):
    """A column: its title and, where it can sort the list, the link that does so."""

    text: str
    url: str = ""
    direction: str = ""  # of the current order: ascending, descending or none


class Row(NamedTuple):
    """A lock, and its times as the page shows them."""

    lock: dict[str, Any]
    url: str
    result: ResultLink | None
    age: str
    lease: str
    window: str  # empty without a window
    ended: bool = False  # its policy still keeps the key taken


class Filter(NamedTuple):
    title: str
    links: list[Link]


def row_of(lock: LockView, url: str, result: ResultLink | None, units: int = 1) -> Row:
    entry, now = lock.entry, lock.now
    return Row(
        lock.as_document(),
        url,
        result,
        brief(lock.age_ms, units),
        brief(entry.lease - now, units),
        brief(entry.window_ends - now, units) if entry.window_ends else "",
        lock.state in TERMINAL,
    )


def headers(query: Any, wanted: Wanted) -> list[Header]:
    def sortable(text: str, order: str, first: str = "") -> Header:
        """``first`` is a minus where the first click sorts from high to low."""
        if wanted.order.removeprefix("-") != order:
            return Header(text, _with(query, o=first + order, p=None))
        is_descending = wanted.order.startswith("-")
        other = order if is_descending else f"-{order}"
        # The oldest lock was created first: its age is the largest.
        falls = is_descending != (order == "created")
        return Header(text, _with(query, o=other, p=None), "descending" if falls else "ascending")

    return [
        sortable("Task", "task"),
        Header("State, worker"),
        sortable("Age", "created"),
        sortable("Duplicates", "duplicates", "-"),
        sortable("Expires in", "expires"),
    ]


def filters(query: Any, wanted: Wanted, found: Found) -> list[Filter]:
    tasks = {name: f"{name} ({number})" for name, number in found.tasks.most_common(MOST_TASKS)}
    ended = sum(found.states[state] for state in TERMINAL)
    states = {ENDED: f"finished, key kept ({ended})"} if ended or wanted.state == ENDED else {}
    states |= {
        str(state): f"{state} ({found.states[state]})"
        for state in State
        if found.states[state] or state == wanted.state
    }
    states[ANY] = f"any ({found.seen})"
    ages = {name: text for name, (text, _) in AGES.items()}
    if wanted.task:
        tasks.setdefault(wanted.task, wanted.task)
    return [
        Filter("task", _choices(query, "task", wanted.task, sorted(tasks.items()))),
        Filter("state", _choices(query, "state", wanted.state, states.items(), "Not finished")),
        Filter("age", _choices(query, "age", wanted.age, ages.items())),
    ]


def _choices(
    query: Any, name: str, present: str, choices: Iterable[tuple[str, str]], default: str = "All"
) -> list[Link]:
    links = [Link(default, _with(query, **{name: None, "p": None}), not present)]
    links += [
        Link(text, _with(query, **{name: value, "p": None}), value == present)
        for value, text in choices
    ]
    return links


def page_links(query: Any, found: Found) -> list[Link | None]:
    """The first, the last and those around the current one; None where some are left out."""
    if found.pages == 1:
        return []
    numbers = Paginator(range(found.pages), 1).get_elided_page_range(
        found.page, on_each_side=2, on_ends=2
    )
    return [
        Link(str(number), _with(query, p=number if number > 1 else None), number == found.page)
        if isinstance(number, int)
        else None
        for number in numbers
    ]


def ended_url(query: Any) -> str:
    """The same search among the finished tasks that keep their keys."""
    return _with(query, state=ENDED, p=None)


def _with(query: Any, **changes: Any) -> str:
    """The current query string with changes; None removes a parameter."""
    changed = query.copy()
    for name, value in changes.items():
        changed.pop(name, None)
        if value is not None:
            changed[name] = value
    return f"?{changed.urlencode()}"
