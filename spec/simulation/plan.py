"""What takes part in a run, and what may go wrong: chosen by the seed, before the run."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random
from typing import Any

#: How much is wrong with a run, by the weights with which seeds choose it.
FAULT_BUDGETS = {0: 2, 1: 4, 2: 3, 3: 2, 5: 1}
#: At which points each fault may happen: the beginnings of their names; empty: at every one.
FAULTS: dict[str, tuple[str, ...]] = {
    "caller dies": ("",),
    "worker dies": ("",),
    "pool process dies": ("",),
    "short pause": ("",),
    "long pause": ("",),
    "request lost": ("store ",),
    "reply lost": ("store ",),
    "request late": ("store ",),
    "publish fails": ("publish",),
    "publish fails after it arrived": ("reply of the broker",),
    "connection lost": ("loop",),
}
#: Some seeds try one part harder than the others: the faults that it gets, more of them.
FOCUS: dict[str, tuple[str, ...]] = {
    "callers": ("caller dies", "publish fails", "publish fails after it arrived", "short pause"),
    "deliveries": ("connection lost", "worker dies", "short pause"),
    "store": ("request lost", "reply lost", "request late"),
    "pool": ("pool process dies", "worker dies"),
}
#: Of an operator, at a time that the seed chooses.
OPERATOR = ("revoke", "release")
STRATEGIES = ("ignore", "reject", "replace", "replace_except_schedule", "rerun")
#: As the stress is on what calls do to each other, most runs have one policy and two to four calls.
SHORT_PAUSES_S = (0.05, 0.3, 0.8)
LONG_PAUSES_S = (6.0, 12.0, 40.0)
#: How long bodies take: a moment, longer than the lease of a run, longer than the broker waits.
BODIES_S = (0.0, 0.0, 0.05, 1.0, 12.0, 25.0)


@dataclass(slots=True)
class Call:
    """One call: when, by which process, and its options."""

    at_s: float
    process: int
    strategy: str = "ignore"
    key: int = 0
    countdown_s: float = 0.0
    joins: bool = False  # under an id that it chose: a duplicate follows the holder
    in_body: bool = False  # called from the first body that runs, instead
    after_result: int = -1  # called once the result of this call can be read


@dataclass(slots=True)
class Plan:
    seed: int
    late: bool = False
    calls: list[Call] = field(default_factory=list)
    workers: int = 2
    slots: int = 2
    prefetch: int = 4
    prefork: bool = False
    by_time: bool = False  # the broker redelivers by time, as Redis
    on_store_error: str = "raise"
    same_machine: bool = True
    bodies_s: tuple[float, ...] = (0.0,)
    fails: float = 0.0  # how probable it is that a body fails, or is retried
    retries: float = 0.0
    faults: tuple[str, ...] = ()
    budget: int = 0
    fault_rate: float = 0.02
    switchiness: float = 0.2
    operator: tuple[tuple[float, str, int], ...] = ()

    def options(self, call: Call) -> dict[str, Any]:
        options: dict[str, Any] = {"unique_on_conflict": call.strategy}
        if call.strategy == "merge":
            options["unique_merge"] = "values"
        return options


def plan_of(seed: int) -> Plan:
    random = Random(f"plan {seed}")
    number = random.choice((1, 2, 2, 3, 3, 4, 5))
    strategy = random.choice((*STRATEGIES, "ignore", "ignore", "queue", "queue", "merge"))
    mixed = strategy in STRATEGIES and random.random() < 0.4
    budget = random.choices(list(FAULT_BUDGETS), list(FAULT_BUDGETS.values()))[0]
    kinds = list(FAULTS)
    random.shuffle(kinds)
    plan = Plan(
        seed,
        late=random.random() < 0.5,
        workers=random.choice((1, 2, 2, 3)),
        slots=random.choice((1, 2, 2)),
        prefetch=random.choice((1, 2, 4)),
        prefork=random.random() < 0.4,
        by_time=random.random() < 0.5,
        on_store_error="publish" if random.random() < 0.2 else "raise",
        same_machine=random.random() < 0.3,
        bodies_s=tuple(random.sample(BODIES_S, 3)),
        fails=random.choice((0.0, 0.0, 0.3)),
        retries=random.choice((0.0, 0.0, 0.3)),
        faults=tuple(sorted(kinds[: random.randint(1, 5)])),
        budget=budget,
        fault_rate=random.choice((0.01, 0.03, 0.1)),
        switchiness=random.choice((0.02, 0.1, 0.3, 0.6)),
    )
    spread_s = random.choice((0.0, 0.02, 1.0, 15.0))
    follows = strategy in ("ignore", "rerun", "queue", "merge") and random.random() < 0.4
    for n in range(number):
        in_body = n > 0 and random.random() < 0.1
        earlier = n > 0 and random.random() < 0.2
        call = Call(
            at_s=round(random.uniform(0, spread_s), 4),
            process=random.randrange(3),
            strategy=random.choice(STRATEGIES) if mixed else strategy,
            key=int(random.random() < 0.1),
            countdown_s=random.choice((0.0, 0.0, 0.0, 2.0, 11.0)),
            joins=follows and random.random() < 0.7,
            in_body=in_body,
            after_result=random.randrange(n) if earlier and not in_body else -1,
        )
        plan.calls.append(call)
    if random.random() < 0.5:
        _concentrate(plan, random)
    if budget and random.random() < 0.25:
        what = random.choice(OPERATOR)
        moment = round(random.uniform(0, spread_s + 1), 4)
        plan.operator = ((moment, what, random.randrange(number)),)
    return plan


def _concentrate(plan: Plan, random: Random) -> None:
    focus = random.choice(list(FOCUS))
    plan.faults = FOCUS[focus]
    plan.budget = max(plan.budget, 1)
    plan.fault_rate = random.choice((0.05, 0.15))
    if focus == "callers" and random.random() < 0.7:
        for call in plan.calls:
            call.at_s = 0.0
            call.after_result, call.in_body = -1, False
    if focus in ("deliveries", "pool"):
        plan.bodies_s = (0.05, 1.0, 25.0)
        plan.prefork = plan.prefork or focus == "pool"
