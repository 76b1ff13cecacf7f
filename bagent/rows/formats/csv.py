"""Comma-, semicolon- or tab-separated text with a header: every cell is text.

CSV goes through the standard library's reader in its strict mode: quotes may hold line ends and
separators, a quote doubled is a quote. Lines may end in LF, CRLF or CR. A warning tells where a
quoted cell runs over lines that look like rows, or over very many.

In a ``.tsv`` tabs and line ends part cells, and quotes are text; see ``csv``. One
whose header is in quotes, cell by cell, is read as CSV is.

Blanks around the names of a header do not count; where all names but the first begin with one, nor
do blanks behind separators. Cells without a name at the end of a header stand for no column.
"""

from __future__ import annotations

import csv
import io
import re
from collections import Counter, deque
from collections.abc import Iterator

from bagent.errors import InputError, Position
from bagent.rows.discovery import FileSource
from bagent.rows.formats.compression import ByteStream, check_start, unreadable
from bagent.rows.formats.json import LONGEST, ROWS, Chunk, Item, Unreadable, too_long
from bagent.rows.warnings import RowWarnings
from bagent.text.unicode import is_utf8


class PhysicalLines:
    """Physical lines with their ends, counted, and those of the present record kept.

    Args:
        stream: the bytes of the file.
        source: the file, for errors.
    """

    def __init__(self, stream: ByteStream, source: FileSource) -> None:
        self._source = source
        self._text = io.TextIOWrapper(
            stream.reader, encoding="utf-8-sig", errors="surrogateescape", newline=""
        )
        self._ahead: deque[str] = deque()
        self.taken: list[str] = []
        """The lines of the present record."""
        self.count = 0
        """How many lines were taken."""
        self._size = 0

    def __iter__(self) -> PhysicalLines:
        return self

    def __next__(self) -> str:
        line = self.peek()
        if not line:
            raise StopIteration
        self._ahead.popleft()
        self.count += 1
        self.taken.append(line)
        self._size += len(line)
        if self._size > LONGEST:
            raise too_long(self._source.path, self.count - len(self.taken) + 1)
        return line

    def begin_record(self) -> int:
        """Forget the lines of the last record; the number of the line that comes next."""
        self.taken.clear()
        self._size = 0
        return self.count + 1

    def peek(self, ahead: int = 0) -> str:
        """Return the next line, or one behind it, not yet taken; empty at the end.

        Raises:
            InputError: the file cannot be read, or the line is too long.
        """
        while len(self._ahead) <= ahead:
            self._ahead.append(self._read())
        return self._ahead[ahead]

    def _read(self) -> str:
        try:
            line = self._text.readline(LONGEST)
        except OSError as error:
            raise unreadable(self._source.path, error) from error
        if len(line) == LONGEST:
            raise too_long(self._source.path, self.count + len(self._ahead) + 1)
        return line

    def raw(self) -> bytes:
        """Return the bytes of the record, without its last line end."""
        return "".join(self.taken).rstrip("\r\n").encode(errors="surrogateescape")

    def blank(self) -> bool:
        """Return whether the record holds nothing but blanks."""
        return not any(line.strip() for line in self.taken)

    def undecodable(self) -> bool:
        """Return whether the record holds bytes that are not UTF-8."""
        return any(not is_utf8(line) for line in self.taken)


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
        """Return the cells of the record that begins on ``line`` if it is quoted, else None."""
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
    """Return the one record that lines are in quoted TSV, None where it is not that."""
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

_AS_UTF8 = "save the file as UTF-8: in Excel as CSV UTF-8, else by iconv -f {} -t UTF-8"


_CUT_CHARACTER = re.compile(
    rb"(?:[\xc2-\xdf]|[\xe0-\xef][\x80-\xbf]?|[\xf0-\xf4][\x80-\xbf]{0,2})\Z"
)
"""A character of UTF-8 that the end of the text cuts."""
_BEYOND_ASCII = re.compile(rb"[\x80-\xff]+")
_UNDEFINED = re.compile(rb"[\x81\x8d\x8f\x90\x9d]")
"""Bytes that are no characters in windows-1252."""


class CsvFile:
    """One CSV file, opened; its header is read and checked at once.

    Args:
        source: the file; its format is ``csv`` or ``tsv``.
        warnings: receives the warnings about rows of many lines.

    Raises:
        InputError: it cannot be read, is not UTF-8, or two columns have the same name.
    """

    def __init__(self, source: FileSource, warnings: RowWarnings) -> None:
        csv.field_size_limit(_LARGEST_CELL)  # the library has this only for the whole process
        self._source = source
        self._warnings = warnings
        self._width = 1
        self._stream = ByteStream(source.path, source.packing)
        try:
            check_start(self._stream.start(), source.path)
            self._has_utf8 = _check_encoding(self._stream.start(), source)
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
        """Return bytes of the file read so far."""
        return self._stream.position()

    def close(self) -> None:
        """Close the file."""
        self._stream.close()

    def chunks(self) -> Iterator[Chunk]:
        """Yield the records, each at the physical line where it begins."""
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
        """Return a tab for .tsv, else the separator that is most frequent in the first line."""
        if self._source.format == "tsv":
            return "\t"
        line = self._lines.peek()
        if declared := _SEPARATOR_LINE.fullmatch(line):
            next(self._lines)
            return declared[1]
        return max(_SEPARATORS, key=_QUOTED.sub("", line).count)

    def _quoted_cells(self, *, blanks: bool = False) -> Iterator[list[str]]:
        return csv.reader(
            self._lines, delimiter=self._separator, strict=True, skipinitialspace=blanks
        )

    def _read_header(self) -> None:
        line, header = next(self._records(), (0, []))
        at = Position(self._source.path, line)
        if isinstance(header, Unreadable):
            raise InputError(f"the header cannot be read: {header.error}", at=at)
        if len(header) > MAX_COLUMNS:
            raise InputError(
                f"the header has {len(header):,} columns, at most {MAX_COLUMNS:,} are read",
                at=at,
                hint="check the separator, or keep fewer columns",
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
        """Warn of a record of many lines: an open quote swallows rows up to the next quote."""
        taken = self._lines.taken
        if len(taken) == 1:
            return
        separators = self._width - 1
        rows = sum(text.count(self._separator) == separators for text in taken[1:])
        if len(taken) > _MANY_LINES or (separators and rows > 1 and 2 * rows >= len(taken) - 1):
            example = f"{self._source.name}:{line}, {len(taken)} lines"
            self._warnings.add(LONG_ROW, example)

    def _why(self, error: csv.Error) -> str:
        """Describe a CSV error; an open quote has taken all lines up to the end of the file."""
        taken = self._lines.taken
        if len(taken) > 1 and not self._lines.peek():
            return f'a quote is never closed, so {len(taken)} lines are one row (double it: "")'
        return str(error)

    def _encoding_error(self, raw: bytes) -> str:
        """Describe a record that is not UTF-8; another encoding explains no single record."""
        if not self._has_utf8:
            return "{} ({})".format(*_not_utf8(raw))
        if not self._lines.taken[-1].endswith(("\r", "\n")) and _CUT_CHARACTER.search(raw):
            return "the file is cut off inside a character"
        return "not UTF-8, as other lines are (mend this line)"

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
                yield line, Unreadable(self._encoding_error(lines.raw()), lines.raw())
            else:
                yield line, cells


def _check_encoding(start: bytes, source: FileSource) -> bool:
    """Return whether some of the first lines have UTF-8 beyond ASCII; refuse another encoding.

    Single bad lines beside lines of UTF-8 are failures of their rows.

    Raises:
        InputError: some lines are not UTF-8, and all other ones are ASCII.
    """
    lines = _CUT_CHARACTER.sub(b"", start).splitlines()
    valid = [_is_utf8(line) for line in lines]
    if any(ok and not line.isascii() for ok, line in zip(valid, lines, strict=True)):
        return True
    bad = [number for number, ok in enumerate(valid, 1) if not ok]
    if bad:
        problem, hint = _not_utf8(b"\n".join(lines[number - 1] for number in bad))
        raise InputError(f"the file is {problem}", hint=hint, at=Position(source.path, bad[0]))
    return False


def _is_utf8(line: bytes) -> bool:
    try:
        line.decode()
    except UnicodeDecodeError:
        return False
    return True


def _not_utf8(text: bytes) -> tuple[str, str]:
    """Return what a text is that is not UTF-8, with its probable encoding, and the way out.

    Bytes beyond ASCII are alone or two in the single-byte encodings of Western languages, and
    mostly more in those of others.
    """
    runs = _BEYOND_ASCII.findall(text)
    if sum(map(len, runs)) <= 2 * len(runs) and not _UNDEFINED.search(text):
        return "not UTF-8, probably windows-1252", _AS_UTF8.format("WINDOWS-1252")
    return "not UTF-8", _AS_UTF8.format("ENCODING")


def _first(names: list[str]) -> str:
    """Return the first few names, for people."""
    more = len(names) - _NAMED
    return ", ".join(map(repr, names[:_NAMED])) + (f" and {more:,} more" if more > 0 else "")
