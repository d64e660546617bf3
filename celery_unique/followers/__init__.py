"""Followers: duplicates that keep their own id and share the outcome of the holder.

1. ``call``: a follower is stored with the lock as a whole call that any worker can publish.
2. ``complete``: when the holder ends, its outcome becomes that of each follower: callbacks and the
   next link are sent, the result is stored, its chord is counted.
3. ``promote``: where the holder died or was ignored, the first follower is published under its own
   id, and the others follow it.
4. ``continuations``: publishes that Celery makes while it finishes a task never raise into it.
"""
