"""A store and the plain model side by side: every act goes to both, and they must agree.

The stores read their real clocks, so the model counts whole minutes: every duration is
some minutes, time is moved in minutes, and the seconds that really pass are left off (a
history takes far less than the half minute that would be mistaken).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from celery_unique.stores.base import (
    Acquired,
    Called,
    Claim,
    Finish,
    Finished,
    Held,
    LockStore,
    Start,
    Started,
)
from celery_unique.stores.record import LETTER_OF, STATE_OF, Mark, State, TaskEntry, letters
from celery_unique.stores.record_followers import Following
from celery_unique.testing.store_contract.factories import MINUTE, fresh_key
from tests.stores.model import FINAL, Answer, Model

Call = dict[str, Any]
Seen = dict[str, Any]


class SideBySide:
    """One history on two keys that the store has not seen before."""

    def __init__(self, store: LockStore, figures: Counter[str]) -> None:
        self.store = store
        self.figures = figures
        self.figures["histories"] += 1
        self.model = Model()
        self.keys = [fresh_key(), fresh_key()]
        #: Every key and id that ever had a mark.
        self.marked: set[tuple[str, str]] = set()
        self.tokens: dict[str, list[int]] = {key: [0] for key in self.keys}
        _, self.began_at = store.read(self.keys[0])

    def count(self, what: str) -> None:
        self.figures["acts"] += 1
        self.figures[what] += 1
        # No two tasks are of the same millisecond: which one a store chooses would be chance,
        # and a history that is played again would take another course.
        self.store.clock_offset_ms += 1

    # -- time, in minutes since this history began --------------------------

    def advance(self, minutes: int) -> None:
        self.store.clock_offset_ms += minutes * MINUTE
        self.model.advance(minutes)
        self.count("time passes")

    def minutes(self, time_ms: int) -> float | None:
        """None for no time; a fraction shows a time that is no sum of the durations."""
        if time_ms == 0:
            return None
        whole, rest = divmod(time_ms - self.began_at, MINUTE)
        return whole if rest < MINUTE // 2 else whole + rest / MINUTE

    def milliseconds(self, minutes: int | None) -> int:
        return 0 if minutes is None else minutes * MINUTE

    # -- acts of the caller -------------------------------------------------

    def acquire(self, key: str, task_id: str, call: Call) -> None:
        reply = self.store.acquire(key, self._claim(task_id, call))

        self._compare_acquired(key, task_id, call, reply)

    def acquire_many(self, claims: Sequence[tuple[str, str, Call]]) -> None:
        replies = self.store.acquire_many(
            [(key, self._claim(task_id, call)) for key, task_id, call in claims]
        )

        for (key, task_id, call), reply in zip(claims, replies, strict=True):
            self._compare_acquired(key, task_id, call, reply)

    def _claim(self, task_id: str, call: Call) -> Claim:
        return Claim(
            task_id,
            "shop.rebuild",
            states=letters(call["states"]),
            grace_ms=self.milliseconds(call["grace"]),
            on_conflict=call["on_conflict"],
            window_ms=self.milliseconds(call["window"]),
            delay_ms=self.milliseconds(call["delay"]),
            keep=letters(call["states"] & set(FINAL)),
            keep_ms=self.milliseconds(call["keep_for"]),
            arguments=call["arguments"],
            again=call["again"],
            parent=call["parent"] or "",
            max_wait_ms=self.milliseconds(call["max_wait"]),
            join=f"message of {task_id}" if call["join"] else "",
            limit=call.get("limit", 1),
            max_queue=call.get("max_queue") or 0,
        )

    def _compare_acquired(self, key: str, task_id: str, call: Call, reply: Acquired) -> None:
        answer = self.model.acquire(key, task_id, **call)
        if answer.outcome == "duplicate" and call["join"] and reply.holder is not None:
            # Which of them it is depends on the holder that the store has chosen.
            answer.outcome = self.model.outcome_of_joining(
                key, task_id, call["arguments"], reply.holder.task_id
            )
        assert reply.outcome == answer.outcome
        assert self.minutes(reply.now) == self.model.now
        if answer.outcome == "created":
            self._compare_place(key, task_id, reply, answer)
            return
        if answer.outcome in ("queued", "full"):
            assert reply.position == len(self.model.parked(key))
            named = reply.holder.task_id if reply.holder is not None else None
            assert named in (answer.may_be_named or [None])
            self.count(f"acquire: {answer.outcome}")
            return
        self.count(f"acquire: {answer.outcome}")
        assert reply.holder is not None
        assert (reply.replaced, reply.after, reply.eta) == ((), "", 0)
        assert reply.holder.task_id in answer.may_be_named
        holder = self.model.task(key, reply.holder.task_id)
        assert holder is not None
        assert (
            str(reply.holder.state),
            self.minutes(reply.holder.created_at),
            self.minutes(reply.holder.lease),
            reply.holder.arguments,
            self.minutes(reply.holder.eta),
        ) == (
            self.model.shown_state(holder),
            holder["created_at"],
            holder["lease"],
            holder["arguments"],
            holder["eta"],
        )
        if answer.asked_before:
            return
        self.model.count_duplicate(key, reply.holder.task_id)
        if answer.outcome == "joined":
            self.model.join(
                key,
                task_id,
                reply.holder.task_id,
                keep=call["states"] & set(FINAL),
                kept_for=call["window"] if call["keep_for"] is None else call["keep_for"],
                arguments=call["arguments"],
            )

    def _compare_place(self, key: str, task_id: str, reply: Acquired, answer: Answer) -> None:
        assert reply.holder is None
        assert (reply.after or None) in answer.may_come_after
        replaced, may_be_at = self.model.place(key, task_id, answer, reply.after or None)
        assert list(reply.replaced) == replaced
        eta = self.minutes(reply.eta)
        assert eta in may_be_at
        self.model.note_eta(key, task_id, None if eta is None else int(eta))
        how = ", replaces" if reply.replaced else ""
        how += ", succeeds" if reply.after else ""
        self.count(f"acquire: created{how}")

    def confirm(self, key: str, task_id: str, lease: int) -> None:
        self.store.confirm(key, task_id, lease * MINUTE)
        self.store.flush()

        self.model.confirm(key, task_id, lease)
        self.count("confirm")

    def give_back(self, key: str, task_id: str, mark_for: int) -> None:
        removed = self.store.give_back(key, task_id, mark_for * MINUTE)

        assert removed == self.model.give_back(key, task_id, mark_for)
        self.count(f"give_back: {'removed' if removed else 'kept'}")

    def help(self, key: str, task_id: str) -> None:
        verdict = self.store.help(key, task_id)

        assert verdict == self.model.help(key, task_id)
        self.count(f"help: {verdict}")

    def cancel(self, key: str, task_id: str, mark_for: int) -> None:
        verdict = self.store.cancel(key, task_id, mark_for * MINUTE)

        assert verdict == self.model.cancel(key, task_id, mark_for)
        self.count(f"cancel: {verdict}")

    def release(self, key: str, task_id: str | None) -> None:
        count = self.store.release(key, task_id)

        assert count == self.model.release(key, task_id)
        self.count(f"release: {count}")

    # -- acts of the worker -------------------------------------------------

    def delivery_of(self, key: str, task_id: str) -> str:
        """The delivery that is recorded for a task."""
        task = self.model.task(key, task_id)
        return (task and task["delivery"]) or "d1"

    def start(
        self, key: str, task_id: str, delivery: str, leases: tuple[int, int, int], header: Call
    ) -> None:
        """``leases``: of the lock, of the delivery, and of the marks of what it replaced."""
        lease, run_lease, mark_for = leases
        created_ago = header["created_ago"]
        created_at = None if created_ago is None else self.model.now - created_ago
        verdict, lost, mark, by = self.model.start(
            key,
            task_id,
            delivery,
            lease=lease,
            run_lease=run_lease,
            created_at=created_at,
            window=header["window"],
            mark_for=mark_for,
            keep=header["keep"],
            arguments=header["arguments"],
        )

        reply = self.store.start(
            key,
            Start(
                task_id,
                delivery,
                "shop.rebuild",
                lease_ms=lease * MINUTE,
                run_lease_ms=run_lease * MINUTE,
                mark_ms=mark_for * MINUTE,
                created_at=0 if created_at is None else self.began_at + created_at * MINUTE,
                window_ms=self.milliseconds(header["window"]),
                keep=letters(header["keep"]),
                arguments=header["arguments"],
            ),
        )

        assert reply == Started(verdict, reply.token, lost, mark, by)  # type: ignore[arg-type]
        self._compare_token(key, task_id, reply)
        self.count(f"start: {verdict}{', lost' if lost else ''}")

    def _compare_token(self, key: str, task_id: str, reply: Started) -> None:
        if reply.verdict != "run":
            assert reply.token == 0
            return
        task = self.model.task(key, task_id)
        assert task is not None
        if task["token"] is None:
            assert reply.token > self.tokens[key][-1]
            self.tokens[key].append(reply.token)
            self.model.note_token(key, task_id, reply.token)
        assert reply.token == task["token"]

    def renew(self, lines: Sequence[tuple[str, str, str, int, int, bool, str]]) -> None:
        """Lines of key, id, delivery ("" for a message that is only held), two leases,
        whether the message may come back while it runs, and as what it waits."""
        replies = self.store.renew(
            [
                Held(key, task_id, delivery, lease * MINUTE, run_lease * MINUTE, copies, waits_as)
                for key, task_id, delivery, lease, run_lease, copies, waits_as in lines
            ]
        )

        assert [reply > 0 for reply in replies] == [self._model_renews(*line) for line in lines]
        for mine in replies:
            self.count(f"renew: {'extended' if mine else 'lost'}")

    def _model_renews(
        self,
        key: str,
        task_id: str,
        delivery: str,
        lease: int,
        run_lease: int,
        copies: bool,
        waits_as: str,
    ) -> bool:
        if not delivery:
            return self.model.renew_held(
                key, task_id, lease=lease, copies=copies, waits_as=waits_as
            )
        return self.model.renew_running(
            key, task_id, delivery, lease=lease, run_lease=run_lease, copies=copies
        )

    def retry(self, key: str, task_id: str, delivery: str, lease: int, copies: bool) -> None:
        self.store.retry(key, task_id, delivery, lease * MINUTE, copies)
        self.store.flush()

        self.model.retry(key, task_id, delivery, lease=lease, copies=copies)
        self.count("retry")

    def finish(
        self, key: str, task_id: str, delivery: str, state: str, times: tuple[int, int], later: bool
    ) -> None:
        """``times``: how long an end without a window is kept, and a done mark."""
        retention, mark_for = times
        run_lease = 5

        reply = self.store.finish(
            key,
            Finish(
                task_id,
                delivery,
                State(state),
                retention * MINUTE,
                mark_for * MINUTE,
                later,
                run_lease * MINUTE,
            ),
        )

        expected = self.model.finish(
            key,
            task_id,
            delivery,
            state=state,
            retention=retention,
            mark_for=mark_for,
            later=later,
            run_lease=run_lease,
        )
        *facts, turns = expected
        called = tuple(Called(i, f"message of {i}", again) for i, again in turns)
        assert reply == Finished(*facts, called)  # type: ignore[arg-type]
        how = ", settle" if reply.settle else ""
        how += ", followed" if reply.followers else ""
        how += ", calls" if called else ""
        self.count(f"finish: {reply.verdict}{how}")

    def settle(
        self, key: str, task_id: str, delivery: str, state: str, times: tuple[int, int], again: bool
    ) -> None:
        retention, mark_for = times
        asked = Finish(task_id, delivery, State(state), retention * MINUTE, mark_for * MINUTE)
        self.store.settle(key, asked, again)
        self.store.flush()

        self.model.settle(
            key,
            task_id,
            delivery,
            state=state,
            retention=retention,
            mark_for=mark_for,
            again=again,
        )
        self.count("settle")

    def forget(self, key: str, task_id: str) -> None:
        self.store.forget(key, task_id)
        self.store.flush()

        self.model.forget(key, task_id)
        self.count("forget")

    # -- followers ----------------------------------------------------------

    def complete_follower(self, key: str, follower_id: str) -> None:
        self.store.complete_follower(key, follower_id)

        known = self.model.stop_following(key, follower_id)
        self.count(f"complete_follower: {'done' if known else 'unknown'}")

    def due(self) -> None:
        due = set(self.store.due(limit=100_000)) & set(self.keys)

        assert due == self.model.keys_due()
        self.count(f"due: {len(due)}")

    def reap(self, key: str, reaper: str, claim_for: int) -> None:
        orphans = self.store.reap(key, reaper, claim_for * MINUTE)

        expected = self.model.reap(key, reaper, claim_for)
        assert {o.follower_id: (o.holder, o.promoted, o.fate) for o in orphans} == expected
        assert all(orphan.message == f"message of {orphan.follower_id}" for orphan in orphans)
        called = [o.follower_id for o in orphans if o.fate == "called"]
        assert [o.follower_id for o in orphans[: len(called)]] == called
        assert called == [i for i, (_, _, fate) in expected.items() if fate == "called"]
        others = [o.promoted for o in orphans[len(called) :]]
        assert others == sorted(others, reverse=True)
        self.count(f"reap: {'calls' if called else 'orphans' if orphans else 'none'}")

    def promote(self, key: str, follower_id: str, reaper: str, grace: int, mark_for: int) -> None:
        verdict = self.store.promote(key, follower_id, reaper, grace * MINUTE, mark_for * MINUTE)

        promotion = self.model.promote(key, follower_id, reaper, grace)
        assert verdict == promotion.verdict
        if verdict == "follows":
            follows = dict(self.store.followers(key))[follower_id].holder
            assert follows in promotion.may_be_followed
            self.model.follow(key, follower_id, follows, mark_for)
        self.count(f"promote: {verdict}")

    # -- the records --------------------------------------------------------

    def compare_records(self) -> None:
        for key in self.keys:
            record, now = self.store.read(key)
            assert self.minutes(now) == self.model.now
            marks = dict(record.marks)
            self.marked.update((mark["key"], mark["id"]) for mark in self.model.marks)
            for marked_key, task_id in self.marked if record.more_until else ():
                mark = self.store.mark(key, task_id) if marked_key == key else None
                if mark is not None:
                    marks[task_id] = mark
            assert {i: self._seen_mark(mark) for i, mark in marks.items()} == {
                mark["id"]: (mark["kind"], mark["until"], mark["by"], mark["lasting"])
                for mark in self.model.marks_of(key)
            }
            assert {i: self._seen_task(task) for i, task in record.tasks.items()} == {
                task["id"]: self._modelled_task(task) for task in self.model.tasks_of(key)
            }
            # A record that was forgotten in between begins without a token.
            assert record.token in (0, self.tokens[key][-1])
            self._compare_following(key, record.following)

    def _compare_following(self, key: str, following: Following | None) -> None:
        expected = self.model.followers_of(key)
        assert self.store.parked(key) == self.model.parked(key)
        if following is None:
            assert expected == []
            assert self.model.called(key) == []
            return
        lane = following.lane
        assert (lane.count if lane else 0) == len(self.model.parked(key))
        assert sorted(lane.called if lane else ()) == sorted(self.model.called(key))
        seen = self.store.followers(key)
        assert {i: (one.holder, one.promoted) for i, one in seen} == {
            one["id"]: (one["holder"], one["promoted"]) for one in expected
        }
        joined_at = {one["id"]: one["joined_at"] for one in expected}
        assert [joined_at[i] for i, _ in seen] == sorted(joined_at.values())
        assert sum(g.count for g in following.groups.values()) + len(following.promoted) == len(
            seen
        )
        reaper, until = self.model.claims.get(key, ("", None))
        assert (
            self.minutes(following.due_at),
            following.reaper,
            self.minutes(following.reaper_until),
        ) == (self.model.due[key], reaper, until)

    def _seen_mark(self, mark: Mark) -> tuple[str, float | None, str | None, bool]:
        return mark.kind, self.minutes(mark.until), mark.by or None, mark.lasting

    def _seen_task(self, task: TaskEntry) -> Seen:
        seen = {
            "state": str(STATE_OF[task.state]),
            "created_at": self.minutes(task.created_at),
            "lease": self.minutes(task.lease),
            "name": task.task_name,
            "window_ends": self.minutes(task.window_ends),
            "eta": self.minutes(task.eta),
            "keep": set(task.keep),
            "arguments": task.arguments,
            "duplicates": task.duplicates,
            "last_duplicate_at": self.minutes(task.last_duplicate_at),
            "flags": set(task.flags),
            "by": task.by or None,
            "after": task.after or None,
            "since": self.minutes(task.since),
        }
        delivery = (task.delivery or None, self.minutes(task.delivery_lease), task.token or None)
        return self._with_delivery(seen, delivery)

    def _modelled_task(self, task: dict[str, Any]) -> Seen:
        flags = {"ending": "e", "copies": "m", "released": "o"}
        modelled = {
            "state": task["state"],
            "created_at": task["created_at"],
            "lease": task["lease"],
            "name": "shop.rebuild",
            "window_ends": task["window_ends"],
            "eta": task["eta"],
            "keep": {LETTER_OF[State(state)] for state in task["keep"]},
            "arguments": task["arguments"],
            "duplicates": task["duplicates"],
            "last_duplicate_at": task["last_duplicate_at"],
            "flags": {letter for name, letter in flags.items() if task[name]},
            "by": task["by"],
            "after": task["after"],
            "since": task["since"],
        }
        delivery = (task["delivery"], task["delivery_lease"], task["token"])
        return self._with_delivery(modelled, delivery)

    def _with_delivery(self, seen: Seen, delivery: tuple[Any, ...]) -> Seen:
        """Who ran a task means nothing any more once it is over."""
        is_over = seen["state"] in FINAL and "e" not in seen["flags"]
        return seen if is_over else {**seen, "delivery": delivery}
