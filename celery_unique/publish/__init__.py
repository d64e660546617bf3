"""A call on its way to the broker.

1. ``before_publish``: the hook in ``app.send_task``. A retry or ``self.replace`` continues under
   its lock; a call without a policy is plain Celery.
2. ``request``: the policy, the key and the leases of the call become a ``PublishRequest``;
   ``joining`` adds what a call needs whose very id is awaited.
3. ``coordinator``: acquire the lock (``store_client``), publish the message, confirm. Where the
   store is the broker, one act does all of it (``atomic``). With another broker and a store that
   can do so, Celery builds the message while the store decides (``overlapped_acquire``).
4. ``conflicts``: what a call gets whose key is held.
5. ``results``: the ``UniqueResult`` for the caller.
"""
