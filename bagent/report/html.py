"""HTML of untrusted text and templates of pages: everything is escaped unless it was made here."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from html import escape
from pathlib import Path
from typing import Any

import msgspec
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from bagent.observe.formatting import counted, duration, milliseconds, money, rate, visible
from bagent.observe.formatting import percent as whole_percent

CELL = 300
"""Characters of a cell that are shown."""

MOST_NARROW = 3
"""Columns that a window of a telephone has room for."""

WIDE = 40
"""Characters from which on a text gets a wide column."""

_HERE = Path(__file__).parent
_SHARES = ("_share", "hit_rate", "kv_max")

TEMPLATES = Path(__file__).parent / "templates"
"""The templates that several pages share."""

LONGEST_TEXT = 100_000
"""Characters of one text on a page; a link leads to the whole."""


class Html(str):
    """Finished HTML; a plain ``str`` is text and gets escaped."""

    __slots__ = ()

    def __html__(self) -> str:
        """Tell templates that it is finished."""
        return self


def text(value: Any, limit: int = CELL) -> Html:
    """Escape ``value`` as text of at most ``limit`` characters; an :class:`Html` stays as it is."""
    if isinstance(value, Html):
        return value
    if value is None:
        return Html("")
    if isinstance(value, bool):
        return Html("yes" if value else "no")
    if isinstance(value, int):
        return Html(f"{value:,}")
    if isinstance(value, float):
        return Html(number(value))
    return Html(escape(visible(str(value), limit)))


def number(value: float | None) -> str:
    """Write ``12,345``, ``12.3`` or ``0.0012``; empty for None, infinity and NaN."""
    if value is None or not math.isfinite(value):
        return ""
    if abs(value) >= 100 or value == int(value):
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.3g}"


def block(value: Any, limit: int) -> Html:
    """Text with its lines, at most ``limit`` characters; control characters are visible."""
    raw = "" if value is None else str(value)
    cut = raw[:limit] + (" ..." if len(raw) > limit else "")
    return Html(f'<pre tabindex="0">{escape(printable(cut))}</pre>')


def printable(value: str) -> str:
    """Return text with its line ends and blanks, and other control characters as escapes.

    Direction marks are among them, so that no text can be read in another order than it has.
    """
    if value.isprintable():
        return value
    return "".join(c if c.isprintable() or c == "\n" else visible(c) or " " for c in value)


def join(parts: Iterable[str]) -> Html:
    """Concatenate pieces; plain text among them is escaped."""
    return Html("".join(part if isinstance(part, Html) else escape(part) for part in parts))


def table(rows: Sequence[Mapping[str, Any]], heads: Mapping[str, str] | None = None) -> Html:
    """A table of dicts; columns without any value are left out.

    In a narrow window, one of many columns or long texts has a block for each row.

    Numbers whose column ends in ``_ms``, ``_usd``, ``percent`` or ``_share`` get that unit.

    Args:
        heads: the columns and their titles; None takes all of the first row.
    """
    if not rows:
        return Html("")
    names = dict(heads) if heads else {name: _title(name) for name in rows[0]}
    columns = [n for n in names if any(row.get(n) is not None for row in rows)]
    numeric = {n for n in columns if all(_is_number(row.get(n)) for row in rows)}
    head = "".join(
        f"<th{' class=n' * (name in numeric)}>{escape(names[name])}</th>"
        if names[name]
        else "<td></td>"
        for name in columns
    )
    has_long = any(len(row[n]) > WIDE for row in rows for n in columns if _is_text(row.get(n)))
    css = "stack" if has_long or len(columns) > MOST_NARROW else ""
    css = "narrow" if numeric == set(columns) else css
    labels = {name: names[name] for name in columns[1:]} if css == "stack" else {}
    body = "".join(
        f"<tr>{''.join(_cell(n, row.get(n), labels.get(n, '')) for n in columns)}</tr>"
        for row in rows
    )
    table_class = f" class={css}" * bool(css)
    return Html(
        f'<div class="wide" tabindex="0"><table{table_class}><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def _title(name: str) -> str:
    """A column's name less the unit that its values show."""
    for unit in ("_ms", "_usd", "_percent"):
        name = name.removesuffix(unit)
    return name.replace("_", " ")


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and not isinstance(value, Html)


def _is_number(value: Any) -> bool:
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool))


def _cell(name: str, value: Any, label: str) -> str:
    """A cell; ``label`` stands before its value in a narrow window."""
    if value is None:
        return "<td></td>"
    data = f' data-label="{escape(label)}"' * bool(label)
    if _is_number(value):
        return f'<td class="n"{data}>{_measure(name, value)}</td>'
    content = text(value)
    if name == "endpoint":
        return f'<td class="host"{data}>{content}</td>'
    if not _is_text(value):
        return f"<td{data}>{content}</td>"
    css = " class=w" if len(content) > WIDE else "" if " " in content else " class=word"
    return f"<td{css}{data}>{content}</td>"


def _measure(name: str, value: float) -> str:
    if name.endswith("_ms"):
        return milliseconds(value)
    if name.endswith("_usd"):
        return money(value)
    if name.endswith(_SHARES):
        return percent(100 * value)
    if name == "slower":
        return f"{value:.1f}"
    return percent(value) if name.endswith("percent") else number(value)


def section(title: str, *parts: str, name: str = "") -> Html:
    """A part of the page with its heading; empty where all parts are empty."""
    inner = join(parts)
    if not inner:
        return Html("")
    anchor = name or title.lower().split(" ")[0]
    return Html(f'<section id="{escape(anchor)}"><h2>{escape(title)}</h2>{inner}</section>')


def note(message: str, css: str = "note") -> Html:
    """A paragraph of explanation; ``css`` "warn" is a warning."""
    return Html(f'<p class="{css}">{escape(message)}</p>') if message else Html("")


def heading(title: str) -> Html:
    """A heading inside a section."""
    return Html(f"<h3>{escape(title)}</h3>")


def charts(*parts: Html) -> Html:
    """Charts side by side where the window is wide enough."""
    return Html(f'<div class="charts">{join(parts)}</div>')


def page(title: str, parts: Iterable[str], *, heading: str = "", script: str = "") -> str:
    """A whole page that loads nothing from elsewhere.

    Args:
        heading: its first line; empty takes ``title``.
        script: the name of a file of this package.
    """
    style = (_HERE / "page.css").read_text(encoding="utf-8")
    code = (_HERE / script).read_text(encoding="utf-8") if script else ""
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\';'
        " style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:\">"
        f"<title>{text(title)}</title><style>{style}</style></head><body><main>"
        f"<h1>{text(heading or title)}</h1>{join(parts)}</main>"
        + (f"<script>{code}</script>" if code else "")
        + "</body></html>\n"
    )


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
        "percent": whole_percent,
        "pretty": pretty,
        "rate": rate,
        "share": share,
        "time": time_of_day,
        "usd": money,
        "line": visible,
        "cut": cut,
    }
    return made


def compile_templates(folder: Path, *names: str) -> None:
    """Compile templates of a folder ahead; those of the page of a run take 0.1 s."""
    for name in names:
        environment(folder).get_template(name)


def template_page(folder: Path, template: str, **values: Any) -> str:
    """Return a page made by a template of a folder."""
    return environment(folder).get_template(template).render(**values)


class Finding(msgspec.Struct, frozen=True):
    """What stands out, with some of its rows and the command that lists all of them."""

    message: str
    """Its lines, separated by `` | ``."""

    ids: Sequence[str] = ()
    rows: int = 0
    """How many rows it has."""

    command: str = ""


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
    return percent(100 * part / total) if total else ""


def percent(value: float) -> str:
    """Write percents as :func:`share` does."""
    if 0 < value < 0.1:
        return "< 0.1 %"
    if 99.9 < value < 100:
        return "> 99.9 %"
    whole = value == 0 or 10 <= value <= 99 or value == 100
    return f"{value:.0f} %" if whole else f"{value:.1f} %"


def time_of_day(at: float) -> str:
    """Write Unix seconds as ``09:31:12``, in UTC."""
    return time.strftime("%H:%M:%S", time.gmtime(at))


def date_time(at: float) -> str:
    """Write Unix seconds as ``2026-11-30 09:31:12``, in UTC."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(at))


def _clock(at: float | None) -> str:
    """Write a time of day with its milliseconds."""
    return "" if at is None else f"{time_of_day(at)}.{math.floor(at % 1 * 1000):03d}"
