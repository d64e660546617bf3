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


def result_links(site: Any, request: Any, task_ids: Sequence[str]) -> dict[str, ResultLink]:
    """The stored results of several tasks by id, found with one query."""
    model = _result_model(site, request)
    if model is None:
        return {}
    page = "admin:django_celery_results_taskresult_change"
    return {
        task_id: ResultLink(
            reverse(page, args=(pk,), current_app=site.name),
            ", ".join(_plain(text) for text in (args, kwargs) if text),
        )
        for task_id, pk, args, kwargs in model.objects.filter(task_id__in=task_ids).values_list(
            "task_id", "pk", "task_args", "task_kwargs"
        )
    }


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
