"""Messages that Celery makes while their locks are being asked for.

Celery makes a message and sends it in one function, ``send_task``. In between it asks
``app.amqp.create_task_message`` for the message: there the answer of the lock store is waited
for, which has mostly come by then. A call that is not admitted leaves by an exception, and
nothing of it is sent: until that moment Celery has not touched the broker.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from .header import HEADER, LockHeader

#: Waits for the answer of the store: the header of the message, or an exception.
Admit = Callable[[], LockHeader]


class _Due(threading.local):
    """The call of this thread whose message is being made."""

    task_id = ""
    admit: Admit | None = None


_due = _Due()


def send_when_admitted(app: Any, task_id: str, admit: Admit, send: Callable[[], Any]) -> Any:
    """What ``send`` returns, whose message under this id waits for ``admit``."""
    _watch(app.amqp)
    before = _due.task_id, _due.admit
    _due.task_id, _due.admit = task_id, admit
    try:
        return send()
    finally:
        _due.task_id, _due.admit = before


def _watch(amqp: Any) -> None:
    make_message = amqp.create_task_message
    if hasattr(make_message, "admits"):
        return

    def create_task_message(task_id: str, *args: Any, **options: Any) -> Any:
        message = make_message(task_id, *args, **options)
        admit = _due.admit
        if admit is not None and task_id == _due.task_id:
            _due.admit = None
            message.headers[HEADER] = admit().as_message()
        return message

    create_task_message.admits = True  # type: ignore[attr-defined]
    amqp.create_task_message = create_task_message
