"""The package carries its types: checkers of users accept right use, and refuse wrong use."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest
from celery.app.task import Task

from celery_unique import CallOptions, TaskOptions, UniqueTask
from celery_unique.policy.option_names import CALL_ONLY, TASK_OPTIONS
from celery_unique.policy.option_types import UniqueOptions
from celery_unique.policy.states import GROUPS, STATES, StateGroup, StateName

HERE = Path(__file__).parent
BIN = Path(sys.executable).parent
FILES = ("sample_use.py", "wrong_use.py")

STRICT = "[mypy]\nstrict = true\n"
#: As where celery-types is not installed.
WITHOUT_STUBS = f"""{STRICT}disallow_subclassing_any = false

[mypy-celery.*,kombu.*]
follow_imports = skip
follow_imports_for_stubs = true
"""


def mypy(directory: Path, config: str = STRICT) -> list[str | Path]:
    (directory / "mypy.ini").write_text(config)
    return ["mypy", "--config-file", "mypy.ini", "--no-incremental", *FILES]


def mypy_without_stubs(directory: Path) -> list[str | Path]:
    return mypy(directory, WITHOUT_STUBS)


def pyright(directory: Path) -> list[str | Path]:
    (directory / "pyrightconfig.json").write_text(json.dumps({"typeCheckingMode": "strict"}))
    return ["pyright", "--project", ".", "--pythonpath", sys.executable]


def ty(_: Path) -> list[str | Path]:
    return ["ty", "check", "--python", sys.executable, "--output-format", "concise", *FILES]


@pytest.fixture(scope="module", params=[mypy, mypy_without_stubs, pyright, ty])
def checked(request, tmp_path_factory):
    """The name of a checker, and its report."""
    checker = request.param
    # Elsewhere, since here the package counts as code of the user, which is checked as well.
    directory = tmp_path_factory.mktemp(checker.__name__)
    for name in FILES:
        (directory / name).write_text((HERE / name).read_text())
    command, *arguments = checker(directory)
    done = subprocess.run(
        [BIN / command, *arguments], cwd=directory, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1, done.stdout + done.stderr
    return checker.__name__, done.stdout


def lines_with_errors(report: str, file: str) -> set[int]:
    return {int(line) for line in re.findall(rf"{file}:(\d+):.*error", report)}


@pytest.mark.slow
def test_a_checker_accepts_the_code_of_a_user(checked):
    _, report = checked

    assert lines_with_errors(report, "sample_use.py") == set(), report


@pytest.mark.slow
def test_a_checker_refuses_each_mistake(checked):
    checker, report = checked
    wrong = {
        number
        for number, line in enumerate((HERE / "wrong_use.py").read_text().splitlines(), 1)
        if "# wrong" in line and not (checker == "ty" and line.endswith("but not for ty"))
    }

    assert lines_with_errors(report, "wrong_use.py") == wrong


def test_the_types_name_every_option():
    celerys = {"name", "queue", "countdown"}

    assert set(UniqueOptions.__annotations__) == TASK_OPTIONS
    assert {option for option in vars(UniqueTask) if option in TASK_OPTIONS} == TASK_OPTIONS
    assert set(CallOptions.__annotations__) >= TASK_OPTIONS | CALL_ONLY
    assert not CALL_ONLY & set(TaskOptions.__annotations__)
    assert celerys <= set(CallOptions.__annotations__) | set(TaskOptions.__annotations__)


def test_the_types_name_every_option_of_this_celerys_tasks():
    attributes = {name for name, value in vars(Task).items() if is_option(name, value)}
    assert {"acks_late", "typing", "rate_limit"} <= attributes

    assert attributes | {name for name, _ in Task.from_config} <= set(TaskOptions.__annotations__)


def is_option(name: str, value: object) -> bool:
    its_own = name.startswith("_") or name in ("app", "from_config")
    return not (its_own or callable(value) or isinstance(value, (property, classmethod)))


def test_the_types_name_every_state():
    assert get_args(StateName) == STATES
    assert set(get_args(StateGroup)) == set(GROUPS)


def test_the_sample_uses_every_option():
    sample = (HERE / "sample_use.py").read_text()

    assert {name for name in TASK_OPTIONS | CALL_ONLY if f"{name}=" not in sample} == set()
