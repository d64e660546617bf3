"""Several beats publish each tick once: Celery's own, django-celery-beat's and RedBeat.

The beats are killed, stopped and started again, and their clocks are apart. A crontab has minutes,
so its clock runs thirty times as fast. ``make test-beats`` runs 300 ticks of each.
"""

from __future__ import annotations

import json
import math
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import redis

from celery_unique.header import HEADER
from celery_unique.keys.digest import key_of
from celery_unique.publish.beat_ticks import SKEW_S
from tests.support import RedisServer, eventually
from tests.support.worker import REPOSITORY

pytestmark = [pytest.mark.slow, pytest.mark.server, pytest.mark.timeout(1500)]

#: How many ticks, one second apart.
TICKS = int(os.environ.get("CELERY_UNIQUE_TICKS", "5"))
#: A minute of a crontab is two seconds.
SPEED = 30
#: How far the clocks of the beats are apart, in their own seconds.
OFFSETS_S = (-1, 0, 1)

KINDS = {
    "celery": "celery.beat:PersistentScheduler",
    "django": "django_celery_beat.schedulers:DatabaseScheduler",
    "redbeat": "redbeat.RedBeatScheduler",
}


class Beats:
    """Three beats, and the messages that they publish."""

    def __init__(
        self,
        url: str,
        directory: Path,
        kind: str,
        every_s: float | None,
        unique_beat: bool = True,
        **settings: Any,
    ) -> None:
        self.redis = redis.Redis.from_url(url)
        self._kind, self._directory = kind, directory
        #: How fast the clock of a beat runs, and from when: all clocks have the same beginning.
        self._speed = SPEED if every_s is None else 1
        self._tick_s = 60 if every_s is None else every_s
        self._began = time.time()
        self.settings: dict[str, Any] = {
            "broker": url,
            "every_s": every_s,
            "unique_beat": unique_beat,
            "began": self._began,
            "speed": self._speed,
            "journal": str(directory),
            **settings,
        }
        if kind == "django":
            self.settings["django"] = str(directory / "beat.sqlite3")
            self._migrate()
        self._processes: dict[int, subprocess.Popen[bytes]] = {}

    def _environment(self, number: int | None) -> dict[str, str]:
        env = {**os.environ, "PYTHONPATH": str(REPOSITORY), "BEAT_APP": json.dumps(self.settings)}
        if number is not None:
            env["BEAT_OFFSET_S"] = str(OFFSETS_S[number])
        return env

    def _migrate(self) -> None:
        code = (
            "from tests.workers.beat_app import app\n"
            "from django.core.management import call_command\n"
            "call_command('migrate', verbosity=0)\n"
        )
        subprocess.run([sys.executable, "-c", code], env=self._environment(None), check=True)

    def start(self, number: int) -> None:
        """Return once it ticks: two others run all the time."""
        before = self._starts(number)
        self._launch(number)
        eventually(
            lambda: self._starts(number) > before, timeout=120, message="the beat does not start"
        )

    def _starts(self, number: int) -> int:
        log = self._directory / f"beat{number}.log"
        return log.read_text().count("beat: Starting...") if log.exists() else 0

    def _launch(self, number: int) -> None:
        schedule = ["--schedule", str(self._directory / f"schedule{number}")]
        with (self._directory / f"beat{number}.log").open("ab") as log:
            self._processes[number] = subprocess.Popen(
                [
                    *(sys.executable, "-m", "celery", "-A", "tests.workers.beat_app", "beat"),
                    *("--scheduler", KINDS[self._kind], "--loglevel", "INFO", "--pidfile="),
                    *(schedule if self._kind == "celery" else ()),
                ],
                env=self._environment(number),
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def signal(self, number: int, sent: signal.Signals) -> None:
        self._processes[number].send_signal(sent)

    def kill(self, number: int) -> None:
        self.signal(number, signal.SIGKILL)
        self._processes[number].wait()

    def _now(self) -> float:
        """The time of the beats, but for what their clocks are apart."""
        return time.time() + (time.time() - self._began) * (self._speed - 1)

    def close(self) -> None:
        for process in self._processes.values():
            process.kill()
            process.wait()

    # -- what they published ------------------------------------------------------------

    def messages(self, task: str) -> list[dict[str, Any]]:
        texts = self.redis.lrange("ticks", 0, -1)[::-1]
        return [each for each in map(json.loads, texts) if each["headers"]["task"] == task]

    def ticks(self) -> Counter[int]:
        """Nominal time -> how many messages of the plain task."""
        last = int(self._now() // self._tick_s) + 10
        nominal_of = {}
        for n in range(last - (TICKS + 200) * 2, last):
            nominal = round(n * self._tick_s)
            text = json.dumps(
                {"key": f"every tick@{nominal}", "type": "shop.plain"}, separators=(",", ":")
            )
            nominal_of[key_of(text)] = nominal
        keys = [each["headers"][HEADER]["key"] for each in self.messages("shop.plain")]
        return Counter(nominal_of[key] for key in keys)

    def ticks_of_policy(self) -> Counter[int]:
        """The same of the task with a policy of its own."""
        return Counter(each["headers"]["tick"] for each in self.messages("shop.unique"))

    def missed(self, ticks: Counter[int], until: int | None = None) -> list[int]:
        last = max(ticks) if until is None else until
        return [at for at in range(min(ticks), last, self.step) if at not in ticks]

    @property
    def step(self) -> int:
        """Between two ticks, in seconds of the beats."""
        return round(self._tick_s)

    def looked(self) -> list[float]:
        """When a beat came to its schedule."""
        return sorted(
            float(line)
            for path in self._directory.glob("looks-*")
            for line in path.read_text().splitlines()
        )

    def attended(self, missed: list[int]) -> list[int]:
        """Those of the missed ticks in whose time a beat came to its schedule: one look takes one
        entry, there are two, and the third shows that both were done with.

        Without a look in a whole minute (two seconds here) Celery's beat skips a crontab, on a
        machine that is too busy. A kill excuses nothing: a tick is published before it is
        recorded, also by RedBeat, whose record is that of all beats.
        """
        until_s = max(self._tick_s, SKEW_S)
        looks = [
            [float(line) for line in path.read_text().splitlines()]
            for path in self._directory.glob("looks-*")
        ]
        return [
            at
            for at in missed
            if any(sum(at <= look < at + until_s for look in each) >= 3 for each in looks)
        ]

    def published_again(self) -> int:
        """How often a beat published a tick that another one had acquired and not recorded."""
        logs = (path.read_text() for path in self._directory.glob("beat*.log"))
        return sum(log.count("publishing tick of its own policy again") for log in logs)

    def abandoned(self) -> set[int]:
        """The ticks of the task with a policy of its own that a beat took over from another."""
        journals = (path.read_text().split() for path in self._directory.glob("abandoned-*"))
        return {int(nominal) for journal in journals for nominal in journal}


@pytest.fixture
def beats_of(redis_server: RedisServer, tmp_path: Path) -> Iterator[Any]:
    made: list[Beats] = []

    def make(*args: Any, **options: Any) -> Beats:
        made.append(Beats(redis_server.fresh_url(), tmp_path, *args, **options))
        return made[-1]

    yield make
    for beats in made:
        beats.close()


@pytest.mark.parametrize("every_s", [1, None], ids=["interval", "crontab"])
@pytest.mark.parametrize("kind", KINDS)
def test_each_tick_is_published_once(
    beats_of: Any, kind: str, every_s: float | None, capsys: Any
) -> None:
    beats = beats_of(kind, every_s)
    chance = random.Random(7)
    beats.start(0)
    # The others start once the entries exist: those of a shared kind are written by the first.
    eventually(lambda: beats.messages("shop.plain"), timeout=60, message="no beat ticks")
    beats.start(1)
    beats.start(2)
    killed = stopped = 0
    # On a busy machine a few ticks are over before the first of both faults.
    while len(beats.ticks()) < TICKS or not (killed and stopped):
        victim = chance.randrange(3)
        time.sleep(chance.uniform(0.5, 1.5))
        if chance.random() < 0.5:
            beats.kill(victim)
            beats.start(victim)
            killed += 1
        else:
            beats.signal(victim, signal.SIGSTOP)
            time.sleep(chance.uniform(0.5, 2.5))
            beats.signal(victim, signal.SIGCONT)
            stopped += 1
    # What is under way now is decided by then: a beat waits for at most 3 s for another one.
    until = max(beats.ticks())
    decided = until + max(2 * SKEW_S, 2 * beats.step)
    for published in (beats.ticks, beats.ticks_of_policy):
        eventually(lambda ticks=published: max(ticks()) >= decided, timeout=60)
    beats.close()

    plain = Published.of(beats, beats.ticks(), until)
    of_policy = Published.of(beats, beats.ticks_of_policy(), until)
    again = beats.published_again()
    with capsys.disabled():
        print(
            f"\n{kind}, {'crontab' if every_s is None else 'interval'}, {killed} kills, "
            f"{stopped} stops: plain: {plain}; with a policy of its own: {of_policy}, "
            f"{again} published again"
        )
    assert (plain.missed, plain.doubled) == ([], [])
    assert of_policy.missed == []
    # A beat that is killed or stopped after it published a task with a policy of its own, and
    # before it recorded that, leaves the tick to another, which says so. (Its policy would find the
    # second call; here it has a window of a millisecond.)
    assert set(of_policy.doubled) <= beats.abandoned()
    assert len(of_policy.doubled) <= again <= killed + stopped
    # Both entries begin with the first beat.
    assert abs(plain.first - of_policy.first) <= beats.step
    for each in (plain, of_policy):
        most = 1 + each.ticks // 10
        assert len(each.excused) <= most, "the machine is too busy for this test"


@dataclass(frozen=True)
class Published:
    """The ticks of one entry, by their nominal times."""

    first: int
    ticks: int
    missed: list[int]
    excused: list[int]  # missed, too: no beat came to its schedule in their time
    doubled: list[int]

    @classmethod
    def of(cls, beats: Beats, ticks: Counter[int], until: int) -> Published:
        missed = beats.missed(ticks, until)
        attended = beats.attended(missed)
        excused = [at for at in missed if at not in attended]
        doubled = [at for at, times in ticks.items() if times > 1]
        return cls(min(ticks), len(ticks), attended, excused, doubled)

    def __str__(self) -> str:
        return (
            f"{self.ticks} ticks, missed: {self.missed}, excused: {self.excused}, "
            f"doubled: {self.doubled}"
        )


@pytest.mark.parametrize("kind", ["celery", "redbeat"])
def test_a_tick_that_is_recorded_and_not_published_counts_as_missed(
    beats_of: Any, kind: str
) -> None:
    """Also where a beat is killed at that moment."""
    every = 4
    beats = beats_of(kind, 1, skips=every)
    beats.start(0)
    eventually(lambda: beats.messages("shop.plain"), timeout=60, message="no beat ticks")
    beats.start(1)
    beats.start(2)
    lost = math.ceil(time.time() / every) * every
    eventually(lambda: time.time() >= lost)
    beats.kill(1)
    eventually(lambda: max(beats.ticks()) > lost + 2 * SKEW_S, timeout=60)
    beats.close()

    for ticks in (beats.ticks(), beats.ticks_of_policy()):
        missed = beats.missed(ticks)
        assert lost in missed
        assert [at for at in missed if at % every == 0] == missed
        assert lost in beats.attended(missed)


def test_a_beat_that_records_a_tick_late_takes_no_other_tick_along(beats_of: Any) -> None:
    """Its clock is ahead, so that no other beat has come to the ticks that pass meanwhile."""
    beats = beats_of("redbeat", 1, slow_s=2)
    beats.start(0)
    eventually(lambda: beats.messages("shop.plain"), timeout=60, message="no beat ticks")
    beats.start(1)
    beats.start(2)

    eventually(lambda: len(beats.ticks()) >= 20, timeout=60)
    beats.close()

    assert beats.missed(beats.ticks()) == []


@pytest.mark.parametrize("unique_beat", [True, False])
def test_a_crontab_is_missed_if_no_beat_runs_in_its_whole_minute(
    beats_of: Any, unique_beat: bool
) -> None:
    """As when the machine is too busy: Celery runs an entry once for all minutes that passed."""
    beats = beats_of("celery", None, unique_beat=unique_beat)
    running = range(3 if unique_beat else 1)
    for number in running:
        beats.start(number)
    eventually(lambda: beats.messages("shop.plain"), timeout=60, message="no beat ticks")
    for number in running:
        beats.signal(number, signal.SIGSTOP)
    before = len(beats.messages("shop.plain"))
    time.sleep(4 * 60 / SPEED)
    assert len(beats.messages("shop.plain")) == before
    for number in running:
        beats.signal(number, signal.SIGCONT)
    eventually(lambda: len(beats.messages("shop.plain")) >= before + 2, timeout=60)
    if unique_beat:  # else the looks at the schedule would show nothing
        eventually(lambda: beats.attended(list(beats.ticks())), timeout=60)
    beats.close()

    if not unique_beat:  # four minutes and a half, and two messages
        sent = beats.looked()
        assert max(later - at for at, later in pairwise(sent)) > 3 * 60
        return
    ticks = beats.ticks()
    missed = beats.missed(ticks)
    assert len(missed) >= 2
    assert beats.attended(missed) == []


def test_without_the_setting_every_beat_publishes_each_tick(beats_of: Any) -> None:
    beats = beats_of("celery", 1, unique_beat=False)
    for number in range(3):
        beats.start(number)

    eventually(lambda: len(beats.messages("shop.plain")) >= 9, timeout=60, message="no ticks")

    sent = [each["headers"] for each in beats.messages("shop.plain")]
    assert not any(HEADER in headers for headers in sent)
