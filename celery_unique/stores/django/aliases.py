"""The alias in a URL, and the errors that name it."""

from __future__ import annotations

from urllib.parse import parse_qsl, unquote

from celery_unique.exceptions import ConfigurationError, install_command, one_of, shown, suggestion

SETTING = "unique_store_url"


def alias_of(url: str) -> tuple[str, dict[str, str]]:
    """The alias and the options in the query; an empty alias is Django's default one."""
    scheme, _, rest = url.partition("://")
    # Not urlsplit's host, which has lost its capitals.
    alias, _, query = rest.partition("?")
    alias = unquote(alias.strip("/"))
    if "/" in alias or "@" in alias:
        raise refused(f"{scheme}://{alias.rpartition('@')[2]}", "write only the alias after ://")
    return alias or "default", dict(parse_qsl(query, keep_blank_values=True))


def check_alias(scheme: str, alias: str, setting: str, known: list[str]) -> None:
    if alias not in known:
        raise refused(
            f"{scheme}://{alias}",
            f"{setting} has no {shown(alias)}.{suggestion(alias, known)} Use {one_of(known)}",
        )


def refused(what: str, reason: str) -> ConfigurationError:
    return ConfigurationError(
        f"{SETTING}: {what} cannot be the lock store: {reason}.", setting=SETTING
    )


#: What the extras bring, by the name under which it is imported -> as people know it.
_PACKAGES = {
    "django": "Django",
    "django_redis": "django-redis",
    "redis": "redis",
    "sqlalchemy": "SQLAlchemy",
    "psycopg": "psycopg",
    "psycopg2": "psycopg",
}


def missing_package(what: str, error: BaseException, extra: str) -> ConfigurationError | None:
    """The error that names the command, where `error` comes from a package that an extra brings."""
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
        cause = cause.__cause__ or cause.__context__  # Django raises its own errors on top
    return None


def settings_missing(scheme: str) -> ConfigurationError:
    return ConfigurationError(
        f"{SETTING}: {scheme}:// is for Django projects, and Django is not set up in this process: "
        "set DJANGO_SETTINGS_MODULE before the Celery app is made, as Celery's guide for Django "
        "shows.",
        setting=SETTING,
    )
