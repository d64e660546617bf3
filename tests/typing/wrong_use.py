"""What a type checker must refuse: each marked line, and no other."""

from __future__ import annotations

import celery_unique

celery_unique.UniquePolicy(on_conflict=3)  # wrong
celery_unique.UniquePolicy("type")  # wrong
celery_unique.lookup(key=3)  # wrong
print(celery_unique.no_such_name)  # wrong
