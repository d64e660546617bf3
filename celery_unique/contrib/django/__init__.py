"""Unique tasks in a Django project: add this package to ``INSTALLED_APPS``.

It installs the library in the project's Celery app, reads ``CELERY_UNIQUE_*`` from the settings,
adds system checks and ``manage.py celery_unique``, and shows the locks in the admin.
"""
