"""Which tests make test-fast leaves out is told from the fixtures they use."""

from __future__ import annotations

import pytest

pytest_plugins = ["pytester"]

USES_A_SERVER = """
    import pytest

    def test_uses_redis(redis_url): ...

    @pytest.fixture
    def store(postgres_url): ...

    def test_uses_postgres_through_a_fixture(store): ...

    def test_uses_a_private_server(start_server): ...
"""
NEEDS_NONE = """
    def test_needs_none(sqlite_url, start_worker): ...
"""
CHOOSES_A_SERVER_BY_PARAMETER = """
    import pytest

    @pytest.fixture(params=["memory", pytest.param("redis_url", marks=pytest.mark.server)])
    def marked(request): ...

    def test_marked_parameter(marked): ...
"""
HIDDEN = """
    def test_hides_its_server(request):
        request.getfixturevalue("redis_url")
"""
CONFTEST = """
    import pytest
    from tests.conftest import *
    from tests.conftest import pytest_collection_modifyitems
    from tests.support import RedisServer

    @pytest.fixture(scope="session")
    def redis_server():
        return RedisServer()
"""


@pytest.fixture
def inner(pytester: pytest.Pytester, pytestconfig: pytest.Config) -> pytest.Pytester:
    pytester.makeini(
        "[pytest]\naddopts = -p no:celery -p no:valkey\nmarkers =\n    server: needs a server\n"
    )
    pytester.makeconftest(CONFTEST)
    pytester.syspathinsert(pytestconfig.rootpath)
    return pytester


def selected(inner: pytest.Pytester, source: str) -> list[str]:
    inner.makepyfile(source)
    result = inner.runpytest_inprocess("--collect-only", "-q", "-m", "not server")
    return [line.rpartition("::")[2] for line in result.outlines if "::" in line]


@pytest.mark.parametrize(
    ("source", "left"),
    [
        (USES_A_SERVER, []),
        (NEEDS_NONE, ["test_needs_none"]),
        (CHOOSES_A_SERVER_BY_PARAMETER, ["test_marked_parameter[memory]"]),
    ],
    ids=["uses a server", "needs none", "marked parameter"],
)
def test_tests_that_use_a_server_are_marked(inner, source, left):
    assert selected(inner, source) == left


def test_a_server_got_at_run_time_without_the_marker_is_an_error(inner):
    inner.makepyfile(HIDDEN)

    result = inner.runpytest_inprocess()

    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*mark it, or the parameter*pytest.mark.server*"])
