"""What was found, as a table and, where something must not be, the history of its key."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

from tests.chaos.story import CONFLICT, Story, key_of_event

#: How far to both sides of a violation its key's history is shown.
TIMELINE_S = 10.0


@dataclass(frozen=True)
class Finding:
    """Something that must not happen (``explained`` empty), or that has a reason."""

    what: str
    key: str
    t: float
    says: str
    explained: str = ""


#: What must be 0: the head of its column, and the findings that are counted in it.
MUST_BE_ZERO = {
    "lost": ("lost",),
    "swallowed": ("swallowed",),
    "two at once": ("overlap",),
    "superseded": ("superseded",),
    "revoked": ("revoked",),
    "lapsed": ("lapsed",),
    "ran twice": ("twice",),
    "left over": ("left", "unended", "unhandled", "stuck"),
}
#: What has a reason, and is counted besides.
EXPLAINED = {
    "early ack": ("lost",),
    "by broker": ("lost by broker",),
    "evicted": ("lost with record",),
    "swallowed": ("swallowed",),
    "lapsed": ("lapsed",),
    "duplicates": ("overlap", "twice", "superseded"),
    "revoked": ("revoked",),
}


@dataclass
class Report:
    story: Story
    findings: list[Finding]
    shown: int = 5

    @property
    def violations(self) -> list[Finding]:
        return [f for f in self.findings if not f.explained]

    @property
    def passed(self) -> bool:
        return not self.violations

    def count(self, *kinds: str, explained: bool, episode: str | None = None) -> int:
        return sum(
            f.what in kinds
            and bool(f.explained) == explained
            and (episode is None or self.story.episode_at(f.t) == episode)
            for f in self.findings
        )

    def text(self) -> str:
        lines = [self._head(), "", *self._table(), "", *self._notes()]
        for violation in self.violations[: self.shown]:
            lines += ["", f"VIOLATION ({violation.what}) {violation.key}: {violation.says}"]
            lines += self._timeline(violation)
        if len(self.violations) > self.shown:
            lines.append(f"... and {len(self.violations) - self.shown} more violations")
        lines += ["", "PASSED" if self.passed else f"FAILED: {len(self.violations)} violations"]
        return "\n".join(lines)

    def _head(self) -> str:
        settings = self.story.settings
        last = self.story.events[-1]["t"] - settings["t"]
        return (
            f"{settings['broker']}, locks in {settings['store']}: {last:.0f} s, "
            f"run lease {settings['run_lease']:g} s, "
            f"queue lease {settings['queue_lease']:g} s, {len(self.story.calls)} calls, "
            f"{len(self.story.by_what['one_act'])} of them asked to publish in one act, "
            f"{sum(len(event['calls']) for event in self.story.by_what['many'])} by apply_many, "
            f"{len(self.story.chords)} chords, {len(self.story.by_what['revoked'])} revokes, "
            f"{len(self.story.runs)} runs"
        )

    def _table(self) -> list[str]:
        kinds = list(dict.fromkeys(fault for _, fault in self.story.episodes))
        kinds.sort(key=lambda kind: (kind == "afterwards", kind))
        rows = [self._row(kind) for kind in (*kinds, None)]
        groups = ("", "must be 0", "explained by a fault")
        lines = [""] * (len(rows) + 2)
        for number, title in enumerate(groups):
            block = _columns([row[number] for row in rows])
            width = max(len(title), *map(len, block))
            block = [line.rjust(width) for line in (title.ljust(width), *block)]
            bar = " | " if number else ""
            lines = [f"{line}{bar}{part}" for line, part in zip(lines, block, strict=True)]
        return [line.rstrip() for line in lines]

    def _row(self, kind: str | None) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        def here(t: float) -> bool:
            return kind is None or self.story.episode_at(t) == kind

        calls = [call for call in self.story.calls if here(call.began)]
        facts = {
            "fault": kind or "all",
            "faults": sum(here(f.t) and f.kind != "machine stalled" for f in self.story.faults),
            "calls": len(calls),
            "duplicates": sum(call.outcome in CONFLICT for call in calls),
            "refused": sum(call.outcome == "refused" for call in calls),
            "runs": sum(here(run.start) for run in self.story.runs),
        }
        must = {
            title: self.count(*kinds, explained=False, episode=kind)
            for title, kinds in MUST_BE_ZERO.items()
        }
        explained = {
            title: self.count(*kinds, explained=True, episode=kind)
            for title, kinds in EXPLAINED.items()
        }
        return facts, must, explained

    def _notes(self) -> list[str]:
        lines = [
            f"not drained in time: {event['waiting']} messages waiting"
            for event in self.story.by_what["drained"]
            if not event["ok"]
        ]
        for event in self.story.by_what["after_drain"]:
            blocking = [lock for lock in event["locks"] if lock["state"] not in "cdx"]
            lines.append(
                f"when the last message was handled: {len(blocking)} locks waited for their lease, "
                f"{len(event['locks']) - len(blocking)} ended ones were unsettled, "
                f"{event['marks']} marks"
            )
        stalls = [f.seconds for f in self.story.faults if f.kind == "machine stalled"]
        if stalls:
            lines.append(f"the machine stalled {len(stalls)} times, at most {max(stalls):.1f} s")
        why: dict[str, int] = defaultdict(int)
        for finding in self.findings:
            if finding.explained:
                why[f"{finding.what}: {finding.explained}"] += 1
        lines += [f"{count:5} x {reason}" for reason, count in sorted(why.items())]
        return lines

    def _timeline(self, violation: Finding) -> list[str]:
        """What happened to the key around the time in question, duplicates left out if far."""
        story = self.story
        ids = {task_id for task_id, key in story.key_of.items() if key == violation.key}
        lines = []
        for event in story.events:
            after = event["t"] - violation.t
            mine = event.get("id") in ids or (
                "task" in event and "arg" in event and key_of_event(event) == violation.key
            )
            if abs(after) > TIMELINE_S or not (mine or event["what"] == "fault"):
                continue
            if abs(after) > 1 and (event["what"] == "call" or event.get("outcome") in CONFLICT):
                continue
            facts = {n: v for n, v in event.items() if n not in ("t", "what", "task", "arg")}
            if event["what"] == "fault":
                facts["until"] = f"{event['until'] - violation.t:+.3f}"
            told = " ".join(f"{name}={value}" for name, value in facts.items())
            lines.append(f"  {after:+8.3f} {event['what']:<11} {told}")
        return lines


def _columns(rows: list[dict[str, Any]]) -> list[str]:
    """A line of names, and one for each row: words to the left, numbers to the right."""
    lines = [""] * (len(rows) + 1)
    for name, first in rows[0].items():
        cells = [name, *(str(row[name]) for row in rows)]
        width = max(map(len, cells))
        left = isinstance(first, str)
        cells = [cell.ljust(width) if left else cell.rjust(width) for cell in cells]
        lines = [f"{line}  {cell}" for line, cell in zip(lines, cells, strict=True)]
    return [line.removeprefix("  ") for line in lines]
