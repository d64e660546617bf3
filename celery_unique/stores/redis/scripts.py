"""The acts as Lua scripts, one file each in ``lua/``."""

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
        """The command with the text of the script, for a server that does not have it yet."""
        return ("EVAL", self.body, *command[2:])


def load(name: str) -> Script:
    """The script, with ``lua/include/NAME.lua`` in place of each line ``-- @include NAME``."""
    text = _with_includes((_DIRECTORY / f"{name}.lua").read_bytes())
    # Without comments and indentation: a script is sent whole where it is not known yet.
    body = re.sub(rb"(?m)^ *(--.*\n)?", b"", text)
    return Script(body, hashlib.sha1(body, usedforsecurity=False).hexdigest())


def _with_includes(text: bytes) -> bytes:
    return re.sub(
        rb"(?m)^ *-- @include (\w+)\n",
        lambda found: _with_includes(
            (_DIRECTORY / "include" / f"{found[1].decode()}.lua").read_bytes()
        ),
        text,
    )


ACQUIRE = load("acquire")
PROBE = load("probe")
PUBLISH = load("publish")
PUBLISH_PLAIN = load("publish_plain")
#: Of a call that is merged, in place of these two.
MERGE = load("merge")
MERGE_PUBLISH = load("merge_publish")
UNMERGE = load("unmerge")
WITHDRAW = load("withdraw")
CONFIRM = load("confirm")
GIVE_BACK = load("give_back")
HELP = load("help")
CANCEL = load("cancel")
RELEASE = load("release")
START = load("start")
RENEW = load("renew")
RETRY = load("retry")
FINISH = load("finish")
FINISH_WITH_RESULT = load("finish_with_result")
SETTLE = load("settle")
FORGET = load("forget")
#: These access only the record of a key that has no followers; acquire, unless it adds one.
RECORD_ONLY = frozenset(
    name
    for script in (
        *(ACQUIRE, CONFIRM, GIVE_BACK, HELP, CANCEL, RELEASE),
        *(START, RENEW, RETRY, FINISH, SETTLE, FORGET),
    )
    for name in (script.sha, script.body)
)

FOLLOW = load("follow")
FOLLOWERS = load("followers")
COMPLETE_FOLLOWER = load("complete_follower")
REAP = load("reap")
PROMOTE = load("promote")
PARKED = load("parked")

BY_SHA = {each.sha: each for each in list(globals().values()) if isinstance(each, Script)}
