from django.db import models


class Product(models.Model):
    name = models.CharField(max_length=100)
    description = models.TextField(blank=True)
    stock = models.PositiveIntegerField(default=0)
    search_text = models.TextField(blank=True, editable=False, help_text="What the search looks in")

    def __str__(self):
        return self.name


class Order(models.Model):
    # Celery delivers at least once, so a body can run twice: this column makes that harmless.
    task_id = models.UUIDField(unique=True)
    product = models.ForeignKey(Product, on_delete=models.PROTECT)
    quantity = models.PositiveIntegerField()
    email = models.EmailField()
    created_at = models.DateTimeField(auto_now_add=True)
    confirmed_at = models.DateTimeField(null=True, editable=False)

    def __str__(self):
        return f"Order {self.pk}"


class Event(models.Model):
    """Something that the page shows: a call, a run of a body, or a task that was replaced."""

    class Kind(models.TextChoices):
        CALL = "call"
        RUN = "run"
        SUPERSEDED = "superseded"

    kind = models.CharField(max_length=10, choices=Kind)
    task = models.CharField(max_length=100)
    task_id = models.CharField(max_length=36, db_index=True)
    outcome = models.CharField(max_length=40, blank=True)
    duplicate = models.BooleanField(default=False)
    arguments = models.TextField(blank=True)
    source = models.CharField(max_length=10, blank=True)
    result = models.TextField(blank=True)
    at = models.DateTimeField(auto_now_add=True)
    ended_at = models.DateTimeField(null=True)

    class Meta:
        ordering = ("pk",)

    def __str__(self):
        return f"{self.kind} of {self.task}: {self.outcome}"
