"""The alias in a URL, and the errors that name it."""

from __future__ import annotations

from urllib.parse import parse_qsl, unquote

from celery_unique.exceptions import ConfigurationError
from celery_unique.messages import one_of, shown, suggestion

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


def settings_missing(scheme: str) -> ConfigurationError:
    return ConfigurationError(
        f"{SETTING}: {scheme}:// is for Django projects, and Django is not set up in this process: "
        "set DJANGO_SETTINGS_MODULE before the Celery app is made, as Celery's guide for Django "
        "shows.",
        setting=SETTING,
    )
