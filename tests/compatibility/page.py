"""``make matrix-docs``: docs/reference/compatibility.md from the latest ``make test-matrix``.

The runs leave a file each in .cache/matrix. They are put together in compatibility.json beside the
page, from which the page is made: `tests/docs/test_compatibility.py` compares the two. Runs of
different commits, or of one that is not known, are put together with ``--mixed`` only; the page
states the commit of each.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.compatibility.recorder import MATRIX, UNKNOWN
from tests.workers.matrix import (
    BETWEEN,
    BROKERS,
    DJANGOS,
    NOT_COMBINED,
    OF_OLDEST,
    OF_VERSIONS,
    OLDEST_REDIS,
    POOLS,
    RESULTS,
    STORES,
    VERSIONS,
    Cell,
)

REPOSITORY = Path(__file__).resolve().parents[2]
RUNS = REPOSITORY / ".cache" / "matrix"
PAGE = REPOSITORY / "docs" / "reference" / "compatibility.md"
RESULTS_FILE = PAGE.with_suffix(".json")

#: Column -> the tests that it stands for.
COLUMNS: dict[str, tuple[str, ...]] = {
    "duplicate": ("duplicate",),
    "ends": ("success", "failure", "ignore", "reject", "expired"),
    "retry": ("retry",),
    "time limit, lost child": ("hard_time_limit", "lost_child"),
    "revoke": ("revoked", "terminated"),
    "redelivery": ("requeued", "redelivered_while_it_runs", "killed_worker"),
    "ETA": ("eta",),
}
#: What each test shows.
SHOWN = {
    "duplicate": "a call is dropped while the task runs, and the task runs once",
    "success": "the key is free when the result is there",
    "failure": "the same after an exception",
    "retry": "the key is kept while the task waits for its retry, and free after that",
    "ignore": "the key is free after `Ignore`",
    "reject": "the key is free after `Reject`, and the task does not run again",
    "expired": "a task whose `expires` has passed does not run, and its key is free",
    "hard_time_limit": "the key of a task that its `time_limit` killed is free",
    "lost_child": "the key of a task whose process was killed (SIGKILL) is free",
    "revoked": "the key of a revoked task that waits is free at once, and the task does not run",
    "terminated": "the key of a running task that `revoke(terminate=True)` ended is free",
    "requeued": "`Reject(requeue=True)`: the key is kept, and the task runs once more",
    "redelivered_while_it_runs": "the broker delivers the message of a running task again: it is "
    "held back, and dropped after the end",
    "killed_worker": "a late acknowledged task of a killed worker runs once more, elsewhere",
    "eta": "a task with a countdown runs once, not before, and holds its key meanwhile",
}
#: A test, or a row, that is newer than the latest run.
NOT_RUN = "not run yet"
DJANGO = "tests/django"
CONTRACT = "tests/stores/test_contract.py"


class MixedCommits(Exception):
    """The runs are not of one commit."""


def collect(directory: Path = RUNS, *, mixed: bool = False) -> dict[str, Any]:
    """The runs, oldest first; those of one commit with the same versions are parts of one."""
    paths = sorted(directory.glob("*.json"), key=lambda path: path.stat().st_mtime)
    parts = {path.name: json.loads(path.read_text()) for path in paths}
    if not mixed:
        _check_commits({name: _commit(part) for name, part in parts.items()})
    runs: dict[str, dict[str, Any]] = {}
    for part in parts.values():
        which = json.dumps([_commit(part), part["python"], part["packages"]])
        run = runs.setdefault(which, part)
        run["servers"] |= part["servers"]
        run["files"] |= part["files"]
        for cell, outcomes in part["cells"].items():
            run["cells"].setdefault(cell, {}).update(outcomes)
    return {"runs": list(runs.values())}


def _check_commits(commits: Mapping[str, str]) -> None:
    if len(set(commits.values())) <= 1 and UNKNOWN not in commits.values():
        return
    told = ", ".join(f"{name} of {commit}" for name, commit in sorted(commits.items()))
    raise MixedCommits(
        f"the runs are not of one commit: {told}. Run make test-matrix again; --mixed puts them "
        "together all the same, and the page states the commit of each"
    )


def _commit(run: Mapping[str, Any]) -> str:
    return str(run.get("commit") or UNKNOWN)


def page(document: Mapping[str, Any]) -> str:
    runs: list[dict[str, Any]] = document["runs"]
    newest = _run_of_all(runs)
    taken = max(run["taken"] for run in runs)
    parts = [
        "# Compatibility",
        (
            "What the tests have run with. `make test-matrix` runs them and writes this page, and "
            "`docs/reference/compatibility.json`, which has every test with its outcome. A link "
            "leads to the tests of its column; a test that a row leaves out is named with the "
            "reason. *Not run yet* are tests and versions that are newer than the latest run."
        ),
        _commits(runs, newest),
        f"Latest run: {taken}, with Python {newest['python']}, "
        + ", ".join(f"{name} {number}" for name, number in newest["packages"].items() if number)
        + " where a table does not say otherwise.",
        "## Brokers",
        _cells(BROKERS, newest),
        "## Result backends",
        "With Redis as broker, unless said otherwise, and a prefork pool.",
        _cells(RESULTS, newest),
        "## Pools",
        "With Redis as broker and for results.",
        _cells(POOLS, newest),
        "## Lock stores",
        (
            "With Redis as broker and for results. *Contract* is how many tests of the "
            f"[store contract](../howto/write-a-store.md) passed (`{CONTRACT}`)."
        ),
        _cells(STORES, newest, contract=True),
        "## Python and Celery",
        "Each combination ran the tests of the brokers "
        + " and ".join(f"`{each}`" for each in OF_VERSIONS)
        + " with all columns; the one with the oldest packages also the store SQLite.",
        _versions(runs),
        _not_combined(runs),
        "## Django",
        "The tests in `tests/django`, with real workers, and those of the Django stores.",
        _django(runs),
        "## Tests",
        (
            f"All are in `{MATRIX}`, with the name in parentheses as their parameter: "
            f"`test_eta[sqs]`. `CELERY_UNIQUE_MATRIX=sqs pytest {MATRIX}` runs one row, "
            "`make test-matrix` all."
        ),
        _tests(),
    ]
    return "\n\n".join(parts) + "\n"


def _commits(runs: Sequence[dict[str, Any]], newest: dict[str, Any]) -> str:
    commits = {_commit(run) for run in runs}
    changed = " `+` marks uncommitted changes." if any("+" in each for each in commits) else ""
    if commits == {UNKNOWN}:
        return "Commit of the runs: not recorded; they may be of more than one."
    if len(commits) == 1:
        return f"Commit of all runs: `{commits.pop()}`.{changed}"
    return (
        f"The runs are of {len(commits)} commits: brokers, result backends, pools and lock stores "
        f"of `{_commit(newest)}`, the others as their tables say.{changed}"
    )


def _run_of_all(runs: Iterable[dict[str, Any]]) -> dict[str, Any]:
    return max(runs, key=lambda run: len(run["cells"]))


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    head = list(head)
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _cells(cells: Iterable[Cell], run: dict[str, Any], *, contract: bool = False) -> str:
    cells = list(cells)
    head = [cells[0].axis.replace("results", "result backend"), "version", *COLUMNS]
    rows = [_row(cell, run, contract=contract) for cell in cells]
    notes = [f"- {cell.name}: {note}." for cell in cells if (note := _notes(cell))]
    table = _table([*head, *(["contract"] if contract else [])], rows)
    return table + ("\n\n" + "\n".join(notes) if notes else "")


def _row(cell: Cell, run: dict[str, Any], *, contract: bool) -> list[str]:
    shown = run["cells"].get(cell.id, {})
    row = [f"{cell.name} (`{cell.id}`)", _server_version(cell, run)]
    row += [_column(cell, column, shown) for column in COLUMNS]
    if contract:
        name = f"{CONTRACT}[{cell.store}]"
        counts = run["files"].get(name, {})
        row.append(_counts(counts) if counts else NOT_RUN)
    return row


def _column(cell: Cell, column: str, shown: Mapping[str, str]) -> str:
    tests = [test for test in COLUMNS[column] if test not in cell.without]
    if not tests:
        return "-"
    outcomes = [shown.get(test, "not run") for test in tests]
    anchor = f"#{_anchor(column)}"
    if all(outcome == "passed" for outcome in outcomes):
        return f"[passed]({anchor})"
    return f"[**failed**]({anchor})" if "failed" in outcomes else NOT_RUN


def _notes(cell: Cell) -> str:
    reasons: dict[str, list[str]] = {}
    for test, reason in cell.without.items():
        reasons.setdefault(reason, []).append(f"`{test}`")
    texts = [f"no {' and '.join(tests)}, since {reason}" for reason, tests in reasons.items()]
    return "; ".join([*([cell.note] if cell.note else []), *texts])


def _server_version(cell: Cell, run: dict[str, Any]) -> str:
    name = getattr(cell, cell.axis)
    known = {"cluster": "redis", "sentinel": "redis", "sqs": "moto", "rpc": "rabbitmq"}
    return str(run["servers"].get(name) or run["servers"].get(known.get(name, "")) or "-")


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{number:,} {outcome}" for outcome, number in sorted(counts.items()))


def _versions(runs: Iterable[dict[str, Any]]) -> str:
    ran = {}
    for run in runs:
        if set(OF_VERSIONS) <= run["cells"].keys():
            packages = run["packages"]
            name = f"{_series(run['python'])}-{_series(packages['celery'])}"
            ran[name + ("-oldest" if _series(packages["redis"]) == OLDEST_REDIS else "")] = run
    rows = []
    for wanted in VERSIONS:
        if wanted not in ran:
            rows.append([*wanted.split("-")[:2], "-", "-", "-", "-", NOT_RUN])
            continue
        run = ran[wanted]
        cells = OF_OLDEST if wanted.endswith("-oldest") else OF_VERSIONS
        outcomes = [outcome for cell in cells for outcome in run["cells"][cell].values()]
        text = f"[{outcomes.count('passed')} of {len(outcomes)} passed](#tests)"
        packages = [run["packages"][name] for name in ("celery", "kombu", "redis", "SQLAlchemy")]
        rows.append([run["python"], *packages, _commit(run), text])
    return _table(["Python", "Celery", "kombu", "redis-py", "SQLAlchemy", "commit", "tests"], rows)


def _not_combined(runs: Iterable[dict[str, Any]]) -> str:
    """What of the supported versions is not in the table, and why."""
    combined: dict[str, list[str]] = {}
    for wanted in VERSIONS:
        python, celery = wanted.split("-")[:2]
        combined.setdefault(celery, []).append(python)
    pythons = {python for found in combined.values() for python in found}
    missing = [
        f"Celery {celery} with Python {', '.join(sorted(pythons - set(found)))}"
        for celery, found in combined.items()
        if pythons - set(found)
    ]
    clients = {int(_series(str(run["packages"]["redis"])).split(".")[0]) for run in runs}
    between = sorted(set(range(min(clients), max(clients))) - clients)
    return (
        f"- Not run: {'; '.join(missing)}, since {NOT_COMBINED}.\n"
        f"- Not run: redis-py {' and '.join(map(str, between))}, since {BETWEEN}."
    )


def _series(version: str) -> str:
    return ".".join(version.split(".")[:2])


def _django(runs: Iterable[dict[str, Any]]) -> str:
    ran = {_series(str(run["packages"]["Django"])): run for run in runs if DJANGO in run["files"]}
    rows = []
    for wanted in DJANGOS:
        if wanted not in ran:
            rows.append([wanted, "-", "-", NOT_RUN])
            continue
        run, counts = ran[wanted], Counter[str]()
        for name, outcomes in run["files"].items():
            if name == DJANGO or name.startswith("tests/stores/test_django_"):
                counts.update(outcomes)
        version = str(run["packages"]["Django"])
        rows.append([version, run["python"], _commit(run), _counts(counts)])
    return _table(["Django", "Python", "commit", "tests"], rows)


def _tests() -> str:
    parts = []
    for column, tests in COLUMNS.items():
        rows = [[f"`test_{test}`", SHOWN[test]] for test in tests]
        parts.append(f"### {_title(column)}\n\n{_table(['test', 'shows'], rows)}")
    return "\n\n".join(parts)


def _title(column: str) -> str:
    return f"Tests of {column}"


def _anchor(column: str) -> str:
    return _title(column).lower().replace(",", "").replace(" ", "-")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.compatibility.page")
    parser.add_argument(
        "--mixed", action="store_true", help="put runs of different commits together"
    )
    try:
        document = collect(mixed=parser.parse_args(arguments).mixed)
    except MixedCommits as error:
        print(error, file=sys.stderr)
        return 1
    if not document["runs"]:
        print(f"no runs in {RUNS}: run make test-matrix")
        return 1
    RESULTS_FILE.write_text(json.dumps(document, indent=1, sort_keys=True) + "\n")
    PAGE.write_text(page(document))
    print(PAGE)
    return 0


if __name__ == "__main__":
    sys.exit(main())
