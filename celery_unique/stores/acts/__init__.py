"""The acts of the lock protocol as plain functions over one record.

A store that can run Python next to its data (memory, SQL by compare-and-set) calls these; the
Redis store has the same rules as Lua, and a state machine compares all of them with a model.
Nothing here reads a clock or does I/O.

Each function gets the record, its arguments, and the store's clock ``now`` in milliseconds. It
first removes what has lapsed, then changes the record in place.
"""

from __future__ import annotations

from .acquire import acquire
from .confirm import cancel, confirm, give_back, help_holder, release
from .followers import complete_follower, follow, followers_of
from .lanes import parked_ids
from .merge import unmerge
from .reap import promote, reap
from .run import finish, forget, renew, retry, settle, start

__all__ = [
    "acquire",
    "cancel",
    "complete_follower",
    "confirm",
    "finish",
    "follow",
    "followers_of",
    "forget",
    "give_back",
    "help_holder",
    "parked_ids",
    "promote",
    "reap",
    "release",
    "renew",
    "retry",
    "settle",
    "start",
    "unmerge",
]
