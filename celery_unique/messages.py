"""Words that errors and warnings share."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable

__all__ = ["install_command", "nearest", "one_of", "shown", "suggestion", "warn_user"]

_LONGEST_VALUE = 80
_OUR_PREFIX = "unique_"


def shown(value: object) -> str:
    """Return the repr of a wrong value, cut short, whatever the value is."""
    try:
        text = repr(value)
    except Exception:  # noqa: BLE001  its repr is somebody else's code, and we are in an error
        text = f"<{type(value).__name__}>"
    return text if len(text) <= _LONGEST_VALUE else f"{text[:_LONGEST_VALUE]}..."


def one_of(names: Iterable[str]) -> str:
    """Return ``'a', 'b' or 'c'``."""
    *most, last = [repr(name) for name in names]
    return f"{', '.join(most)} or {last}" if most else last


def nearest(wrong: object, names: Iterable[str]) -> str | None:
    """Return the name that `wrong` was most likely meant to be."""
    import difflib  # only errors need it

    if not isinstance(wrong, str):
        return None
    # Two names are not alike for both being one of ours.
    ours = wrong.lower().startswith(_OUR_PREFIX)
    by_text = {_comparable(name, ours): name for name in names}
    near = difflib.get_close_matches(_comparable(wrong, ours), by_text, n=1)
    return by_text[near[0]] if near else None


def _comparable(name: str, without_prefix: bool) -> str:
    name = name.lower()
    return name.removeprefix(_OUR_PREFIX) if without_prefix else name


def suggestion(wrong: object, names: Iterable[str]) -> str:
    """Return `` Did you mean 'this'?`` with the name nearest to `wrong`, or nothing."""
    near = nearest(wrong, names)
    return f" Did you mean {near!r}?" if near else ""


def install_command(*extras: str) -> str:
    """Return the command that installs these extras, quoted: brackets are patterns in zsh."""
    return f'pip install "celery-unique-tasks[{",".join(extras)}]"'


def warn_user(message: str, category: type[Warning]) -> None:
    """Warn at the line of the first caller outside this package and Celery."""
    frame, level = sys._getframe(), 1
    while frame.f_back is not None and _is_ours(frame.f_globals.get("__name__", "")):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)


def _is_ours(module: str) -> bool:
    return module.partition(".")[0] in ("celery_unique", "celery", "dataclasses")
