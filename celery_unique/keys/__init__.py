"""From a call to its key, in pure steps.

``call`` is a call as plain values, ``arguments`` binds them to the signature, ``identity`` collects
what makes the call unique and writes it as canonical text (``canonical``), ``digest`` hashes it.
``unique_key`` applies a user's own key, and ``time_bucket`` names stretches of the calendar.
"""
