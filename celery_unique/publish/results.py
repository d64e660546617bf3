"""Results of calls, with what became of each call."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Literal, get_args
from weakref import getweakrefcount

from celery import current_app
from celery.backends.base import DisabledBackend
from celery.result import AsyncResult, EagerResult

from celery_unique.config.app_state import state_of

from .stored_meta import StoredUnique, carry, read

if TYPE_CHECKING:
    from typing_extensions import TypeVar

    R_co = TypeVar("R_co", covariant=True, default=Any)
else:
    from typing import TypeVar

    R_co = TypeVar("R_co", covariant=True)

logger = logging.getLogger("celery_unique")


Outcome = Literal[
    "created",
    "deduplicated",
    "replaced",
    "joined",
    "rerun",
    "merged",
    "bypassed",
    "would_deduplicate",
    "queued",
]
OUTCOMES: tuple[str, ...] = get_args(Outcome)


@dataclass(slots=True)
class CallOutcome:
    """What became of a call, as its result shows it."""

    outcome: str = "bypassed"
    deduplicated: bool = False
    unique_key: str | None = None
    holder_state: str | None = None


_BYPASSED = CallOutcome()
#: The outcomes of calls whose result is that of the holder, and which publish no message.
_PUBLISH_NOTHING = ("deduplicated", "merged")


class CallFacts:
    """The public attributes, shared by the two kinds of result."""

    call_facts: CallOutcome = _BYPASSED

    @property
    def outcome(self) -> Outcome:
        """One of `OUTCOMES`."""
        return self.call_facts.outcome  # type: ignore[return-value]

    @property
    def deduplicated(self) -> bool:
        """Whether this call was not published, since another task does its work."""
        return self.call_facts.deduplicated

    @property
    def unique_key(self) -> str | None:
        return self.call_facts.unique_key

    @property
    def holder_state(self) -> str | None:
        """The state in which a duplicate found the holder."""
        return self.call_facts.holder_state

    @property
    def unique(self) -> StoredUnique | None:
        """What is stored of the task beside its result: nothing, where nothing is stored."""
        return None


class UniqueResult(CallFacts, AsyncResult, Generic[R_co]):
    """An ``AsyncResult`` of the task that does the work: the caller's own, or the holder."""

    if TYPE_CHECKING:
        id: str

        def get(self, timeout: float | None = None, **options: Any) -> R_co: ...

    @property
    def unique(self) -> StoredUnique | None:
        """What the result backend has stored of the task beside its result, from its end on.

        Queries the backend, as ``result.state`` does. None where the task is not unique, has
        nothing stored yet, or where the backend keeps nothing but the result, or there is none.
        """
        if isinstance(self.backend, DisabledBackend):  # it raises on every access
            return None
        return read(self._get_task_meta())

    def __del__(self) -> None:
        """Celery ends the subscription to the id here. For a duplicate, which has published
        nothing, there is none unless it was waited for; and others may wait for the same id."""
        # Besides ``on_ready``, what waits for a result refers to it: weakly, or it would not end.
        if self.call_facts.outcome in _PUBLISH_NOTHING and getweakrefcount(self) == 1:
            return
        super().__del__()

    def revoke(self, *args: Any, **kwargs: Any) -> None:
        """Revoke the task that does the work. Its key is free immediately if it has not started.

        A duplicate has no task of its own: this revokes the holder for all its callers. One that
        has joined the holder under its own id is revoked alone.
        """
        if self.deduplicated and self.outcome != "joined":
            logger.warning(
                "revoking task %s, which other calls share: this result is a duplicate", self.id
            )
        if self.unique_key is not None:
            self._remember_key()
        super().revoke(*args, **kwargs)

    def _remember_key(self) -> None:
        from .coordinator import UniqueTaskCoordinator  # which makes results

        client = state_of(self.app).part(UniqueTaskCoordinator).client
        client.published.remember(self.id, self.unique_key or "")

    def __reduce__(self) -> tuple[Any, ...]:
        return _restore, (self.id, self.backend, self.parent, self.call_facts)

    def __copy__(self) -> UniqueResult[R_co]:
        return with_facts(super().__copy__(), self.call_facts)  # type: ignore[no-any-return]


class UniqueEagerResult(CallFacts, EagerResult, Generic[R_co]):
    """The result of an eager call."""

    if TYPE_CHECKING:
        id: str

        def get(self, timeout: float | None = None, **options: Any) -> R_co: ...

    def __reduce__(self) -> tuple[Any, ...]:
        return _restore_eager, (self.__reduce_args__(), self.call_facts)

    def __copy__(self) -> UniqueEagerResult[R_co]:
        return _restore_eager(self.__reduce_args__(), self.call_facts)


def result_class(app: Any) -> type[UniqueResult[Any]]:
    """The app's own ``AsyncResult`` with our attributes, keeping a user's class."""
    existing = app.AsyncResult
    if issubclass(existing, UniqueResult):
        return existing  # type: ignore[no-any-return]
    members = {"app": app, "__module__": UniqueResult.__module__}
    if existing.__mro__[1] is AsyncResult:
        return type("UniqueResult", (UniqueResult,), members)
    members["__del__"] = existing.__del__  # a user's own has to run for each result
    return type("UniqueResult", (UniqueResult, existing), members)


def with_facts(result: Any, facts: CallOutcome) -> Any:
    """Set the facts of the result, where it is one of ours."""
    if isinstance(result, CallFacts):
        result.call_facts = facts
    return result


def eager_result(result: EagerResult) -> UniqueEagerResult[Any]:
    if isinstance(result, UniqueEagerResult):
        return result
    return _restore_eager(result.__reduce_args__(), _BYPASSED)


def _restore(task_id: str, backend: Any, parent: Any, facts: CallOutcome) -> UniqueResult[Any]:
    result = result_class(current_app._get_current_object())(
        task_id, backend=carry(backend), parent=parent
    )
    result.call_facts = facts
    return result


def _restore_eager(arguments: tuple[Any, ...], facts: CallOutcome) -> UniqueEagerResult[Any]:
    result: UniqueEagerResult[Any] = UniqueEagerResult(*arguments)
    result.call_facts = facts
    return result
