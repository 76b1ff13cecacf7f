"""Rows as a table, CSV or JSON lines, and tables with colours and widths on a terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, BinaryIO, Literal

import msgspec

from bagent.errors import UsageError
from bagent.observe.formatting import visible
from bagent.text.csv import NUMBER, cell_text, csv_lines
from bagent.text.terminal import data_stdout, unguarded

Format = Literal["table", "csv", "jsonl"]
WIDEST = 60
"""Characters of a table's cell; longer text is cut and marked."""


def write_rows(names: Sequence[str], rows: Iterable[Sequence[Any]], form: str) -> None:
    """Print ``rows`` with the column ``names`` as ``form``: table, csv or jsonl.

    Raises:
        UsageError: there is no such form.
        BrokenPipeError: the reader has gone.
    """
    makers = {"table": _table, "csv": csv_lines, "jsonl": _jsonl}
    if form not in makers:
        raise UsageError(f"--format {form}: no such format", hint=", ".join(makers))
    if form == "table":
        for text in _table(names, rows):
            sys.stdout.write(text + "\n")
        sys.stdout.flush()
    else:
        write_lines(makers[form](names, rows), data_stdout())


def write_lines(lines: Iterable[str], file: BinaryIO) -> None:
    """Write each line with a line feed, as UTF-8."""
    for line in lines:
        file.write(line.encode("utf-8", "backslashreplace") + b"\n")
    file.flush()


def _jsonl(names: Sequence[str], rows: Iterable[Sequence[Any]]) -> Iterator[str]:
    for row in rows:
        yield msgspec.json.encode(dict(zip(names, row, strict=True)), enc_hook=str).decode()


def _table(names: Sequence[str], rows: Iterable[Sequence[Any]]) -> Iterator[str]:
    cells = [[_short(cell_text(value)) for value in row] for row in rows]
    numeric = [
        bool(cells) and all(NUMBER.match(row[i]) for row in cells if row[i])
        for i in range(len(names))
    ]
    widths = [max(len(row[i]) for row in [list(names), *cells]) for i in range(len(names))]

    def line(row: Sequence[str]) -> str:
        padded = (
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(row, widths, numeric, strict=True)
        )
        return "  ".join(padded).rstrip()

    yield line(names)
    yield "  ".join("-" * width for width in widths)
    yield from map(line, cells)


def _short(text: str) -> str:
    flat = " ".join(text.split())
    return flat if len(flat) <= WIDEST else flat[: WIDEST - 1] + "…"


class TableColumn(msgspec.Struct, frozen=True):
    """A column of :func:`print_table`."""

    head: str
    right: bool = False
    no_wrap: bool = False
    width: int | None = None
    fill: bool = False
    """Whether the column takes the remaining width of the terminal."""

    styles: Mapping[str, str] = {}
    """Colours by text; that of the empty text is for all others."""


def print_table(columns: Sequence[TableColumn], rows: Sequence[Sequence[str]]) -> None:
    """Print texts as a table: with colours on a terminal, plain elsewhere."""
    if not sys.stdout.isatty():
        cells = [[visible(text) for text in row] for row in rows]
        write_rows([column.head for column in columns], cells, "table")
        return
    from rich.table import Table
    from rich.text import Text

    fills = any(column.fill for column in columns)
    table = Table(box=None, pad_edge=False, header_style="bold", expand=fills)
    for column in columns:
        table.add_column(
            column.head,
            justify="right" if column.right else "left",
            overflow="fold",
            no_wrap=column.no_wrap,
            min_width=column.width,
            width=None if column.fill else column.width,
            ratio=1 if column.fill else None,
        )
    for row in rows:
        texts = [
            Text(visible(text), column.styles.get(text, column.styles.get("", "")))
            for column, text in zip(columns, row, strict=True)
        ]
        table.add_row(*texts)
    _console().print(table)


def terminal_width() -> int:
    """Return the columns of the terminal."""
    return int(_console().width)


def _console() -> Any:
    from rich.console import Console

    return Console(file=unguarded(sys.stdout), highlight=False)
