from django.urls import path

from . import api, views

urlpatterns = [
    path("", views.index, name="index"),
    path("orders/", api.orders, name="orders"),
    path("orders/<uuid:task_id>/", api.order, name="order"),
    path("products/<int:pk>/description/", views.describe, name="describe"),
    path("products/<int:pk>/offers/", views.offers, name="offers"),
    path("search/", views.search, name="search"),
    path("report/", views.report, name="report"),
    path("stock/", views.stock, name="stock"),
    path("products/<int:pk>/views/", views.view, name="views"),
    path("labels/", views.label, name="labels"),
    path("activity/", views.activity, name="activity"),
]
