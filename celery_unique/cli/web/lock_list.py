"""The list of locks: its search form, its table, and the links to its other pages."""

from __future__ import annotations

from collections.abc import Iterable
from urllib.parse import urlencode

from celery_unique.keys.digest import short_key
from celery_unique.operations.search import AGES, ANY, ENDED, Cursor, Found, Wanted
from celery_unique.operations.select import brief
from celery_unique.policy.states import STATES, TERMINAL
from celery_unique.publish.stale_holders.lock_view import LockView

from .markup import Content, Html, tag

#: More tasks than these are found by a search.
MOST_TASKS = 50

#: Column -> the order of its first click; empty: it does not sort.
COLUMNS = {
    "Task": "task",
    "State": "",
    "Worker": "",
    "Age": "created",
    "Duplicates": "-duplicates",
    "Expires in": "expires",
}


def badge(state: str) -> Html:
    kind = state if state in (*STATES, "parked", "released", "unreadable") else "other"
    return tag("span", state, class_=f"badge {kind}")


def _link(wanted: Wanted, **changes: str) -> str:
    """The list with another query; without a cursor, which belongs to this one."""
    query = {
        "q": wanted.text,
        "task": wanted.task,
        "state": wanted.state,
        "age": wanted.age,
        "o": "" if wanted.order == "created" else wanted.order,
    } | changes
    kept = urlencode({name: value for name, value in query.items() if value})
    return f"./?{kept}" if kept else "./"


def search_form(wanted: Wanted, found: Found) -> Html:
    tasks = {name for name, _ in found.tasks.most_common(MOST_TASKS)} | {wanted.task} - {""}
    return tag(
        "form",
        tag("input", type="search", name="q", value=wanted.text, aria_label="Search",
            placeholder="Part of a task's name, id, label, key or worker"),
        _choice("task", "Every task", wanted.task, [
            (name, f"{name} ({found.tasks[name]:,})") for name in sorted(tasks)
        ]),
        _choice("age", "Any age", wanted.age, [(name, text) for name, (text, _) in AGES.items()]),
        wanted.state and tag("input", type="hidden", name="state", value=wanted.state),
        tag("input", type="hidden", name="o", value=wanted.order),
        tag("button", "Search", type="submit"),
        wanted.is_narrowed and tag("a", "Clear", href="./"),
        class_="search",
        role="search",
    )  # fmt: skip


def _choice(name: str, default: str, current: str, choices: Iterable[tuple[str, str]]) -> Html:
    options = [
        tag("option", text, value=value, selected=value == current)
        for value, text in (("", default), *choices)
    ]
    return tag("select", options, name=name, aria_label=name.capitalize())


def state_links(wanted: Wanted, found: Found) -> Html:
    """Each state that there is, with the number of its locks."""
    ended = sum(found.states[state] for state in TERMINAL)
    counts = {"": found.seen - ended}
    counts |= {state: found.states[state] for state in STATES if state not in TERMINAL}
    counts |= {ENDED: ended, ANY: found.seen}
    texts = {"": "Not finished", ENDED: "Finished, key kept", ANY: "All"}
    return tag(
        "nav",
        [
            tag(
                "a",
                texts.get(state, state),
                " ",
                tag("span", f"{number:,}"),
                href=_link(wanted, state=state),
                aria_current="true" if state == wanted.state else None,
            )
            for state, number in counts.items()
            if number or state in texts or state == wanted.state
        ],
        class_="states",
        aria_label="States",
    )


def lock_table(wanted: Wanted, found: Found) -> Html:
    return tag(
        "table",
        tag("thead", tag("tr", [_header(wanted, text, o) for text, o in COLUMNS.items()])),
        tag("tbody", [_row(lock) for lock in found.locks]),
        class_="locks",
    )


def _header(wanted: Wanted, text: str, order: str) -> Html:
    if not order:
        return tag("th", text, scope="col")
    if wanted.order.removeprefix("-") != order.removeprefix("-"):
        return tag("th", tag("a", text, href=_link(wanted, o=order)), scope="col")
    falls = wanted.order.startswith("-")
    other = wanted.order.removeprefix("-") if falls else f"-{wanted.order}"
    # The oldest lock was created first: its age is the largest.
    down = falls != (order == "created")
    return tag(
        "th",
        tag("a", text, Html(" &darr;" if down else " &uarr;"), href=_link(wanted, o=other)),
        scope="col",
        aria_sort="descending" if down else "ascending",
    )


def _row(lock: LockView) -> Html:
    entry = lock.entry
    unnamed = "(no name)" if lock.task_id else "(no task)"
    window = f"window {brief(entry.window_ends - lock.now, 1)}" if entry.window_ends else ""
    cells: dict[str, Content] = {
        "State": badge(lock.state),
        "Worker": lock.worker or "-",
        "Age": brief(lock.age_ms),
        "Duplicates": (
            f"{entry.duplicates:,}",
            lock.parked > 0 and tag("small", f"{lock.parked:,} parked"),
            lock.position > 0 and tag("small", f"the call at position {lock.position:,}"),
        ),
        "Expires in": (brief(entry.lease - lock.now), bool(window) and tag("small", window)),
    }
    return tag(
        "tr",
        tag(
            "th",
            tag("a", entry.task_name or unnamed, href=f"lock?{urlencode({'key': lock.key})}"),
            entry.label and tag("small", entry.label, class_="label"),
            tag("small", lock.task_id, " · ", short_key(lock.key)),
            scope="row",
        ),
        [tag("td", value, data_label=name) for name, value in cells.items()],
    )


def apart(wanted: Wanted, found: Found) -> Html | None:
    if not found.apart:
        return None
    tasks = "task keeps its key" if found.apart == 1 else "tasks keep their keys"
    link = tag("a", "show", href=_link(wanted, state=ENDED))
    return tag("p", f"{found.apart:,} finished {tasks}: ", link, ".", class_="quiet")


def pager(wanted: Wanted, found: Found, cursor: Cursor | None) -> Html:
    back = cursor is not None and cursor.back
    earlier = found.more if back else cursor is not None
    later = back or found.more

    def at(lock: LockView, *, back: bool = False) -> str:
        return _link(wanted, at=Cursor.of(lock, wanted.order, back=back).encode())

    locks = found.locks
    return tag(
        "nav",
        earlier and tag("a", "First", href=_link(wanted)),
        bool(earlier and locks) and tag("a", "Previous", href=at(locks[0], back=True)),
        tag("span", f"{found.matched:,} lock{'' if found.matched == 1 else 's'}"),
        bool(later and locks) and tag("a", "Next", href=at(locks[-1])),
        class_="pager",
        aria_label="Pages of the list",
    )
