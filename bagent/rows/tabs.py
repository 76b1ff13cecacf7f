"""The cells of a ``.tsv`` file, in which tabs and line ends part cells and quotes are text.

Spreadsheets and pandas put quotes around a cell that holds a tab, a line end or a quote. So quotes
count where the lines cannot be read without them, and can with them:

- a cell in quotes inside of which every quote is doubled, and at least one is, is that text;
- a record goes on behind its line where a cell opens a quote that a later line closes, the record
  then has the header's number of cells, and its lines alone do not look like rows: none between
  the first and the last has that number of cells, and not both of these have it.
"""

from __future__ import annotations

import csv

from bagent.rows.physical import PhysicalLines

_MOST_LINES = 1000
_MOST_TEXT = 1 << 24
"""A quote that so many lines, or characters, do not close is text."""


class TabCells:
    """An iterator over the cells of each record.

    Args:
        lines: of the file.
        width: how many cells the header has; 0: this is the header, of one line.
    """

    def __init__(self, lines: PhysicalLines, width: int = 0) -> None:
        self._lines = lines
        self._width = width

    def __iter__(self) -> TabCells:
        return self

    def __next__(self) -> list[str]:
        line = next(self._lines)
        cells = _split(line)
        if '"' not in line or not self._width:
            return cells
        if not any(cell.startswith('"') for cell in cells):
            return cells
        quoted = self._in_quotes(line)
        return [_without_doubled(cell) for cell in cells] if quoted is None else quoted

    def _in_quotes(self, line: str) -> list[str] | None:
        """The cells of the record that begins on ``line``, if only quotes hold it together."""
        like_row = self._is_row(line)
        if like_row and line.count('"') % 2 == 0:
            return None
        lines, quotes, size = [line], line.count('"'), len(line)
        for more in range(_MOST_LINES):
            if more:
                lines.append(self._lines.peek(more - 1))
                size += len(lines[-1])
                if not lines[-1] or size > _MOST_TEXT:
                    return None
                quotes += lines[-1].count('"')
            if quotes % 2 == 0:
                record = None if like_row and self._is_row(lines[-1]) else _read_quoted(lines)
                if record is None or len(record) != self._width:
                    return None
                for _ in range(more):
                    next(self._lines)
                return record
            if more and self._is_row(lines[-1]):
                return None
        return None

    def _is_row(self, line: str) -> bool:
        return len(_split(line)) == self._width


def _split(line: str) -> list[str]:
    text = line.rstrip("\r\n")
    return text.split("\t") if text else []


def _read_quoted(lines: list[str]) -> list[str] | None:
    """The one record that lines are in quoted TSV, None where it is not that."""
    try:
        records = list(csv.reader(lines, delimiter="\t", strict=True))
    except csv.Error:
        return None
    return records[0] if len(records) == 1 else None


def _without_doubled(cell: str) -> str:
    inner = cell[1:-1]
    if len(cell) < 4 or not (cell.startswith('"') and cell.endswith('"') and '""' in inner):
        return cell
    return cell if '"' in inner.replace('""', "") else inner.replace('""', '"')
