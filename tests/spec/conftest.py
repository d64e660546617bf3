"""Prints what ``make prove`` explored. Its tests run in several processes, and send their facts."""

from __future__ import annotations

import os
from typing import Any

from spec.protocol.summary import summary
from tests.spec.rules_left_out import NOT_NEEDED


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if not os.environ.get("CELERY_UNIQUE_PROVE"):
        return
    found: dict[str, list[Any]] = {"explored": [], "rule": []}
    for reports in terminalreporter.stats.values():
        for report in reports:
            if getattr(report, "when", "") != "call":  # the teardown has them, too
                continue
            for name, facts in report.user_properties:
                found.get(name, []).append(facts)
    if found["explored"] or found["rule"]:
        terminalreporter.section("interleavings")
        terminalreporter.write_line(summary(found["explored"], found["rule"], NOT_NEEDED))
