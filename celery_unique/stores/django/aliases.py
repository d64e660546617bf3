"""The alias in a ``django-cache://`` or ``django-db://`` URL, and the errors that name it."""

from __future__ import annotations

from typing import Any
from urllib.parse import parse_qsl, unquote

from celery_unique.exceptions import ConfigurationError, install_command, one_of, shown, suggestion

SETTING = "unique_store_url"

#: Packages of the extras: import name -> name.
_PACKAGES = {
    "django": "Django",
    "django_redis": "django-redis",
    "redis": "redis",
    "sqlalchemy": "SQLAlchemy",
    "psycopg": "psycopg",
    "psycopg2": "psycopg",
}


def alias_of(url: str) -> tuple[str, dict[str, str]]:
    """The alias and the options in the query; an empty alias is Django's default one."""
    scheme, _, rest = url.partition("://")
    # Not urlsplit's host, which is in lower case.
    alias, _, query = rest.partition("?")
    alias = unquote(alias.strip("/"))
    if "/" in alias or "@" in alias:
        raise refused(f"{scheme}://{alias.rpartition('@')[2]}", "write only the alias after ://")
    return alias or "default", dict(parse_qsl(query, keep_blank_values=True))


def opened(handler: Any, what: str, setting: str, backend: str) -> Any:
    """The cache or database wrapper that Django's ``handler`` makes of an alias; not connected.

    ``what`` is the URL, ``setting`` and ``backend`` name what to correct in Django's settings.
    """
    from django.core.exceptions import ImproperlyConfigured

    scheme, _, alias = what.partition("://")
    try:
        known = list(handler)
    except ImproperlyConfigured:
        raise ConfigurationError(
            f"{SETTING}: {scheme}:// is for Django projects, and Django is not set up in this "
            "process: set DJANGO_SETTINGS_MODULE before the Celery app is created, as Celery's "
            "guide for Django shows.",
            setting=SETTING,
        ) from None
    if alias not in known:
        near = suggestion(alias, known)
        raise refused(what, f"{setting} has no {shown(alias)}.{near} Use {one_of(known)}")
    try:
        return handler[alias]
    except (ImproperlyConfigured, ImportError) as error:
        cure = f"Give {setting}[{alias!r}] a {backend} that is installed"
        reason = f"Django cannot open it: {error}. {cure}"
        raise missing_package(what, error) or refused(what, reason) from error


def refused(what: str, reason: str) -> ConfigurationError:
    return ConfigurationError(
        f"{SETTING}: {what} cannot be the lock store: {reason}.", setting=SETTING
    )


def missing_package(what: str, error: BaseException) -> ConfigurationError | None:
    """The error with the pip command, if `error` comes from a package of an extra."""
    extra = "redis" if what.startswith("django-cache:") else "sql"
    cause: BaseException | None = error
    while cause is not None:
        name = cause.name if isinstance(cause, ImportError) else None
        package = _PACKAGES.get((name or "").partition(".")[0])
        if package is not None:
            return ConfigurationError(
                f"{SETTING}: {what} needs {package}, which is not installed: "
                f"{install_command('django', extra)}",
                setting=SETTING,
            )
        cause = cause.__cause__ or cause.__context__  # Django wraps it in its own errors
    return None
