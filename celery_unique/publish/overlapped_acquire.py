"""The answer of the lock store to a call whose message is made meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from celery_unique.exceptions import StoreUnavailable
from celery_unique.header import HEADER, LockHeader
from celery_unique.stores.base import Acquired


class NotAdmitted(Exception):
    """The store has not given the lock: the message that was being made is not sent."""


class NotAnswered(Exception):
    """The store could not be asked for the lock, or did not answer."""

    def __init__(self, error: StoreUnavailable) -> None:
        super().__init__(error)
        self.error = error


class Answer:
    """What the store says to a question that is under way. It is waited for once: whoever asks
    again is told the same, since the connection may be somebody else's by then."""

    def __init__(self, wait: Callable[[], Acquired]) -> None:
        self._wait = wait
        self._error: BaseException | None = None
        self.was_awaited = False
        self.acquired: Acquired | None = None

    def heard(self) -> Acquired:
        if not self.was_awaited:
            self.was_awaited = True
            try:
                self.acquired = self._wait()
            except BaseException as error:
                self._error = error
                raise
        if self.acquired is None:
            assert self._error is not None
            raise self._error
        return self.acquired


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


def patch_create_task_message(amqp: Any) -> bool:
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
