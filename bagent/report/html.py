"""HTML made of text that nobody can trust: everything is escaped unless it was made here."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from bagent.observe.formatting import milliseconds, money, visible

CELL = 300
"""Characters of a cell that are shown."""

WEAK = "weak: "
"""What a finding begins with that may be chance, or explains only a part."""

FEW = 20
"""What fewer rows than these show is weak."""

WORDS = 40
"""Longer texts get a wide column."""


class Html(str):
    """A piece of finished HTML; a plain ``str`` is text and gets escaped."""

    __slots__ = ()


def text(value: Any, limit: int = CELL) -> Html:
    """``value`` as escaped text of at most ``limit`` characters; an :class:`Html` as it is."""
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
    """A number for people: ``12,345``, ``12.3``, ``0.0012``; empty for None and what is none."""
    if value is None or not math.isfinite(value):
        return ""
    if abs(value) >= 100 or value == int(value):
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.3g}"


def block(value: Any, limit: int) -> Html:
    """Text that keeps its lines, cut at ``limit`` characters; control characters are visible."""
    raw = "" if value is None else str(value)
    cut = raw[:limit] + (" ..." if len(raw) > limit else "")
    printable = "".join(c if c.isprintable() or c == "\n" else visible(c) or " " for c in cut)
    return Html(f"<pre>{escape(printable)}</pre>")


def join(parts: Iterable[str]) -> Html:
    """Pieces one after the other; plain text among them is escaped."""
    return Html("".join(part if isinstance(part, Html) else escape(part) for part in parts))


def table(rows: Sequence[Mapping[str, Any]], heads: Mapping[str, str] | None = None) -> Html:
    """A table of dicts; ``heads`` chooses and names the columns, None takes all.

    Columns whose name ends in ``_ms``, ``_usd`` or ``percent`` are shown in that unit.
    """
    if not rows:
        return Html("")
    names = dict(heads) if heads else {name: _title(name) for name in rows[0]}
    columns = [n for n in names if any(row.get(n) is not None for row in rows)]
    numeric = {n for n in columns if all(_is_number(row.get(n)) for row in rows)}
    head = "".join(
        f"<th{' class=n' * (name in numeric)}>{escape(names[name])}</th>" for name in columns
    )
    body = "".join(
        f"<tr>{''.join(_cell(name, row.get(name)) for name in columns)}</tr>" for row in rows
    )
    return Html(f'<div class="wide"><table><tr>{head}</tr>{body}</table></div>')


def _title(name: str) -> str:
    """A column's name as words, less the unit that its values show."""
    for unit in ("_ms", "_usd", "_percent"):
        name = name.removesuffix(unit)
    return name.replace("_", " ")


def _is_number(value: Any) -> bool:
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool))


def _cell(name: str, value: Any) -> str:
    if value is None:
        return "<td></td>"
    if _is_number(value):
        return f'<td class="n">{_measure(name, value)}</td>'
    content = text(value)
    wide = " class=w" * (not isinstance(value, Html) and len(content) > WORDS)
    return f"<td{wide}>{content}</td>"


def _measure(name: str, value: float) -> str:
    if name.endswith("_ms"):
        return milliseconds(value)
    if name.endswith("_usd"):
        return money(value)
    return f"{number(value)} %" if name.endswith("percent") else number(value)


def section(title: str, *parts: str, name: str = "") -> Html:
    """A part of the page with its heading; nothing where all parts are empty."""
    inner = join(parts)
    if not inner:
        return Html("")
    anchor = name or title.lower().split(" ")[0]
    return Html(f'<section id="{escape(anchor)}"><h2>{escape(title)}</h2>{inner}</section>')


def note(message: str) -> Html:
    """A line of explanation."""
    return Html(f'<p class="note">{escape(message)}</p>')


def heading(title: str) -> Html:
    """A heading inside a section."""
    return Html(f"<h3>{escape(title)}</h3>")
