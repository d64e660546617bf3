"""Small records that many calls make: frozen for the type checker, cheap at run time."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeVar, dataclass_transform

Record = TypeVar("Record")


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def value(cls: type[Record]) -> type[Record]:
    """A dataclass with slots. mypy refuses to change one; Python does not look, since making a
    dataclass that is frozen at run time takes three times as long, several times a call."""
    return dataclass(slots=True)(cls)
