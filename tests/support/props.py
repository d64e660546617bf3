"""How a task body and a test talk to each other: lists in the test's Redis database.

A body says that it runs, and waits for the test's word; so nothing has to be timed.
"""

from __future__ import annotations

import json
import os
import time
from typing import Any

import redis

#: Longer than any test waits: a body that nobody releases fails by itself.
PATIENCE_S = 120


class Props:
    def __init__(self, url: str) -> None:
        # redis-py's own time-out of five seconds would end a wait for the test's word.
        self.redis = redis.Redis.from_url(url, decode_responses=True, socket_timeout=None)

    # -- the body ------------------------------------------------------------

    def enter(self, tag: str) -> int:
        """Say that a body runs. How many have by now, this one included."""
        return int(self.redis.rpush(f"ran:{tag}", os.getpid()))

    def wait_for_word(self, tag: str, run: int = 1) -> None:
        """Each run waits for a word of its own: a dying one must not take the next one's."""
        if self.redis.blpop([f"go:{tag}:{run}"], timeout=PATIENCE_S) is None:
            raise TimeoutError(f"nobody let {tag} go on")

    def tell(self, what: str, task_id: str, **facts: Any) -> None:
        """What a signal told in the worker."""
        self.redis.rpush(f"told:{task_id}", json.dumps({"signal": what, **facts}))

    def note(self, tag: str, event: str, **facts: Any) -> None:
        line = json.dumps({"event": event, "at": time.time(), **facts})
        self.redis.rpush(f"diary:{tag}", line)

    # -- the test ------------------------------------------------------------

    def runs(self, tag: str) -> int:
        return int(self.redis.llen(f"ran:{tag}"))

    def pids(self, tag: str) -> list[int]:
        """The process of each run."""
        return [int(pid) for pid in self.redis.lrange(f"ran:{tag}", 0, -1)]

    def let_go(self, tag: str, run: int = 1) -> None:
        self.redis.rpush(f"go:{tag}:{run}", "go")

    def told(self, task_id: str) -> list[dict[str, Any]]:
        return [json.loads(fact) for fact in self.redis.lrange(f"told:{task_id}", 0, -1)]

    def notes(self, tag: str, event: str) -> list[dict[str, Any]]:
        """In the order in which they were made."""
        lines = [json.loads(line) for line in self.redis.lrange(f"diary:{tag}", 0, -1)]
        return [line for line in lines if line["event"] == event]
