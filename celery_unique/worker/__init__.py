"""A unique message in a worker.

1. ``bootstrap`` connects the worker; ``request`` puts a mixin in front of Celery's ``Request``.
2. A message arrives: its request carries a ``delivery``, which has the state of the message here.
3. Celery is about to hand it to the pool: ``gate`` starts it in the store, holds it back, or drops
   it (``request.revoked``).
4. ``renewal`` renews the leases of all that the worker holds; ``reaper`` reaps orphaned followers.
5. ``body`` runs in the pool: it releases the lock after the body and before the result is stored.
6. ``release_signals`` settles the record once the result is stored, and is the backstop.
7. ``ack`` and ``request``: the acknowledgement, and the ends that only the main process sees.
   The table of ends is ``delivery.End``; the operations on the store are in ``lock_client``.
"""
