"""A dict that keeps its newest entries, up to a limit."""

from __future__ import annotations

from collections import OrderedDict
from typing import TypeVar

Name = TypeVar("Name")
Value = TypeVar("Value")


class BoundedDict(OrderedDict[Name, Value]):
    """Add with ``remember``; or set, and ``trim`` where the limit is passed."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most

    def remember(self, name: Name, value: Value) -> None:
        """Set the entry, and drop the oldest ones beyond the limit."""
        self[name] = value
        self.trim()

    def trim(self) -> None:
        while len(self) > self._most:
            try:
                self.popitem(last=False)
            except KeyError:  # another thread was faster
                return
