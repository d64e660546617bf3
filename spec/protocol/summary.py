"""What ``make prove`` explored, as tables: states, steps by actor, acts, sentences and rules."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from .actors import Protocol
from .explorer import Explored
from .invariants import INVARIANTS


def facts(name: str, model: Protocol, explored: Explored, took_s: float) -> dict[str, Any]:
    """Of one scenario, in types that a test process can send to another."""
    labels: Counter[str] = Counter()
    for label, times in explored.labels.items():
        labels[re.sub(r"\d+", "N", label)] += times
    return {
        "scenario": name,
        "states": explored.states,
        "steps": explored.steps,
        "ends": explored.ends,
        "seconds": took_s,
        "labels": dict(labels),
        "acts": dict(model.store.acts),
        "checked": dict(model.checked),
    }


def summary(
    scenarios: Iterable[Mapping[str, Any]],
    caught: Iterable[Mapping[str, Any]],
    not_needed: Mapping[str, str],
) -> str:
    """``caught`` are the rules without which a sentence was violated; ``not_needed`` the others,
    and why."""
    scenarios, caught = list(scenarios), list(caught)
    labels, acts = _sum(scenarios, "labels"), _sum(scenarios, "acts")
    states, steps, ends, seconds = (
        sum(each[name] for each in scenarios) for name in ("states", "steps", "ends", "seconds")
    )
    head = f"{len(scenarios)} scenarios: {states:,} states, {steps:,} steps, {ends:,} ends"
    lines = [
        f"{head}, {seconds:.0f} s of one core",
        "",
        f"{len(labels)} kinds of step, and how often each was taken:",
        *_counted(labels),
        "",
        f"{len(acts)} kinds of act and reply, and how often:",
        *_counted(acts),
        "",
        "Sentences, and the scenarios and states in which each was checked and not suspended:",
    ]
    for name in INVARIANTS:
        counts = [each["checked"].get(name, 0) for each in scenarios]
        lines.append(f"  {name:<18} {sum(n > 0 for n in counts):>4} {sum(counts):>12,}")
    lines += ["", f"{len(caught)} rules without which a sentence is violated:"]
    for each in sorted(caught, key=lambda each: str(each["rule"])):
        lines.append(
            f"  {each['rule']}: {each['invariant']}, in {each['scenario']!r}, "
            f"after {each['steps']} steps ({each['states']:,} states)"
        )
    lines += ["", f"{len(not_needed)} rules without which none is violated, and why:"]
    lines += [f"  {rule}: {why}" for rule, why in sorted(not_needed.items())]
    return "\n".join(lines)


def _sum(scenarios: list[Mapping[str, Any]], name: str) -> Counter[str]:
    total: Counter[str] = Counter()
    for each in scenarios:
        total.update(each[name])
    return total


def _counted(counts: Counter[str]) -> list[str]:
    return [f"  {name:<52} {counts[name]:>12,}" for name in sorted(counts)]
