"""The acts as Lua, one file each in ``lua/``, with a common prelude."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_DIRECTORY = Path(__file__).parent / "lua"


@dataclass(frozen=True, slots=True)
class Script:
    body: bytes
    sha: str

    def whole(self, command: tuple[Any, ...]) -> tuple[Any, ...]:
        """The command with the text of the script: the server carries it out, and knows it then."""
        return ("EVAL", self.body, *command[2:])


def load(name: str, *before: str, at_first: tuple[str, ...] = ()) -> Script:
    """An act behind what it shares with others: the prelude reads the record for all of them.

    ``at_first`` is a short way for the common case, which is found before the record is read.
    """
    parts = ("entries", *at_first, "prelude", *before, name)
    text = b"".join((_DIRECTORY / f"{part}.lua").read_bytes() for part in parts)
    # Comments and indentation stay at home: a script is sent whole where it is not known yet.
    body = re.sub(rb"(?m)^ *(--.*\n)?", b"", text)
    return Script(body, hashlib.sha1(body, usedforsecurity=False).hexdigest())


#: For the acts that change what followers wait for.
FOLLOWING = "following"

ACQUIRE = load("acquire", FOLLOWING, at_first=("free", "alone", "acquire_alone"))
CONFIRM = load("confirm", FOLLOWING, at_first=("alone", "confirm_alone"))
GIVE_BACK = load("give_back", FOLLOWING)
HELP = load("help")
CANCEL = load("cancel", FOLLOWING)
RELEASE = load("release", FOLLOWING)
START = load("start", FOLLOWING, at_first=("alone", "start_alone"))
RENEW = load("renew", FOLLOWING)
RETRY = load("retry", FOLLOWING)
FINISH = load("finish", FOLLOWING, at_first=("alone", "finish_alone"))
SETTLE = load("settle", FOLLOWING)
FORGET = load("forget")
#: These touch nothing but the record of a key that has no followers; acquire, unless it adds one.
RECORD_ONLY = frozenset(
    name
    for script in (
        *(ACQUIRE, CONFIRM, GIVE_BACK, HELP, CANCEL, RELEASE),
        *(START, RENEW, RETRY, FINISH, SETTLE, FORGET),
    )
    for name in (script.sha, script.body)
)

FOLLOW = load("follow", FOLLOWING)
FOLLOWERS = load("followers", FOLLOWING)
COMPLETE_FOLLOWER = load("complete_follower", FOLLOWING)
REAP = load("reap", FOLLOWING)
PROMOTE = load("promote", FOLLOWING)
