"""Holders that wait by their record, and whose task has ended or whose message is lost.

``lost_messages`` is the rule, for callers and operators alike: the result backend (``ended``), the
queues of the broker (``queues``) and the workers (``workers``) decide whether a holder is stale.
``healing`` applies it to a duplicate of a holder that has waited for long.
"""
