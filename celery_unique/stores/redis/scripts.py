"""The acts as Lua, one file each in ``stores/lua``, with a common prelude."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path

_DIRECTORY = Path(__file__).parent.parent / "lua"


@dataclass(frozen=True, slots=True)
class Script:
    body: bytes
    sha: str


def load(name: str) -> Script:
    """An act behind the prelude, which reads the record for all of them."""
    text = b"".join((_DIRECTORY / f"{part}.lua").read_bytes() for part in ("prelude", name))
    # Comments stay at home: a one-way act is sent whole.
    body = re.sub(rb"(?m)^ *--.*\n", b"", text)
    return Script(body, hashlib.sha1(body, usedforsecurity=False).hexdigest())


ACQUIRE = load("acquire")
CONFIRM = load("confirm")
GIVE_BACK = load("give_back")
HELP = load("help")
CANCEL = load("cancel")
RELEASE = load("release")
START = load("start")
RENEW = load("renew")
RETRY = load("retry")
FINISH = load("finish")
SETTLE = load("settle")
FORGET = load("forget")
