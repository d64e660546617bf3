"""Record a store and check what it did: the report, and the worst that was found."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field

from .checker import Operation, Verdict, check
from .record_model import RecordModel
from .workload import outcome_of

Histories = Mapping[str, Sequence[Operation]]


@dataclass(slots=True)
class Report:
    """What came of one store."""

    keys: int = 0
    operations: int = 0
    overlapping: int = 0
    applied: int = 0
    widest: int = 0
    checked_s: float = 0.0
    violations: list[Verdict] = field(default_factory=list)
    coverage: Counter[str] = field(default_factory=Counter)

    @property
    def overlap(self) -> float:
        """The share of acts that were under way together with another one on their key."""
        return self.overlapping / max(1, self.operations)

    def __str__(self) -> str:
        verdict = "all linearizable"
        if self.violations:
            verdict = f"{len(self.violations)} keys NOT linearizable"
        return (
            f"{self.operations} acts on {self.keys} keys, {self.overlap:.0%} of them at the same "
            f"time as another one on their key: {verdict}; checked in {self.checked_s:.0f} s by "
            f"{self.applied} acts of the specification, at most {self.widest} explanations at a "
            f"time; {len(self.coverage)} kinds of act and reply"
        )


def report_on(histories: Histories, processes: int = 1) -> Report:
    """Check the history of every key by itself: an act touches one key alone."""
    began = time.monotonic()
    report = Report(keys=len(histories))
    for history in histories.values():
        report.coverage.update(f"{o.act}: {outcome_of(o)}" for o in history)
    parts = list(histories.values())
    if processes > 1:
        with ProcessPoolExecutor(processes) as pool:
            verdicts = list(pool.map(checked, parts, chunksize=8))
    else:
        verdicts = [checked(part) for part in parts]
    for verdict in verdicts:
        report.operations += verdict.operations
        report.overlapping += verdict.overlapping
        report.applied += verdict.applied
        report.widest = max(report.widest, verdict.widest)
        if not verdict.linearizable:
            report.violations.append(verdict)
    report.checked_s = time.monotonic() - began
    return report


def checked(history: Sequence[Operation]) -> Verdict:
    return check(history, RecordModel(history))


def acts_wanted(few: int) -> int:
    """How many acts to play on each store: ``CELERY_UNIQUE_ACTS`` of make prove, else a few."""
    return int(os.environ.get("CELERY_UNIQUE_ACTS") or few)
