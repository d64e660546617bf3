"""What a fleet needs, worked out from the costs that a run has measured."""

from __future__ import annotations

from typing import Any

from benchmarks.contenders import OURS
from benchmarks.report import table
from benchmarks.server_cost import DUPLICATE, LIFE, beyond_plain

RATES = (10, 1_000, 100_000)
#: How long a message waits in the examples, and how much of a Redis core one would use.
WAITS_S, FULL = 60, 0.5
#: Share of calls that are duplicates in the examples.
DUPLICATES = 0.2


def sections(document: dict[str, Any]) -> dict[str, str]:
    results = document["results"]
    if not {"server", "memory", "renewal", "new", "duplicate", "worker"} <= results.keys():
        return {}
    return {"costs": _costs(results), "expect": _expect(results), "worked": _worked(results)}


def _costs(results: dict[str, Any]) -> str:
    life, again = _beyond_plain(results, LIFE), _beyond_plain(results, DUPLICATE)
    renewal = results["renewal"]
    per_lock = 1000 / renewal["held"]
    rows = [
        (
            "N",
            "a caller's time for a new call, added",
            f"{_added_us(results):.0f} us",
        ),
        (
            "D",
            "a caller's time for a duplicate",
            f"{results['duplicate'][OURS]['median_us']:.0f} us",
        ),
        ("W", "of a worker's tasks a second, what is left", f"{_worker_share(results):.2f}"),
        ("L", "Redis, processor, a task's whole life, added", f"{life['server_cpu_us']:.0f} us"),
        ("d", "Redis, processor, a duplicate", f"{again['server_cpu_us']:.0f} us"),
        (
            "B",
            "Redis, bytes in and out, a whole life, added",
            f"{_bytes(life):,.0f}",
        ),
        ("e", "Redis, bytes in and out, a duplicate", f"{_bytes(again):,.0f}"),
        (
            "M",
            "Redis, memory of a waiting lock",
            f"{results['memory']['bytes']['waiting']:.0f} bytes",
        ),
        (
            "A",
            "Redis, memory of an active lock",
            f"{results['memory']['bytes']['active']:.0f} bytes",
        ),
        ("R", "Redis, processor, one renewal", f"{renewal['server_cpu_ms'] * per_lock:.0f} us"),
    ]
    return table(("", "measured", "each"), rows)


#: The fleet that is worked through: calls a second, share of duplicates, seconds that messages
#: wait, bodies that run at once, run lease.
FLEET = (500, 0.1, 300, 40, 60)


def _worked(results: dict[str, Any]) -> str:
    calls, share, waits, bodies, lease = FLEET
    life, again = _beyond_plain(results, LIFE), _beyond_plain(results, DUPLICATE)
    bytes_of = results["memory"]["bytes"]
    tasks, refused = calls * (1 - share), calls * share
    renewal = 1000 * results["renewal"]["server_cpu_ms"] / results["renewal"]["held"]
    busy = tasks * life["server_cpu_us"] + refused * again["server_cpu_us"]
    busy += 3 * bodies * renewal / lease
    network = tasks * _bytes(life) + refused * _bytes(again)
    memory = tasks * waits * bytes_of["waiting"] + bodies * bytes_of["active"]
    added, duplicate = _added_us(results), results["duplicate"][OURS]["median_us"]
    rows = [
        ("tasks a second", f"{calls} x (1 - {share})", f"{tasks:,.0f}"),
        ("locks that wait", f"{tasks:,.0f} x {waits}", f"{tasks * waits:,.0f}"),
        ("Redis, share of one core", "(1 - p) c L + p c d + 3 b R / l", f"{busy / 1e6:.1%}"),
        ("Redis, network", "(1 - p) c B + p c e", f"{network / 1e6:.2f} MB/s"),
        ("Redis, memory", "(1 - p) c w M + b A", f"{memory / 1e6:,.1f} MB"),
        (
            "callers, cores together",
            "(1 - p) c N + p c D",
            f"{(tasks * added + refused * duplicate) / 1e6:.2f}",
        ),
    ]
    return table(("what", "how", "comes to"), rows)


def _bytes(cost: dict[str, float]) -> float:
    return cost["bytes_in"] + cost["bytes_out"]


def _beyond_plain(results: dict[str, Any], act: str) -> dict[str, float]:
    fields = ("server_cpu_us", "bytes_in", "bytes_out")
    # Below zero it is noise: nothing makes a server do less.
    return {field: max(0.0, beyond_plain(results["server"], act, field)) for field in fields}


def _added_us(results: dict[str, Any]) -> float:
    # Below zero it is noise, too.
    return max(0.0, float(results["new"][OURS]["added_us"]))


def _worker_share(results: dict[str, Any]) -> float:
    rates = results["worker"]["1"]["with results"]
    # Above one it is noise: nothing makes a worker faster.
    return min(1.0, float(rates[OURS]["times_plain"]["ratio"]))


def _expect(results: dict[str, Any]) -> str:
    rows = []
    life, again = _beyond_plain(results, LIFE), _beyond_plain(results, DUPLICATE)
    for rate in RATES:
        admitted, refused = rate * (1 - DUPLICATES), rate * DUPLICATES
        cores = (admitted * life["server_cpu_us"] + refused * again["server_cpu_us"]) / 1e6
        network = (admitted * _bytes(life) + refused * _bytes(again)) / 1e6
        memory = admitted * WAITS_S * results["memory"]["bytes"]["waiting"] / 1e6
        callers = rate * max(_added_us(results), results["duplicate"][OURS]["median_us"]) / 1e6
        rows.append(
            (
                f"{rate:,}",
                f"{cores:.2%}" if cores < 1 else f"{cores:.1f} cores",
                str(max(1, -int(-cores // FULL))),
                f"{network:,.2f} MB/s",
                f"{memory:,.1f} MB",
                f"{callers:.2%}" if callers < 1 else f"{callers:.1f} cores",
            )
        )
    head = (
        *("unique calls a second", "Redis, processor", "Redis nodes at half load"),
        *("network", "memory of locks", "callers, together, at most"),
    )
    return table(head, rows)
