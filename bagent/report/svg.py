"""Charts as inline SVG: no script, no style sheet from elsewhere, nothing is loaded.

Colours are CSS variables of the page, so that one drawing serves light and dark.
"""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Sequence
from html import escape

import msgspec

from bagent.report.html import Html, number

CHART_WIDTH, CHART_HEIGHT = 520, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 16, 16, 46
_MARKS = 5


class Series(msgspec.Struct, frozen=True):
    """One line of a chart: points (x, y) with a word for each, in the order of drawing."""

    name: str
    points: Sequence[tuple[float, float]]
    labels: Sequence[str]


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

    def position(self, value: float) -> float:
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
    drawn = [line for line in series if line.points]
    if not drawn:
        return ""
    xs = [x for line in drawn for x, _ in line.points]
    ys = [y for line in drawn for _, y in line.points]
    across = _Scale(xs, _LEFT, CHART_WIDTH - _RIGHT, log=False)
    up = _Scale(ys, CHART_HEIGHT - _BOTTOM, _TOP, log=axes.log)
    parts = [_axes(axes, across, up)]
    for index, line in enumerate(drawn):
        parts.append(_line(line, index, across, up))
    legend = "".join(
        f'<li><span class="key k{number}"></span>{html.escape(line.name)}</li>'
        for number, line in enumerate(drawn)
    )
    return (
        f'<figure><figcaption>{html.escape(title)}</figcaption><ul class="legend">{legend}</ul>'
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{html.escape(title)}">'
        f"{''.join(parts)}</svg></figure>"
    )


def _axes(axes: Axes, across: _Scale, up: _Scale) -> str:
    parts = []
    for value in up.marks():
        y = up.position(value)
        parts.append(
            f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
            f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{short(value)}</text>'
        )
    for value in across.marks():
        x = across.position(value)
        y = CHART_HEIGHT - _BOTTOM + 16
        parts.append(f'<text x="{x:.1f}" y="{y}" text-anchor="middle">{short(value)}</text>')
    middle = (CHART_HEIGHT - _BOTTOM + _TOP) / 2
    parts.append(
        f'<text x="{(WIDTH + _LEFT) / 2}" y="{HEIGHT - 8}" text-anchor="middle" class="axis">'
        f"{html.escape(axes.x)}</text>"
        f'<text transform="translate(14 {middle}) rotate(-90)" text-anchor="middle" class="axis">'
        f"{html.escape(axes.y)}</text>"
    )
    return "".join(parts)


def _line(line: Series, number: int, across: _Scale, up: _Scale) -> str:
    positions = [(across.position(x), up.position(y)) for x, y in line.points]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in positions)
    dots = "".join(
        f'<circle class="s{number}" cx="{x:.1f}" cy="{y:.1f}" r="4">'
        f"<title>{html.escape(label)}</title></circle>"
        for (x, y), label in zip(positions, line.labels, strict=True)
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
    for index, (name, cells) in enumerate(rows):
        y = ROW * index
        short_name = name if len(name) <= 26 else f"{name[:12]}…{name[-13:]}"
        parts.append(
            f'<text x="{NAME_WIDTH - 8}" y="{y + 13}" text-anchor="end">{html.escape(short_name)}'
            f"<title>{html.escape(name)}</title></text>"
        )
        parts += [
            _field(NAME_WIDTH + CELL * index_in_row, y, cell)
            for index_in_row, cell in enumerate(cells)
        ]
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


WIDTH, HEIGHT = 720, 170
NARROW = 440
LEFT, RIGHT, TOP, BOTTOM = 58, 8, 8, 22

Label = Callable[[float], str]


def _nice(top: float) -> float:
    """A round number at or above ``top`` for the end of an axis."""
    if top <= 0:
        return 1.0
    power = 10.0 ** len(str(int(top))) / 10 if top >= 1 else 0.001
    while power * 10 < top:
        power *= 10
    return next((power * step for step in (1, 2, 2.5, 5, 10) if power * step >= top), power * 10)


def _frame(
    inner: str, title: str, top: float, ticks: Sequence[tuple[float, str]], wide: int = WIDTH
) -> Html:
    """Axes around a drawing; ``ticks`` are (share of the width, words) below it."""
    floor = HEIGHT - BOTTOM
    lines = []
    for share in (0.0, 0.5, 1.0):
        y = floor - share * (floor - TOP)
        lines.append(
            f'<line class="grid" x1="{LEFT}" x2="{wide - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        )
        lines.append(
            f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{number(top * share)}</text>'
        )
    for share, words in ticks:
        x = LEFT + share * (wide - LEFT - RIGHT)
        anchor = "start" if share < 0.02 else "end" if share > 0.98 else "middle"
        lines.append(
            f'<text x="{x:.1f}" y="{HEIGHT - 6}" text-anchor="{anchor}">{escape(words)}</text>'
        )
    size = " class=big" * (wide == WIDTH)
    return Html(
        f'<figure{size}><figcaption>{escape(title)}</figcaption><svg viewBox="0 0 {wide} {HEIGHT}"'
        f' role="img" aria-label="{escape(title)}">{"".join(lines)}{inner}</svg></figure>'
    )


def stacked(
    title: str,
    series: Sequence[tuple[str, str, Sequence[float]]],
    ticks: Sequence[tuple[float, str]],
) -> Html:
    """Bars over time, one series on top of the other.

    Args:
        series: (name, class of the colour, value for each bucket), the lowest first.
        ticks: (share of the width, words).
    """
    count = len(series[0][2])
    top = _nice(max(sum(band[2][i] for band in series) for i in range(count)))
    width = (WIDTH - LEFT - RIGHT) / count
    floor = HEIGHT - BOTTOM
    bars = []
    for i in range(count):
        y: float = floor
        for name, color, values in series:
            height = values[i] / top * (floor - TOP)
            if height <= 0:
                continue
            y -= height
            bars.append(
                f'<rect class="{color}" x="{LEFT + i * width:.1f}" y="{y:.1f}"'
                f' width="{max(0.5, width - 0.5):.1f}" height="{height:.1f}">'
                f"<title>{escape(name)}: {number(values[i])}</title></rect>"
            )
    keys = "".join(f' <b class="{c}">&#9632;</b> {escape(n)}' for n, c, _ in series)
    chart = _frame("".join(bars), title, top, ticks)
    return (
        Html(chart.replace("</figcaption>", f"{keys}</figcaption>", 1))
        if len(series) > 1
        else chart
    )


def histogram(title: str, bars: Sequence[tuple[float, float, int]], label: Label) -> Html:
    """Counts in bins of growing width, drawn equally wide.

    Args:
        bars: (from, to, count) of each bin, rising.
        label: a value of the axis in words.
    """
    if not bars:
        return Html("")
    top = _nice(max(count for _, _, count in bars))
    width = (NARROW - LEFT - RIGHT) / len(bars)
    floor = HEIGHT - BOTTOM
    heights = [count / top * (floor - TOP) for _, _, count in bars]
    drawn = "".join(
        f'<rect class="accent" x="{LEFT + i * width:.1f}" y="{floor - heights[i]:.1f}"'
        f' width="{max(0.5, width - 1):.1f}" height="{heights[i]:.1f}">'
        f"<title>{escape(label(low))} to {escape(label(high))}: {count:,}</title></rect>"
        for i, (low, high, count) in enumerate(bars)
    )
    tick_indices = sorted({0, len(bars) // 3, 2 * len(bars) // 3})
    ticks = [(i / len(bars), label(bars[i][0])) for i in tick_indices] + [(1.0, label(bars[-1][1]))]
    return _frame(drawn, title, top, ticks, NARROW)


def meter(share: float, color: str = "accent") -> Html:
    """A bar inside a table's cell; ``share`` of 0 to 1."""
    width = 100 * max(0.0, min(1.0, share))
    return Html(f'<span class="meter"><i class="{color}" style="width:{width:.1f}%"></i></span>')


def span(low: float, high: float) -> Html:
    """A part of a bar inside a table's cell, from ``low`` to ``high`` of 0 to 1."""
    low = max(0.0, min(0.99, low))
    width = max(0.01, min(1.0, high) - low)
    style = f"margin-left:{100 * low:.1f}%;width:{100 * width:.1f}%"
    return Html(f'<span class="meter"><i class="accent" style="{style}"></i></span>')


def sparkline(values: Sequence[float], most: float) -> Html:
    """A line as high as a row of text, from 0 to ``most``."""
    if len(values) < 2 or most <= 0:
        return Html("")
    step = 120 / (len(values) - 1)
    points = " ".join(f"{i * step:.1f},{22 - 20 * v / most:.1f}" for i, v in enumerate(values))
    return Html(f'<svg class="spark" viewBox="0 0 120 24"><polyline points="{points}"/></svg>')
