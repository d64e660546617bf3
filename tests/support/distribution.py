"""Which test process runs what, and when: the tests of a file together, and those of a dear server.

Each test process starts the servers that its tests ask for. Some take seconds of a core to start
and never rest, so that all tests that need such a server go to one process.
"""

from __future__ import annotations

import pytest
from xdist.scheduler import LoadScopeScheduling

#: A word in the id of a test, which names its file, itself and its parameters -> its group.
DEAR = {
    "rabbitmq": "rabbitmq",
    "cluster": "several Redis servers",
    "sentinel": "several Redis servers",
    "mariadb": "mariadb",
}
#: The fixtures that start them.
SERVERS = frozenset({"rabbitmq_server", "redis_cluster", "redis_sentinels", "mariadb_server"})

#: Files whose tests with different parameters share nothing: each parameter goes by itself.
BY_PARAMETER = frozenset({"tests/workers/test_matrix.py"})


#: Directories whose tests mostly wait: for workers, leases and browsers. The others use a core.
WAITING = ("workers", "chaos", "example", "django", "smoke")
#: Of the others, those with long files, which begin first.
LONG = ("stores", "integration")
#: What waits is through when this share of the rest is: the end belongs to many short files, so
#: that no process ends alone with a long one.
DONE_WAITING = 0.85


class ByServerOrFile(LoadScopeScheduling):
    """In place of ``loadfile``. (``loadgroup`` of xdist 3.8 finds no group under pytest 9.2.)"""

    def _split_scope(self, nodeid: str) -> str:
        file, _, name = nodeid.partition("::")
        if file in BY_PARAMETER:
            return _group_of(nodeid) or name.partition("[")[2]
        return _group_of(nodeid) or file


def check_name(item: pytest.Item) -> None:
    """A test that asks for a dear server under a name that does not tell would start another."""
    used = SERVERS.intersection(getattr(item, "fixturenames", ()))
    if used and _group_of(item.nodeid) is None:
        raise pytest.UsageError(
            f"{item.nodeid} uses {', '.join(used)}: tell so in its name or that of its file, by "
            f"one of {', '.join(DEAR)}, so that it runs where that server is"
        )


def _group_of(name: str) -> str | None:
    return next((group for word, group in DEAR.items() if word in name), None)


def put_in_order(items: list[pytest.Item]) -> None:
    """Files that wait and files that work in turns: cores are neither idle nor overrun."""
    files: dict[str, list[pytest.Item]] = {}
    for item in items:
        files.setdefault(item.nodeid.partition("::")[0], []).append(item)
    waiting = sorted((file for file in files if _waits(file)), key=_rank)
    working = sorted((file for file in files if not _waits(file)), key=_rank)
    turns = {file: turn * DONE_WAITING / len(waiting) for turn, file in enumerate(waiting)}
    turns |= {file: turn / len(working) for turn, file in enumerate(working)}
    items[:] = [item for file in sorted(files, key=turns.__getitem__) for item in files[file]]


def _waits(file: str) -> bool:
    return _directory(file) in WAITING


def _rank(file: str) -> int:
    order = (*WAITING, *LONG)
    return order.index(_directory(file)) if _directory(file) in order else len(order)


def _directory(file: str) -> str:
    """Below tests/, for the files of this suite."""
    return file.removeprefix("tests/").partition("/")[0]
