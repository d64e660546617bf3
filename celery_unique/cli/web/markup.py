"""HTML in which all text is escaped but what was made here: names and ids come from outside."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

from celery_unique.cli.output import printable

#: Elements without an end.
_EMPTY = frozenset({"br", "input", "link", "meta"})


class Html(str):
    """Markup. Any other text is escaped when it becomes part of some."""

    __slots__ = ()


#: Nothing where it is None or False.
Content = str | Iterable["Content"] | bool | None


def join(content: Content) -> Html:
    if content is None or isinstance(content, bool):
        return Html("")
    if isinstance(content, Html):
        return content
    if isinstance(content, str):
        return Html(escape(printable(content)))
    return Html("".join(join(part) for part in content))


def tag(name: str, /, *content: Content, **attributes: str | bool | None) -> Html:
    """``tag("a", "text", href="...")``. Attributes that are None or False are left out; a name that
    Python reserves ends with an underscore, and one inside of a name is a hyphen."""
    shown = "".join(
        f" {key.rstrip('_').replace('_', '-')}"
        + ("" if value is True else f'="{escape(value, quote=True)}"')
        for key, value in attributes.items()
        if value is not None and value is not False
    )
    end = "" if name in _EMPTY else f"</{name}>"
    return Html(f"<{name}{shown}>{join(content)}{end}")
