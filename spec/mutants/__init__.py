"""Bugs planted one at a time: each patch is one plausible slip, and some check must find it.

The first line of a patch says what goes wrong. Its name begins with the part that it changes:
``lua``, ``sql``, ``act``, ``caller`` or ``worker``.
"""
