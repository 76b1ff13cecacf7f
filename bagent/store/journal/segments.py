"""The files of a journal: their names, their order, and the repair of a torn end.

``RUN/journal/rows-all-000001.jsonl``: stream, part, number. A part is ``all`` or ``1-of-4``. Only
the last segment of a part grows; the others are sealed. Each writer appends complete lines to
its own files, so no lock is needed on any file system.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal

import msgspec

from bagent.errors import UsageError, WriteError
from bagent.files import link_error

Stream = Literal["rows", "turns", "attempts", "endpoints", "tools"]
"""``rows`` and ``turns`` are synced; the others are not."""

SEGMENT_BYTES = 64 * 1024 * 1024
"""Size in bytes at which a segment is sealed and the next one begins."""

OFFSET_BITS = 32
PART_SHIFT = 56
_BLOCK = 1 << 20
_NAME = re.compile(r"(rows|turns|attempts|endpoints|tools)-(all|\d+-of-\d+)-(\d{6,})\.jsonl")
_PART = re.compile(r"all|[1-9]\d*-of-[1-9]\d*")

Report = Callable[[str], None]
"""Receives one-line messages for the user."""


@dataclass(frozen=True, slots=True)
class Segment:
    """One journal file: its part, its number from 1, and its path."""

    part: str
    number: int
    path: Path

    @property
    def sidecar(self) -> Path:
        """The path of the index file."""
        return self.path.with_suffix(".idx")


def check_part(part: str) -> str:
    """Return ``part`` if it is ``all`` or like ``1-of-4``.

    Raises:
        ValueError: it is not.
    """
    if not _PART.fullmatch(part):
        raise ValueError(f"not a part name: {part!r}")
    return part


def part_order(part: str) -> tuple[int, int]:
    """Return the sort key of a part: ``all`` first, then by count and number."""
    if part == "all":
        return (0, 0)
    number, _, count = part.partition("-of-")
    return (int(count), int(number))


def segment_path(journal: Path, stream: str, part: str, number: int) -> Path:
    """Return the path of a segment."""
    return journal / f"{stream}-{part}-{number:06d}.jsonl"


def list_segments(
    journal: Path, stream: Stream | None = None, part: str | None = None
) -> list[Segment]:
    """Return the segments of a stream and part (None: of all), by part and number.

    Raises:
        UsageError: the journal or a segment is a link, or a segment was packed or renamed: its
            rows would be sent again.
    """
    if journal.is_symlink():
        raise link_error(journal)
    try:
        with os.scandir(journal) as entries:
            regular = {entry.name: not entry.is_symlink() for entry in entries}
    except (FileNotFoundError, NotADirectoryError):
        return []
    segments: list[Segment] = []
    renamed: list[str] = []
    for name, is_regular in regular.items():
        match = _NAME.match(name)
        if not match or stream not in (None, match[1]) or part not in (None, match[2]):
            continue
        if match.end() < len(name):
            if match[0] not in regular:
                renamed.append(name)
        elif is_regular:
            segments.append(Segment(match[2], int(match[3]), journal / name))
        else:
            raise link_error(journal / name)
    if renamed:
        first = min(renamed)
        raise UsageError(
            f"{journal / first}: the journal is read from .jsonl files only"
            + (f", so {len(renamed)} files of it are missing" if len(renamed) > 1 else ""),
            hint=f"unpack or rename it to {_NAME.match(first)[0]}",  # type: ignore[index]
        )
    return sorted(segments, key=lambda s: (part_order(s.part), s.number))


def pack_location(part: int, segment: int, offset: int) -> int:
    """Return one integer for a part, a segment number and a byte offset.

    ``part`` counts the parts of a run directory from 0 in the order of :func:`list_segments`;
    within a :class:`~bagent.store.journal.journal.Journal`, which has one part, it is 0.
    """
    return part << PART_SHIFT | segment << OFFSET_BITS | offset


def unpack_location(location: int) -> tuple[int, int, int]:
    """Return the part, segment number and byte offset of a location."""
    offset = location & ((1 << OFFSET_BITS) - 1)
    segment = (location >> OFFSET_BITS) & ((1 << (PART_SHIFT - OFFSET_BITS)) - 1)
    return location >> PART_SHIFT, segment, offset


def read_line(descriptor: int, offset: int) -> bytes:
    """The line that begins at byte ``offset``, without its newline."""
    size = 4096
    while True:
        data = os.pread(descriptor, size, offset)
        end = data.find(b"\n")
        if end >= 0:
            return data[:end]
        if len(data) < size:
            return data
        size *= 4


def whole_lines(handle: BinaryIO, start: int, end: int) -> Iterator[tuple[int, bytes]]:
    """Each whole line in bytes ``start`` to ``end`` of a file: (offset, line without newline).

    What follows the last newline is left out. Memory: one block of 1 MiB, or the longest line.
    """
    handle.seek(start)
    remaining = end - start
    partial = b""
    while remaining > 0:
        block = handle.read(min(_BLOCK, remaining))
        if not block:
            return
        remaining -= len(block)
        lines = (partial + block).split(b"\n")
        partial = lines.pop()
        for line in lines:
            yield start, line
            start += len(line) + 1


def mend_tail(path: Path, report: Report) -> None:
    """Repair the end of a file, so that the next line begins on its own.

    A torn last line is moved to ``torn-NAME-OFFSET`` beside it; a complete JSON line without
    newline gets one; trailing zero bytes of a crash are cut.

    Raises:
        WriteError: the file cannot be changed.
    """
    try:
        with path.open("r+b", buffering=0) as handle:
            size = handle.seek(0, os.SEEK_END)
            start = _after_last_newline(handle, size)
            if start == size:
                return
            handle.seek(start)
            tail = _read_all(handle).rstrip(b"\0")
            if _is_object(tail):
                handle.truncate(start + len(tail))
                handle.seek(0, os.SEEK_END)
                handle.write(b"\n")
                report(f"{path}: the last line had no newline; added")
                return
            note = _keep_torn(path, start, tail)
            handle.truncate(start)
    except OSError as error:
        raise write_error(path, error) from error
    report(f"{path}: cut off {size - start} bytes of an unfinished last line{note}")


def _after_last_newline(handle: BinaryIO, size: int) -> int:
    end = size
    while end > 0:
        begin = max(0, end - _BLOCK)
        handle.seek(begin)
        index = handle.read(end - begin).rfind(b"\n")
        if index >= 0:
            return begin + index + 1
        end = begin
    return 0


def _read_all(handle: BinaryIO) -> bytes:
    pieces = []
    while piece := handle.read(_BLOCK):
        pieces.append(piece)
    return b"".join(pieces)


def _is_object(line: bytes) -> bool:
    try:
        line.decode()
        msgspec.json.decode(line, type=dict[str, msgspec.Raw])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False
    return True


def _keep_torn(path: Path, start: int, tail: bytes) -> str:
    if not tail:
        return ""
    torn = path.with_name(f"torn-{path.stem}-{start}")
    try:
        torn.write_bytes(tail)
    except OSError:
        return ""
    return f" (kept in {torn.name})"


def write_error(path: Path, error: OSError) -> WriteError:
    """Return the error for a file that cannot be written."""
    reason = os.strerror(error.errno) if error.errno else str(error)
    return WriteError(
        f"cannot write {path}: {reason}",
        hint="free space or repair the file system, then give the same command again",
    )
