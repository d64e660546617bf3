"""The admin's pages of locks: a list, a page for one lock, and releasing.

Seeing needs the permission ``celery_unique.view_lock``, releasing
``celery_unique.release_lock`` besides. Only a POST releases, and only after a page that
asks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
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
from celery_unique.config.leases import moment_of
from celery_unique.exceptions import CeleryUniqueError
from celery_unique.locks import holders_of
from celery_unique.operations.select import is_key

from .admin_page import Row, filters, headers, page_links, read_query, row_of
from .admin_release import let_go, read_selection
from .admin_results import ResultLinks
from .admin_search import Found, find
from .celery_app import project_app
from .models import Lock

View = Callable[..., HttpResponse]


def _guarded(view: View) -> View:
    """A store that cannot be asked is a page that says so, not an error of the site."""

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

    # -- addresses -----------------------------------------------------------
    def get_urls(self) -> list[Any]:
        def wrapped(view: View) -> View:
            return self.admin_site.admin_view(view)  # type: ignore[no-any-return]

        return [
            path("", wrapped(self.changelist_view), name="celery_unique_lock_changelist"),
            path("release/", wrapped(self.release_view), name="celery_unique_lock_release"),
            path(
                "<path:object_id>/change/",
                wrapped(self.lock_view),
                name="celery_unique_lock_change",
            ),
        ]

    # -- pages ---------------------------------------------------------------
    @_guarded
    def changelist_view(self, request: HttpRequest, extra_context: Any = None) -> HttpResponse:
        wanted = read_query(request.GET)
        found = find(_app_state(), wanted)
        context = {
            "wanted": wanted,
            "found": found,
            "rows": self._rows(request, found.locks, found.now),
            "headers": headers(request.GET, wanted),
            "filters": filters(request.GET, wanted, found),
            "page_links": page_links(request.GET, found),
            "query": [(name, value) for name, value in request.GET.items() if name != "q"],
        }
        return self._page(request, "locks", context)

    @_guarded
    def lock_view(self, request: HttpRequest, object_id: str) -> HttpResponse:
        key, locks, now = unquote(object_id), [], 0
        if is_key(key):
            record, now = _app_state().store.read(key)
            locks = holders_of(key, record, now)
        if not locks:
            messages.warning(request, "That lock is not there any more: its key is free.")
            return HttpResponseRedirect(self._url("changelist"))
        rows = self._rows(request, locks, moment_of(now), units=2)
        return self._page(request, "lock", {"title": locks[0].task_name or "Lock", "rows": rows})

    @_guarded
    def release_view(self, request: HttpRequest) -> HttpResponse:
        """Asks first; releases when the answer is yes."""
        if request.method != "POST":
            return HttpResponseNotAllowed(["POST"])
        if not self.has_release_permission(request):
            raise PermissionDenied
        app_state = _app_state()
        locks, gone = read_selection(app_state, request.POST.getlist("lock"))
        if request.POST.get("confirm") == "yes":
            released = [lock for lock in locks if let_go(app_state, lock)]
            for lock in released:
                entry = Lock(key=lock.key, task_name=lock.task_name, task_id=lock.task_id)
                self.log_change(request, entry, "Released.")
            self._tell(request, len(released), gone + len(locks) - len(released))
            return HttpResponseRedirect(self._url("changelist"))
        if not locks:
            self._tell(request, 0, gone)
            return HttpResponseRedirect(self._url("changelist"))
        rows = self._rows(request, locks, datetime.now(UTC), units=2)
        return self._page(request, "release", {"title": "Are you sure?", "rows": rows})

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
            **context,
        }
        template = f"admin/celery_unique/lock/{name}.html"
        return TemplateResponse(request, template, whole, status=status)

    def _rows(
        self, request: HttpRequest, locks: Sequence[Any], now: datetime, units: int = 1
    ) -> list[Row]:
        results = ResultLinks(self.admin_site, request, [lock.task_id for lock in locks])
        return [
            row_of(lock, self._url("change", lock.key), results.of(lock.task_id), now, units)
            for lock in locks
        ]

    def _url(self, name: str, *arguments: str) -> str:
        url: str = reverse(
            f"admin:celery_unique_lock_{name}",
            args=arguments,
            current_app=self.admin_site.name,
        )
        return url

    def _tell(self, request: HttpRequest, released: int, gone: int) -> None:
        if released:
            messages.success(request, f"Released {_locks(released)}.")
        if gone:
            messages.warning(request, f"{_locks(gone).capitalize()} had ended or changed hands.")
        if not released and not gone:
            messages.warning(request, "No lock was selected.")


def _app_state() -> AppState:
    return state_of(project_app())


def _locks(number: int) -> str:
    return "1 lock" if number == 1 else f"{number} locks"
