"""Messages that Celery makes while their locks are being asked for.

Celery makes a message and sends it in one function, ``send_task``. In between it asks
``app.amqp.create_task_message`` for the message: there the answer of the lock store is waited
for, which has mostly come by then. A call that is not admitted leaves by an exception, and
nothing of it is sent: until that moment Celery has not touched the broker.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .header import HEADER, LockHeader

#: The header of the message, or an exception: asked for again by whoever makes the message again.
Admit = Callable[[], LockHeader]


class AwaitedHeader(dict[str, Any]):
    """The header of a message that waits for its lock: empty until the call is admitted.

    It goes along with the call, among its headers. A variable of the thread would have to be
    reset after the call, and a signal could come before that.
    """

    def __init__(self, admit: Admit) -> None:
        super().__init__()
        self._admit = admit

    def admitted(self) -> dict[str, Any]:
        """The header as the message gets it, or the exception of a call that is not admitted."""
        packed = self._admit().as_message()
        self.update(packed)  # for a ``send_task`` that has put its headers into another mapping
        return packed

    def __copy__(self) -> AwaitedHeader:
        return self

    def __deepcopy__(self, _: Any) -> AwaitedHeader:
        return self

    def __reduce__(self) -> Any:
        return dict, (dict(self),)


def is_watched(amqp: Any) -> bool:
    """Whether messages that this object makes wait for their locks, from now on if need be."""
    make_message = amqp.create_task_message
    if hasattr(make_message, "admits"):
        return True

    def create_task_message(task_id: str, *args: Any, **options: Any) -> Any:
        message = make_message(task_id, *args, **options)
        headers: Any = options.get("headers")
        header = headers.get(HEADER) if headers else None
        if isinstance(header, AwaitedHeader):
            headers[HEADER] = message[0][HEADER] = header.admitted()
        return message

    create_task_message.admits = True  # type: ignore[attr-defined]
    try:
        amqp.create_task_message = create_task_message
    except AttributeError:  # a class of the user's own that lets nobody do this
        return False
    return True
