"""Charts as inline SVG: no script, no style sheet from elsewhere, nothing is loaded.

Colours are CSS variables of the page, so that one drawing serves light and dark.
"""

from __future__ import annotations

import html
import math
from collections.abc import Sequence

import msgspec

WIDTH, HEIGHT = 520, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 16, 16, 46
_MARKS = 5


class Series(msgspec.Struct, frozen=True):
    """One line of a chart: points (x, y) with a word for each, in the order of drawing."""

    name: str
    points: Sequence[tuple[float, float]]
    words: Sequence[str]


class Axes(msgspec.Struct, frozen=True):
    """Titles of a chart's axes, and whether y is logarithmic."""

    x: str
    y: str
    log: bool = False


class _Scale:
    """From values to places on one axis."""

    def __init__(self, values: Sequence[float], low: float, high: float, *, log: bool) -> None:
        self._log = log and min(values) > 0
        top = max(values)
        if self._log:
            self._from = 10.0 ** math.floor(math.log10(min(values)))
            self._to = 10.0 ** math.ceil(math.log10(top))
            if self._to <= self._from:
                self._to = 10 * self._from
        else:
            self._from, self._to = 0.0, _round_up(top)
        self._low, self._high = low, high

    def place(self, value: float) -> float:
        """Where ``value`` is drawn."""
        if self._log:
            share = math.log(value / self._from) / math.log(self._to / self._from)
        else:
            share = (value - self._from) / (self._to - self._from)
        return self._low + share * (self._high - self._low)

    def marks(self) -> list[float]:
        """Values at which the axis is marked."""
        if self._log:
            count = round(math.log10(self._to / self._from))
            return [self._from * 10**step for step in range(count + 1)]
        return [self._to * step / _MARKS for step in range(_MARKS + 1)]


def _round_up(value: float) -> float:
    """The next round number that five marks divide well."""
    if value <= 0:
        return 1.0
    unit = 10.0 ** math.floor(math.log10(value))
    return next(step * unit for step in (1, 1.5, 2, 2.5, 3, 4, 5, 7.5, 10) if step * unit >= value)


def lines(title: str, axes: Axes, series: Sequence[Series]) -> str:
    """A chart of lines with points; an empty text where there is nothing to draw."""
    drawn = [one for one in series if one.points]
    if not drawn:
        return ""
    xs = [x for one in drawn for x, _ in one.points]
    ys = [y for one in drawn for _, y in one.points]
    across = _Scale(xs, _LEFT, WIDTH - _RIGHT, log=False)
    up = _Scale(ys, HEIGHT - _BOTTOM, _TOP, log=axes.log)
    parts = [_frame(axes, across, up)]
    for number, one in enumerate(drawn):
        parts.append(_line(one, number, across, up))
    legend = "".join(
        f'<li><span class="key k{number}"></span>{html.escape(one.name)}</li>'
        for number, one in enumerate(drawn)
    )
    return (
        f'<figure><figcaption>{html.escape(title)}</figcaption><ul class="legend">{legend}</ul>'
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{html.escape(title)}">'
        f"{''.join(parts)}</svg></figure>"
    )


def _frame(axes: Axes, across: _Scale, up: _Scale) -> str:
    parts = []
    for value in up.marks():
        y = up.place(value)
        parts.append(
            f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
            f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{short(value)}</text>'
        )
    for value in across.marks():
        x = across.place(value)
        y = HEIGHT - _BOTTOM + 16
        parts.append(f'<text x="{x:.1f}" y="{y}" text-anchor="middle">{short(value)}</text>')
    middle = (HEIGHT - _BOTTOM + _TOP) / 2
    parts.append(
        f'<text x="{(WIDTH + _LEFT) / 2}" y="{HEIGHT - 8}" text-anchor="middle" class="axis">'
        f"{html.escape(axes.x)}</text>"
        f'<text transform="translate(14 {middle}) rotate(-90)" text-anchor="middle" class="axis">'
        f"{html.escape(axes.y)}</text>"
    )
    return "".join(parts)


def _line(one: Series, number: int, across: _Scale, up: _Scale) -> str:
    places = [(across.place(x), up.place(y)) for x, y in one.points]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    dots = "".join(
        f'<circle class="s{number}" cx="{x:.1f}" cy="{y:.1f}" r="4">'
        f"<title>{html.escape(word)}</title></circle>"
        for (x, y), word in zip(places, one.words, strict=True)
    )
    return f'<polyline class="s{number}" points="{path}"/>{dots}'


class Cell(msgspec.Struct, frozen=True):
    """One field of the heat strip: its level from 0 (as fast as any) to 1 (ten times slower);
    None is no request. ``bad`` marks failures."""

    level: float | None
    bad: bool
    words: str


CELL, NAME_WIDTH, ROW = 12, 200, 18


def strip(title: str, rows: Sequence[tuple[str, Sequence[Cell]]], seconds: float) -> str:
    """Endpoints over time: a row for each, a field for each slice of the test."""
    if not rows:
        return ""
    count = max(len(cells) for _, cells in rows)
    width, height = NAME_WIDTH + CELL * count + 8, ROW * len(rows) + 26
    parts = []
    for number, (name, cells) in enumerate(rows):
        y = ROW * number
        shown = name if len(name) <= 26 else f"{name[:12]}…{name[-13:]}"
        parts.append(
            f'<text x="{NAME_WIDTH - 8}" y="{y + 13}" text-anchor="end">{html.escape(shown)}'
            f"<title>{html.escape(name)}</title></text>"
        )
        parts += [_field(NAME_WIDTH + CELL * place, y, cell) for place, cell in enumerate(cells)]
    for step in range(_MARKS + 1):
        x = NAME_WIDTH + CELL * count * step / _MARKS
        parts.append(
            f'<text x="{x:.0f}" y="{height - 8}" text-anchor="middle">'
            f"{short(seconds * step / _MARKS)} s</text>"
        )
    return (
        f'<figure class="wide"><figcaption>{html.escape(title)}</figcaption>'
        f'<ul class="legend"><li><span class="key h0"></span>as fast as the median</li>'
        f'<li><span class="key h2"></span>3 times slower</li>'
        f'<li><span class="key h4"></span>10 times slower</li>'
        f'<li><span class="key bad"></span>failures</li>'
        f'<li><span class="key none"></span>no request</li></ul>'
        f'<svg viewBox="0 0 {width + 12} {height}" style="min-width:{width}px" role="img" '
        f'aria-label="{html.escape(title)}">{"".join(parts)}</svg></figure>'
    )


def _field(x: int, y: int, cell: Cell) -> str:
    if cell.bad:
        kind = "bad"
    elif cell.level is None:
        kind = "none"
    else:
        kind = f"h{min(4, max(0, round(4 * cell.level)))}"
    size = CELL - 1
    return (
        f'<rect class="{kind}" x="{x}" y="{y + 1}" width="{size}" height="{ROW - 3}">'
        f"<title>{html.escape(cell.words)}</title></rect>"
    )


def short(value: float) -> str:
    """A number in few letters: ``0.25``, ``12``, ``3.4k``."""
    if abs(value) >= 10_000:
        return f"{value / 1000:.3g}k"
    return f"{value:.3g}" if abs(value) < 999.5 else f"{value:.0f}"
