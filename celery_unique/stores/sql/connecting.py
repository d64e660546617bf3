"""Connecting, which no driver can be told to do within a certain time."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from .deadline import Deadline, call_within
from .url_check import wrong

if TYPE_CHECKING:
    from sqlalchemy import Engine


def connect_within(engine: Engine, deadline: Deadline, connect: Callable[..., Any]) -> None:
    """Let the engine make its connections by ``connect``, within the time of the act."""
    from sqlalchemy import event

    @event.listens_for(engine, "do_connect")
    def connect_in_time(_dialect: Any, _record: Any, args: Any, options: Any) -> Any:
        try:
            return call_within(
                deadline.remaining(),
                lambda: connect(*args, **options),
                late=lambda connection: connection.close(),
            )
        except TimeoutError as error:
            raise engine.dialect.loaded_dbapi.OperationalError(str(error)) from None
        except (AttributeError, LookupError, OverflowError, TypeError, ValueError) as error:
            # Not an answer of the server's. Its text is not shown: it may tell a password.
            raise wrong(
                f"its driver cannot connect with what it says ({type(error).__name__}). Write it "
                "as HOST:PORT/DATABASE, and after the ? only what is needed"
            ) from None
