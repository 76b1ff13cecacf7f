"""Charts as inline SVG: colours come from the page's style, so that light and dark both work."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape

from bagent.observe.report.html import Html, number

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
    top = _nice(max(sum(one[2][i] for one in series) for i in range(count)))
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
    places = sorted({0, len(bars) // 3, 2 * len(bars) // 3})
    ticks = [(i / len(bars), label(bars[i][0])) for i in places] + [(1.0, label(bars[-1][1]))]
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
