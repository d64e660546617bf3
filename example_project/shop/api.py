"""Orders over HTTP, with an ``Idempotency-Key`` header as payment providers have it.

https://datatracker.ietf.org/doc/draft-ietf-httpapi-idempotency-key-header/

POST /orders/            202  the order is new, and queued
                         200  it was confirmed before: the same response again
                         409  the same request is still at work
                         400  no key, a key that cannot be one, or an order that makes no sense
                         422  the key was used before, for another order
                         503  the lock store is unavailable: nothing was queued (middleware.py)
GET  /orders/<task id>/  200  what became of it
"""

import json
import re

from django.http import JsonResponse
from django.urls import reverse
from django.views.decorators.csrf import csrf_exempt
from django.views.decorators.http import require_GET, require_POST

from celery_unique import IdempotencyKeyConflict, IdempotencyKeyRequired, UniqueKeyError

from .forms import OrderForm
from .models import Order
from .tasks import confirm_order

PROBLEMS = {
    IdempotencyKeyRequired: (400, "Idempotency-Key is missing"),
    UniqueKeyError: (400, "Idempotency-Key is not 1 to 255 characters"),
    IdempotencyKeyConflict: (422, "Idempotency-Key was used before, for another request"),
}

# A string in quotes (RFC 9651, 3.3.3); clients that leave the quotes out are understood.
QUOTED = re.compile(r'"((?:[ -!#-\[\]-~]|\\["\\])*)"')
BARE = re.compile(r"[!#-+\--:<-~]+")


# No CSRF token: another site's page cannot make a browser send the required header.
@csrf_exempt
@require_POST
def orders(request):
    try:
        key = idempotency_key(request)
        form = OrderForm(json_object(request))
    except ValueError as error:
        return problem(400, str(error))
    if not form.is_valid():
        return problem(400, "This order cannot be placed", errors=form.errors)
    try:
        result = confirm_order.apply_async(
            kwargs=form.arguments(),
            headers={"customer": customer(request)},
            idempotency_key=key,
        )
    except tuple(PROBLEMS) as error:
        return problem(*PROBLEMS[type(error)])
    if not result.deduplicated:
        return answer(result.id, 202)
    if result.holder_state == "completed":
        return answer(result.id, 200)
    return problem(409, "The same order is still at work", task=result.id)


@require_GET
def order(request, task_id):
    return answer(task_id, 200)


def answer(task_id, status):
    # The order is in the database before its task counts as completed, so no client has to wait for
    # a result here.
    placed = Order.objects.filter(task_id=task_id).first()
    content = {"task": str(task_id), "order": placed and placed.pk}
    location = reverse("order", kwargs={"task_id": task_id})
    return JsonResponse(content, status=status, headers={"Location": location})


def problem(status, title, **facts):
    """RFC 9457. Neither the key nor another order's facts are in it."""
    headers = {"Retry-After": "1"} if status == 409 else {}
    content = {"title": title, "status": status, **facts}
    return JsonResponse(
        content, status=status, headers=headers, content_type="application/problem+json"
    )


def idempotency_key(request):
    value = request.headers.get("Idempotency-Key", "").strip()
    if match := QUOTED.fullmatch(value):
        return re.sub(r"\\(.)", r"\1", match[1])
    if value and not BARE.fullmatch(value):
        raise ValueError("Idempotency-Key is not a string in quotes")
    return value or None


def json_object(request):
    try:
        content = json.loads(request.body)
    except ValueError:
        content = None
    if not isinstance(content, dict):
        raise ValueError("The body is not a JSON object")
    return content


def customer(request):
    """Whose keys these are. Guests share theirs, so their keys must not be guessable: the page
    uses random ones."""
    return str(request.user.pk or "guest")
