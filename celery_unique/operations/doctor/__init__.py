"""``celery unique doctor``: checks of the store, the workers and the locks.

``report`` runs the checks in order and collects their findings; ``checks`` has those of clocks and
workers, ``failovers`` and ``followers`` those of their subjects.
"""
