"""Every store does under concurrency what the pure acts do one after the other.

``workload`` plays acts at random from many threads and processes and records their intervals;
``checker`` searches an order of the acts that explains every reply; ``record_model`` is the
specification they are compared with: the shipped functions of ``celery_unique.stores.acts``.
"""
