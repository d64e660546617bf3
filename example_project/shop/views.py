import inspect

from celery import chord
from django.conf import settings
from django.db.models import Q
from django.http import JsonResponse
from django.shortcuts import get_object_or_404, render
from django.views.decorators.cache import never_cache
from django.views.decorators.csrf import ensure_csrf_cookie
from django.views.decorators.http import require_GET, require_POST

from .forms import DescriptionForm
from .models import Event, Product
from .tasks import (
    choose_offer,
    confirm_order,
    count_views,
    fetch_offer,
    nightly_report,
    print_label,
    reindex_product,
    sync_stock,
)

SUPPLIERS = ("North", "South", "West")
DEBOUNCE_S = 3
SHOWN = (
    confirm_order,
    reindex_product,
    nightly_report,
    sync_stock,
    print_label,
    count_views,
    fetch_offer,
)


@require_GET
@ensure_csrf_cookie
def index(request):
    context = {
        "products": Product.objects.order_by("pk"),
        "on_redis": bool(settings.REDIS_URL),
        "flower_url": settings.FLOWER_URL,
        "debounce_s": DEBOUNCE_S,
        "report_every_s": settings.REPORT_EVERY_S,
        "last": last_event(),
        "code": {task.__name__: definition(task) for task in SHOWN},
    }
    return render(request, "shop/index.html", context)


@require_GET
def search(request):
    words = request.GET.get("q", "").casefold().split()
    every_word = Q(*(("search_text__contains", word) for word in words))
    found = Product.objects.filter(every_word).order_by("pk")
    return JsonResponse({"products": list(found.values("id", "name", "description", "stock"))})


@require_POST
def describe(request, pk):
    """Save a description. The search index follows when the saves have stopped."""
    form = DescriptionForm(request.POST, instance=get_object_or_404(Product, pk=pk))
    if not form.is_valid():
        return JsonResponse({"errors": form.errors}, status=400)
    product = form.save()
    # After the commit, or the task might run before what it reads is there.
    reindex_product.apply_async_on_commit((pk, product.description), countdown=DEBOUNCE_S)
    return JsonResponse({"saved": product.description}, status=202)


@require_POST
def report(request):
    return summary(nightly_report.delay())


@require_POST
def stock(request):
    return summary(sync_stock.delay("main"))


@require_POST
def label(request):
    return summary(print_label.delay("packing desk", f"parcel {last_event() + 1}"))


@require_POST
def view(request, pk):
    product = get_object_or_404(Product, pk=pk)
    return summary(count_views.apply_async(([product.pk],), countdown=DEBOUNCE_S))


@require_POST
def offers(request, pk):
    product = get_object_or_404(Product, pk=pk)
    header = [fetch_offer.s(supplier, product.pk) for supplier in SUPPLIERS]
    result = chord(header, choose_offer.s()).delay()
    return JsonResponse({"task": result.id}, status=202)


@require_GET
@never_cache
def activity(request):
    """What happened after the event ``since``, for the page to show."""
    try:
        since = int(request.GET.get("since", 0))
    except ValueError:
        return JsonResponse({"title": "since is not a number"}, status=400)
    recent = list(Event.objects.filter(pk__gt=since).order_by("-pk").values()[:300])[::-1]
    return JsonResponse({"last": last_event(), "events": earlier_runs(since, recent) + recent})


def earlier_runs(since, events):
    """The runs before ``since`` that duplicates among these calls are duplicates of."""
    ids = {event["task_id"] for event in events if event["duplicate"]}
    before = Event.objects.filter(pk__lte=since, task_id__in=ids)
    callers = dict(before.filter(kind="call", duplicate=False).values_list("task_id", "source"))
    runs = before.filter(kind="run").values()
    return [{**run, "earlier": True, "source": callers.get(run["task_id"], "")} for run in runs]


def last_event():
    return Event.objects.order_by("pk").values_list("pk", flat=True).last() or 0


def definition(task):
    """The task as it stands in tasks.py, down to its first line."""
    source = inspect.getsource(task.run)
    return source[: source.index("):\n") + 2]


def summary(result):
    """What became of a call."""
    content = {"task": result.id, "outcome": result.outcome, "duplicate": result.deduplicated}
    return JsonResponse(content, status=200 if result.deduplicated else 202)
