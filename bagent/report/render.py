"""Templates of pages, and the one function through which values reach them."""

from __future__ import annotations

import math
import time
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from bagent.observe.formatting import counted, duration, milliseconds, money, rate, visible
from bagent.report.html import Html, number, printable

TEMPLATES = Path(__file__).parent / "templates"
"""The templates that several pages share."""

LONGEST_TEXT = 100_000
"""Characters of one text on a page; a link leads to the whole."""


def _value(value: Any) -> Any:
    """Return a value as a template prints it: text without control characters and direction marks.

    Escaping follows by the environment. Markup and :class:`Html` were made by this program.
    """
    if value is None:
        return ""
    if isinstance(value, Markup | Html) or not isinstance(value, str):
        return value
    return printable(value)


@cache
def environment(folder: Path = TEMPLATES) -> Environment:
    """Return the environment of the templates of a folder and the shared ones.

    It escapes everything.
    """
    made = Environment(
        loader=FileSystemLoader((folder, TEMPLATES)),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_value,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters |= {
        "clock": _clock,
        "counted": counted,
        "duration": duration,
        "json_text": json_text,
        "ms": milliseconds,
        "number": number,
        "pretty": pretty,
        "rate": rate,
        "share": share,
        "time": _time,
        "usd": money,
        "when": _when,
        "line": visible,
        "cut": cut,
    }
    return made


def page(folder: Path, template: str, **values: Any) -> str:
    """Return a page made by a template of a folder."""
    return environment(folder).get_template(template).render(**values)


def part(name: str, *values: Any) -> Html:
    """Return a part of a page: a macro of ``parts.html`` with its values."""
    return Html(getattr(environment().get_template("parts.html").module, name)(*values))


def json_text(value: Any) -> str:
    """Return a value as compact JSON, text as it is."""
    return value if isinstance(value, str) else msgspec.json.encode(value, enc_hook=str).decode()


def pretty(value: Any) -> str:
    """Return a value, or text that is JSON, as indented JSON; other text as it is."""
    if isinstance(value, str):
        if value[:1] not in "[{" or len(value) > LONGEST_TEXT:
            return value
        try:
            return msgspec.json.format(value.encode("utf-8", "replace"), indent=2).decode()
        except msgspec.DecodeError:
            return value
    return msgspec.json.format(msgspec.json.encode(value, enc_hook=str), indent=2).decode()


def cut(text: str, limit: int = LONGEST_TEXT) -> str:
    """Return the first characters of a text."""
    return text if len(text) <= limit else f"{text[:limit]} ..."


def share(part: float, total: float) -> str:
    """Return a share as percent: ``3.1 %``; small shares are never 0, large ones never 100."""
    if not total:
        return ""
    percent = 100 * part / total
    if 0 < percent < 0.1:
        return "< 0.1 %"
    if 99.9 < percent < 100:
        return "> 99.9 %"
    whole = percent == 0 or 10 <= percent <= 99 or percent == 100
    return f"{percent:.0f} %" if whole else f"{percent:.1f} %"


def _time(at: float) -> str:
    return time.strftime("%H:%M:%S", time.gmtime(at))


def _clock(at: float | None) -> str:
    return "" if at is None else _time(at) + _fraction(at)


def _fraction(at: float) -> str:
    return f".{math.floor(at % 1 * 1000):03d}"


def _when(at: float | None) -> str:
    return "" if at is None else time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(at))
