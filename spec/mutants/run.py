"""Apply each patch to a copy of the project, and run the checks until one fails.

python -m spec.mutants.run [NAME ...]     those whose names contain one of the words; else all
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
COPIED = ("celery_unique", "spec", "tests", "docs", "pyproject.toml", "README.md", "CHANGELOG.md")
#: For all checks of a mutant together: what has not been found by then is not found.
LONGEST_S = 600

#: How many seeds of the simulation a mutant has to survive.
SEEDS = "3000"
SIMULATION = ("simulation", "tests/spec/test_simulation.py -k no_seed")
CHAOS = ("chaos", "tests/chaos/test_chaos.py -k under_faults and one and redis")
CHAOS_OF_SQL = ("chaos", "tests/chaos/test_chaos.py -k another_lock_store and postgresql")
#: The checks for each part, in the order in which they are tried: those of the specification first,
#: then chaos, and other tests where none of these has found it.
CHECKS: dict[str, list[tuple[str, str]]] = {
    "lua": [
        ("linearizability", "tests/spec/test_linearizability.py -k explained and redis"),
        CHAOS,
        ("contract", "tests/stores/test_contract.py -k redis"),
        ("against the acts", "tests/stores/test_redis_against_python.py"),
    ],
    "sql": [
        ("linearizability", "tests/spec/test_linearizability.py -k explained and sqlite"),
        CHAOS_OF_SQL,
        ("contract", "tests/stores/test_contract.py -k sqlite"),
        ("tests of the store", "tests/stores/test_sql_store.py -k sqlite"),
    ],
    "act": [
        ("model", "tests/spec/test_protocol.py -k no_order"),
        SIMULATION,
        ("linearizability", "tests/spec/test_linearizability.py -k explained and redis"),
        CHAOS_OF_SQL,
        ("contract", "tests/stores/test_contract.py -k memory"),
        (
            "integration",
            "tests/integration/test_followers.py tests/integration/test_replacing.py",
        ),
    ],
    "caller": [
        SIMULATION,
        CHAOS,
        ("unit", "tests/unit/publish"),
        (
            "integration",
            "tests/integration/test_publish_failures.py tests/integration/test_idempotency_keys.py",
        ),
    ],
    "worker": [
        SIMULATION,
        CHAOS,
        ("unit", "tests/unit/worker"),
        ("integration", "tests/integration/test_guard.py"),
        (
            "workers",
            "tests/workers/faults/test_redelivery.py tests/workers/test_task_ends.py",
        ),
        ("store outage", "tests/workers/faults/test_store_outage.py"),
    ],
}


@dataclass(frozen=True, slots=True)
class Mutant:
    path: Path

    @property
    def name(self) -> str:
        return self.path.stem.partition("-")[2]

    @property
    def part(self) -> str:
        return self.name.partition("-")[0]

    @property
    def about(self) -> str:
        return self.path.read_text(encoding="utf-8").partition("\n")[0]


def mutants() -> list[Mutant]:
    return [Mutant(path) for path in sorted(Path(__file__).parent.glob("*.patch"))]


def apply(mutant: Mutant, root: Path, *, check: bool = False) -> str:
    """Apply the patch in this tree, or only see whether it applies; returns what git says."""
    command = ["git", "apply", "-C1", *(["--check"] if check else []), str(mutant.path)]
    applied = subprocess.run(command, cwd=root, check=False, capture_output=True, text=True)
    return applied.stderr if applied.returncode else ""


def ended(check: str, arguments: str, root: Path, longest_s: float = LONGEST_S) -> str:
    """How the check ends in this copy of the project: "passed", "failed", or "timed out", which
    finds nothing: a mutant that hangs a test fails by the time limit of that test."""
    files, _, word = arguments.partition(" -k ")
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
    command += [*files.split(), *(["-k", word] if word else [])]
    try:
        code = subprocess.run(
            command,
            cwd=root,
            check=False,
            capture_output=True,
            timeout=longest_s,
            env={**os.environ, "CELERY_UNIQUE_SEEDS": SEEDS},
        ).returncode
    except subprocess.TimeoutExpired:
        return "timed out"
    if code not in (0, 1):
        raise RuntimeError(f"{check}: {' '.join(command)} ended with {code}")
    return "failed" if code else "passed"


@contextmanager
def copied(mutant: Mutant | None) -> Iterator[Path]:
    """A copy of the project, with the patch of the mutant if there is one."""
    with tempfile.TemporaryDirectory(prefix="mutant-") as name:
        copy = Path(name)
        for each in COPIED:
            source = ROOT / each
            if source.is_dir():
                ignored = shutil.ignore_patterns("__pycache__", "_build")
                shutil.copytree(source, copy / each, ignore=ignored)
            else:
                shutil.copy(source, copy / each)
        problem = apply(mutant, copy) if mutant is not None else ""
        if problem:
            raise RuntimeError(f"{mutant.path.name} does not apply: {problem}")
        yield copy


def caught_by(mutant: Mutant) -> tuple[str, float]:
    """The first check that fails on the mutant, and when it had; empty if none does in time."""
    began = time.monotonic()
    ends = began + LONGEST_S
    with copied(mutant) as copy:
        for check, arguments in CHECKS[mutant.part]:
            left_s = ends - time.monotonic()
            if left_s > 0 and ended(check, arguments, copy, left_s) == "failed":
                return check, time.monotonic() - began
    return "", time.monotonic() - began


def not_passing_without_a_mutant(parts: set[str]) -> list[str]:
    """The checks that prove nothing, since they do not pass on the project as it is."""
    checks = dict.fromkeys(check for part in sorted(parts) for check in CHECKS[part])
    with copied(None) as copy:
        return [check for check, given in checks if ended(check, given, copy) != "passed"]


def table(results: list[tuple[Mutant, str, float]]) -> str:
    lines = ["| mutant | what goes wrong | found by | after |", "| --- | --- | --- | --- |"]
    lines += [
        f"| `{mutant.name}` | {mutant.about} | {check or '**not found**'} | {took_s:.0f} s |"
        for mutant, check, took_s in results
    ]
    return "\n".join(lines)


def main(words: list[str]) -> int:
    chosen = [m for m in mutants() if not words or any(word in m.name for word in words)]
    failing = not_passing_without_a_mutant({mutant.part for mutant in chosen})
    if failing:
        print(f"these checks do not pass without a mutant: {', '.join(failing)}")
        return 1
    results = []
    for mutant in chosen:
        check, took_s = caught_by(mutant)
        results.append((mutant, check, took_s))
        print(f"{mutant.name}: {check or 'NOT FOUND'} after {took_s:.0f} s", flush=True)
    print(table(results))
    missed = [mutant.name for mutant, check, _ in results if not check]
    print(f"{len(results) - len(missed)} of {len(results)} mutants found")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
