"""``make bench``: measure, print tables and goals, and write them as JSON.

make bench                             everything, about a quarter of an hour
make bench ARGS="--only key,new"       parts of it
make bench ARGS="--only lanes"         lanes beside plain Celery, about three minutes
make bench ARGS="--quick"              smaller numbers, about two minutes
make bench ARGS="--check"              exit code 1 if a goal is missed
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
import traceback
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks import (
    calls,
    growth,
    growth_sql,
    keys,
    lanes,
    machine,
    report,
    running,
    server_cost,
    storage,
)
from benchmarks.goals import goals
from benchmarks.measuring import progress
from benchmarks.sizes import FULL, QUICK, TINY, Sizes
from benchmarks.stage import Stage, stage

LATEST = Path(__file__).parent / "results" / "latest.json"
SIZES = {"full": FULL, "quick": QUICK, "tiny": TINY}

PARTS: dict[str, Callable[[Stage], dict[str, Any]]] = {
    "key": keys.run,
    "new": calls.new,
    "duplicate": calls.duplicate,
    "worker": running.run,
    "memory": storage.memory,
    "server": server_cost.run,
    "renewal": storage.renewal,
    "growth": growth.run,
    "growth_sql": growth_sql.run,
    "many": calls.many,
    "rabbitmq": calls.rabbitmq,
}
#: Measured only where they are named: they take long.
EXTRA: dict[str, Callable[[Stage], dict[str, Any]]] = {"lanes": lanes.run}


def main(arguments: list[str] | None = None) -> int:
    options = _parsed(arguments)
    # Stopped by a signal it stops its servers and workers too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    document = measured(SIZES[options.sizes], options.sizes, options.only)
    for name, text in report.sections(document).items():
        print(f"\n{name}\n{text}")
    if options.json != "-":
        path = Path(options.json)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(document, indent=2) + "\n")
        print(f"\n{path}")
    missed = [goal for goal in document["goals"] if goal["verdict"] != "pass"]
    return 1 if document["failed"] or (options.check and missed) else 0


def measured(sizes: Sizes, name: str, only: list[str]) -> dict[str, Any]:
    """The whole document of one run."""
    began, started, load_before = time.monotonic(), datetime.now(UTC), machine.load()
    results: dict[str, Any] = {}
    failed: list[str] = []
    with stage(sizes) as shared:
        for missing in shared.missing:
            progress(f"{missing} is not installed and is left out: make bench installs it")
        for part in only:
            progress(f"[{time.monotonic() - began:4.0f} s] {part}")
            try:
                results[part] = {**PARTS, **EXTRA}[part](shared)
            except Exception:  # noqa: BLE001  what other parts have measured is not lost over it
                failed.append(part)
                traceback.print_exc()
        left_out = shared.missing
    return {
        "started": started.isoformat(timespec="seconds"),
        "took_s": round(time.monotonic() - began, 1),
        "sizes_name": name,
        "machine": machine.described(),
        "load_before": load_before,
        "load_after": machine.load(),
        "missing": left_out,
        "failed": failed,
        "results": results,
        "goals": [goal.as_json() for goal in goals(results)],
    }


def _parsed(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="make bench", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "--only", type=_parts, default=list(PARTS), help=f"some of {','.join([*PARTS, *EXTRA])}"
    )
    parser.add_argument(
        "--quick", dest="sizes", action="store_const", const="quick", default="full"
    )
    parser.add_argument(
        "--tiny", dest="sizes", action="store_const", const="tiny", help="only to see that it works"
    )
    parser.add_argument(
        "--check", action="store_true", help="exit code 1 if a goal is missed or not measured"
    )
    parser.add_argument("--json", default=str(LATEST), help="where to; - for nowhere")
    return parser.parse_args(arguments)


def _parts(text: str) -> list[str]:
    named = [part.strip() for part in text.split(",") if part.strip()]
    unknown = [part for part in named if part not in PARTS and part not in EXTRA]
    if unknown or not named:
        known = ", ".join([*PARTS, *EXTRA])
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)!r}: use {known}")
    return named


if __name__ == "__main__":
    sys.exit(main())
