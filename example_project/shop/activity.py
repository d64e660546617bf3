"""Notes down what the page shows. Not needed to make tasks unique.

Every call passes ``apply_async`` of its task, whether it comes from a view, from beat or from a
canvas, and its result reports its outcome. The runs are counted where bodies start and end.
"""

from datetime import timedelta

from celery import current_task
from celery.contrib.django.task import DjangoTask
from celery.signals import beat_init
from django.utils import timezone

from celery_unique import CeleryUniqueError, unique_superseded

in_beat = False


@beat_init.connect
def note_beat(**_):
    global in_beat
    in_beat = True


class WatchedTask(DjangoTask):
    abstract = True

    def apply_async(self, args=None, kwargs=None, *rest, **options):
        note = {"arguments": text_of(args, kwargs), "source": source(), "at": timezone.now()}
        try:
            result = super().apply_async(args, kwargs, *rest, **options)
        except CeleryUniqueError as error:
            record("call", self.name, outcome=type(error).__name__, **note)
            raise
        outcome, duplicate = result.outcome, result.deduplicated
        record("call", self.name, result.id, outcome=outcome, duplicate=duplicate, **note)
        return result

    def before_start(self, task_id, args, kwargs):
        record("run", self.name, task_id, outcome="running", arguments=text_of(args, kwargs))

    def after_return(self, status, retval, task_id, args, kwargs, einfo):
        from .models import Event

        run = Event.objects.filter(kind="run", task_id=task_id, ended_at=None)
        run.update(outcome=status.lower(), result=str(retval), ended_at=timezone.now())


@unique_superseded.connect
def note_superseded(sender, task_id, **_):
    record("superseded", sender, task_id)


def record(kind, task, task_id="", **facts):
    from .models import Event

    Event.objects.create(kind=kind, task=task, task_id=task_id, **facts)


def forget(older_than=timedelta(hours=1)):
    from .models import Event

    Event.objects.filter(at__lt=timezone.now() - older_than).delete()


def source():
    if in_beat:
        return "beat"
    return "task" if current_task else "visitor"


def text_of(args, kwargs):
    """Arguments as a person would write them."""
    named = (f"{name}={value!r}" for name, value in (kwargs or {}).items())
    return ", ".join([*map(repr, args or ()), *named])
