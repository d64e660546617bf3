"""Which test process runs what: the tests of a file together, and those of a dear server.

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


class ByServerOrFile(LoadScopeScheduling):
    """In place of ``loadfile``. (``loadgroup`` of xdist 3.8 finds no group under pytest 9.2.)"""

    def _split_scope(self, nodeid: str) -> str:
        return _group_of(nodeid) or nodeid.partition("::")[0]


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
