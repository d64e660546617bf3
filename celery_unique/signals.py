"""What happened to a lock, as Celery signals. The sender is the task's name.

Receivers run where the thing happened: in the calling process, in the pool's
child or in the worker's main process. They get the facts below and ``**extra``:
accept ``**kwargs``, so that a new fact never breaks a receiver.
"""

from __future__ import annotations

from celery.utils.dispatch import Signal

#: A call took its key. ``task_id, key, app``
unique_acquired = Signal(name="unique_acquired")

#: A call found its key held. ``task_id`` (the holder's), ``state, key, on_conflict, waited_s``
#: (how long the holder has waited in the queue; 0 when it is not there), ``app``
unique_conflict = Signal(name="unique_conflict")

#: A key was given back: its task ended or was revoked, or somebody released it by hand.
#: ``task_id, key, reason, app``
unique_released = Signal(name="unique_released")

#: A task was replaced before it ran. ``task_id, key, by, app``
unique_superseded = Signal(name="unique_superseded")

#: A task runs or ends although its lock had lapsed or went to another.
#: ``task_id, key, reason, app``
unique_lost = Signal(name="unique_lost")

#: The store did not answer. ``act, exception, task_id, key, app``
unique_store_error = Signal(name="unique_store_error")
