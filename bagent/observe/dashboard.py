"""The full-screen display of ``--dashboard``: it fits 80 columns and any height."""

from __future__ import annotations

import textwrap
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Literal

from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.live import Live as Screen
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from bagent.observe.formatting import milliseconds, name_of, percent, rate, visible
from bagent.observe.live_state import SLOW, EndpointLine, Live, times_of_lines
from bagent.observe.progress import Once
from bagent.observe.snapshot import Snapshot
from bagent.observe.terminal import RunView

STEP_S = 5.0
"""Seconds that one bar of the history covers."""

BARS = 60
REDRAW_S = 1.0
"""Drawing takes about 10 ms, so once a second costs a hundredth of a core."""

_BLOCKS = " ▁▂▃▄▅▆▇█"
_HEADS = 6
_NARROWEST = 8
"""The fewest columns of an endpoint's name."""

_NOTES = 3
_HEALTH = {"ok": "green", "down": "red", "leaving": "dim"}


class History:
    """Rows and answer tokens of the last five minutes, in steps of :data:`STEP_S`."""

    def __init__(self) -> None:
        self._marks: deque[tuple[float, int, int]] = deque([(0.0, 0, 0)], maxlen=BARS + 1)

    def add(self, s: Snapshot) -> None:
        """Record a snapshot if a step is over."""
        if s.elapsed_s - self._marks[-1][0] >= STEP_S:
            self._marks.append((s.elapsed_s, s.this_start.done, s.tokens.completion.total or 0))

    def rates(self, column: int) -> list[float]:
        """Return the rate of each step: column 1 is rows, 2 answer tokens."""
        marks = list(self._marks)
        return [(b[column] - a[column]) / (b[0] - a[0]) for a, b in pairwise(marks)]


def bars(values: Sequence[float], width: int) -> str:
    """Draw values as a line of blocks, the newest at the right."""
    recent = values[-width:]
    top = max(recent, default=0.0)
    if top <= 0:
        return ""
    return "".join(_BLOCKS[round(value / top * 8)] for value in recent)


class _View:
    """The whole screen; the lower parts are left out where it is low."""

    def __init__(self, board: Dashboard, snapshot: Snapshot) -> None:
        self._board = board
        self._s = snapshot

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Group]:
        board, width = self._board, options.max_width
        rows = (options.height or console.size.height) - _HEADS - 3
        parts: list[RenderableType] = [
            Text(board.header, style="bold", no_wrap=True, overflow="ellipsis"),
            RunView(self._s, width),
            *_history(board.history, width),
        ]
        notes = list(board.notes)[-_NOTES:]
        rows -= len(notes) + 2
        lines = board.live.endpoints() if board.live else []
        endpoints = lines_shown(lines, max(2, min(len(lines), rows // 2)))
        parts += [Rule("endpoints", style="dim"), _endpoints(endpoints, lines, width)]
        rows -= len(endpoints) + 3
        errors = self._s.errors[: max(0, min(4, rows // 2))]
        if errors:
            parts.append(Rule("errors", style="dim"))
            wrapped = [_wrapped(f"{e.count:,} x {e.kind}: {e.text}", width) for e in errors]
            roomy = sum(map(len, wrapped)) <= max(len(errors), rows // 2)
            drawn = [line for lines_of in wrapped for line in lines_of[: 2 if roomy else 1]]
            parts += [_line(line, "red") for line in drawn]
            rows -= len(drawn) + 1
        last = list(board.live.last())[-max(0, rows - 1) :] if board.live and rows > 1 else []
        if last:
            parts.append(Rule("last answers", style="dim"))
            parts += [
                _line(f"{name_of(o.id, 24)}: {o.text or o.error or o.status}", _mood(o.status))
                for o in reversed(last)
            ]
        parts += [_line(note, "yellow") for note in notes]
        yield Group(*parts)


def lines_shown(lines: Sequence[EndpointLine], most: int) -> list[EndpointLine]:
    """Return the endpoints that need attention first, slow ones among them, then the busiest."""
    slower = times_of_lines(lines)

    def order(e: EndpointLine) -> tuple[bool, bool, float, int]:
        times = slower.get(e.name, 0.0)
        return e.health == "ok", times <= SLOW, -times if times > SLOW else 0.0, -e.in_flight

    return sorted(lines, key=order)[:most]


def _history(history: History, width: int) -> Iterable[Text]:
    width_bars = max(10, min(BARS, width - 24))
    for label, column in (("rows/s", 1), ("tokens/s", 2)):
        values = history.rates(column)
        if any(values):
            line = Text(f"{label:<9}", no_wrap=True, overflow="crop")
            line.append(bars(values, width_bars), style="cyan").append(f" {rate(values[-1])}")
            yield line


def _endpoints(
    lines: Sequence[EndpointLine], everything: Sequence[EndpointLine], width: int
) -> Table:
    """Draw the endpoints; columns that no endpoint has a value for are left out."""
    slower = times_of_lines(everything)
    columns: dict[str, list[str | Text]] = {
        "": [_health(e, slower) for e in lines],
        "in flight": [f"{e.in_flight:,}/{e.limit:,}" for e in lines],
        "waiting": ["" if e.waiting is None else f"{e.waiting:,}" for e in lines],
        "cache": ["" if e.hit_rate is None else percent(e.hit_rate) for e in lines],
        "p50": ["" if e.p50_s is None else milliseconds(1000 * e.p50_s) for e in lines],
        "x others": [f"{slower[e.name]:.1f}" if e.name in slower else "" for e in lines],
        "attempts": [f"{e.tries:,}" for e in lines],
        "failed": [Text(f"{e.failed:,}", style="red" if e.failed else "") for e in lines],
    }
    columns = {
        name: cells for name, cells in columns.items() if any(str(c) for c in cells) or not name
    }
    others = sum(max(map(len, map(str, [name, *cells]))) + 2 for name, cells in columns.items())
    widest = max(_NARROWEST, width - others)
    columns = {"endpoint": [_short(visible(e.name, 200), widest) for e in lines], **columns}
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, expand=False)
    for name in columns:
        justify: Literal["left", "right"] = "left" if name in ("endpoint", "") else "right"
        table.add_column(name, no_wrap=True, overflow="ellipsis", justify=justify)
    for row in zip(*columns.values(), strict=True):
        table.add_row(*row)
    if len(everything) > len(lines):
        table.add_row(Text(f"and {len(everything) - len(lines):,} more", style="dim"))
    return table


def _short(name: str, width: int) -> Text:
    """Return a name that fits: without its scheme, then without its middle."""
    if len(name) > width:
        name = name.removeprefix("http://").removeprefix("https://")
    if len(name) > width:
        tail = (width - 1) // 3
        name = f"{name[: width - 1 - tail]}…{name[len(name) - tail :]}"
    return Text(name)


def _health(e: EndpointLine, slower: Mapping[str, float]) -> Text:
    """Return the state of an endpoint; one that serves, but late, is slow."""
    if e.health == "ok" and slower.get(e.name, 0.0) > SLOW:
        return Text("slow", style="yellow")
    return Text(e.health, style=_HEALTH.get(e.health, "yellow"))


def _line(text: str, style: str) -> Text:
    return Text(visible(text, 400), style=style, no_wrap=True, overflow="ellipsis")


def _wrapped(text: str, width: int) -> list[str]:
    """Return a text as at most two lines, wrapped at words."""
    indent = "    "
    return textwrap.wrap(
        visible(text, 400), width, subsequent_indent=indent, max_lines=2, placeholder=" ..."
    )


def _mood(status: str) -> str:
    return "" if status == "ok" else "red"


class Dashboard:
    """The display of ``--dashboard``.

    Messages are on the screen for a while, and are printed once it is gone.

    Args:
        console: where to draw; it decides on size and colour.
        clock: monotonic seconds.
    """

    interval_s = REDRAW_S

    def __init__(self, console: Console, clock: Callable[[], float]) -> None:
        self._console = console
        self._clock = clock
        self._drawn = float("-inf")
        self._screen = Screen(
            console=console,
            screen=True,
            auto_refresh=False,
            redirect_stdout=False,
            redirect_stderr=False,
            vertical_overflow="crop",
        )
        self._once = Once()
        self._started = False
        self.header = ""
        self.history = History()
        self.notes: deque[str] = deque(maxlen=1000)
        self.live: Live | None = None

    def start(self, header: str) -> None:
        """Take the screen."""
        self.header = visible(header)
        self._started = True
        self._screen.start()

    def attach(self, live: Live) -> None:
        """Show its endpoints and last answers."""
        self.live = live

    def update(self, snapshot: Snapshot) -> None:
        """Draw the state, at most once a second."""
        self.history.add(snapshot)
        now = self._clock()
        if now - self._drawn >= REDRAW_S:
            self._drawn = now
            self._screen.update(_View(self, snapshot), refresh=True)

    def note(self, text: str, *, warning: bool = False) -> None:
        """Show the message at the next drawing."""
        text = visible(text)
        if self._once.is_new(text):
            self.notes.append(text)
            if not self._started:
                self._print(text)

    def stop(self) -> None:
        """Restore the screen and print the messages."""
        if not self._started:
            return
        self._started = False
        self._screen.stop()
        for text in self.notes:
            self._print(text)
        self.notes.clear()

    def _print(self, text: str) -> None:
        self._console.print(Text(f"bagent: {text}", style="yellow"), soft_wrap=False)
