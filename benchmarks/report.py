"""The figures as tables for people."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from benchmarks.contenders import PLAIN
from benchmarks.stage import FLOOR

Row = Sequence[str]


def table(head: Row, rows: Iterable[Row]) -> str:
    """A Markdown table, which reads well on a terminal too."""
    lines = [list(head), *(list(row) for row in rows)]
    widths = [max(len(line[n]) for line in lines) for n in range(len(head))]
    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    return "\n".join(_line(line, widths) for line in (lines[0], rule, *lines[1:]))


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    first, *rest = [*cells]
    padded = [first.ljust(widths[0]), *(c.rjust(w) for c, w in zip(rest, widths[1:], strict=True))]
    return "| " + " | ".join(padded) + " |"


def us(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.1f}" if abs(value) < 20 else f"{value:,.0f}"


def sections(document: dict[str, Any]) -> dict[str, str]:
    """Name of the part -> its table."""
    results = document["results"]
    found = {name: make(results[name]) for name, make in _PARTS.items() if name in results}
    found["goals"] = _goals(document["goals"])
    found["machine"] = _machine(document)
    return found


def _new(new: dict[str, Any]) -> str:
    floor = new[FLOOR]["median_us"]
    rows = []
    for name, figures in new.items():
        added = figures.get("added_us")
        in_floors = "" if added is None else f"{added / floor:.2f}"
        fastest = us(figures["p10_us"])
        rows.append((name, us(figures["median_us"]), us(added), in_floors, fastest))
    head = ("new call", "median us", "added us", "added, in floors", "fastest tenth, us")
    return table(head, rows)


def _duplicate(again: dict[str, Any]) -> str:
    floor = again[FLOOR]["median_us"]
    rows = [
        (
            name,
            us(figures["median_us"]),
            f"{figures['median_us'] / floor:,.2f}",
            us(figures["p10_us"]),
        )
        for name, figures in again.items()
    ]
    return table(("duplicate call", "median us", "in floors", "fastest tenth, us"), rows)


def _many(many: dict[str, Any]) -> str:
    rows = [
        (name, us(figures["median_us"]), us(figures["added_us"]))
        for name, figures in many["ways"].items()
    ]
    return table((f"{many['members']:,} calls together", "us a call", "added us a call"), rows)


def _worker(worker: dict[str, Any]) -> str:
    rates = worker["throughput"]
    plain = rates[PLAIN]["median_per_s"]
    rows = [
        (
            name,
            us(figures["median_us"]),
            f"{figures['times_plain']:.2f}",
            f"{rates[name]['median_per_s']:,.0f}",
            f"{rates[name]['median_per_s'] / plain:.2f}",
        )
        for name, figures in worker["call_to_result"].items()
    ]
    head = ("no-op task", "call to result, us", "of plain", "tasks a second", "of plain")
    return table(head, rows)


def _key(key: dict[str, Any]) -> str:
    rows = [
        (
            name,
            f"{figures['bytes']:,}",
            us(figures["key"]["median_us"]),
            us(figures["json_dumps"]["median_us"]),
            f"{figures['times_json_dumps']:.2f}",
        )
        for name, figures in key.items()
    ]
    return table(("key of", "bytes as JSON", "key, us", "json.dumps, us", "ratio"), rows)


def _commands(commands: dict[str, Any]) -> str:
    rows = [(name, str(each["new"]), str(each["duplicate"])) for name, each in commands.items()]
    return table(("commands to the lock server", "new call", "duplicate"), rows)


def _memory(memory: dict[str, Any]) -> str:
    times = memory["times_bare"]
    rows = [
        (name.replace("_", " "), us(value), f"{times[name]:.2f}")
        for name, value in memory["bytes"].items()
    ]
    bare = memory["bytes"]["bare_set"]
    rows += [(name, us(value), f"{value / bare:.2f}") for name, value in memory["rivals"].items()]
    return table(("one lock", "bytes", "of a bare SET"), rows)


def _server(server: dict[str, Any]) -> str:
    rows = [
        (name, us(cost["server_cpu_us"]), f"{cost['bytes_in']:,.0f}", f"{cost['bytes_out']:,.0f}")
        for name, cost in [*server["acts"].items(), ("a task's whole life", server["life"])]
    ]
    return table(("on the lock server", "processor us", "bytes in", "bytes out"), rows)


def _renewal(renewal: dict[str, Any]) -> str:
    rows = [
        ("one batch, from first to last", f"{renewal['wall_ms']:,.0f} ms"),
        ("processor time of the worker", f"{renewal['client_cpu_ms']:,.0f} ms"),
        ("processor time of Redis", f"{renewal['server_cpu_ms']:,.0f} ms"),
        ("share of a core, worker", f"{renewal['client_share_of_a_core']:.2%}"),
        ("share of a core, Redis", f"{renewal['server_share_of_a_core']:.2%}"),
    ]
    return table((f"renewing {renewal['held']:,} locks every 20 s", ""), rows)


def _growth(growth: dict[str, Any]) -> str:
    rows = []
    for kind, sizes in growth["figures"].items():
        for locks, figures in sizes.items():
            interval = f"{figures['low']:.2f} to {figures['high']:.2f}"
            ratio = f"{figures['ratio']:.2f}"
            act = _act(growth, kind)
            rows.append((act, f"{int(locks):,}", us(figures["median_us"]), ratio, interval))
    head = ("as locks grow", "locks", "median us", "against none", "95 % interval")
    return table(head, rows)


def _act(growth: dict[str, Any], kind: str) -> str:
    at_once = growth.get("together", {}).get(kind)
    return f"{kind} of {at_once:,}, each" if at_once else kind


def _growth_sql(growth: dict[str, Any]) -> str:
    """A row for each act: one for each number of locks would be three times as many."""
    none, *more = growth["locks"]
    rows = []
    for name, told in growth["stores"].items():
        for kind, sizes in told["figures"].items():
            cells = [f"{name}: {_act(growth, kind)}", us(sizes[str(none)]["median_us"])]
            for locks in more:
                each = sizes[str(locks)]
                interval = f"{each['low']:.2f} to {each['high']:.2f}"
                cells += [us(each["median_us"]), f"{each['ratio']:.2f}", interval]
            rows.append(cells)
    head = ["as locks grow", "none, us"]
    for locks in more:
        head += [f"{locks:,}, us", "against none", "95 % interval"]
    return table(head, rows)


def _goals(goals: list[dict[str, Any]]) -> str:
    rows = []
    for goal in goals:
        measured = "" if goal["measured"] is None else f"{goal['measured']:.2f} {goal['unit']}"
        limit = f"{goal['limit']:.2f} {goal['unit']}"
        rows.append((goal["goal"], limit, measured, goal["verdict"]))
    return table(("goal", "at most", "measured", "verdict"), rows)


def _machine(document: dict[str, Any]) -> str:
    machine = document["machine"]
    packages = ", ".join(f"{name} {version}" for name, version in machine["packages"].items())
    load = " / ".join(f"{value:.1f}" for value in document["load_before"])
    after = " / ".join(f"{value:.1f}" for value in document["load_after"])
    rows = [
        ("when", document["started"]),
        ("how long", f"{document['took_s']:.0f} s, {document['sizes_name']}"),
        ("processor", f"{machine['processor']}, {machine['cores']} cores"),
        ("memory", f"{machine['memory_gib']:.0f} GiB"),
        ("system", f"{machine['system']}, Python {machine['python']}"),
        ("Redis", f"{machine['redis_server']}, on the same machine"),
        *_databases(document),
        ("packages", packages),
        ("load average before (1, 5, 15 minutes)", load),
        ("load average after", after),
    ]
    if document["missing"]:
        rows.append(("not installed, left out", ", ".join(document["missing"])))
    return table(("run", ""), rows)


def _databases(document: dict[str, Any]) -> list[Row]:
    versions = document["machine"].get("databases", {})
    named = ", ".join(f"{name} {version}" for name, version in versions.items())
    return [("databases", f"{named}, on the same machine")] if named else []


_PARTS: dict[str, Callable[[dict[str, Any]], str]] = {
    "new": _new,
    "duplicate": _duplicate,
    "many": _many,
    "worker": _worker,
    "key": _key,
    "commands": _commands,
    "memory": _memory,
    "server": _server,
    "renewal": _renewal,
    "growth": _growth,
    "growth_sql": _growth_sql,
}
#: Every section that a full run has.
NAMES = frozenset({*_PARTS, "goals", "machine"})
