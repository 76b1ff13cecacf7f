"""Comma-, semicolon- or tab-separated text with a header: every cell is text.

CSV goes through the standard library's reader in its strict mode: quotes may hold line ends and
separators, a quote doubled is a quote. Lines may end in LF, CRLF or CR. A warning tells where a
quoted cell runs over lines that look like rows, or over very many.

In a ``.tsv`` tabs and line ends part cells, and quotes are text; see :mod:`bagent.rows.tabs`. One
whose header is in quotes, cell by cell, is read as CSV is.

Blanks around the names of a header do not count; where all names but the first begin with one, nor
do blanks behind separators. Cells without a name at the end of a header stand for no column.
"""

from __future__ import annotations

import csv
import re
from collections import Counter
from collections.abc import Iterator

from bagent.errors import InputError, Position
from bagent.rows.inputs import FileSource
from bagent.rows.lines import LONGEST, ROWS
from bagent.rows.notices import Notices
from bagent.rows.physical import PhysicalLines
from bagent.rows.streams import ByteStream, check_start
from bagent.rows.tabs import TabCells
from bagent.rows.values import Chunk, Item, Unreadable

LONG_ROW = (
    "rows whose quoted cells run over lines that look like rows, or over more than 100 lines:"
    " {count}; first {example} (a quote that is not closed? inside of quotes one is doubled)"
)
_MANY_LINES = 100

_LARGEST_CELL = LONGEST
"""Characters of one cell. It also ends what a quote that is never closed would swallow."""

MAX_COLUMNS = 100_000
_NAMED = 10

_SEPARATORS = (",", ";", "\t")
_QUOTED = re.compile('"[^"]*"')
_QUOTED_NAMES = re.compile(r'"[^"\t]+"(?:\t"[^"\t]+")*[\r\n]*')
"""A header of which every name is in quotes."""

_SEPARATOR_LINE = re.compile(r'"?sep=(.)"?[\r\n]*')
"""A first line with which Excel names the separator."""

_AS_UTF8 = "save the file as UTF-8, e.g. iconv -f LATIN1 -t UTF-8"


class CsvFile:
    """One CSV file, opened; its header is read and checked at once.

    Args:
        source: the file; its format is ``csv`` or ``tsv``.
        notices: takes the warnings about rows of many lines.

    Raises:
        InputError: it cannot be read, is not UTF-8, or two columns have the same name.
    """

    def __init__(self, source: FileSource, notices: Notices) -> None:
        csv.field_size_limit(_LARGEST_CELL)  # the library has this only for the whole process
        self._source = source
        self._notices = notices
        self._width = 1
        self._stream = ByteStream(source.path, source.packing)
        try:
            check_start(self._stream.reader.peek(4), source.path)
            self._lines = PhysicalLines(self._stream, source)
            self._separator = self._find_separator()
            plain = source.format == "tsv" and not _QUOTED_NAMES.fullmatch(self._lines.peek())
            self._cells = TabCells(self._lines) if plain else self._quoted_cells()
            self._read_header()
            if plain:
                self._cells = TabCells(self._lines, self._width)
        except BaseException:
            self.close()
            raise

    def position(self) -> int:
        """Bytes of the file read so far."""
        return self._stream.position()

    def close(self) -> None:
        """Close the file."""
        self._stream.close()

    def chunks(self) -> Iterator[Chunk]:
        """The records, each at the physical line where it begins."""
        lines: list[int] = []
        items: list[Item] = []
        for line, record in self._records():
            lines.append(line)
            items.append(self._item(record))
            if len(items) == ROWS:
                yield Chunk(self._source.name, lines, items)
                lines, items = [], []
        if items:
            yield Chunk(self._source.name, lines, items)

    def _find_separator(self) -> str:
        """The tab in a .tsv; else the one that the first line has most of, outside quotes."""
        if self._source.format == "tsv":
            return "\t"
        line = self._lines.peek()
        if told := _SEPARATOR_LINE.fullmatch(line):
            next(self._lines)
            return told[1]
        return max(_SEPARATORS, key=_QUOTED.sub("", line).count)

    def _quoted_cells(self, *, blanks: bool = False) -> Iterator[list[str]]:
        return csv.reader(
            self._lines, delimiter=self._separator, strict=True, skipinitialspace=blanks
        )

    def _read_header(self) -> None:
        line, header = next(self._records(), (0, []))
        at = Position(self._source.path, line)
        if isinstance(header, Unreadable):
            raise InputError(
                f"the header cannot be read: {header.error}",
                hint=_AS_UTF8,
                at=at,
            )
        if len(header) > MAX_COLUMNS:
            raise InputError(
                f"the header has {len(header):,} columns, at most {MAX_COLUMNS:,} are read", at=at
            )
        names = [name.strip() for name in header]
        self._width = len(names)  # of rows that have a cell for each nameless column
        while len(names) > 1 and not names[-1]:
            names.pop()
        twice = sorted(name for name, count in Counter(names).items() if count > 1)
        if twice:
            raise InputError(
                f"the header names a column twice: {_first(twice)}",
                hint="give every column its own name",
                at=at,
            )
        self._header = names
        if len(header) > 1 and all(name.startswith(" ") for name in header[1:]):
            self._cells = self._quoted_cells(blanks=True)

    def _item(self, record: list[str] | Unreadable) -> Item:
        if isinstance(record, Unreadable):
            return record
        columns = len(self._header)
        if columns < len(record) <= self._width and not any(map(str.strip, record[columns:])):
            record = record[:columns]
        if len(record) != columns:
            error = f"{len(record)} cells where the header has {columns}"
            return Unreadable(error, self._lines.raw())
        return dict(zip(self._header, record, strict=True))

    def _check_length(self, line: int) -> None:
        """Note a record of many lines: an open quote swallows rows up to the next quote."""
        taken = self._lines.taken
        if len(taken) == 1:
            return
        separators = self._width - 1
        rows = sum(one.count(self._separator) == separators for one in taken[1:])
        if len(taken) > _MANY_LINES or (separators and rows > 1 and 2 * rows >= len(taken) - 1):
            example = f"{self._source.name}:{line}, {len(taken)} lines"
            self._notices.add(LONG_ROW, example)

    def _why(self, error: csv.Error) -> str:
        """The reader's words; an open quote has taken all lines up to the end of the file."""
        taken = self._lines.taken
        if len(taken) > 1 and not self._lines.peek():
            return f'a quote is never closed, so {len(taken)} lines are one row (double it: "")'
        return str(error)

    def _records(self) -> Iterator[tuple[int, list[str] | Unreadable]]:
        """Physical line and cells of every record that is not blank."""
        lines = self._lines
        while True:
            line = lines.begin_record()
            try:
                cells = next(self._cells)
            except StopIteration:
                return
            except csv.Error as error:
                yield line, Unreadable(f"malformed CSV: {self._why(error)}", lines.raw())
                continue
            if len(cells) < 2 and lines.blank():
                continue
            self._check_length(line)
            if lines.undecodable():
                yield line, Unreadable(f"not UTF-8 ({_AS_UTF8})", lines.raw())
            else:
                yield line, cells


def _first(names: list[str]) -> str:
    """The first few names, for people."""
    more = len(names) - _NAMED
    return ", ".join(map(repr, names[:_NAMED])) + (f" and {more:,} more" if more > 0 else "")
