"""The tasks of the shop, each unique in a way of its own."""

import random
import time

from celery import shared_task
from django.conf import settings
from django.core.mail import send_mail
from django.db.models import Sum
from django.utils import timezone

from . import activity
from .models import Order, Product


@shared_task(
    bind=True,
    unique=True,
    identity_strategy="caller_provided",  # no key, no order
    unique_meta="customer",  # each customer has keys of their own
)
def confirm_order(self, product, quantity, email):
    """The same Idempotency-Key is the same order, for a day. See api.py for the HTTP side."""
    work()  # calls the bank
    order, _ = Order.objects.get_or_create(
        task_id=self.request.id,
        defaults={"product_id": product, "quantity": quantity, "email": email},
    )
    if not order.confirmed_at:  # else it has run before, and its worker died too late to matter
        send_mail(f"Order {order.pk}", "Thank you.", "shop@example.com", [email])
        order.confirmed_at = timezone.now()
        order.save(update_fields=["confirmed_at"])
    return f"order {order.pk} confirmed"


@shared_task(
    unique=True,
    unique_on="product_id",
    unique_on_conflict="replace",
    unique_states="until_start",
    unique_max_wait="PT1M",
)
def reindex_product(product_id, description):
    """Debounce: called with a countdown at every save, it runs when the saves have stopped, with
    the newest text; after a minute at the latest."""
    product = Product.objects.get(pk=product_id)
    product.search_text = f"{product.name} {description}".casefold()
    product.save(update_fields=["search_text"])
    return "indexed"


@shared_task(unique=True, unique_for="PT1M", unique_states="window")
def nightly_report():
    """Beat sends it far too often, and a second beat may run by mistake: one report in each window.

    For a real night: unique_for="PT12H".
    """
    activity.forget()
    sold = Order.objects.aggregate(Sum("quantity"))["quantity__sum"]
    return f"{sold or 0} pieces sold"


@shared_task(unique=True, unique_on_conflict="rerun")
def sync_stock(warehouse):
    """A call that comes while it runs may have seen a newer stock: one more run follows, and only
    one, however many calls come."""
    work()
    for product in Product.objects.all():
        product.stock = random.randint(1, 99)
        product.save(update_fields=["stock"])
    return f"stock of {warehouse} is up to date"


@shared_task(unique=True, unique_on="printer", unique_on_conflict="queue")
def print_label(printer, address):
    """A printer prints one label at a time, in the order of the calls. The others wait in the
    store: they occupy no worker, and none is dropped."""
    work()
    return f"{address} printed by {printer}"


@shared_task(
    unique=True, unique_on_conflict="merge", unique_merge="product_ids", unique_max_wait="PT1M"
)
def count_views(product_ids):
    """Called with one product at every view, and with a countdown: it runs once, when the views
    have stopped, with the products of all calls; after a minute at the latest."""
    return f"{len(product_ids)} views of {len(set(product_ids))} products"


@shared_task(unique=True)
def fetch_offer(supplier, product_id):
    """A member of a chord. Another chord that needs the same offer does not fetch it again."""
    work()
    return {"supplier": supplier, "price": random.randint(100, 200)}


@shared_task
def choose_offer(offers):
    """The body of the chord."""
    best = min(offers, key=lambda offer: offer["price"])
    return f"{best['supplier']} for {best['price']}, of {len(offers)} offers"


def work():
    """What takes time in a real shop: a bank, a supplier, a warehouse."""
    time.sleep(settings.WORK_S)
