"""Messages in which an id goes on that has its lock already: retries and replacements."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from celery.app.task import Context

from .header import HEADER, LockHeader
from .runtime import Runtime
from .timing import delay_ms

SendTask = Callable[..., Any]

#: Attributes of a request that are no headers of the user's.
_NAMES_OF_CELERY = {*vars(Context), "argsrepr", "compression", "kwargsrepr", "lang", "task"}


def is_sent_again(runtime: Runtime, name: str, options: dict[str, Any]) -> bool:
    """Whether this is a retry (or another resend) of the task whose header it carries.

    A header that was copied from another task is taken off: it is not this call's.
    """
    request = _retried_request(runtime, name, options)
    packed = getattr(request, HEADER, None)
    headers = options.get("headers") or {}
    if packed is None:
        if HEADER not in headers:
            return False
        packed = headers[HEADER]
    header, wrong = LockHeader.read(packed)
    if wrong and (request is not None or options.get("retries")):
        # Carried as it came. A retry is never checked again: its own lock, which cannot be read
        # here, would make it a duplicate of itself.
        options["headers"] = {**headers, HEADER: packed}
        return True
    headers = {name: value for name, value in headers.items() if name != HEADER}
    again = header is not None and header.task_id == options.get("task_id")
    if again and header is not None:
        headers[HEADER] = header.as_published().as_message()
    options["headers"] = headers
    return again


def _retried_request(runtime: Runtime, name: str, options: dict[str, Any]) -> Any:
    """The request of the running task, if this is its retry.

    A retry does not depend on the headers that it is published with: Celery takes them from a
    header named ``headers`` alone, where a tracing library has added one, and
    ``self.retry(headers=...)`` replaces them.
    """
    if "retries" not in options:
        return None
    request = current_request(runtime)
    if request is None or request.id != options.get("task_id") or request.task != name:
        return None
    return request


def is_handed_over(runtime: Runtime, name: str, key: str | None, options: dict[str, Any]) -> bool:
    """Whether this is ``self.replace(...)``: another task that goes on under our id.

    It inherits the lock, unless it is unique by a key of its own, or one of Celery's own
    tasks, at whose end nobody would give the lock back.
    """
    # First what is cheap to ask: all other calls pass here too.
    if not options.get("replaced_task_nesting") or name.startswith("celery."):
        return False
    request = current_request(runtime)
    if request is None or request.id != options.get("task_id"):
        return False
    header = LockHeader.from_message(getattr(request, HEADER, None))
    if header is None or (key is not None and key != header.key):
        return False
    headers = dict(options.get("headers") or {})
    headers[HEADER] = header.as_published().as_message()
    options["headers"] = headers
    return True


def send_on(
    runtime: Runtime,
    original: SendTask,
    name: str,
    args: Any,
    kwargs: Any,
    options: dict[str, Any],
) -> Any:
    """Publish the message in which an id goes on, and tell the body that is running under
    it, so that its end does not free the key.

    Told after the publish: one that failed must not leave a key that nobody holds.
    """
    result = original(name, args, kwargs, **options)
    request = current_request(runtime)
    if request is not None and request.id == options.get("task_id"):
        request.unique_goes_on_in_ms = delay_ms(runtime.app, options)
    return result


def current_request(runtime: Runtime) -> Any:
    task = runtime.app.current_worker_task
    return task.request if task is not None else None


def inherited_headers(request: Any) -> Mapping[str, Any]:
    """The headers of the message that the running task came with.

    Celery's ``request.headers`` has only what is in a header named ``headers``, where a tracing
    library has added one: the message's own headers are attributes of the request.
    """
    own = {name: value for name, value in vars(request).items() if name not in _NAMES_OF_CELERY}
    return {**(request.headers or {}), **own}
