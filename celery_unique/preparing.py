"""Messages that Celery makes while their locks are being asked for.

Celery makes a message and sends it in one function, ``send_task``. In between it asks
``app.amqp.create_task_message`` for the message: there the answer of the lock store is waited
for, which has mostly come by then. A call that is not admitted leaves by an exception, and
nothing of it is sent: until that moment Celery has not touched the broker.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

from .header import HEADER, LockHeader

#: The header of the message, or an exception: asked for again by whoever makes the message again.
Admit = Callable[[], LockHeader]

#: The call whose message is being made. Not of the thread: greenlets may share one.
_due: ContextVar[tuple[str, Admit] | None] = ContextVar("due", default=None)


def send_when_admitted(task_id: str, admit: Admit, send: Callable[[], Any]) -> Any:
    """What ``send`` returns, whose message under this id waits for ``admit``."""
    before = _due.set((task_id, admit))
    try:
        return send()
    finally:
        _due.reset(before)


def is_watched(amqp: Any) -> bool:
    """Whether messages that this object makes wait for their locks, from now on if need be."""
    make_message = amqp.create_task_message
    if hasattr(make_message, "admits"):
        return True

    def create_task_message(task_id: str, *args: Any, **options: Any) -> Any:
        message = make_message(task_id, *args, **options)
        due = _due.get()
        if due is not None and task_id == due[0]:
            message[0][HEADER] = due[1]().as_message()
        return message

    create_task_message.admits = True  # type: ignore[attr-defined]
    try:
        amqp.create_task_message = create_task_message
    except AttributeError:  # a class of the user's own that lets nobody do this
        return False
    return True
