"""Every shape of canvas with a duplicate in it.

Each is written once, for a cast that is either unique or not, and gives a result, and perhaps
something else to look at. Holders wait in a queue of their own, which no worker consumes until
every duplicate has been called; or they run, and wait for a word.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from celery import Celery, chain, chord, group

import celery_unique
from tests.support import eventually

#: Where holders wait until everything else has been called.
HELD = "held"

SHAPES: dict[str, Callable[[Cast], Any]] = {}
#: How often the unique body runs, where that is not once.
RUNS: dict[str, int] = {}
#: Shapes with a chord in them, which a result backend may refuse.
WITH_CHORD: set[str] = set()
#: Shapes whose holder occupies a worker, which a pool of one can do for one at a time.
RUNNING: set[str] = set()


def shapes_for(backend: str) -> list[str]:
    """What can be played with a result backend: Celery has no chords with rpc."""
    return [name for name in SHAPES if backend != "rpc" or name not in WITH_CHORD]


@dataclass
class Cast:
    """The tasks of one kind, and a tag that no other cast has."""

    app: Celery
    kind: str
    tag: str = field(default_factory=lambda: uuid.uuid4().hex[:12])
    held: tuple[Any, int] | None = None

    def __getattr__(self, name: str) -> Any:
        tasks = self.app.tasks
        return tasks[name] if name in tasks else tasks[f"{self.kind}.{name}"]

    @property
    def runs(self) -> int:
        return int(self.app.props.runs(f"{self.kind}-{self.tag}"))

    def holder(self, task: str = "work", *, duplicates: int = 1, **options: Any) -> Any:
        """Somebody else's call, of which the shape's own are so many duplicates."""
        result = getattr(self, task).apply_async((self.tag,), queue=HELD, **options)
        self.held = (getattr(self, task), duplicates)
        return result

    def waiting(self, task: str = "work") -> Any:
        """A signature whose call waits as holders do: equal ones find each other."""
        return getattr(self, task).si(self.tag).set(queue=HELD)

    def is_joined(self) -> bool:
        """Whether every duplicate of the holder has been called."""
        if self.held is None or self.kind != "unique":
            return True
        task, duplicates = self.held
        lock = celery_unique.lookup(task, (self.tag,))
        return lock is not None and lock.duplicates >= duplicates

    def running(self) -> Any:
        """Somebody else's call, found running."""
        result = self.hold.delay(self.tag)
        eventually(lambda: self.runs, timeout=60, message="the holder does not run")
        return result

    def let_go(self) -> None:
        for run in range(1, 4):
            self.app.props.let_go(self.tag, run)

    def noted(self, number: int, where: str = "") -> list[str]:
        """What callbacks were told: waits for so many. Error callbacks tell it by the id."""
        name, redis = f"noted:{where or f'{self.kind}-{self.tag}'}", self.app.props.redis
        eventually(lambda: redis.llen(name) >= number, timeout=60, message="a callback is lost")
        return sorted(redis.lrange(name, 0, -1))

    @property
    def note_here(self) -> Any:
        return self.note.s(where=f"{self.kind}-{self.tag}")


def shape(
    runs: int = 1, *, chords: bool = False, running: bool = False
) -> Callable[[Callable[[Cast], Any]], Any]:
    def add(function: Callable[[Cast], Any]) -> Callable[[Cast], Any]:
        name = function.__name__
        SHAPES[name] = function
        RUNS[name] = runs
        if chords:
            WITH_CHORD.add(name)
        if running:
            RUNNING.add(name)
        return function

    return add


# -- groups ------------------------------------------------------------------------------


@shape()
def group_of_equals(c: Cast) -> Any:
    return group(c.waiting(), c.waiting(), c.waiting())()


@shape()
def group_with_one_that_waits(c: Cast) -> Any:
    c.holder()
    return group(c.work.s(c.tag), c.echo.s(5))()


@shape(running=True)
def group_with_one_that_runs(c: Cast) -> Any:
    c.running()
    return group(c.hold.s(c.tag), c.echo.s(5))()


@shape()
def nested_groups(c: Cast) -> Any:
    c.holder()
    return group(group(c.work.s(c.tag), c.work.s(c.tag)), group(c.work.s(c.tag), c.echo.s(2)))()


@shape()
def group_of_failing_equals(c: Cast) -> Any:
    return group(c.waiting("fail"), c.waiting("fail"))()


# -- chords ------------------------------------------------------------------------------


@shape(chords=True)
def chord_with_equal_header_members(c: Cast) -> Any:
    return chord([c.waiting(), c.waiting()], c.total.s())()


@shape(chords=True)
def chord_with_a_header_member_that_waits(c: Cast) -> Any:
    c.holder()
    return chord([c.echo.s(5), c.work.s(c.tag)], c.total.s())()


@shape(chords=True, running=True)
def chord_with_a_header_member_that_runs(c: Cast) -> Any:
    c.running()
    return chord([c.hold.s(c.tag), c.echo.s(5)], c.total.s())()


@shape(chords=True)
def chord_of_duplicates_alone(c: Cast) -> Any:
    c.holder()
    return chord([c.work.s(c.tag), c.work.s(c.tag), c.work.s(c.tag)], c.total.s())()


@shape(chords=True)
def chord_with_a_duplicate_body(c: Cast) -> Any:
    c.holder()
    return chord([c.echo.s(1), c.echo.s(2)], c.work.si(c.tag))()


@shape(chords=True)
def chord_with_a_failing_header(c: Cast) -> Any:
    return chord([c.waiting("fail"), c.waiting("fail")], c.total.s())()


@shape(chords=True)
def chord_in_a_chain(c: Cast) -> Any:
    c.holder(duplicates=2)
    header = [c.work.si(c.tag), c.work.si(c.tag)]
    return chain(c.echo.s(1), chord(header, c.total.s()), c.echo.s())()


@shape(chords=True)
def chain_in_a_chord(c: Cast) -> Any:
    c.holder()
    return chord([chain(c.work.si(c.tag), c.echo.s()), c.echo.s(2)], c.total.s())()


# -- chains ------------------------------------------------------------------------------


@shape()
def chain_with_a_duplicate_head(c: Cast) -> Any:
    c.holder()
    return chain(c.work.si(c.tag), c.echo.s(), c.echo.s())()


@shape()
def chain_with_a_duplicate_in_the_middle(c: Cast) -> Any:
    c.holder()
    return chain(c.echo.s(9), c.work.si(c.tag), c.echo.s())()


@shape()
def chain_with_a_duplicate_tail(c: Cast) -> Any:
    c.holder()
    return chain(c.echo.s(9), c.echo.s(), c.work.si(c.tag))()


@shape()
def chain_with_a_failing_duplicate_head(c: Cast) -> Any:
    c.holder("fail")
    return chain(c.fail.si(c.tag), c.echo.s(), c.echo.s())()


@shape(runs=2)
def chain_of_two_equal_links(c: Cast) -> Any:
    """One after the other: the first has ended when the second is called."""
    return chain(c.work.si(c.tag), c.work.si(c.tag))()


@shape()
def chain_of_two_equal_links_that_count_once(c: Cast) -> Any:
    """Under ``until_success`` the second is a duplicate of the first, which has ended."""
    return chain(c.once.si(c.tag), c.once.si(c.tag), c.echo.s())()


@shape()
def chain_into_a_group(c: Cast) -> Any:
    c.holder()
    return chain(c.work.si(c.tag), group(c.echo.s(), c.echo.s(3)))()


@shape(chords=True)
def chain_of_two_groups(c: Cast) -> Any:
    c.holder()
    return chain(group(c.work.si(c.tag), c.echo.s(2)), group(c.total.s(), c.total.s()))()


@shape(chords=True)
def group_into_a_chain(c: Cast) -> Any:
    return chain(group(c.waiting(), c.waiting()), c.total.s(), c.echo.s())()


@shape()
def group_of_chains(c: Cast) -> Any:
    one = chain(c.waiting(), c.echo.s())
    other = chain(c.waiting(), c.echo.s(4))
    return group(one, other)()


# -- callbacks, ids, ends ----------------------------------------------------------------


@shape()
def link(c: Cast) -> Any:
    c.holder()
    result = c.work.apply_async((c.tag,), link=c.note_here)
    return result, lambda: c.noted(1)


@shape()
def two_links_and_a_group(c: Cast) -> Any:
    c.holder()
    links = [c.note_here, group(c.note_here, c.note_here), c.note_here]
    result = c.work.apply_async((c.tag,), link=links)
    return result, lambda: c.noted(4)


@shape()
def link_error_with_a_failing_holder(c: Cast) -> Any:
    c.holder("fail")
    result = c.fail.apply_async((c.tag,), link_error=c.note_error.s())
    return result, lambda: c.noted(1, where=result.id)


@shape()
def link_and_link_error_on_one_call(c: Cast) -> Any:
    c.holder()
    result = c.work.apply_async((c.tag,), link=c.note_here, link_error=c.note_error.s())
    return result, lambda: c.noted(1)


@shape()
def links_of_holder_and_follower(c: Cast) -> Any:
    c.holder(link=c.note_here)
    result = c.work.apply_async((c.tag,), link=c.note_here)
    return result, lambda: c.noted(2)


@shape()
def explicit_id(c: Cast) -> Any:
    c.holder()
    result = c.work.apply_async((c.tag,), task_id=f"id-{c.kind}-{c.tag}")
    return result, lambda: result.id.startswith(f"id-{c.kind}")


@shape()
def no_result_but_a_link(c: Cast) -> Any:
    c.holder()
    c.work.apply_async((c.tag,), link=c.note_here, ignore_result=True)
    return None, lambda: c.noted(1)


@shape(runs=2)
def holder_that_retries(c: Cast) -> Any:
    return group(c.waiting("retry"), c.waiting("retry"))()


@shape()
def holder_that_is_replaced_in_its_body(c: Cast) -> Any:
    c.holder("replace")
    return group(c.replace.s(c.tag), c.echo.s(1))()


@shape()
def stamped(c: Cast) -> Any:
    """The next link of a follower's chain and its callback have the stamps of the canvas."""
    c.holder()
    callback = c.stamps.s(where=f"{c.kind}-{c.tag}")
    canvas = group(chain(c.work.si(c.tag), c.stamps.s()), c.work.s(c.tag).set(link=callback))
    canvas.stamp(tenant="a")
    result = canvas.apply_async()

    def stamps() -> list[Any]:
        found = [result.results[0].get(timeout=60), json.loads(c.noted(1)[0])]
        assert found == [{"tenant": "a"}] * 2
        return found

    return result, stamps


@shape()
def children_of_the_body(c: Cast) -> Any:
    c.holder("spawn")
    result = c.spawn.apply_async((c.tag,), task_id=f"id-{c.kind}-{c.tag}")
    return result, lambda: len(result.children or ())


@shape()
def trail_of_a_chain(c: Cast) -> Any:
    """The next link knows the follower as its parent, and the chain's first as its root."""
    c.holder()
    result = chain(c.echo.s(1), c.work.si(c.tag), c.where.s())()

    def ids() -> list[bool]:
        root, parent = result.get(timeout=60)
        return [root == result.parent.parent.id, parent == result.parent.id]

    return None, ids


# -- many calls --------------------------------------------------------------------------


@shape(runs=4)
def starmap_and_chunks(c: Cast) -> Any:
    """One message that calls the body again and again: those calls take no locks."""
    c.work.starmap([(c.tag,), (c.tag,)]).apply_async()
    chunks = c.work.chunks([(c.tag,), (c.tag,)], 1).group()()
    return chunks, lambda: eventually(lambda: c.runs >= 4, timeout=60)


@shape()
def apply_many(c: Cast) -> Any:
    c.holder()
    canvas = chain(c.work.si(c.tag), c.echo.s())
    results = celery_unique.apply_many(
        [c.work.s(c.tag), c.echo.s(3), c.work.s(c.tag).set(link=c.note_here), canvas]
    )
    return results, lambda: c.noted(1)


#: Shapes on which Celery hangs without us, with what they come to with us: the message of a
#: replacement goes without the name of the queue that waits for the result.
HANGS_IN_CELERY: dict[tuple[str, str], list[Any]] = {
    ("rpc", "holder_that_is_replaced_in_its_body"): [
        [["SUCCESS", "replaced"], ["SUCCESS", 1]],
        None,
    ],
}
