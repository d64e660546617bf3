from django.http import JsonResponse

from celery_unique import StoreUnavailable

POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self' data:",
        "connect-src 'self'",
        "form-action 'self'",
        "base-uri 'none'",
        "frame-ancestors 'none'",
    )
)


class ContentSecurityPolicy:
    """One header on every response: nothing is loaded from other hosts, and no script is inline.

    From Django 6.0 on this is a setting, SECURE_CSP.
    """

    def __init__(self, get_response):
        self.get_response = get_response

    def __call__(self, request):
        response = self.get_response(request)
        response.headers.setdefault("Content-Security-Policy", POLICY)
        return response


class StoreUnavailableIsTemporary:
    """A 503 if the lock store is unavailable: nothing was queued, and a retry is safe."""

    def __init__(self, get_response):
        self.get_response = get_response

    def __call__(self, request):
        return self.get_response(request)

    def process_exception(self, request, exception):
        if not isinstance(exception, StoreUnavailable):
            return None
        content = {"title": "Nothing was queued: send the same request again later", "status": 503}
        return JsonResponse(
            content,
            status=503,
            headers={"Retry-After": "1"},
            content_type="application/problem+json",
        )
