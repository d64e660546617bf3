"""The journal of a run, put together: calls, runs of bodies, and faults."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

from tests.chaos.journal import Event

COMPLETE = ("success", "failure")
DUPLICATE = "deduplicated"
#: The task of the members of chords.
MEMBER = "tests.chaos.app.member"
#: What a call gets that another task prevents.
CONFLICT = (DUPLICATE, "rejected")
#: What a call gets that takes the place of tasks that have not started.
SUPERSEDING = ("replaced", "rerun")


def is_late(key: str) -> bool:
    """Whether the messages of these tasks are acknowledged after the body."""
    return not key.startswith("tests.chaos.app.early")


@dataclass(frozen=True)
class Fault:
    kind: str
    t: float
    until: float
    target: str = ""
    link: str = ""
    mode: str = ""
    pids: tuple[int, ...] = ()
    ahead: float = 0.0  # how far the store's clock was set ahead at its beginning, until its end
    records: tuple[tuple[str, str], ...] = ()  # of the store, each with the id of one task in it
    evicted: frozenset[str] = frozenset()  # those that were

    def __str__(self) -> str:
        whose = "producers'" if self.target == "producers" else "worker's"
        return f"{self.kind}, {whose} {self.link}" if self.link else self.kind

    @property
    def seconds(self) -> float:
        return self.until - self.t

    def touches(self, since: float, until: float) -> bool:
        return self.t <= until and since <= self.until


@dataclass
class Run:
    """One run of a body."""

    id: str
    key: str
    worker: str
    pid: int
    delivery: str
    token: int | None
    start: float
    end: float | None = None
    outcome: str = ""  # success, failure, retry; empty: it never came to its end
    still_mine: bool | None = None
    killed: Fault | None = None
    values: tuple[str, ...] = ()  # of the calls that were merged

    @property
    def over(self) -> float:
        if self.end is not None:
            return self.end
        return self.killed.until if self.killed else float("inf")

    @property
    def complete(self) -> bool:
        return self.outcome in COMPLETE

    @property
    def late(self) -> bool:
        return is_late(self.key)


@dataclass
class Call:
    call: str
    key: str
    pid: int
    began: float
    returned: float | None = None  # None: it raised, or its process died in it
    id: str = ""
    outcome: str = ""  # as the library told it; "refused" when it raised
    value: str = ""  # that the call adds to what is merged


@dataclass
class Revoke:
    id: str
    began: float
    returned: float | None = None  # None: it raised, or its process died in it


@dataclass
class Chord:
    """One that was called: its body must run."""

    chord: str
    keys: tuple[str, ...]  # of its members
    members: tuple[str, ...]
    body: str
    began: float


class Story:
    """The journal, put together: calls, runs and faults."""

    def __init__(self, events: Iterable[Event]) -> None:
        self.events = list(events)
        self.by_what: dict[str, list[Event]] = defaultdict(list)
        for event in self.events:
            self.by_what[event["what"]].append(event)
        self.settings: Event = self.by_what["settings"][0]
        self.run_lease: float = self.settings["run_lease"]
        self.has_one_server = self.settings["broker"] == "one redis"
        self.faults = [_fault(event) for event in self.by_what["fault"]]
        self.calls = self._calls()
        self.runs = self._runs()
        self.runs_of: dict[str, list[Run]] = defaultdict(list)
        for run in self.runs:
            self.runs_of[run.id].append(run)
        self.calls_of: dict[str, list[Call]] = defaultdict(list)
        for call in self.calls:
            self.calls_of[call.key].append(call)
        self.chords = self._chords()
        self.revokes_of: dict[str, list[Revoke]] = defaultdict(list)
        for revoke in self._revokes():
            self.revokes_of[revoke.id].append(revoke)
        self.key_of = {run.id: run.key for run in self.runs}
        self.key_of |= {
            task_id: key
            for chord in self.chords
            for task_id, key in zip(chord.members, chord.keys, strict=True)
        }
        self.key_of |= {call.id: call.key for call in self.calls if call.id}

    def _calls(self) -> list[Call]:
        calls: dict[str, Call] = {}
        for event in self.by_what["call"]:
            calls[event["call"]] = Call(
                event["call"],
                key_of_event(event),
                event["pid"],
                event["t"],
                value=event.get("value", ""),
            )
        for event in self.by_what["called"]:
            call = calls[event["call"]]
            call.returned, call.id, call.outcome = event["t"], event["id"], event["outcome"]
        for event in self.by_what["refused"]:
            calls[event["call"]].outcome = "refused"
        return list(calls.values())

    def _chords(self) -> list[Chord]:
        began = {event["chord"]: event["t"] for event in self.by_what["chord"]}
        return [
            Chord(
                event["chord"],
                tuple(f"{MEMBER}({argument})" for argument in event["args"]),
                tuple(event["members"]),
                event["body"],
                began[event["chord"]],
            )
            for event in self.by_what["chord_called"]
        ]

    def _revokes(self) -> list[Revoke]:
        returned = {event["revoke"]: event["t"] for event in self.by_what["revoked"]}
        return [
            Revoke(event["id"], event["t"], returned.get(event["revoke"]))
            for event in self.by_what["revoke"]
        ]

    def _runs(self) -> list[Run]:
        runs: list[Run] = []
        open_runs: dict[tuple[str, str], Run] = {}
        for event in self.events:
            place = (event.get("id", ""), event.get("delivery", ""))
            if event["what"] == "start":
                run = Run(
                    id=event["id"],
                    key=key_of_event(event),
                    worker=event["worker"],
                    pid=event["pid"],
                    delivery=event["delivery"],
                    token=event["token"],
                    start=event["t"],
                    values=tuple(event.get("values", ())),
                )
                runs.append(run)
                open_runs[place] = run
            elif event["what"] == "end" and place in open_runs:
                run = open_runs.pop(place)
                run.end, run.outcome = event["t"], event["outcome"]
                run.still_mine = event["still_mine"]
        for run in open_runs.values():
            run.killed = next(self.kills(run.pid, run.start), None)
        return runs

    def kills(self, pid: int, since: float) -> Iterator[Fault]:
        """Deaths of a process, begun after ``since`` (or going on then)."""
        return (f for f in self.faults if pid in f.pids and f.until >= since)

    def of_id(self, what: str, task_id: str) -> list[Event]:
        return self._of_id[what].get(task_id, [])

    @cached_property
    def _of_id(self) -> dict[str, dict[str, list[Event]]]:
        found: dict[str, dict[str, list[Event]]] = defaultdict(lambda: defaultdict(list))
        for event in self.events:
            if "id" in event:
                found[event["what"]][event["id"]].append(event)
        return found

    def asked(self, run: Run) -> float:
        """When its worker was about to pass it to the pool: its start in the store came later."""
        times = [e["t"] for e in self.of_id("asked", run.id) if e["worker"] == run.worker]
        return max((t for t in times if t <= run.start), default=run.start)

    def received(self, run: Run) -> float:
        """When the worker got the message of this run."""
        times = [e["t"] for e in self.of_id("received", run.id) if e["delivery"] == run.delivery]
        return min(times, default=run.start)

    def born(self, task_id: str) -> float:
        """When the call began that published this id first."""
        published = [e["t"] - 1.0 for e in self.of_id("published", task_id)[:1]]
        return min([*self._admissions.get(task_id, ()), *published], default=0.0)

    def admitted(self, task_id: str) -> float:
        """As `born`, but exact where the call was noted."""
        return min(self._admissions.get(task_id, ()), default=self.born(task_id))

    @cached_property
    def _admissions(self) -> dict[str, list[float]]:
        """When the calls began that were given this id."""
        found: dict[str, list[float]] = defaultdict(list)
        for call in self.calls:
            if call.outcome not in CONFLICT:
                found[call.id].append(call.began)
        for chord in self.chords:
            for task_id in chord.members:
                found[task_id].append(chord.began)
        return found

    def store_ahead(self, since: float, until: float) -> float:
        """How much longer than this time it was for the store, whose clock jumped meanwhile."""
        return sum(fault.ahead for fault in self.faults if since <= fault.t <= until)

    def store_behind(self, since: float, until: float) -> float:
        """By how much the store's clock was set back meanwhile."""
        return sum(fault.ahead for fault in self.faults if since <= fault.until <= until)

    @cached_property
    def key_of_record(self) -> dict[str, str]:
        """Which key a record of the store is of, by the tasks that were seen in it."""
        return {
            record: self.key_of[task_id]
            for fault in self.faults
            for record, task_id in fault.records
            if task_id in self.key_of
        }

    @cached_property
    def episodes(self) -> list[tuple[float, str]]:
        return [(event["t"], event["fault"]) for event in self.by_what["episode"]]

    def episode_at(self, t: float) -> str:
        kind = self.episodes[0][1] if self.episodes else "none"
        for began, fault in self.episodes:
            if began > t:
                break
            kind = fault
        return kind


def key_of_event(event: Event) -> str:
    return f"{event['task']}({event['arg']})"


def _fault(event: Event) -> Fault:
    return Fault(
        kind=event["fault"],
        t=event["t"],
        until=event["until"],
        target=event.get("target", ""),
        link=event.get("link", ""),
        mode=event.get("mode", ""),
        pids=tuple(event.get("pids", ())),
        ahead=event.get("ahead", 0.0),
        records=tuple(event.get("records", {}).items()),
        evicted=frozenset(event.get("evicted", ())),
    )
