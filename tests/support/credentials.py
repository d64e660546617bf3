"""A credential provider for Redis whose password changes."""

from __future__ import annotations

import redis


class Passwords(redis.CredentialProvider):
    """Named by its class in a URL, so that all of its objects share the password."""

    password = "first"
    error: Exception | None = None

    def get_credentials(self) -> tuple[str, str]:
        if self.error:
            raise self.error
        return "shop", type(self).password
