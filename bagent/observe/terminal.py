"""The live display on a terminal: a bar and a few lines, drawn again at every update."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import IO, cast

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from bagent.observe.formatting import duration, visible
from bagent.observe.live_state import Live as LiveRun
from bagent.observe.progress import Once, Phrase, arrival, position, results, speed, stages, work
from bagent.observe.snapshot import Snapshot
from bagent.text.terminal import SafeTextStream

_STYLES = {"": "", "good": "green", "bad": "red", "wait": "yellow"}

# A display narrower than its window is not broken when the window shrinks.
_WIDEST = 80
_BAR_WIDEST = 30
_BAR_NARROWEST = 6


def make_console(out: SafeTextStream, env: Mapping[str, str], width: int | None) -> Console:
    """A console on ``out``; ``width`` None follows the terminal. NO_COLOR is respected."""
    return Console(
        file=cast(IO[str], out),
        force_terminal=True,
        width=width,
        no_color=bool(env.get("NO_COLOR")),
        legacy_windows=False,
        highlight=False,
        _environ=env,
    )


class RunView:
    """A snapshot as a renderable of any width.

    Args:
        snapshot: the state.
        widest: the most columns to use.
    """

    def __init__(self, snapshot: Snapshot, widest: int = _WIDEST) -> None:
        self._s = snapshot
        self._widest = widest

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Group]:
        """Lines no wider than the console is at this moment."""
        s = self._s
        width = min(options.max_width, self._widest)
        lines: list[RenderableType] = [*_bar(s, width)]
        for phrases in (results(s), stages(s), work(s), [*speed(s), Phrase(duration(s.elapsed_s))]):
            lines += flow(phrases, width)
        yield Group(*lines)


def _bar(s: Snapshot, width: int) -> Iterator[RenderableType]:
    """The first line, with a bar where the size is known and there is room."""
    lines = flow([Phrase(position(s)), Phrase(arrival(s))], width)
    bar_width = min(_BAR_WIDEST, width - lines[0].cell_len - 2)
    if s.fraction is None or bar_width < _BAR_NARROWEST or len(lines) > 1:
        yield from lines
        return
    grid = Table.grid(padding=(0, 2, 0, 0), pad_edge=False)
    grid.add_column(width=bar_width, no_wrap=True)
    grid.add_column(no_wrap=True)
    grid.add_row(ProgressBar(total=1.0, completed=s.fraction, width=bar_width), lines[0])
    yield grid


def flow(phrases: list[Phrase], width: int) -> list[Text]:
    """Lay phrases out on lines of ``width`` columns."""
    lines: list[Text] = []
    for phrase in phrases:
        # Text takes foreign text literally; markup would interpret it.
        piece = Text(phrase.text, style=_STYLES[phrase.style])
        piece.truncate(max(1, width), overflow="crop")
        if lines and lines[-1].cell_len + 2 + cell_len(piece.plain) <= width:
            lines[-1].append("  ").append_text(piece)
        else:
            # An empty head, so that the first piece's style does not colour the line.
            lines.append(Text(no_wrap=True, overflow="crop").append_text(piece))
    return lines


class RichProgress:
    """The live display.

    Args:
        console: where to draw; it decides on width and colour.
    """

    interval_s = 0.25

    def __init__(self, console: Console) -> None:
        self._console = console
        # Drawn by update(), without a thread; standard output is not redirected.
        self._live = Live(
            console=console,
            auto_refresh=False,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
            vertical_overflow="crop",
        )
        self._once = Once()

    def start(self, header: str) -> None:
        """Print the header line and begin to draw."""
        self._print(visible(header), "bold")
        self._live.start()

    def update(self, snapshot: Snapshot) -> None:
        """Draw the state."""
        self._live.update(RunView(snapshot), refresh=True)

    def attach(self, live: LiveRun) -> None:
        """Do nothing."""

    def note(self, text: str, *, warning: bool = False) -> None:
        """Print the message above the display."""
        text = visible(text)
        if self._once.is_new(text):
            self._print(f"bagent: {text}", "yellow")

    def stop(self) -> None:
        """Remove the display, show the cursor."""
        self._live.stop()

    def _print(self, text: str, style: str) -> None:
        self._console.print(Text(text, style=style), soft_wrap=False)
