"""The keys that a walk has told of, not all of them: a walk over millions would keep millions."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

#: SCAN tells of a key again when the server shrinks its tables, and mostly soon after.
MOST = 100_000


class Recent:
    """As a set, of the last ones that were added."""

    def __init__(self) -> None:
        self._keys: OrderedDict[str, None] = OrderedDict()

    def __contains__(self, key: str) -> bool:
        return key in self._keys

    def update(self, keys: Iterable[str]) -> None:
        self._keys.update(dict.fromkeys(keys))
        while len(self._keys) > MOST:
            self._keys.popitem(last=False)
