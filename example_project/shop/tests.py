"""python manage.py test --settings config.test_settings"""

import json
from unittest.mock import patch

from celery.contrib.testing.worker import start_worker
from config import celery_app
from django.core import mail
from django.test import TestCase, TransactionTestCase
from django.urls import reverse

from celery_unique import StoreUnavailable, lookup

from .models import Event, Order, Product
from .tasks import choose_offer, count_views, print_label, reindex_product, sync_stock

ORDER = {"product": 1, "quantity": 2, "email": "ada@example.com"}


class OwnLocks:
    """Locks outlive a test, as they outlive a request: each test has keys of its own."""

    def setUp(self):
        celery_app.conf.unique_namespace = self.id()
        self.addCleanup(celery_app.control.purge)

    def order(self, key='"8e03978e"', **changes):
        headers = {} if key is None else {"Idempotency-Key": key}
        body = json.dumps(ORDER | changes)
        return self.client.post("/orders/", body, "application/json", headers=headers)


class OrderTests(OwnLocks, TestCase):
    def test_a_new_key_is_accepted(self):
        response = self.order()

        self.assertEqual(response.status_code, 202)
        task = response.json()["task"]
        self.assertEqual(response["Location"], reverse("order", args=[task]))
        self.assertEqual(self.client.get(response["Location"]).json()["order"], None)

    def test_the_same_request_while_the_first_is_at_work_is_a_conflict(self):
        first = self.order()

        again = self.order()

        self.assertEqual(again.status_code, 409)
        self.assertEqual(again["Retry-After"], "1")
        self.assertEqual(again["Content-Type"], "application/problem+json")
        self.assertEqual(again.json()["task"], first.json()["task"])

    def test_another_key_is_another_order(self):
        first, other = self.order(), self.order(key='"another"')

        self.assertEqual(other.status_code, 202)
        self.assertNotEqual(other.json()["task"], first.json()["task"])

    def test_a_key_may_come_without_quotes(self):
        self.order(key='"8e03978e"')

        self.assertEqual(self.order(key="8e03978e").status_code, 409)

    def test_the_same_key_for_another_order_is_refused(self):
        first = self.order()

        response = self.order(quantity=3)

        self.assertEqual(response.status_code, 422)
        self.assertNotIn(first.json()["task"], response.content.decode())
        self.assertNotIn("8e03978e", response.content.decode())

    def test_a_missing_key_is_refused(self):
        response = self.order(key=None)

        self.assertEqual(response.status_code, 400)
        self.assertEqual(response.json()["title"], "Idempotency-Key is missing")

    def test_a_malformed_key_is_refused(self):
        for key in ('"', '""', '"open', 'a"b', '"a" "b"', "a b", '"a\\b"', "k" * 256, "k\u00e9y"):
            with self.subTest(key=key):
                self.assertEqual(self.order(key=key).status_code, 400)

    def test_a_body_that_is_no_order_is_refused(self):
        headers = {"Idempotency-Key": "k"}
        for body in ("", "[]", "{", '{"product": 1}', json.dumps(ORDER | {"quantity": 0})):
            with self.subTest(body=body):
                response = self.client.post("/orders/", body, "application/json", headers=headers)
                self.assertEqual(response.status_code, 400)

    def test_customers_have_keys_of_their_own(self):
        from django.contrib.auth.models import User

        guest = self.order()
        self.client.force_login(User.objects.create_user("grace"))

        hers = self.order()

        self.assertEqual(hers.status_code, 202)
        self.assertNotEqual(hers.json()["task"], guest.json()["task"])

    def test_a_store_that_does_not_answer_queues_nothing(self):
        silent = {"side_effect": StoreUnavailable("acquire")}
        with (
            patch("shop.api.confirm_order.apply_async", **silent),
            patch("shop.views.sync_stock.delay", **silent),
        ):
            for response in (self.order(), self.client.post("/stock/")):
                self.assertEqual(response.status_code, 503)
                self.assertIn("Retry-After", response)

    def test_only_post_orders(self):
        self.assertEqual(self.client.get("/orders/").status_code, 405)


class ConfirmedOrderTests(OwnLocks, TransactionTestCase):
    def test_a_confirmed_order_answers_again_and_is_not_placed_twice(self):
        first = self.order()
        with start_worker(celery_app, perform_ping_check=False):
            celery_app.AsyncResult(first.json()["task"]).get(timeout=30)

            again = self.order()

        self.assertEqual(again.status_code, 200)
        placed = Order.objects.get()
        self.assertEqual(again.json(), {"task": first.json()["task"], "order": placed.pk})
        self.assertEqual(len(mail.outbox), 1)


class OtherTests(OwnLocks, TestCase):
    def test_the_page_shows_the_products_and_the_tasks(self):
        response = self.client.get("/")

        self.assertContains(response, "Teapot")
        self.assertContains(response, "unique_on_conflict=&quot;rerun&quot;")
        self.assertIn("default-src 'none'", response["Content-Security-Policy"])

    def test_a_second_sync_before_the_first_has_begun_is_a_duplicate(self):
        first, again = self.client.post("/stock/"), self.client.post("/stock/")

        self.assertEqual((first.status_code, again.status_code), (202, 200))
        self.assertEqual(first.json()["task"], again.json()["task"])
        self.assertEqual(lookup(sync_stock, ("main",)).duplicates, 1)

    def test_labels_wait_for_the_printer_and_none_is_dropped(self):
        labels = [self.client.post("/labels/").json() for _ in range(3)]

        self.assertEqual([each["outcome"] for each in labels], ["created", "queued", "queued"])
        self.assertEqual(len({each["task"] for each in labels}), 3)
        self.assertEqual(lookup(print_label, ("packing desk", "")).parked, 2)

    def test_views_are_merged_into_one_task_and_none_is_lost(self):
        views = [self.client.post(f"/products/{pk}/views/").json() for pk in (1, 2, 1)]

        self.assertEqual([each["outcome"] for each in views], ["created", "merged", "merged"])
        self.assertEqual(len({each["task"] for each in views}), 1)
        self.assertEqual(lookup(count_views, ([],)).duplicates, 2)

    def test_one_report_in_each_window(self):
        self.assertEqual(self.client.post("/report/").json()["outcome"], "created")
        self.assertEqual(self.client.post("/report/").json()["outcome"], "deduplicated")

    def test_a_report_before_the_visit_is_shown_with_its_duplicates(self):
        nightly = {"task": "shop.tasks.nightly_report", "task_id": "beats"}
        Event.objects.create(kind="call", source="beat", outcome="created", **nightly)
        Event.objects.create(kind="run", outcome="success", result="0 pieces sold", **nightly)
        since = Event.objects.create(kind="run", task="other", task_id="others").pk
        Event.objects.create(kind="call", outcome="deduplicated", duplicate=True, **nightly)

        events = self.client.get("/activity/", {"since": since}).json()["events"]

        self.assertEqual([event["kind"] for event in events], ["run", "call"])
        self.assertEqual((events[0]["earlier"], events[0]["source"]), (True, "beat"))

    def test_each_save_takes_the_place_of_the_one_before(self):
        product = Product.objects.get(name="Teapot")
        for text in ("S", "Sh", "Short"):
            with self.captureOnCommitCallbacks(execute=True):
                self.client.post(f"/products/{product.pk}/description/", {"description": text})

        calls = Event.objects.filter(kind="call").values_list("outcome", flat=True)
        self.assertEqual([*calls], ["created", "replaced", "replaced"])
        self.assertEqual(lookup(reindex_product, (product.pk, "")).state, "scheduled")

    def test_the_search_finds_what_was_indexed(self):
        product = Product.objects.get(name="Teapot")
        reindex_product(product.pk, "STOUT and <b>brown</b>")

        found = self.client.get("/search/", {"q": "stout Teapot"}).json()["products"]

        self.assertEqual([row["name"] for row in found], ["Teapot"])
        self.assertEqual(len(self.client.get("/search/").json()["products"]), 3)

    def test_a_product_that_is_not_there_is_not_found(self):
        self.assertEqual(self.client.post("/products/99/description/").status_code, 404)
        self.assertEqual(self.client.post("/products/99/offers/").status_code, 404)

    def test_offers_are_a_chord(self):
        self.assertEqual(self.client.post("/products/1/offers/").status_code, 202)

        fetched = Event.objects.filter(task="shop.tasks.fetch_offer", kind="call")
        self.assertEqual(fetched.count(), 3)
        offers = [{"supplier": "North", "price": 3}, {"supplier": "West", "price": 2}]
        self.assertEqual(choose_offer(offers), "West for 2, of 2 offers")

    def test_the_activity_since_an_event(self):
        self.client.post("/stock/")
        last = self.client.get("/activity/").json()["last"]
        self.client.post("/stock/")

        events = self.client.get("/activity/", {"since": last}).json()["events"]

        self.assertEqual([event["outcome"] for event in events], ["deduplicated"])
        self.assertEqual(self.client.get("/activity/", {"since": "x"}).status_code, 400)

    def test_a_forged_press_is_refused(self):
        client = self.client_class(enforce_csrf_checks=True)

        self.assertEqual(client.post("/stock/").status_code, 403)
        self.assertEqual(client.post("/orders/", ORDER).status_code, 400)  # no header, no order
