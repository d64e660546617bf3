"""Unique tasks in a Django project: add this package to ``INSTALLED_APPS``.

The project's Celery app then knows the library, ``CELERY_UNIQUE_*`` in the settings
configure it, ``manage.py check`` looks at them, ``manage.py celery_unique`` has the
commands, and the admin site shows the live locks.
"""
