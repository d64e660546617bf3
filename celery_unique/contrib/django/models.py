"""A model without a table, for the admin's page and its permissions."""

from __future__ import annotations

from typing import Any

from django.db import models


class NoLocks(models.Manager):
    """Empty: locks are in the lock store, and dumpdata must not query the database for them."""

    def get_queryset(self) -> Any:
        return super().get_queryset().none()


class Lock(models.Model):
    """A lock, as the log of the admin names it."""

    key = models.CharField(primary_key=True, max_length=100)
    task_name = models.CharField(max_length=255)
    task_id = models.CharField(max_length=255)

    objects = NoLocks()

    class Meta:
        app_label = "celery_unique"
        managed = False
        # Not the table of the SQL store.
        db_table = "celery_unique_no_table"
        base_manager_name = "objects"
        verbose_name = "lock"
        verbose_name_plural = "locks"
        default_permissions = ("view",)
        permissions = (
            ("release_lock", "Can release lock"),
            ("revoke_lock", "Can revoke task of lock"),
        )

    def __str__(self) -> str:
        return f"{self.task_name} [{self.task_id}]"
