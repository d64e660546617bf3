"""Lock stores on servers of a Django project: its Redis cache, or its database.

``django-cache://ALIAS`` is the Redis store on the server of that cache, and ``django-db://ALIAS``
the SQL store on that database. Both read the address from Django's settings, and have connections
of their own.
"""

from .cache import DjangoCacheStore
from .database import DjangoDatabaseStore

__all__ = ["DjangoCacheStore", "DjangoDatabaseStore"]
