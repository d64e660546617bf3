"""Records with room for few marks, so that short histories have marks beside them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from celery_unique.stores import record
from celery_unique.stores.redis import scripts

#: They leave a record that has marks to other scripts, and write none.
SHORT = {"PROBE", "PUBLISH_PLAIN"}


@contextmanager
def marks_inline(number: int) -> Iterator[None]:
    """Every store keeps so many marks in a record, and the others beside it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(record, "MARKS_INLINE", number)
        for name, script in list(vars(scripts).items()):
            if isinstance(script, scripts.Script):
                assert script.body.count(b"local MARKS_INLINE = 16") == (name not in SHORT), name
                body = script.body.replace(
                    b"local MARKS_INLINE = 16", f"local MARKS_INLINE = {number}".encode()
                )
                sha = hashlib.sha1(body, usedforsecurity=False).hexdigest()
                patch.setattr(scripts, name, scripts.Script(body, sha))
        yield
