"""The physical lines of a text file of cells."""

from __future__ import annotations

import io
from collections import deque

from bagent.rows.inputs import FileSource
from bagent.rows.lines import LONGEST, too_long
from bagent.rows.streams import ByteStream, unreadable
from bagent.rows.values import has_surrogate


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
        """The next line, or one behind it, not yet taken; empty at the end.

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
        """The bytes of the record, without its last line end."""
        return "".join(self.taken).rstrip("\r\n").encode(errors="surrogateescape")

    def blank(self) -> bool:
        """Whether the record holds nothing but blanks."""
        return not any(line.strip() for line in self.taken)

    def undecodable(self) -> bool:
        """Whether the record holds bytes that are not UTF-8."""
        return any(has_surrogate(line) for line in self.taken)
