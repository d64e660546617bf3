"""The files of a release: what they name exists, and each fact stands in one place."""

from __future__ import annotations

import json
import re
import subprocess
import tomllib
from collections.abc import Iterable
from configparser import ConfigParser
from importlib import metadata

import pytest
import yaml

import celery_unique
from celery_unique.operations.doctor.checks import PYTHONS, TESTED
from tests.compatibility.page import RESULTS_FILE
from tests.docs.pages import ROOT
from tests.workers.matrix import OF_VERSIONS

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
YAML = [
    *WORKFLOWS,
    *sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml")),
    *(ROOT / name for name in (".readthedocs.yaml", ".pre-commit-config.yaml")),
    ROOT / ".github" / "dependabot.yml",
    ROOT / "example_project" / "compose.yaml",
]


def tracked_files_with(text: str) -> set[str]:
    found = subprocess.run(
        ["git", "grep", "--untracked", "-lF", text], cwd=ROOT, capture_output=True, text=True
    )
    return set(found.stdout.split())


@pytest.mark.parametrize("path", YAML, ids=lambda path: path.name)
def test_every_yaml_file_can_be_read(path):
    assert isinstance(yaml.safe_load(path.read_text(encoding="utf-8")), dict)


def test_the_version_stands_in_one_place():
    assert "version" in PROJECT["project"]["dynamic"]
    assert PROJECT["tool"]["hatch"]["version"]["path"] == "celery_unique/__init__.py"
    with_version = tracked_files_with(f'version__ = "{celery_unique.__version__}"')
    assert with_version == {"celery_unique/__init__.py"}
    assert celery_unique.__version__ == metadata.version("celery-unique-tasks")


def test_the_address_of_the_repository_stands_in_one_file():
    home = PROJECT["project"]["urls"]["Homepage"]

    assert all(url.startswith(home) for url in PROJECT["project"]["urls"].values())
    # The page on releases shows the command that writes it.
    assert tracked_files_with(home) <= {"pyproject.toml", "docs/contributing/release.md"}


def test_set_repository_writes_every_address(tmp_path):
    (tmp_path / "scripts").mkdir()
    script = tmp_path / "scripts" / "set-repository"
    script.write_bytes((ROOT / "scripts" / "set-repository").read_bytes())
    (tmp_path / "pyproject.toml").write_bytes((ROOT / "pyproject.toml").read_bytes())

    subprocess.run(["bash", script, "https://git.example/me/unique/"], check=True)

    text = (tmp_path / "pyproject.toml").read_text()
    urls = tomllib.loads(text)["project"]["urls"]
    assert urls["Issues"] == "https://git.example/me/unique/issues"
    assert PROJECT["project"]["urls"]["Homepage"] not in text


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_what_a_workflow_runs_exists(path):
    jobs = yaml.safe_load(path.read_text(encoding="utf-8"))["jobs"].values()
    lines = [step["run"] for job in jobs for step in job["steps"] if "run" in step]
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")

    for line in lines:
        command, *arguments = line.split()
        if command == "make":
            assert all(re.search(rf"^{re.escape(a)}:", makefile, re.MULTILINE) for a in arguments)
        elif command == ".ci/run":
            assert (ROOT / command).is_file()
        else:
            assert command in ("python", "test", ".venv/bin/celery", ".venv/bin/python"), line


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_a_workflow_that_runs_the_tests_has_the_history(path):
    """The previous release is played from it, see ``tests/chaos/previous.py``."""
    jobs = yaml.safe_load(path.read_text(encoding="utf-8"))["jobs"].values()
    testing = [
        job["steps"]
        for job in jobs
        if any(re.search(r"\.ci/run|pytest", step.get("run", "")) for step in job["steps"])
    ]
    checkouts = [
        step.get("with", {})
        for steps in testing
        for step in steps
        if step.get("uses", "").startswith("actions/checkout@")
    ]

    assert bool(testing) == (path.name != "release.yml")
    assert len(checkouts) == len(testing)
    assert all(options.get("fetch-depth") == 0 for options in checkouts)


def test_the_workflow_of_every_push_calls_the_ci_script():
    text = (ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8")

    assert "- run: .ci/run" in text


def test_a_release_is_published_without_a_password_and_with_attestations():
    text = (ROOT / ".github" / "workflows" / "release.yml").read_text(encoding="utf-8")

    publish = yaml.safe_load(text)["jobs"]["publish"]
    assert publish["permissions"] == {"id-token": "write"}
    assert publish["steps"][-1]["with"]["attestations"] is True
    assert "password" not in re.sub(r"#.*", "", text)


def test_only_celery_has_an_upper_bound():
    extras = PROJECT["project"]["optional-dependencies"]
    users = [*PROJECT["project"]["dependencies"]]
    users += [
        each
        for name in ("redis", "sql", "django", "prometheus", "opentelemetry", "sentry")
        for each in extras[name]
    ]

    assert [each for each in users if "<" in each or "==" in each] == ["celery>=5.5,<5.8"]


def series(version: str) -> str:
    return ".".join(version.split(".")[:2])


def in_order(versions: Iterable[str]) -> list[str]:
    return sorted(versions, key=lambda version: [int(part) for part in version.split(".")])


def test_the_versions_that_the_doctor_knows_are_those_of_the_page():
    runs = json.loads(RESULTS_FILE.read_text(encoding="utf-8"))["runs"]

    for package, (oldest, newest) in TESTED.items():
        ran = in_order({run["packages"][package] for run in runs if run["packages"][package]})
        assert f"{ran[0]}.".startswith(f"{oldest}.")
        assert f"{ran[-1]}.".startswith(f"{newest}.")
    pythons: dict[str, set[str]] = {}
    for run in runs:
        if set(OF_VERSIONS) <= run["cells"].keys():
            pythons.setdefault(series(run["packages"]["celery"]), set()).add(series(run["python"]))
    assert {celery: tuple(in_order(found)) for celery, found in pythons.items()} == PYTHONS


def test_tox_has_every_version_that_has_run_and_the_reasons_for_others_are_right():
    tox = ConfigParser()
    tox.read(ROOT / "tox.ini")
    listed = tox["testenv"]["deps"] + tox["testenv"]["commands_pre"]
    bounds = re.findall(r"(\w+)>=([\d.]+),<([\d.]+)", listed)
    env_list = tox["tox"]["env_list"]
    pairs = {
        f"{python[0]}.{python[1:]}-{celery[0]}.{celery[1:]}"
        for pythons, celeries in re.findall(r"py([{}\d,]+)-celery([{}\d,]+)", env_list)
        for python in re.findall(r"\d+", pythons)
        for celery in re.findall(r"\d+", celeries)
    }

    for package, (oldest, newest) in TESTED.items():
        lower = [low for name, low, _ in bounds if name == package]
        assert (lower[0], lower[-1]) == (oldest, newest)
    pythons = {python for found in PYTHONS.values() for python in found}
    assert {f"{python}-{celery}" for python in pythons for celery in PYTHONS} - pairs == {
        "3.14-5.5"  # as NOT_COMBINED of tests/workers/matrix.py says
    }
    assert "py311-redis{53,6,7,8}" in env_list  # as BETWEEN says


def test_the_services_of_the_example_run_what_exists():
    services = yaml.safe_load((ROOT / "example_project" / "compose.yaml").read_text())["services"]

    assert set(services) == {"redis", "migrate", "web", "worker", "beat", "flower"}
    commands = {name: service["command"].split()[:3] for name, service in services.items()}
    assert commands.pop("redis")[0] == "redis-server"
    assert {tuple(command[:2]) for command in commands.values()} == {
        ("python", "manage.py"),
        ("celery", "-A"),
    }
    ports = [port for service in services.values() for port in service.get("ports", ())]
    assert ports
    assert all(port.startswith("127.0.0.1:") for port in ports)
