"""Comma-, semicolon- or tab-separated text with a header: every cell is text.

The standard library's reader in its strict mode: quotes may hold line ends and separators, a
quote doubled is a quote. Lines may end in LF, CRLF or CR.
"""

from __future__ import annotations

import csv
import io
import re
from collections import Counter
from collections.abc import Iterator

from bagent.errors import InputError, Position
from bagent.rows.inputs import FileSource
from bagent.rows.lines import LONGEST, ROWS, too_long
from bagent.rows.streams import ByteStream, check_start, unreadable
from bagent.rows.values import Chunk, Item, Unreadable, has_surrogate

_LARGEST_CELL = LONGEST
"""Characters of one cell. It also ends what a quote that is never closed would swallow."""

MAX_COLUMNS = 100_000
_NAMED = 10

_SEPARATORS = (",", ";", "\t")
_QUOTED = re.compile('"[^"]*"')
_SEPARATOR_LINE = re.compile(r'"?sep=(.)"?[\r\n]*')
"""A first line with which Excel names the separator."""


class CsvFile:
    """One CSV file, opened; its header is read and checked at once.

    Args:
        source: the file; its format is ``csv`` or ``tsv``.

    Raises:
        InputError: it cannot be read, is not UTF-8, or two columns have the same name.
    """

    def __init__(self, source: FileSource) -> None:
        csv.field_size_limit(_LARGEST_CELL)  # the library has this only for the whole process
        self._source = source
        self._stream = ByteStream(source.path, source.packing)
        try:
            check_start(self._stream.reader.peek(4), source.path)
            self._lines = _Lines(self._stream, source)
            self._cells = csv.reader(self._lines, delimiter=self._separator(), strict=True)
            self._header = self._read_header()
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

    def _separator(self) -> str:
        """The tab in a .tsv; else the one that the first line has most of, outside quotes."""
        if self._source.format == "tsv":
            return "\t"
        line = self._lines.peek()
        if told := _SEPARATOR_LINE.fullmatch(line):
            next(self._lines)
            return told[1]
        return max(_SEPARATORS, key=_QUOTED.sub("", line).count)

    def _read_header(self) -> list[str]:
        line, header = next(self._records(), (0, []))
        at = Position(self._source.path, line)
        if isinstance(header, Unreadable):
            raise InputError(
                f"the header cannot be read: {header.error}",
                hint="save the file as UTF-8, e.g. iconv -f LATIN1 -t UTF-8",
                at=at,
            )
        if len(header) > MAX_COLUMNS:
            raise InputError(
                f"the header has {len(header):,} columns, at most {MAX_COLUMNS:,} are read", at=at
            )
        twice = sorted(name for name, count in Counter(header).items() if count > 1)
        if twice:
            raise InputError(
                f"the header names a column twice: {_first(twice)}",
                hint="give every column its own name",
                at=at,
            )
        return header

    def _item(self, record: list[str] | Unreadable) -> Item:
        if isinstance(record, Unreadable):
            return record
        if len(record) != len(self._header):
            error = f"{len(record)} cells where the header has {len(self._header)}"
            return Unreadable(error, self._lines.raw())
        return dict(zip(self._header, record, strict=True))

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
            lines.begin_record()
            line = lines.count + 1
            try:
                cells = next(self._cells)
            except StopIteration:
                return
            except csv.Error as error:
                yield line, Unreadable(f"malformed CSV: {self._why(error)}", lines.raw())
                continue
            if len(cells) < 2 and lines.blank():
                continue
            if lines.undecodable():
                yield line, Unreadable("not UTF-8", lines.raw())
            else:
                yield line, cells


def _first(names: list[str]) -> str:
    """The first few names, for people."""
    more = len(names) - _NAMED
    return ", ".join(map(repr, names[:_NAMED])) + (f" and {more:,} more" if more > 0 else "")


class _Lines:
    """Physical lines with their ends, counted, and those of the present record kept."""

    def __init__(self, stream: ByteStream, source: FileSource) -> None:
        self._source = source
        self._text = io.TextIOWrapper(
            stream.reader, encoding="utf-8-sig", errors="surrogateescape", newline=""
        )
        self._next: str | None = None
        self.taken: list[str] = []
        self.count = 0
        self._size = 0

    def __iter__(self) -> _Lines:
        return self

    def __next__(self) -> str:
        line, self._next = self.peek(), None
        if not line:
            raise StopIteration
        self.count += 1
        self.taken.append(line)
        self._size += len(line)
        if self._size > LONGEST:
            raise too_long(self._source.path, self.count - len(self.taken) + 1)
        return line

    def begin_record(self) -> None:
        """Forget the lines of the last record."""
        self.taken.clear()
        self._size = 0

    def peek(self) -> str:
        """The next line, not yet taken; empty at the end."""
        if self._next is None:
            try:
                self._next = self._text.readline(LONGEST)
            except OSError as error:
                raise unreadable(self._source.path, error) from error
            if len(self._next) == LONGEST:
                raise too_long(self._source.path, self.count + 1)
        return self._next

    def raw(self) -> bytes:
        """The bytes of the record, without its last line end."""
        return "".join(self.taken).rstrip("\r\n").encode(errors="surrogateescape")

    def blank(self) -> bool:
        return not any(line.strip() for line in self.taken)

    def undecodable(self) -> bool:
        return any(has_surrogate(line) for line in self.taken)
