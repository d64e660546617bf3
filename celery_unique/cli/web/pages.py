"""The pages of ``celery unique web``, as text. All of them read, none changes anything.

Links are relative and one level deep, so that a proxy can serve the pages below any prefix.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import urlencode

import click

from celery_unique.cli.options import json_array, json_object
from celery_unique.cli.output import moment
from celery_unique.config.app_state import AppState
from celery_unique.config.leases import moment_of
from celery_unique.exceptions import CeleryUniqueError
from celery_unique.header import DeliveryName
from celery_unique.keys.digest import short_key
from celery_unique.operations.count import Counts, TaskCount, count_all
from celery_unique.operations.explain import (
    Explanation,
    beside_stale,
    explain_call,
    explain_record,
    freed_by,
    mark_meaning,
    meaning,
    running_processes,
    why_stale,
)
from celery_unique.operations.search import ANY, WALK_SECONDS, Cursor, Wanted, find_from
from celery_unique.operations.select import brief, find, is_key
from celery_unique.policy.states import STATES
from celery_unique.publish.stale_holders.lock_view import LockView
from celery_unique.stores.memory import MemoryStore

from .lock_list import apart, badge, lock_table, pager, search_form, state_links
from .markup import Content, Html, tag

Query = Mapping[str, str]

MOST_MARKS = 16
MOST_PARKED = 20


class Pages:
    """``program``: how this command was called, for commands that can be copied."""

    def __init__(self, app_state: AppState, program: str) -> None:
        self._app_state = app_state
        self._program = program
        self._title = f"Locks of {app_state.app.main}" if app_state.app.main else "Locks"

    # -- the list ------------------------------------------------------------
    def locks(self, query: Query) -> str:
        wanted = Wanted.of_query(query)
        cursor = Cursor.parse(query.get("at", ""), wanted.order)
        found = find_from(self._app_state, wanted, cursor)
        return self._page(
            self._title,
            "./",
            self._memory_note(),
            _incomplete(found.complete, found.seen),
            search_form(wanted, found),
            state_links(wanted, found),
            lock_table(wanted, found) if found.locks else tag("p", "No locks.", class_="empty"),
            apart(wanted, found),
            pager(wanted, found, cursor),
        )

    # -- one key -------------------------------------------------------------
    def lock(self, query: Query) -> str:
        key = query.get("key", "")
        found = next(find(self._app_state, key), None) if is_key(key) else None
        if found is None:
            text = "Nothing is recorded under this key: it is free."
            return self.message("The key is free", text)
        explanation = explain_record(self._app_state, *found)
        return self._page(_name(explanation), "", *self._explained(explanation))

    def why(self, query: Query) -> str:
        """A form for a call, and what would become of it."""
        task = query.get("task", "").strip()
        explained: list[Content] = []
        if task:
            try:
                args = json_array(query.get("args", "").strip() or "[]")
                kwargs = json_object(query.get("kwargs", "").strip() or "{}")
                explained = self._explained(explain_call(self._app_state, task, args, kwargs))
            except click.BadParameter as error:
                explained = [tag("p", error.message, class_="error", role="alert")]
            except CeleryUniqueError as error:
                if error.retryable:
                    raise
                explained = [tag("p", str(error), class_="error", role="alert")]
        return self._page("Why was a call dropped?", "why", self._call_form(query), *explained)

    # -- counts --------------------------------------------------------------
    def stats(self, _query: Query) -> str:
        counts = count_all(self._app_state, within_s=WALK_SECONDS)
        figures = (
            ("keys", counts.keys),
            ("locks", counts.total.locks),
            ("duplicates", counts.total.duplicates),
            ("parked calls", counts.parked),
            ("marks of finished or superseded tasks", counts.marks),
        )
        return self._page(
            "Counts",
            "stats",
            self._memory_note(),
            _incomplete(counts.complete, counts.total.locks),
            tag(
                "dl",
                [tag("div", tag("dt", text), tag("dd", f"{n:,}")) for text, n in figures],
                class_="figures",
            ),
            _count_table(counts),
        )

    # -- without locks -------------------------------------------------------
    def login(self, *, wrong: bool) -> str:
        return _document(
            self._title,
            tag(
                "main",
                tag("h1", self._title),
                tag("p", "The command that serves these pages has printed an address with a token, "
                    "or was given one."),
                wrong and tag("p", "This is not the token.", class_="error", role="alert"),
                tag(
                    "form",
                    tag("label", "Token ", tag("input", type="password", name="token",
                        autocomplete="off", required=True, autofocus=True)),
                    tag("button", "Show the locks", type="submit"),
                    method="post",
                    action="login",
                ),
                class_="login",
            ),
        )  # fmt: skip

    def message(self, title: str, text: str) -> str:
        return self._page(title, "", tag("p", text or "Go back to the list of locks."))

    # -- parts that know the app ---------------------------------------------
    def _page(self, title: str, current: str, *content: Content) -> str:
        links = (("./", "Locks"), ("why", "Why"), ("stats", "Counts"))
        return _document(
            title if title == self._title else f"{title} · {self._title}",
            tag(
                "header",
                tag("a", tag("strong", self._app_state.app.main or "celery"), " unique tasks",
                    href="./", class_="brand"),
                tag(
                    "nav",
                    [
                        tag("a", text, href=url, aria_current="page" if url == current else None)
                        for url, text in links
                    ],
                    aria_label="Pages",
                ),
            ),
            tag("main", tag("h1", title), *content),
            tag("footer", "Read-only. Commands: ", tag("code", f"{self._program} --help")),
        )  # fmt: skip

    def _memory_note(self) -> Html | None:
        if not isinstance(self._app_state.store, MemoryStore):
            return None
        text = "memory:// keeps locks in the process that acquired them: none is visible here."
        return tag("p", text, class_="note")

    def _call_form(self, query: Query) -> Html:
        names = sorted(name for name in self._app_state.app.tasks if not name.startswith("celery."))
        fields = (
            ("task", "Task", "shop.rebuild_index", True),
            ("args", "Arguments, as a JSON array", "[7]", False),
            ("kwargs", "Keyword arguments, as a JSON object", '{"full": true}', False),
        )
        return tag(
            "form",
            [
                tag(
                    "label",
                    label,
                    tag("input", type="text", name=name, value=query.get(name, "")[:2000],
                        placeholder=example, list="tasks" if required else None,
                        required=required, autocomplete="off"),
                )
                for name, label, example, required in fields
            ],
            tag("datalist", [tag("option", value=name) for name in names[:500]], id="tasks"),
            tag("button", "Explain", type="submit"),
            class_="call",
        )  # fmt: skip

    def _explained(self, explanation: Explanation) -> list[Content]:
        processes = running_processes(self._app_state, explanation.locks)
        stale = why_stale(self._app_state, explanation.locks)
        explanation = beside_stale(explanation, stale)
        policy = explanation.policy
        parts: list[Content] = []
        if explanation.verdict is not None:
            admitted = explanation.verdict.outcome in ("created", "replaced", "rerun")
            text = f"A call now {explanation.verdict.text}."
            parts.append(tag("p", text, class_="verdict ok" if admitted else "verdict held"))
        elif not any(lock.state != "released" for lock in explanation.locks):
            free = ("No task holds the key: a worker publishes the next call.", "verdict held")
            free = free if explanation.parked else ("The key is free.", "verdict ok")
            parts.append(tag("p", free[0], class_=free[1]))
        parts.append(
            _facts(
                ("Key", tag("code", explanation.key)),
                ("Made from", explanation.made_from and tag("code", explanation.made_from)),
                ("On conflict", policy.get("on_conflict")),
                ("In states", ", ".join(policy.get("states", ()))),
            )
        )
        parts += (
            self._lock(lock, processes.get(lock.task_id), stale.get(lock.task_id, ""))
            for lock in explanation.locks
        )
        return [*parts, _parked(explanation), _marks(explanation)]

    def _lock(self, lock: LockView, process: int | None, stale: str) -> Html:
        entry, now = lock.entry, lock.now
        last = f", the last {brief(now - entry.last_duplicate_at)} ago" if entry.duplicates else ""
        release = f"{self._program} release --key {lock.key}"
        return tag(
            "section",
            tag("h2", entry.task_name or "(no name)", " ", badge(lock.state)),
            lock.unreadable and tag("p", lock.unreadable, class_="error"),
            _facts(
                ("Means", "" if lock.unreadable else meaning(lock)),
                ("Task id", lock.task_id and tag("code", lock.task_id)),
                ("Label", entry.label),
                ("Called", f"{brief(lock.age_ms)} ago, at {_when(entry.created_at)}"),
                ("ETA", entry.eta and _ahead(entry.eta, now)),
                ("Run by", _runner(lock, process)),
                ("Duplicates", f"{entry.duplicates:,}{last}"),
                ("Lease ends", _ahead(entry.lease, now)),
                ("Window ends", entry.window_ends and _ahead(entry.window_ends, now)),
                ("Fencing token", entry.token and str(entry.token)),
                ("Comes after", entry.after),
                ("Replaced by", entry.by),
                ("Stale", stale),
                ("Freed by", tag("ul", [tag("li", way) for way in freed_by(lock)])
                 if not lock.unreadable else ""),
                ("Free it now", lock.state != "released" and tag("code", release, class_="copy")),
            ),
            tag("p", "Releasing frees the key and does not stop the task.", class_="quiet"),
        )  # fmt: skip


# -- of every page -----------------------------------------------------------------------


def _document(title: str, *body: Content) -> str:
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="robots", content="noindex"),
        tag("title", title),
        tag("link", rel="icon", href="icon.svg", type="image/svg+xml"),
        tag("link", rel="stylesheet", href="web.css"),
    )
    return f"<!doctype html>\n{tag('html', head, tag('body', *body), lang='en')}\n"


def _incomplete(complete: bool, seen: int) -> Html | None:
    if complete:
        return None
    text = (
        f"The search stopped at its time limit after {seen:,} locks: the store has more, which are "
        "neither shown nor counted. Search for a whole key to find its lock anyway."
    )
    return tag("p", text, class_="note", role="alert")


def _facts(*facts: tuple[str, Any]) -> Html:
    """Those that have a value."""
    return tag(
        "dl",
        [tag("div", tag("dt", name), tag("dd", value)) for name, value in facts if value],
        class_="facts",
    )


# -- of one key --------------------------------------------------------------------------


def _name(explanation: Explanation) -> str:
    names = [lock.entry.task_name for lock in explanation.locks if lock.entry.task_name]
    return names[0] if names else short_key(explanation.key)


def _parked(explanation: Explanation) -> Html | None:
    """The calls of a lane that wait for their turn, the next one first."""
    parked = explanation.parked
    if not parked:
        return None
    left_out = len(parked) - MOST_PARKED
    return tag(
        "section",
        tag("h2", f"Parked calls ({len(parked):,})"),
        tag("ol", [tag("li", tag("code", task_id)) for task_id in parked[:MOST_PARKED]]),
        left_out > 0 and tag("p", f"{left_out:,} more are not shown."),
    )


def _marks(explanation: Explanation) -> Html | None:
    marks = list(explanation.marks.items())
    left_out = max(0, len(marks) - MOST_MARKS) + explanation.more_marks
    if not marks and not left_out:
        return None
    return tag(
        "section",
        tag("h2", "Marks of other tasks"),
        tag(
            "ul",
            [
                tag("li", tag("code", task_id), f" {mark.kind}: {mark_meaning(mark.kind)}")
                for task_id, mark in marks[:MOST_MARKS]
            ],
        ),
        left_out > 0 and tag("p", f"{left_out:,} more are not shown."),
    )


def _runner(lock: LockView, process: int | None) -> str:
    if not lock.entry.delivery:
        return "" if lock.entry.terminal else "no worker yet"
    main = DeliveryName.parse(lock.entry.delivery).process
    where = f", process {process}" if process is not None else ""
    of = f"{' of' if where else ','} main process {main}" if main != str(process or "") else ""
    ends = _ahead(lock.entry.delivery_lease, lock.now)
    return f"{lock.worker}{where}{of if main else ''}; delivery lease ends {ends}"


def _when(milliseconds: int) -> str:
    return moment(moment_of(milliseconds))


def _ahead(milliseconds: int, now: int) -> str:
    left = milliseconds - now
    when = _when(milliseconds)
    return f"in {brief(left)}, at {when}" if left > 0 else f"{brief(-left)} ago, at {when}"


# -- of the counts -----------------------------------------------------------------------


def _count_table(counts: Counts) -> Html:
    states = [state for state in (*STATES, "released") if counts.total.states[state]]
    names = sorted(counts.tasks, key=lambda name: (-counts.tasks[name].locks, name))
    titles = ("Task", "Locks", "Duplicates", "Oldest", *states)
    rows = [_count_row(name, counts.tasks[name], states) for name in names]
    return tag(
        "table",
        tag("thead", tag("tr", [tag("th", text, scope="col") for text in titles])),
        tag("tbody", rows),
        class_="counts",
    )


def _count_row(name: str, count: TaskCount, states: list[str]) -> Html:
    link = tag("a", name or "(no name)", href=f"./?{urlencode({'task': name, 'state': ANY})}")
    cells = {
        "Locks": f"{count.locks:,}",
        "Duplicates": f"{count.duplicates:,}",
        "Oldest": brief(count.oldest_ms),
    } | {state: f"{count.states[state]:,}" for state in states}
    return tag(
        "tr",
        tag("th", link, scope="row"),
        [tag("td", value, data_label=text) for text, value in cells.items()],
    )
