"""The documented alerts, tried by promtool on figures that were scraped."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from tests.support.server import find_program

RULES = Path(__file__).resolve().parents[2] / "docs" / "howto" / "alerts.yml"
JOB = {"job": "celery", "instance": "shop:9808"}

#: A name and its labels -> the figure.
Scrape = Mapping[tuple[str, frozenset[tuple[str, str]]], float]
#: The alerts that fire, each with its labels.
Firing = Sequence[tuple[str, Mapping[str, str]]]


def promtool() -> str:
    return find_program("promtool", install_command="apt-get install prometheus")


def read_exposition(text: str) -> Scrape:
    """The figures of this library in what a process serves."""
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name.startswith("celery_unique")
    }


def check_alerts(
    scrapes: Sequence[Scrape],
    expected: Mapping[int, Firing],
    directory: Path,
    *,
    every: int = 1,
    rules: Path = RULES,
) -> None:
    """Fail unless exactly these alerts fire, at each of these minutes.

    ``scrapes`` were made ``every`` so many minutes; Prometheus saw the same figures in between.
    """
    names = sorted({key for scrape in scrapes for key in scrape}, key=str)
    alerts = [line.split()[-1] for line in rules.read_text().splitlines() if "- alert: " in line]
    document = {
        "rule_files": [str(rules)],
        "evaluation_interval": "1m",
        "tests": [
            {
                "interval": "1m",
                "input_series": [
                    {"series": _series(*key), "values": _values(scrapes, key, every)}
                    for key in names
                    if not key[0].endswith("_created")
                ],
                "alert_rule_test": [
                    {
                        "eval_time": f"{minute}m",
                        "alertname": alert,
                        "exp_alerts": [
                            {"exp_labels": dict(labels)} for name, labels in firing if name == alert
                        ],
                    }
                    for minute, firing in expected.items()
                    for alert in alerts
                ],
            }
        ],
    }
    path = directory / "alerts_test.yml"
    path.write_text(json.dumps(document, indent=1))  # which is YAML, too
    done = subprocess.run([promtool(), "test", "rules", path], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def _series(name: str, labels: frozenset[tuple[str, str]]) -> str:
    written = ",".join(
        f"{label}={json.dumps(value)}" for label, value in sorted({**JOB, **dict(labels)}.items())
    )
    return f"{name}{{{written}}}"


def _values(scrapes: Sequence[Scrape], key: object, every: int) -> str:
    figures = [scrape.get(key) for scrape in scrapes for _ in range(every)]  # type: ignore[call-overload]
    return " ".join("_" if figure is None else f"{figure:g}" for figure in figures)
