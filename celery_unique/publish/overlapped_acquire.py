"""Messages that Celery builds while the store acquires their locks.

Celery builds a message and sends it in one function, ``send_task``, which calls
``app.amqp.create_task_message`` in between: there the reply of the lock store is awaited, which
has mostly arrived by then. A call that is not admitted leaves by an exception, and nothing of it
is sent: until that moment Celery has not used the broker.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from celery_unique.header import HEADER, LockHeader
from celery_unique.stores.base import Acquired


class NotAdmitted(Exception):
    """The lock was not acquired: the message that was being built is not sent."""


class PendingHeader(dict[str, Any]):
    """The header of a message whose lock is being acquired: empty until the call is admitted.

    It travels among the headers of the call. A variable of the thread would have to be reset
    after the call, and a signal could arrive before that.
    """

    def __init__(
        self, receive: Callable[[], Acquired], admit: Callable[[Acquired], LockHeader]
    ) -> None:
        super().__init__()
        self._receive = receive
        self._admit = admit
        self._error: BaseException | None = None
        self.is_received = False
        self.acquired: Acquired | None = None

    def receive(self) -> Acquired:
        """The reply of the store. It is read once: the connection may be in use by another
        call afterwards."""
        if not self.is_received:
            self.is_received = True
            try:
                self.acquired = self._receive()
            except BaseException as error:
                self._error = error
                raise
        if self.acquired is None:
            assert self._error is not None
            raise self._error
        return self.acquired

    def admit(self) -> dict[str, Any]:
        """The header as the message carries it. Raises NotAdmitted for a call that conflicts."""
        acquired = self.receive()
        if acquired.outcome != "created":
            raise NotAdmitted
        packed = self._admit(acquired).as_message()
        self.update(packed)  # for a ``send_task`` that has copied its headers
        return packed

    def __copy__(self) -> PendingHeader:
        return self

    def __deepcopy__(self, _: Any) -> PendingHeader:
        return self

    def __reduce__(self) -> Any:
        return dict, (dict(self),)


def patch_create_task_message(amqp: Any) -> bool:
    """Make messages of this object wait for their locks. False: it does not allow that."""
    build = amqp.create_task_message

    def create_task_message(task_id: str, *args: Any, **options: Any) -> Any:
        message = build(task_id, *args, **options)
        headers: Any = options.get("headers")
        header = headers.get(HEADER) if headers else None
        if isinstance(header, PendingHeader):
            headers[HEADER] = message[0][HEADER] = header.admit()
        return message

    create_task_message.admits = True  # type: ignore[attr-defined]
    try:
        amqp.create_task_message = create_task_message
    except AttributeError:  # a class of the user that has no such attribute to set
        return False
    return True
