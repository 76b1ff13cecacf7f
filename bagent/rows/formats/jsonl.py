"""JSON Lines: one row a line."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from bagent.errors import InputError, Position
from bagent.remote import InputFile
from bagent.rows.decode import Chunk, Item, decode_lines

ROWS = 512
"""Rows handed on at once, at most."""

LONGEST = 64 << 20
"""Bytes of one row, unpacked, at most: what is larger is a file without line ends, or an archive of
a few bytes that is to fill the memory, but no row that a model takes."""


class LineSplitter:
    """Splits bytes into lines without their line feeds, fed piece by piece.

    Args:
        name: the file, for errors.
        longest: bytes of one line, at most.
    """

    def __init__(self, name: str | InputFile, longest: int = LONGEST) -> None:
        self._name = name
        self._longest = longest
        self._parts: list[bytes] = []  # of the line that has not ended yet
        self._size = 0
        self._line = 1

    def feed(self, block: bytes) -> list[bytes]:
        """Return the lines that end in this block.

        Raises:
            InputError: a line is longer than that.
        """
        lines = block.split(b"\n")
        tail = lines.pop()
        if lines:
            if self._parts:
                lines[0] = b"".join(self._parts) + lines[0]
                self._parts, self._size = [], 0
            self._line += len(lines)
        if tail:
            self._parts.append(tail)
            self._size += len(tail)
            if self._size > self._longest:
                raise too_long(self._name, self._line)
        return lines

    def finish(self) -> list[bytes]:
        """Return the last line, where it has no line feed."""
        return [b"".join(self._parts)] if self._parts else []


def split_lines(blocks: Iterable[bytes], name: str | InputFile) -> Iterator[list[bytes]]:
    """Yield the lines of each block, as :class:`LineSplitter` cuts them."""
    splitter = LineSplitter(name)
    for block in blocks:
        yield splitter.feed(block)
    yield splitter.finish()


def too_long(name: str | InputFile, line: int) -> InputError:
    """Return the error for one row of more than :data:`LONGEST` bytes."""
    return InputError(
        f"one row is longer than {LONGEST >> 20} MiB",
        hint="is this JSON with one row a line?",
        at=Position(name, line),
    )


def line_chunks(source: str, lists: Iterable[list[bytes]], line: int = 1) -> Iterator[Chunk]:
    """Lines as chunks of at most :data:`ROWS` rows.

    Blank lines are not in the chunks but do count as lines; a chunk may therefore be empty.

    Args:
        source: name for the rows.
        lists: consecutive lines.
        line: physical number of the first.
    """
    for lines in lists:
        for start in range(0, len(lines), ROWS):
            yield chunk_of(source, lines[start : start + ROWS], line + start)
        line += len(lines)


def chunk_of(source: str, raws: list[bytes], line: int) -> Chunk:
    """Consecutive lines, from physical line ``line`` on, as one chunk without the blank ones."""
    return without_blanks(Chunk(source, range(line, line + len(raws)), [], raws))


def without_blanks(chunk: Chunk) -> Chunk:
    """Return the chunk with its ``items`` decoded from its ``raws``, and without the blank ones."""
    raws = chunk.raws or []
    decoded = decode_lines(raws)
    items: list[Item] = [item for item in decoded if item is not None]
    if len(items) == len(raws):
        return chunk._replace(items=items)
    indexes = [at for at, item in enumerate(decoded) if item is not None]
    lines = chunk.lines
    return Chunk(chunk.source, [lines[at] for at in indexes], items, [raws[at] for at in indexes])
