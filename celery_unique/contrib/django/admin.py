"""The admin's pages of locks: a list, a page for one lock, their release and revoke.

The pages need the permission ``celery_unique.view_lock``; a release also needs
``celery_unique.release_lock``, a revoke ``celery_unique.revoke_lock``, and both a POST request and
a confirmation.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from http import HTTPStatus
from typing import Any

from django import VERSION
from django.contrib import admin, messages
from django.contrib.admin.utils import unquote
from django.core.exceptions import PermissionDenied
from django.http import HttpRequest, HttpResponse, HttpResponseNotAllowed, HttpResponseRedirect
from django.template.response import TemplateResponse
from django.urls import path, reverse

from celery_unique.config.app_state import AppState, state_of
from celery_unique.exceptions import CeleryUniqueError
from celery_unique.operations.release import release_all, revoke_all
from celery_unique.operations.search import Found, Wanted, find_page
from celery_unique.operations.select import holders_of, is_key
from celery_unique.publish.stale_holders.lock_view import LockView, parked_ids

from .admin_page import Row, ended_url, filters, headers, page_links, row_of
from .admin_results import result_links
from .celery_app import project_app
from .models import Lock

View = Callable[..., HttpResponse]


def _guarded(view: View) -> View:
    """Check the permission; show an error of the store as a page with status 503."""

    @functools.wraps(view)
    def guarded(self: LockAdmin, request: HttpRequest, **facts: Any) -> HttpResponse:
        if not self.has_view_permission(request):
            raise PermissionDenied
        try:
            return view(self, request, **facts)
        except CeleryUniqueError as error:
            context = {"error": str(error), "found": Found()}
            return self._page(request, "locks", context, status=HTTPStatus.SERVICE_UNAVAILABLE)

    return guarded


@admin.register(Lock)
class LockAdmin(admin.ModelAdmin):
    # -- permissions ---------------------------------------------------------
    def has_add_permission(self, request: HttpRequest) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def has_release_permission(self, request: HttpRequest) -> bool:
        return bool(request.user.has_perm("celery_unique.release_lock"))

    def has_revoke_permission(self, request: HttpRequest) -> bool:
        return bool(request.user.has_perm("celery_unique.revoke_lock"))

    # -- addresses -----------------------------------------------------------
    def get_urls(self) -> list[Any]:
        def wrapped(view: View) -> View:
            return self.admin_site.admin_view(view)  # type: ignore[no-any-return]

        return [
            path("", wrapped(self.changelist_view), name="celery_unique_lock_changelist"),
            path("release/", wrapped(self.release_view), name="celery_unique_lock_release"),
            path("revoke/", wrapped(self.revoke_view), name="celery_unique_lock_revoke"),
            path(
                "<path:object_id>/change/",
                wrapped(self.lock_view),
                name="celery_unique_lock_change",
            ),
        ]

    # -- pages ---------------------------------------------------------------
    @_guarded
    def changelist_view(self, request: HttpRequest, extra_context: Any = None) -> HttpResponse:
        wanted = Wanted.of_query(request.GET)
        found = find_page(_app_state(), wanted)
        context = {
            "wanted": wanted,
            "found": found,
            "rows": self._rows(request, found.locks),
            "headers": headers(request.GET, wanted),
            "filters": filters(request.GET, wanted, found),
            "page_links": page_links(request.GET, found),
            "ended_url": ended_url(request.GET),
            "query": [(name, value) for name, value in request.GET.items() if name != "q"],
        }
        return self._page(request, "locks", context)

    @_guarded
    def lock_view(self, request: HttpRequest, object_id: str) -> HttpResponse:
        app_state, key = _app_state(), unquote(object_id)
        locks, parked = _holders(app_state, key), _parked(app_state, key)
        if not (locks or parked):
            messages.warning(request, "The lock no longer exists: its key is free.")
            return HttpResponseRedirect(self._url("changelist"))
        title = locks[0].entry.task_name if locks else ""
        rows = self._rows(request, locks, units=2)
        context = {"title": title or "Lock", "rows": rows, "parked": parked}
        return self._page(request, "lock", context)

    @_guarded
    def release_view(self, request: HttpRequest) -> HttpResponse:
        """Show what would be released; release it once that is confirmed."""
        if not self.has_release_permission(request):
            raise PermissionDenied
        if (page := self._to_confirm(request, "release")) is not None:
            return page
        app_state, selected = _app_state(), request.POST.getlist("lock")
        released = [
            lock
            for lock, was_held in release_all(app_state, _selected(app_state, selected))
            if was_held
        ]
        self._log(request, released, "Released.")
        if released:
            messages.success(request, f"Released {_locks(len(released))}.")
        self._report_gone(request, len(selected), len(released))
        return HttpResponseRedirect(self._url("changelist"))

    @_guarded
    def revoke_view(self, request: HttpRequest) -> HttpResponse:
        """Show which tasks would be revoked; revoke them once that is confirmed."""
        if not self.has_revoke_permission(request):
            raise PermissionDenied
        if (page := self._to_confirm(request, "revoke")) is not None:
            return page
        app_state, selected = _app_state(), request.POST.getlist("lock")
        tried = list(revoke_all(app_state, _selected(app_state, selected)))
        revoked = [lock for lock, waited in tried if waited]
        running = len(tried) - len(revoked)
        self._log(request, revoked, "Revoked.")
        if revoked:
            messages.success(
                request, f"Revoked {_tasks(len(revoked))} that waited. The keys are free."
            )
        if running:
            messages.warning(
                request, f"{_tasks(running).capitalize()} had started, and a revoke stops none."
            )
        self._report_gone(request, len(selected), len(tried))
        return HttpResponseRedirect(self._url("changelist"))

    # -- parts ---------------------------------------------------------------
    def _page(
        self, request: HttpRequest, name: str, context: dict[str, Any], status: int = 200
    ) -> HttpResponse:
        request.current_app = self.admin_site.name
        whole = {
            **self.admin_site.each_context(request),
            "opts": self.opts,
            "title": "Locks",
            "is_list": name == "locks",
            "filters_inside": VERSION >= (6, 0),
            "listed_breadcrumbs": VERSION >= (6, 1),
            "can_release": self.has_release_permission(request),
            "can_revoke": self.has_revoke_permission(request),
            "can_act": self.has_release_permission(request) or self.has_revoke_permission(request),
            **context,
        }
        template = f"admin/celery_unique/lock/{name}.html"
        return TemplateResponse(request, template, whole, status=status)

    def _rows(self, request: HttpRequest, locks: Sequence[LockView], units: int = 1) -> list[Row]:
        results = result_links(self.admin_site, request, [lock.task_id for lock in locks])
        return [
            row_of(lock, self._url("change", lock.key), results.get(lock.task_id), units)
            for lock in locks
        ]

    def _url(self, name: str, *arguments: str) -> str:
        url: str = reverse(
            f"admin:celery_unique_lock_{name}",
            args=arguments,
            current_app=self.admin_site.name,
        )
        return url

    def _to_confirm(self, request: HttpRequest, name: str) -> HttpResponse | None:
        """The page that asks first; None once that is confirmed, or for nothing to confirm."""
        if request.method != "POST":
            return HttpResponseNotAllowed(["POST"])
        locks = _selected(_app_state(), request.POST.getlist("lock"))
        if not locks or request.POST.get("confirm") == "yes":
            return None
        rows = self._rows(request, locks, units=2)
        return self._page(request, name, {"title": "Are you sure?", "rows": rows})

    def _log(self, request: HttpRequest, locks: Sequence[LockView], done: str) -> None:
        for lock in locks:
            entry = Lock(key=lock.key, task_name=lock.entry.task_name, task_id=lock.task_id)
            self.log_change(request, entry, done)

    def _report_gone(self, request: HttpRequest, selected: int, found: int) -> None:
        if selected > found:
            gone = _locks(selected - found).capitalize()
            messages.warning(request, f"{gone} had ended or changed hands.")
        elif not selected:
            messages.warning(request, "No lock was selected.")


def _app_state() -> AppState:
    return state_of(project_app())


def _holders(app_state: AppState, key: str) -> list[LockView]:
    return holders_of(key, *app_state.store.read(key)) if is_key(key) else []


def _parked(app_state: AppState, key: str) -> list[str]:
    return parked_ids(app_state, key, app_state.store.read(key)[0]) if is_key(key) else []


def _selected(app_state: AppState, values: Sequence[str]) -> list[LockView]:
    """The locks of a form's values, ``key task_id`` each.

    The task's id matters: since the page was made, another task may have taken the key.
    """
    found = []
    for value in values:
        key, _, task_id = value.partition(" ")
        found += [lock for lock in _holders(app_state, key) if lock.task_id == task_id]
    return found


def _locks(number: int) -> str:
    return "1 lock" if number == 1 else f"{number} locks"


def _tasks(number: int) -> str:
    return "1 task" if number == 1 else f"{number} tasks"
