"""Charts as inline SVG: no script and nothing loaded from elsewhere.

Colours are CSS classes of the page, so one drawing serves light and dark.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from html import escape

import msgspec

from bagent.observe.formatting import duration
from bagent.report.html import Html


class Area(msgspec.Struct, frozen=True):
    """The size of a chart and the margins around its plot, in pixels."""

    width: int
    height: int = 170
    margin_left: int = 58
    margin_right: int = 8
    margin_top: int = 8
    margin_bottom: int = 22
    marks: int = 2
    """Steps of the vertical axis."""

    def x(self, share: float) -> float:
        """The pixel at ``share`` (0 to 1) of the plot's width."""
        return self.margin_left + share * (self.width - self.margin_left - self.margin_right)

    def y(self, share: float) -> float:
        """The pixel at ``share`` (0 to 1) of the plot's height, counted from below."""
        return (
            self.height
            - self.margin_bottom
            - share * (self.height - self.margin_top - self.margin_bottom)
        )


NARROW = Area(440)
LARGE = Area(520, 300, margin_right=16, margin_top=16, margin_bottom=46, marks=5)

Ticks = Iterable[tuple[float, str]]
"""Labels below a chart, each with its share (0 to 1) of the width."""


class _Scale:
    """Maps values to shares (0 to 1) of an axis that begins at 0, or at a power of ten."""

    def __init__(self, values: Sequence[float], *, log: bool = False) -> None:
        self._log = log and min(values) > 0
        if self._log:
            self._low = 10.0 ** math.floor(math.log10(min(values)))
            self._high = max(10.0 ** math.ceil(math.log10(max(values))), 10 * self._low)
        else:
            self._low, self._high = 0.0, _round_up(max(values))

    def share(self, value: float) -> float:
        if self._log:
            return math.log(value / self._low) / math.log(self._high / self._low)
        return (value - self._low) / (self._high - self._low)

    def marks(self, count: int) -> list[float]:
        if self._log:
            powers = round(math.log10(self._high / self._low))
            return [self._low * 10**step for step in range(powers + 1)]
        return [self._high * step / count for step in range(count + 1)]


def _round_up(value: float) -> float:
    """The next round number that a few marks divide well."""
    if value <= 0:
        return 1.0
    unit = 10.0 ** math.floor(math.log10(value))
    return next(step * unit for step in (1, 1.5, 2, 2.5, 3, 4, 5, 7.5, 10) if step * unit >= value)


def _short(value: float) -> str:
    """A number in few letters: ``0.25``, ``12``, ``3.4k``."""
    if abs(value) >= 10_000:
        return f"{value / 1000:.3g}k"
    return f"{value:.3g}" if abs(value) < 999.5 else f"{value:.0f}"


def _figure(
    title: str,
    size: tuple[float, float],
    drawing: Iterable[str],
    *,
    legend: Iterable[tuple[str, str]] = (),
    least_width: int = 0,
) -> Html:
    """A drawing with its title and a legend of (colour class, name)."""
    keys = "".join(f'<li><span class="key {c}"></span>{escape(name)}</li>' for c, name in legend)
    style = f' style="min-width:{least_width}px"' if least_width else ""
    return Html(
        f"<figure><figcaption>{escape(title)}</figcaption>"
        + (f'<ul class="legend">{keys}</ul>' if keys else "")
        + f'<svg viewBox="0 0 {size[0]} {size[1]}"{style} role="img"'
        f' aria-label="{escape(title)}">{"".join(drawing)}</svg></figure>'
    )


def _text(x: float, y: float, label: str, anchor: str, more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{more}>{escape(label)}</text>'


def _axes(area: Area, scale: _Scale, ticks: Ticks) -> list[str]:
    """Grid lines with their values, and the labels below."""
    parts = []
    for value in scale.marks(area.marks):
        y = area.y(scale.share(value))
        parts.append(
            f'<line class="grid" x1="{area.margin_left}" x2="{area.width - area.margin_right}"'
            f' y1="{y:.1f}" y2="{y:.1f}"/>'
            + _text(area.margin_left - 6, y + 4, _short(value), "end")
        )
    for share, label in ticks:
        anchor = "start" if share < 0.02 else "end" if share > 0.98 else "middle"
        parts.append(_text(area.x(share), area.y(0) + 16, label, anchor))
    return parts


class Series(msgspec.Struct, frozen=True):
    """One line of a chart."""

    name: str
    points: Sequence[tuple[float, float]]
    """(x, y) in the order of drawing."""

    labels: Sequence[str]
    """What is shown for each point under the pointer."""


class Axes(msgspec.Struct, frozen=True):
    """Titles of a chart's axes, and whether y is logarithmic."""

    x: str
    y: str
    log: bool = False


def lines(title: str, axes: Axes, series: Sequence[Series]) -> Html:
    """Draw lines with points; empty where there is none."""
    drawn = [line for line in series if line.points]
    if not drawn:
        return Html("")
    across = _Scale([x for line in drawn for x, _ in line.points])
    up = _Scale([y for line in drawn for _, y in line.points], log=axes.log)
    ticks = [(across.share(value), _short(value)) for value in across.marks(5)]
    middle = LARGE.y(0.5)
    parts = [
        *_axes(LARGE, up, ticks),
        _text(LARGE.x(0.5), LARGE.height - 8, axes.x, "middle", ' class="axis"'),
        f'<text transform="translate(14 {middle}) rotate(-90)" text-anchor="middle" class="axis">'
        f"{escape(axes.y)}</text>",
    ]
    for index, line in enumerate(drawn):
        points = [(LARGE.x(across.share(x)), LARGE.y(up.share(y))) for x, y in line.points]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        parts.append(f'<polyline class="s{index}" points="{path}"/>')
        parts += [
            f'<circle class="s{index}" cx="{x:.1f}" cy="{y:.1f}" r="4">'
            f"<title>{escape(label)}</title></circle>"
            for (x, y), label in zip(points, line.labels, strict=True)
        ]
    legend = [(f"s{index}", line.name) for index, line in enumerate(drawn)]
    return _figure(title, (LARGE.width, LARGE.height), parts, legend=legend, least_width=400)


def _bar(color: str, box: tuple[float, float, float, float], label: str) -> str:
    """A rectangle of (x, y, width, height)."""
    x, y, width, height = box
    return (
        f'<rect class="{color}" x="{x:.1f}" y="{y:.1f}" width="{max(0.5, width):.1f}"'
        f' height="{height:.1f}"><title>{escape(label)}</title></rect>'
    )


def histogram(
    title: str, bars: Sequence[tuple[float, float, int]], label: Callable[[float], str]
) -> Html:
    """Draw counts in bins of growing width, each equally wide.

    Args:
        bars: (from, to, count) of each bin, rising.
        label: writes a value of the axis.
    """
    if not bars:
        return Html("")
    scale = _Scale([count for _, _, count in bars])
    width = (NARROW.x(1) - NARROW.x(0)) / len(bars)
    starts = sorted({0, len(bars) // 3, 2 * len(bars) // 3})
    ticks = [(i / len(bars), label(bars[i][0])) for i in starts] + [(1.0, label(bars[-1][1]))]
    parts = _axes(NARROW, scale, ticks)
    for i, (low, high, count) in enumerate(bars):
        top = NARROW.y(scale.share(count))
        box = (NARROW.x(0) + i * width, top, width - 1, NARROW.y(0) - top)
        parts.append(_bar("accent", box, f"{label(low)} to {label(high)}: {count:,}"))
    return _figure(title, (NARROW.width, NARROW.height), parts)


class Cell(msgspec.Struct, frozen=True):
    """One slice of an endpoint's time in a heat strip."""

    level: float | None
    """0 (as fast as any) to 1 (ten times slower); None without a request."""

    failed: bool
    label: str


CELL, NAME_WIDTH, ROW = 12, 200, 18
_HEAT = (
    ("h0", "as fast as the median"),
    ("h2", "3 times slower"),
    ("h4", "10 times slower"),
    ("failed", "failures"),
    ("none", "no request"),
)


def strip(title: str, rows: Sequence[tuple[str, Sequence[Cell]]], seconds: float) -> Html:
    """Draw endpoints over time: a row for each, a field for each slice of the test."""
    if not rows:
        return Html("")
    width = NAME_WIDTH + CELL * max(len(cells) for _, cells in rows)
    height = ROW * len(rows) + 26
    parts = []
    for index, (name, cells) in enumerate(rows):
        y = ROW * index
        short_name = name if len(name) <= 26 else f"{name[:12]}…{name[-13:]}"
        label = _text(NAME_WIDTH - 8, y + 13, short_name, "end")
        parts.append(label.replace("</text>", f"<title>{escape(name)}</title></text>"))
        for column, cell in enumerate(cells):
            box = (NAME_WIDTH + CELL * column, y + 1, CELL - 1, ROW - 3)
            parts.append(_bar(_heat(cell), box, cell.label))
    for step in range(6):
        x = NAME_WIDTH + (width - NAME_WIDTH) * step / 5
        parts.append(_text(x, height - 8, duration(seconds * step / 5), "middle"))
    return _figure(title, (width + 20, height), parts, legend=_HEAT, least_width=width + 8)


def _heat(cell: Cell) -> str:
    if cell.failed:
        return "failed"
    return "none" if cell.level is None else f"h{min(4, max(0, round(4 * cell.level)))}"


def meter(high: float, low: float = 0.0) -> Html:
    """A bar inside a table's cell from ``low`` to ``high``, of 0 to 1."""
    low = max(0.0, min(0.99, low))
    width = max(0.01 if low else 0.0, min(1.0, high) - low)
    style = f"margin-left:{100 * low:.1f}%;width:{100 * width:.1f}%"
    return Html(f'<span class="meter"><i class="accent" style="{style}"></i></span>')


def sparkline(values: Sequence[float]) -> Html:
    """A line from 0 to the largest value, as high as a row of text."""
    top = max(values, default=0.0)
    if len(values) < 2 or top <= 0:
        return Html("")
    step = 120 / (len(values) - 1)
    points = " ".join(f"{i * step:.1f},{22 - 20 * v / top:.1f}" for i, v in enumerate(values))
    line = f'<polyline class="accent" points="{points}"/>'
    return Html(f'<svg class="spark" viewBox="0 0 120 24">{line}</svg>')
