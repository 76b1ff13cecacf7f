"""Rows of a result as a table, CSV or JSON lines on stdout."""

from __future__ import annotations

import csv
import io
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal

import msgspec

from bagent.errors import UsageError

Format = Literal["table", "csv", "jsonl"]
WIDEST = 60
"""Characters of a cell of a table; more is cut and marked."""


def write_rows(names: Sequence[str], rows: Iterable[Sequence[Any]], form: str) -> None:
    """Print ``rows`` with the column ``names`` as ``form``: table, csv or jsonl.

    Raises:
        UsageError: there is no such form.
        BrokenPipeError: the reader has gone.
    """
    makers = {"table": _table, "csv": _csv, "jsonl": _jsonl}
    if form not in makers:
        raise UsageError(f"--format {form}: no such format", hint=", ".join(makers))
    out = sys.stdout
    for text in makers[form](names, rows):
        out.write(text + "\n")
    out.flush()


def _jsonl(names: Sequence[str], rows: Iterable[Sequence[Any]]) -> Iterator[str]:
    for row in rows:
        yield msgspec.json.encode(dict(zip(names, row, strict=True)), enc_hook=str).decode()


def _csv(names: Sequence[str], rows: Iterable[Sequence[Any]]) -> Iterator[str]:
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="")
    for row in _with_header(names, rows):
        writer.writerow([_cell(value) for value in row])
        yield buffer.getvalue()
        buffer.seek(0)
        buffer.truncate()


def _with_header(names: Sequence[str], rows: Iterable[Sequence[Any]]) -> Iterator[Sequence[Any]]:
    yield names
    yield from rows


def _table(names: Sequence[str], rows: Iterable[Sequence[Any]]) -> Iterator[str]:
    cells = [[_short(_cell(value)) for value in row] for row in rows]
    numeric = [
        bool(cells) and all(_is_number(row[i]) for row in cells if row[i])
        for i in range(len(names))
    ]
    widths = [max(len(row[i]) for row in [list(names), *cells]) for i in range(len(names))]

    def line(row: Sequence[str]) -> str:
        shown = (
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(row, widths, numeric, strict=True)
        )
        return "  ".join(shown).rstrip()

    yield line(names)
    yield "  ".join("-" * width for width in widths)
    yield from map(line, cells)


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return f"{value:.10g}"
    if isinstance(value, list | dict):
        return msgspec.json.encode(value, enc_hook=str).decode()
    return str(value)


def _short(text: str) -> str:
    flat = " ".join(text.split())
    return flat if len(flat) <= WIDEST else flat[: WIDEST - 1] + "…"


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
