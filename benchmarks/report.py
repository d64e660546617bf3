"""The figures as tables for people."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from benchmarks.contenders import CACHED, OURS, OURS_CACHED, PLAIN, PLAIN_CACHED
from benchmarks.running import RESULTS
from benchmarks.server_cost import NEW, beyond_plain

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
    parts = {**_PARTS, "lanes": _lanes}
    found = {name: make(results[name]) for name, make in parts.items() if results.get(name)}
    if "worker" in results:
        found["call_to_result"] = _call_to_result(results["worker"])
        found["throughput"] = _throughput(results["worker"])
    if {"new", "many", "worker"} <= results.keys():
        found["cached"] = _cached(results)
    found["goals"] = _goals(document["goals"])
    found["machine"] = _machine(document)
    return found


def times(figures: dict[str, Any], field: str = "times_plain") -> tuple[str, str]:
    """A ratio and its interval, empty where it was not computed."""
    found = figures.get(field)
    if not found:
        return "", ""
    return f"{found['ratio']:.2f}", f"{found['low']:.2f} to {found['high']:.2f}"


def headline(document: dict[str, Any]) -> str:
    """One sentence for the README. It claims no round trip to be saved that was not counted."""
    results = document["results"]
    ratio = results["new"][OURS]["times_plain"]["ratio"]
    extra = beyond_plain(results["server"], NEW, "commands")
    trips = "no round trip" if extra <= 0 else "one round trip"
    page = "[performance](docs/explanation/performance.md)"
    claim = f"A new call makes {trips} beyond plain Celery's publish"
    return f"{claim}: {ratio:.2f} x plain (`make bench`, {page})."


def _new(new: dict[str, Any]) -> str:
    return _new_calls("new call", new, [name for name in new if name not in CACHED])


def _rabbitmq(new: dict[str, Any]) -> str:
    return _new_calls("new call, RabbitMQ is the broker", new, list(new))


def _new_calls(title: str, new: dict[str, Any], names: list[str]) -> str:
    rows = []
    for name in names:
        each = new[name]
        floors, _ = times(each, "added_floors")
        cells = (us(each["median_us"]), *times(each), us(each.get("added_us")), floors)
        rows.append((name, *cells, us(each["p10_us"])))
    head = ("median us", "of plain", "95 % interval", "added us", "added, in floors")
    return table((title, *head, "fastest tenth, us"), rows)


def _duplicate(again: dict[str, Any]) -> str:
    rows = [
        (name, us(each["median_us"]), *times(each, "floors"), us(each["p10_us"]))
        for name, each in again.items()
        if name not in CACHED
    ]
    head = ("duplicate call", "median us", "in floors", "95 % interval", "fastest tenth, us")
    return table(head, rows)


def _many(many: dict[str, Any]) -> str:
    rows = [
        (name, us(each["median_us"]), *times(each), us(each["added_us"]))
        for name, each in many["ways"].items()
        if name.partition(": ")[0] not in CACHED
    ]
    head = (f"{many['members']:,} calls together", "us a call", "of plain", "95 % interval")
    return table((*head, "added us a call"), rows)


def _call_to_result(worker: dict[str, Any]) -> str:
    rows = []
    for concurrency, parts in worker.items():
        for name, each in parts["call_to_result"].items():
            if name not in CACHED:
                cells = (us(each["median_us"]), *times(each), us(each["p10_us"]))
                rows.append((name, concurrency, *cells))
    head = ("no-op task, call to result", "pool", "median us", "of plain", "95 % interval")
    return table((*head, "fastest tenth, us"), rows)


def _throughput(worker: dict[str, Any]) -> str:
    rows = []
    for concurrency, parts in worker.items():
        for kind in RESULTS:
            for name, each in parts[kind].items():
                if name not in CACHED:
                    rows.append((f"{name}, {kind}", concurrency, *_rate_cells(each)))
    head = ("no-op task", "pool", "tasks a second", "lowest to highest", "of plain")
    return table((*head, "95 % interval", "processor us a task", "of plain"), rows)


def _rate_cells(each: dict[str, Any]) -> Row:
    return (
        f"{each['median_per_s']:,.0f}",
        f"{each['lowest_per_s']:,.0f} to {each['highest_per_s']:,.0f}",
        *times(each),
        us(each["processor_us"]),
        times(each, "processor_times_plain")[0],
    )


def _lanes(lanes: dict[str, Any]) -> str:
    rows = [
        (name, f"{lanes[name]['median_per_s']:,.0f}", *times(lanes[name])) for name in (PLAIN, OURS)
    ]
    calls = f"{lanes['calls']:,} tasks of 50 ms, {lanes['keys']:,} keys, {lanes['parked']:,} parked"
    return table((calls, "tasks a second", "of plain", "95 % interval"), rows)


def _cached(results: dict[str, Any]) -> str:
    """Both on a kombu that keeps its Redis clients, for every figure that is a ratio to plain."""
    loop, many = f"{PLAIN_CACHED}: loop", f"{OURS_CACHED}: apply_many"
    ways = results["many"]["ways"]
    found = [
        ("new call, us", *(results["new"][name] for name in CACHED), "median_us"),
        ("call in apply_many, plain in a loop, us", ways[loop], ways[many], "median_us"),
    ]
    for concurrency, parts in results["worker"].items():
        kinds = {"call_to_result": ("call to result, us", "median_us")}
        kinds |= {kind: (f"tasks a second, {kind}", "median_per_s") for kind in RESULTS}
        for part, (text, field) in kinds.items():
            plain, ours = (parts[part][name] for name in CACHED)
            found.append((f"{text}, pool of {concurrency}", plain, ours, field))
    rows = [
        (text, us(plain[field]), us(ours[field]), *times(ours))
        for text, plain, ours, field in found
    ]
    head = ("kombu keeps its client", PLAIN, OURS, "of plain", "95 % interval")
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
    rows = []
    for name, each in server.items():
        rows.append(
            (
                name,
                f"{each['commands']:.0f}",
                us(each["script_us"]),
                us(each["set_us"]),
                *times(each, "times_set_nx"),
                us(each["server_cpu_us"]),
                f"{each['bytes_in']:,.0f}",
                f"{each['bytes_out']:,.0f}",
            )
        )
    head = ("on the Redis server", "commands", "scripts, us", "SET NX, us")
    head = (*head, "of SET NX", "95 % interval")
    return table((*head, "processor us", "bytes in", "bytes out"), rows)


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
    for name, store in growth["stores"].items():
        for kind, sizes in store["figures"].items():
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
        unit = f" {goal['unit']}".rstrip()
        measured = "" if goal["measured"] is None else f"{goal['measured']:.2f}{unit}"
        limit = f"{'>=' if goal['at_least'] else '<='} {goal['limit']:.2f}{unit}"
        ends = goal["interval"]
        interval = f"{ends[0]:.2f} to {ends[1]:.2f}" if ends else ""
        rows.append((goal["goal"], limit, measured, interval, goal["verdict"]))
    return table(("goal", "limit", "measured", "95 % interval", "verdict"), rows)


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
    "rabbitmq": _rabbitmq,
    "key": _key,
    "memory": _memory,
    "server": _server,
    "renewal": _renewal,
    "growth": _growth,
    "growth_sql": _growth_sql,
}
#: Every section that a full run has.
NAMES = frozenset({*_PARTS, "call_to_result", "throughput", "cached", "goals", "machine"})
