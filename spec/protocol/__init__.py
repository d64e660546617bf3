"""The protocol of one key, played out in every order by callers, workers, reapers and an operator.

``world`` holds the state, ``actors`` the steps, ``invariants`` the sentences that must hold,
``scenarios`` who takes part, ``explorer`` the search, and ``rules`` what goes wrong without each
rule. The store is the shipped ``MemoryStore``: its acts are the code under test, not a copy of it.
"""
