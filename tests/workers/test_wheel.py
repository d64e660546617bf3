"""The wheel, installed into an empty environment for each extra, and the pages' first examples.

What is tested is what a user installs: the programs that run see nothing of the checkout.
"""

from __future__ import annotations

import json
import re
import subprocess
import tomllib
import urllib.request
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import celery_unique
from celery_unique.testing.store_contract import LockStoreContract
from tests.docs.pages import DOCS, README, ROOT, all_pages, blocks
from tests.support import RedisServer, eventually
from tests.support.environments import Environment, build_wheel, clean_env, outer_python
from tests.support.process import LocalProcess
from tests.support.server import HOST, free_port

#: Ten environments are filled: a machine with much else to do takes minutes.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

DJANGO_PAGE = DOCS / "howto" / "use-django.md"
PROMETHEUS_PAGE = DOCS / "howto" / "watch-with-prometheus.md"
STORE_PAGE = DOCS / "howto" / "write-a-store.md"
SQL_PAGE = DOCS / "howto" / "use-sql.md"
#: What the tests below install.
INSTALLED = {
    *("redis", "sql", "django", "prometheus", "opentelemetry", "sentry", "all", "django,sql")
}
#: Those that bring nothing else: [django] has all of [redis], and monitoring goes with any store.
SAME = {"django,redis", "django,prometheus"} | {
    ",".join(sorted([monitoring, store]))
    for monitoring in ("prometheus", "opentelemetry", "sentry")
    for store in ("redis", "sql")
}

Environments = Callable[[str], Environment]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(tmp_path_factory.mktemp("dist"))


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Environments:
    """``environment("redis")``: one that was empty, with the wheel and this extra.

    A second extra is installed on top of the first, as by a user who needs it later.
    """
    made: dict[str, Environment] = {}

    def make(extras: str) -> Environment:
        first = extras.partition(",")[0]
        if first not in made:
            directory = tmp_path_factory.mktemp(f"with-{first or 'no-extra'}")
            made[first] = Environment(directory / "env")
            made[first].install(f"{wheel}[{first}]" if first else str(wheel))
        if extras != first:
            made[first].install(f"{wheel}[{extras}]")
        return made[first]

    return make


@pytest.fixture
def shop(tmp_path: Path) -> Path:
    """A user's directory."""
    directory = tmp_path / "project"
    directory.mkdir()
    return directory


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., LocalProcess]]:
    """``start(environment, cwd, env)``: ``celery -A shop worker``, ready."""
    workers: list[LocalProcess] = []

    def start_worker(where: Environment, cwd: Path, env: dict[str, str]) -> LocalProcess:
        worker = LocalProcess(
            [
                *(str(where.python), "-m", "celery", "-A", "shop", "worker"),
                *("--loglevel", "INFO", "--concurrency", "1"),
            ],
            log_path=tmp_path / f"worker{len(workers)}.log",
            cwd=cwd,
            env={**clean_env(), **env},
        )
        workers.append(worker)
        worker.start()
        worker.wait_for_log(r"ready\.", timeout=90)
        return worker

    yield start_worker
    for worker in workers:
        worker.kill()


def python_blocks(page: Path) -> list[str]:
    return [block.text for block in blocks(page) if block.language == "python"]


def replaced(text: str, *changes: tuple[str, str]) -> str:
    """The text with nothing but these addresses changed, each of which must be in it."""
    for before, after in changes:
        assert before in text, f"{before!r} is not in the example any more:\n{text}"
        text = text.replace(before, after)
    return text


#: The shop's module and the calls, as README prints them.
SHOP, CALLS = python_blocks(README)[:2]


def elsewhere(redis_url: str) -> dict[str, str]:
    """Celery reads these before what the app says: README's example is run to the letter."""
    server = redis_url.rpartition("/")[0]
    return {"CELERY_BROKER_URL": f"{server}/0", "CELERY_RESULT_BACKEND": f"{server}/1"}


@pytest.fixture(scope="module")
def own_redis() -> Iterator[RedisServer]:
    """The examples name databases 0 and 1, which must be theirs alone."""
    server = RedisServer().start()
    yield server
    server.stop()


@pytest.fixture
def redis_env(own_redis: RedisServer) -> dict[str, str]:
    own_redis.client().flushall()
    return elsewhere(own_redis.fresh_url())


def run_the_example(
    where: Environment,
    cwd: Path,
    start: Callable[..., LocalProcess],
    env: dict[str, str],
    *,
    begin: str = "from shop import rebuild_index\n",
) -> None:
    """Nobody works while the two calls are made, so that the first is still there for the second;
    then a worker runs the one task, and the key is free."""
    task_id = where.script(f"{begin}{CALLS}\nprint(first.id)\n", cwd=cwd, env=env).strip()

    worker = start(where, cwd, env)
    worker.wait_for_log(rf"rebuild_index\[{task_id}\] succeeded", timeout=60)

    again = f"{begin}print(rebuild_index.delay(7).outcome)\n"
    assert where.script(again, cwd=cwd, env=env).strip() == "created"
    assert len(re.findall(r"rebuild_index\[\S+\] received", worker.log())) <= 2


# -- what is in it -----------------------------------------------------------------


def test_the_wheel_holds_the_whole_package_and_nothing_else(wheel):
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "celery_unique"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}

    assert {name for name in listed if (ROOT / name).exists()} == names
    assert "celery_unique/py.typed" in names
    assert any(name.endswith(".lua") for name in names)


def test_the_page_of_a_package_index_has_no_link_into_the_checkout(wheel):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    with zipfile.ZipFile(wheel) as files:
        name = next(name for name in files.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = files.read(name).decode()
    headers, _, readme = metadata.partition("\n\n")

    links = re.findall(r"\]\(([^)]+)\)", readme)

    assert f"Version: {celery_unique.__version__}" in headers
    assert len(links) > 10
    assert [link for link in links if not link.startswith(("https://", "#"))] == []
    ours = [link for link in links if link.startswith(project["urls"]["Homepage"])]
    assert [link for link in ours if not (ROOT / _path(link)).exists()] == []


def test_a_package_index_accepts_the_files_and_renders_the_readme(wheel, tmp_path):
    twine = Environment(tmp_path / "twine").install("twine>=6")
    source = next(wheel.parent.glob("*.tar.gz"))

    done = twine.run("-m", "twine", "check", "--strict", str(wheel), str(source), cwd=tmp_path)

    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("PASSED") == 2


def _path(link: str) -> str:
    return link.partition("/blob/main/")[2].partition("#")[0]


def test_every_extra_and_every_combination_on_a_page_is_tried():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = set(project["optional-dependencies"]) - {"test", "docs", "dev"}
    on_pages = {
        ",".join(sorted(found.split(",")))
        for page in all_pages()
        for found in re.findall(r"\[([a-z]+(?:,[a-z]+)*)\](?!\()", page.read_text(encoding="utf-8"))
        if set(found.split(",")) <= extras
    }

    assert extras <= INSTALLED
    assert on_pages <= INSTALLED | SAME


@pytest.mark.parametrize(
    "also", [["celery==5.5.*", "redis==5.3.*"], ["celery==5.6.*", "redis==8.*"]]
)
def test_the_redis_extra_goes_with_every_supported_celery_and_client(also, wheel, tmp_path):
    """Which celery[redis] does not: see pyproject.toml. The newest of both are tried below."""
    done = subprocess.run(
        [
            *(outer_python(), "-m", "pip", "install", "--dry-run", "--ignore-installed"),
            *("--no-compile", "--report", str(tmp_path / "report.json"), "-q"),
            *(f"{wheel}[redis]", *also),
        ],
        capture_output=True,
        text=True,
        timeout=100,
    )

    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    assert "packaging" in {each["metadata"]["name"] for each in report["install"]}


# -- the examples ------------------------------------------------------------------


def test_without_an_extra_the_example_runs_in_memory(environment, shop):
    (shop / "shop.py").write_text(SHOP)
    env = {"CELERY_BROKER_URL": "memory://", "CELERY_RESULT_BACKEND": "cache+memory://"}

    environment("").script(f"from shop import rebuild_index\n{CALLS}", cwd=shop, env=env)


@pytest.mark.server
@pytest.mark.parametrize("extra", ["redis", "all"])
def test_the_first_example_runs_as_it_is_printed(extra, environment, shop, start, redis_env):
    (shop / "shop.py").write_text(SHOP)
    where = environment(extra)

    run_the_example(where, shop, start, redis_env)

    if extra == "all":
        opened = f"from celery_unique.stores import open_store\nfor url in {URLS}: open_store(url)"
        imported = "import celery_unique.contrib.opentelemetry, celery_unique.contrib.sentry"
        where.script(f"{opened}\n{imported}, celery_unique.contrib.prometheus", cwd=shop)


#: One of each scheme that opens without Django.
URLS = [
    "memory://",
    "redis://localhost/0",
    "rediss://localhost/0",
    "redis+cluster://localhost",
    "sentinel://localhost:26379/0?master_name=shop",
    "sqlite:////tmp/never-opened.db",
    "postgresql+psycopg://localhost/shop",
    "mysql+pymysql://localhost/shop",
]


def test_the_example_runs_with_a_database(environment, shop, start, postgres_url):
    page = python_blocks(SQL_PAGE)[0]
    setting = next(line for line in page.splitlines() if "unique_store_url" in line)
    setting = replaced(setting, ("postgresql+psycopg://shop:secret@localhost/shop", postgres_url))
    (shop / "shop.py").write_text(
        replaced(SHOP, ("celery_unique.install(app)", f"{setting}\ncelery_unique.install(app)"))
    )
    env = {
        "CELERY_BROKER_URL": f"sqla+sqlite:///{shop}/messages.db",
        "CELERY_RESULT_BACKEND": f"db+sqlite:///{shop}/results.db",
    }

    run_the_example(environment("sql"), shop, start, env)


def django_project(directory: Path, redis_url: str, *changes: tuple[str, str]) -> None:
    """The files of the how-to."""
    server = redis_url.removeprefix("redis://").partition("/")[0]
    for block in blocks(DJANGO_PAGE):
        name = block.options.get("caption", "")
        if name in ("shop/settings.py", "shop/celery.py", "shop/__init__.py", "shop/tasks.py"):
            text = block.text
            if name == "shop/settings.py":
                text = replaced(text, ("127.0.0.1:6379", server), *changes)
            path = directory / name
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)


DATABASE = """
DATABASES = {"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": "shop.sqlite3"}}
"""


@pytest.mark.server
@pytest.mark.parametrize("extras", ["django", "django,sql"])
def test_the_first_steps_with_django(extras, environment, shop, start, own_redis):
    own_redis.client().flushall()
    sql = ('"django-cache://default"', f'"django-db://default"{DATABASE}')
    django_project(shop, own_redis.fresh_url(), *([sql] if "sql" in extras else []))
    where, env = environment(extras), {"DJANGO_SETTINGS_MODULE": "shop.settings"}
    begin = "import django\ndjango.setup()\nfrom shop.tasks import rebuild_index\n"

    checked = where.run("-m", "django", "check", "--tag", "celery_unique", cwd=shop, env=env)
    run_the_example(where, shop, start, env, begin=begin)

    assert checked.returncode == 0, checked.stderr


def test_the_first_steps_with_prometheus(environment, shop, start):
    port = free_port()
    text = replaced(python_blocks(PROMETHEUS_PAGE)[0], ("9808", str(port)))
    (shop / "shop.py").write_text(text)
    where = environment("prometheus")

    start(where, shop, {"CELERY_BROKER_URL": "memory://"})

    def served() -> bool:
        with urllib.request.urlopen(f"http://{HOST}:{port}/metrics", timeout=20) as reply:
            return b"celery_unique_held_locks" in reply.read()

    assert eventually(served, timeout=60)


# -- a store of another package ----------------------------------------------------


@pytest.fixture
def store_package(tmp_path: Path) -> Path:
    """The files of the how-to, as a package of its own."""
    directory = tmp_path / "directory-store"
    directory.mkdir()
    for block in blocks(STORE_PAGE):
        (directory / block.options.get("caption", "directory_store.py")).write_text(block.text)
    return directory


def test_the_shipped_contract_passes_on_a_store_of_another_package_and_fails_on_a_broken_one(
    environment, store_package
):
    where = environment("")
    module = store_package / "directory_store.py"
    run_the_contract = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "test_directory_store.py")
    outside = store_package.parent / "tests"
    outside.mkdir()
    (store_package / "test_directory_store.py").rename(outside / "test_directory_store.py")

    where.install("pytest", str(store_package))
    green = where.run(*run_the_contract, cwd=outside)
    broken = "return self.change(key, acts.give_back, task_id, mark_ms)"
    module.write_text(replaced(module.read_text(), (broken, "return True")))
    where.install("--force-reinstall", "--no-deps", str(store_package))
    red = where.run(*run_the_contract, "-k", "give_back", cwd=outside)

    contract = {name for name in dir(LockStoreContract) if name.startswith("test_")}
    passed = re.search(r"(\d+) passed", green.stdout)
    assert green.returncode == 0, green.stdout
    assert passed is not None
    assert int(passed[1]) >= len(contract)
    assert red.returncode == 1, red.stdout
    assert "test_give_back_frees_the_key_and_marks_the_id_withdrawn" in red.stdout
    assert "assert Record(" in red.stdout, "assertions are not explained"


# -- what is not installed ---------------------------------------------------------

SETTINGS = """
SECRET_KEY = "change me"
INSTALLED_APPS = []
CACHES = {
    "own": {"BACKEND": "django.core.cache.backends.redis.RedisCache",
            "LOCATION": "redis://localhost/1"},
    "other": {"BACKEND": "django_redis.cache.RedisCache", "LOCATION": "redis://localhost/1"},
}
DATABASES = {
    "default": {"ENGINE": "django.db.backends.sqlite3", "NAME": "shop.sqlite3"},
    "large": {"ENGINE": "django.db.backends.postgresql", "NAME": "shop"},
}
"""

PROBE = """
import importlib, json, sys
from celery_unique.stores import open_store
from celery_unique.exceptions import ConfigurationError

found = {}
for place in json.loads(sys.argv[1]):
    try:
        open_store(place) if "://" in place else importlib.import_module(place)
        found[place] = ["", ""]
    except Exception as error:
        found[place] = [type(error).__name__, str(error)]
print(json.dumps(found))
"""

REDIS = 'pip install "celery-unique-tasks[redis]"'
SQL = 'pip install "celery-unique-tasks[sql]"'
DJANGO_REDIS = 'pip install "celery-unique-tasks[django,redis]"'
DJANGO_SQL = 'pip install "celery-unique-tasks[django,sql]"'
PROMETHEUS = 'pip install "celery-unique-tasks[prometheus]"'
OPENTELEMETRY = 'pip install "celery-unique-tasks[opentelemetry]"'
SENTRY = 'pip install "celery-unique-tasks[sentry]"'
#: What is named -> the package that is missed first and the command that brings it.
BARE = {
    "redis://localhost/0": ("redis", REDIS),
    "rediss://localhost/0": ("redis", REDIS),
    "redis+cluster://localhost": ("redis", REDIS),
    "sentinel://localhost:26379/0?master_name=shop": ("redis", REDIS),
    "sqlite:////tmp/never-opened.db": ("SQLAlchemy", SQL),
    "postgresql+psycopg://localhost/shop": ("SQLAlchemy", SQL),
    "mysql+pymysql://localhost/shop": ("SQLAlchemy", SQL),
    "django-cache://own": ("Django", DJANGO_REDIS),
    "django-db://default": ("Django", DJANGO_SQL),
    "celery_unique.contrib.prometheus": ("prometheus_client", PROMETHEUS),
    "celery_unique.contrib.opentelemetry": ("opentelemetry-api", OPENTELEMETRY),
    "celery_unique.contrib.sentry": ("sentry-sdk", SENTRY),
}
WITH_DJANGO = {
    "django-cache://own": ("redis", DJANGO_REDIS),
    "django-cache://other": ("django-redis", DJANGO_REDIS),
    "django-db://default": ("SQLAlchemy", DJANGO_SQL),
    "django-db://large": ("psycopg", DJANGO_SQL),
}
WITH_SQLALCHEMY = {
    "sqlite:////tmp/never-opened.db": ("", ""),
    "postgresql+psycopg://localhost/shop": ("driver", SQL),
    "mysql+pymysql://localhost/shop": ("driver", SQL),
    "django-db://default": ("", ""),
    "django-db://large": ("psycopg", DJANGO_SQL),
}
#: hiredis is faster, and not needed.
WITH_REDIS = {"redis://localhost/0": ("", ""), "django-cache://own": ("", "")}


def probe(where: Environment, cwd: Path, places: list[str]) -> dict[str, tuple[str, str]]:
    """The class and the text of the error at each place; empty where there is none."""
    (cwd / "probe.py").write_text(PROBE)
    (cwd / "settings.py").write_text(SETTINGS)
    done = where.run(
        "probe.py", json.dumps(places), cwd=cwd, env={"DJANGO_SETTINGS_MODULE": "settings"}
    )
    assert done.returncode == 0, done.stderr
    return {place: (kind, text) for place, (kind, text) in json.loads(done.stdout).items()}


def command_in(message: str) -> str:
    """The command, which is the last thing said: it can be copied to the end of the line."""
    found = re.search(r'pip install "[^"]+"$', message)
    return found[0] if found else ""


def test_without_the_redis_package_a_redis_broker_is_met_with_the_command(environment, shop):
    (shop / "shop.py").write_text(SHOP)
    where = environment("")
    called = where.run("-c", "import shop; shop.rebuild_index.delay(7)", cwd=shop)
    worker = where.run("-m", "celery", "-A", "shop", "worker", cwd=shop)
    listed = where.run("-m", "celery", "-A", "shop", "unique", "list", cwd=shop)

    assert "ConfigurationError: " in called.stderr
    for done in (called, worker, listed):
        assert done.returncode != 0
        assert REDIS in done.stderr, done.stderr
    for done in (worker, listed):
        assert "Traceback" not in done.stderr, done.stderr


def test_a_missing_package_is_a_configuration_error_whose_command_brings_it(environment, shop):
    where = environment("")
    named: dict[str, str] = {}
    for also, expected in (
        ([], BARE),
        (["Django>=5.2"], WITH_DJANGO),
        (["SQLAlchemy>=2.0"], WITH_SQLALCHEMY),
        (["redis>=5.3"], WITH_REDIS),
    ):
        if also:
            where.install(*also)
        for place, (kind, text) in probe(where, shop, list(expected)).items():
            package, command = expected[place]
            assert kind == ("ConfigurationError" if command else ""), f"{place}: {kind}: {text}"
            assert package in text, f"{place}: {text}"
            assert command_in(text) == command, f"{place}: {text}"
            named[place] = command or named[place]

    monitoring = (PROMETHEUS, OPENTELEMETRY, SENTRY)
    for command in (REDIS, SQL, DJANGO_REDIS, DJANGO_SQL, *monitoring):
        places = [place for place, last in named.items() if last == command]
        where.run_command(command)
        wrong = {place: text for place, (kind, text) in probe(where, shop, places).items() if kind}
        assert not wrong, f"after {command}: {wrong}"
        assert places
