"""What goes wrong without each rule: a scenario in which it does, and the invariant it breaks.

Rules of callers, workers and reapers are named in ``spec.protocol.actors``. A rule of the store is
named by the store that leaves it out, in ``tests/stores/broken*.py``.
"""

from __future__ import annotations

from celery_unique.stores.memory import MemoryStore
from tests.stores import (
    broken,
    broken_following,
    broken_lanes,
    broken_merging,
    broken_replacing,
)

COUNTEREXAMPLES: dict[str, tuple[str, str]] = {
    "confirm after publish": ("reject", "nothing is lost"),
    "no give back after a publish": ("two calls, published without a reply", "nothing is lost"),
    "help": ("two calls, no reply", "nothing is lost"),
    "acquire if not helped": ("two calls, no reply", "nothing is lost"),
    "finish before the result": ("a call after the result, in one act", "result seen"),
    "settle after the result": ("guard, a worker dies", "nothing is lost"),
    "settle after the ack": ("one call, late", "once"),
    "gate": ("guard", "token"),
    "wait": ("guard, a retry", "nothing is lost"),
    "renew": ("a long body", "live delivery"),
    "renew held": ("a long body, its successor is held", "admission"),
    "waits as": ("a follower, two reapers, one dies", "free soon"),
    "tell copies": ("one call, late", "once"),
    "complete then remove": ("a follower, a worker dies twice", "nothing is lost"),
    "reaper": ("a follower, a worker dies twice", "nothing is stuck"),
    "publish the promoted": ("a follower, a worker dies twice", "nothing is lost"),
    "HidesThatTheHolderIsPending": ("two calls, no reply", "nothing is lost"),
    "ConfirmsBeforeThePublish": ("one call", "nothing is stuck"),
    "ConfirmCreates": ("a call after the result", "result seen"),
    "ConfirmActsOnAnyState": ("one call", "live delivery"),
    "GivesBackInAnyState": ("one call", "live delivery"),
    "GiveBackIgnoresCopies": ("two calls, no reply", "nothing is lost"),
    "LeavesNoWithdrawnMark": ("one call", "raised"),
    "HelpForgetsTheCopy": ("until success, it fails", "once"),
    "DropsTasksWhoseLeaseLapsed": ("guard", "nothing is lost"),
    "StartsBesideALivingDelivery": ("guard", "one delivery"),
    "FinishDoesNotCompareTheDelivery": ("guard, a worker stops", "live delivery"),
    "FinishEndsEveryTaskOfTheKey": ("guard", "once"),
    "SettleLeavesNoDoneMark": ("guard", "once"),
    "SettleIsNotToldThatTheMessageMayComeAgain": ("guard", "once"),
    "MarksDoneAtFinish": ("guard, a worker dies", "nothing is lost"),
    "FinishReleasesFullyBeforeTheAcknowledgement": ("guard", "once"),
    "ShowsTheEndOnlyOnceItIsSettled": ("a call after the result, in one act", "result seen"),
    "DropsAMessageThatComesAfterTheRetryAct": ("guard, a retry", "nothing is lost"),
    "RevokesTasksThatRun": ("a follower, its holder is revoked", "live delivery"),
    "RevokeLeavesNoMark": ("two calls, revoked", "revoked"),
    "CountsTokensInTheRecord": ("a call after the result, in one act", "token"),
    "GivesTheTokenWithTheTask": ("guard, a retry", "token"),
    "RenewsAsWaitingWhatHasStarted": ("a long body", "free soon"),
    "DropsFollowersAtFinish": ("a follower, a worker dies twice", "nothing is lost"),
    "ForgetsWhomItTellsOf": ("a follower, a worker dies twice", "nothing is lost"),
    "EndsAFollowedTaskAtOnce": ("a follower, two reapers, one is slow", "one outcome"),
    "NobodyIsEverDue": ("a follower, a worker dies twice", "nothing is stuck"),
    "FollowersLapseWithTheTasks": ("a follower, a worker dies twice", "nothing is lost"),
    "ForgetsTheMessageAtPromotion": ("a follower, two reapers, one dies", "nothing is lost"),
    "SupersedesAtTheSwap": ("replace, no reply", "nothing is lost"),
    "BringsNothingBack": ("replace, no reply", "nothing is lost"),
    "LeavesNoSupersededMark": ("replace, no reply", "superseded"),
    "ForgetsTheMarkOfCopies": ("revoke a helped call", "revoked"),
    "LetsATaskInLimboStart": ("replace, no reply", "superseded"),
    "OnlyAConfirmPublishes": ("replace, no reply", "superseded"),
    "ReplacesTasksThatRun": ("replace, no reply", "admission"),
    "SuccessorsDoNotWait": ("atomic rerun", "admission"),
    "KeepsOlderSuccessors": ("rerun twice", "superseded"),
    "FreesWhatAMiddleReplacementReplaced": ("replace twice, a publish fails", "superseded"),
    "PendingCountsOnlyAsPending": ("while it waits", "states"),
    "ReplacesAllWithinALimit": ("replace within a limit of two", "room"),
    "ATaskIsItsOwnDuplicate": ("a task calls itself", "own successor"),
    # -- lanes
    "publish the called": ("lane", "nothing is lost"),
    "leave the lane": ("lane, no reply", "raised"),
    "OvertakesParkedCalls": ("lane of three, a worker dies, a slow caller", "in order"),
    "CallsTheNewest": ("lane, another one ignores", "in order"),
    "CallsWithoutRoom": ("lane", "admission"),
    "ForgetsTheMessageOnceCalled": ("lane, two reapers", "nothing is lost"),
    "ForgetsThatThereMayBeTwoMessages": ("lane, slow workers", "once"),
    "IsNeverDue": ("lane, a caller dies", "nothing is stuck"),
    "HasNoBound": ("bounded lane", "lane"),
    "KeepsARevokedCallInItsLane": ("lane, revoked", "revoked"),
    "CallsTheNextBeforeTheOneToBeCalledAgain": ("lane, two reapers", "nothing is stuck"),
    # -- merged calls
    "run with the payload": ("merge", "nothing is lost"),
    "unmerge": ("merge, no reply", "unmerged"),
    "merged with its task": ("merge", "values"),
    "SwallowsValues": ("merge", "nothing is lost"),
    "StoresNoOwnValues": ("merge", "nothing is lost"),
    "MergesIntoWhatRuns": ("merge", "nothing is lost"),
    "GivesBackWhatOthersWaitFor": ("merge, no reply", "unmerged"),
    "KeepsValuesOfACallThatRaised": ("merge, no reply", "unmerged"),
    "DropsValuesAtTheStart": ("merge, a worker dies", "values"),
    "DropsValuesAtTheEnd": ("merge, a worker dies", "values"),
    "DropsValuesWithTheLease": ("merge, a worker dies", "values"),
    "PutsTheNewestFirst": ("merge", "values"),
    "BeginsAnewAfterTheGrace": ("merge, slow callers", "nothing is lost"),
    "LeavesOwnValuesToTheMessage": ("merge, a publish fails", "unmerged"),
    "KeepsValuesOfARevokedTask": ("merge, revoked", "nothing is lost"),
    "PromotesWithoutValues": ("merge, one is followed, late", "values"),
    "RemovesNothing": ("merge, no reply", "unmerged"),
}

#: Rules without which no scenario violates an invariant, and why. The contract of stores, or a test
#: that is named, shows what each is for.
NOT_NEEDED: dict[str, str] = {
    "give back": (
        "The lock lapses with the grace, or the next call helps: the key is held longer, and "
        "nothing is lost."
    ),
    "acquire again": (
        "It prevents a grace that lapses on a caller who still publishes; where that happens, the "
        "documentation suspends the invariants that it would break."
    ),
    "followers before settle": "The reaper completes what a settled task left, from its result.",
    "ask the backend": (
        "A follower is removed in the step that completes it: the model has no crash in between."
    ),
    "retry copies": (
        "It shows after a worker died between the retry and its acknowledgement, which suspends "
        "`once`."
    ),
    "RenewCreates": (
        "Only a worker renews here, and only what it has: the record that is created goes with "
        "its lease."
    ),
    "HasOneLeaseForLockAndDelivery": (
        "A redelivery waits for a queue lease in place of a run lease: late, not lost."
    ),
    "RetryForgetsTheOldMessage": "As `retry copies`.",
    "IgnoresTheCallersWindow": (
        "No invariant speaks of windows, which admit more calls and lose none."
    ),
    "KeepsEveryEnd": (
        "A key that stays held after the end, for as long as ends are kept, is what some policies "
        "ask for."
    ),
    "RenewShortens": "Every renewal here has the lease of the one before it.",
    "IsDueWhenTheFirstLeaseWasToEnd": (
        "A reaper comes early, finds the holder alive and comes again."
    ),
    "LeavesFollowersOfWhatIsGoneForLater": "They are due later, not never.",
    "ReapsFollowersOfTheLiving": (
        "What is reaped is looked at once more by promote, which finds the holder alive."
    ),
    "ManyReapersAtOnce": (
        "Both publish the same follower, and the gate drops one of the two messages."
    ),
    "PromotesWithoutCopies": (
        "Two reapers publish one follower only where a claim lapsed on a living one, or one died."
    ),
    "PromotesBesideALiveTask": (
        "The invariants that two tasks at a time would break are suspended by the death of the "
        "holder's worker."
    ),
    "WaitsAgainWithoutADoneMark": "As `PromotesBesideALiveTask`.",
    "PromotionLeavesTheMark": "No follower has a mark of its own in these scenarios.",
    "FollowersOfTheReplacedAreForgotten": (
        "The reaper finds them, and another task of the key for them to follow."
    ),
    "AFollowerThatRunsIsStillCompleted": (
        "A follower that runs has its result, so that it is removed and not completed."
    ),
    "FollowsOtherWork": "Idempotency keys with other arguments are not modelled.",
    "PushesBackForEver": "No invariant bounds how often a task is postponed.",
    "merge once": (
        "A merged call acquires again only where an operator released its task, which suspends "
        "`values`, or while a call with `replace` is being published in its place. If that publish "
        "fails, and the task ends before the merged call acquires again, its values are in two "
        "tasks with the rule, too: that mix of strategies is left out of the scenarios."
    ),
    "HasALimitOfOne": "No invariant asks for two tasks at a time.",
    "LeavesAllToTheReaper": "A reaper calls the next one: later, not never.",
    "CallsAgainWhatWasPublished": "The gate drops the second message.",
    "DropsARevokedCall": "The model does not wait for the result of a call that it revokes.",
    "ParksOneIdTwice": "No parked call repeats its attempt here.",
    "MergesARepeatedAttemptTwice": "As `merge once`.",
    "TakesAnyLength": "No invariant bounds the length of a payload.",
    "PostponesNothing": "As `PushesBackForEver`.",
    "PostponesMergedTasksForEver": "As `PushesBackForEver`.",
    "KeepsValuesOfAnEarlierTask": "No id is used again here.",
    "MergesIntoAnotherTask": "All tasks here have one name.",
}


def broken_stores() -> dict[str, type[MemoryStore]]:
    """Every store that leaves a rule out."""
    bases = (MemoryStore, broken.BrokenStore)
    bases += (broken_following.BrokenFollowing, broken_replacing.BrokenReplacing)
    bases += (broken_lanes.BrokenLanes, broken_merging.BrokenMerging)
    return {
        name: store
        for module in (broken, broken_following, broken_replacing, broken_lanes, broken_merging)
        for name, store in vars(module).items()
        if isinstance(store, type) and issubclass(store, MemoryStore) and store not in bases
    }
