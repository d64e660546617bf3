"""Links to the results of django-celery-results, where it is installed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from django.apps import apps
from django.urls import reverse


class ResultLink(NamedTuple):
    """A stored result: its page in the admin, and the arguments that Celery stored as text."""

    url: str
    arguments: str


class ResultLinks:
    """The stored results of several tasks, found with one query."""

    def __init__(self, site: Any, request: Any, task_ids: Sequence[str]) -> None:
        self._found: dict[str, ResultLink] = {}
        model = _result_model(site, request)
        if model is None:
            return
        rows = model.objects.filter(task_id__in=task_ids)
        for task_id, pk, args, kwargs in rows.values_list(
            "task_id", "pk", "task_args", "task_kwargs"
        ):
            url = reverse(
                "admin:django_celery_results_taskresult_change",
                args=(pk,),
                current_app=site.name,
            )
            arguments = ", ".join(_plain(text) for text in (args, kwargs) if text)
            self._found[task_id] = ResultLink(url, arguments)

    def of(self, task_id: str) -> ResultLink | None:
        return self._found.get(task_id)


def _result_model(site: Any, request: Any) -> Any:
    """The model, if it is installed, has a page in this admin, and this user may see it."""
    if not apps.is_installed("django_celery_results"):
        return None
    model = apps.get_model("django_celery_results", "TaskResult")
    if not site.is_registered(model):
        return None
    may_see = site.get_model_admin(model).has_view_or_change_permission(request)
    return model if may_see else None


def _plain(text: str) -> str:
    """Remove one pair of quotes: Celery stores the repr of a repr."""
    return text[1:-1] if len(text) > 1 and text[0] == text[-1] == '"' else text
