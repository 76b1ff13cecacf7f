"""The files that a journal writes: one open segment of each stream."""

from __future__ import annotations

import contextlib
import errno
import os
from collections import deque
from collections.abc import Callable
from pathlib import Path

from bagent.errors import WriteError
from bagent.store.journal.segment_index import SegmentIndex, open_index
from bagent.store.journal.segments import (
    SEGMENT_BYTES,
    Report,
    Segment,
    Stream,
    check_part,
    list_segments,
    mend_tail,
    segment_path,
    write_error,
)

_UNSYNCABLE = frozenset({errno.EINVAL, errno.ENOSYS, errno.ENOTSUP})

UNSYNCED_SECONDS = 10.0
"""A segment that was written so long before the last one has been synced for sure."""


class SegmentWriter:
    """Appends complete lines to the segments of one stream; the last one is open."""

    def __init__(self, journal: Path, stream: Stream, part: str, limit: int) -> None:
        self.journal = journal
        self.stream = stream
        self.part = part
        self.limit = limit
        self.number = 0
        self.size = 0
        self.descriptor = -1
        self.dirty = False
        self.is_new = True  # the folder was perhaps not synced since its last file was made
        self.retired: deque[int] = deque()

    @property
    def segment(self) -> Segment:
        """The segment that is written now."""
        path = segment_path(self.journal, self.stream, self.part, self.number)
        return Segment(self.part, self.number, path)

    def sync_earlier(self) -> bool:
        """Sync the segments that a killed start may not have synced; return whether there are any.

        Call it before the segments are changed: later starts tell by their times which are synced.

        Raises:
            OSError: the disk refused.
        """
        segments = list_segments(self.journal, self.stream, self.part)
        newest = segments[-1].path.stat().st_mtime if segments else 0.0
        for segment in reversed(segments):
            if newest - segment.path.stat().st_mtime > UNSYNCED_SECONDS:
                break
            descriptor = self._open(segment.number, 0)
            try:
                _sync(_fdatasync, descriptor)
            finally:
                os.close(descriptor)
        return bool(segments)

    def start(self, report: Report, *, new_segment: bool, eager: bool) -> None:
        """Mend the last segment and go on in it, or begin the next one."""
        segments = list_segments(self.journal, self.stream, self.part)
        if segments:
            self.number = segments[-1].number
            mend_tail(segments[-1].path, report)
            size = segments[-1].path.stat().st_size
            descriptor = self._open(self.number, 0)
            if not new_segment and size < self.limit:
                self.descriptor, self.size, self.dirty = descriptor, size, True
                return
            self.retired.append(descriptor)
        if eager:
            self.begin_next()

    def begin_next(self) -> None:
        """Begin the next segment; the one before it is closed at the next sync.

        Raises:
            WriteError: the new file cannot be made.
        """
        number = self.number + 1
        while True:
            try:
                descriptor = self._open(number, os.O_CREAT | os.O_EXCL)
                break
            except FileExistsError:
                number += 1
        self.is_new = True
        before, self.descriptor = self.descriptor, descriptor
        self.number, self.size = number, 0
        if before >= 0:
            self.retired.append(before)

    def _open(self, number: int, flags: int) -> int:
        path = segment_path(self.journal, self.stream, self.part, number)
        try:
            return os.open(path, os.O_RDWR | os.O_APPEND | os.O_CLOEXEC | flags, 0o644)
        except FileExistsError:
            raise
        except OSError as error:
            raise write_error(path, error) from error

    def append(self, line: bytes) -> int:
        """Write whole lines in one call; the byte where they begin.

        Raises:
            WriteError: not all could be written; what was is taken back.
        """
        if self.descriptor < 0:
            self.begin_next()
        start = self.size
        try:
            written = os.write(self.descriptor, line)
            if written != len(line):
                self._write_rest(line, written)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.ftruncate(self.descriptor, start)
            raise write_error(self.segment.path, error) from error
        self.size = start + len(line)
        self.dirty = True
        return start

    def _write_rest(self, line: bytes, written: int) -> None:
        """A short write mostly means a full disk: the next try names the reason."""
        while written < len(line):
            more = os.write(self.descriptor, line[written:])
            if more == 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            written += more

    def sync(self) -> None:
        """Bring what was written to the disk and close the segments that are full.

        May run in another thread than the writing: only this method closes descriptors.

        Raises:
            OSError: the disk refused.
        """
        retired = []
        while self.retired:
            retired.append(self.retired.popleft())
        try:
            for descriptor in retired:
                _sync(_fdatasync, descriptor)
            if self.dirty:
                self.dirty = False
                _sync(_fdatasync, self.descriptor)
        finally:
            for descriptor in retired:
                os.close(descriptor)

    def close(self) -> None:
        """Close all files, without a sync."""
        for descriptor in (*self.retired, self.descriptor):
            if descriptor >= 0:
                os.close(descriptor)
        self.retired.clear()
        self.descriptor = -1


def _fdatasync(descriptor: int) -> None:
    getattr(os, "fdatasync", os.fsync)(descriptor)


def _sync(sync: Callable[[int], None], descriptor: int) -> None:
    """Sync a file or a folder; file systems without sync are ignored."""
    try:
        sync(descriptor)
    except OSError as error:
        if error.errno not in _UNSYNCABLE:
            raise


class JournalFiles:
    """The segments of one part of a run that are written now, repaired after a crash.

    Attributes:
        path: the folder ``journal``.
        index: that of the open segment of rows.
    """

    def __init__(self, path: Path, part: str, limit: int) -> None:
        self.path = path
        self.part = part
        self.limit = limit
        self.rows = SegmentWriter(path, "rows", part, limit)
        self.turns = SegmentWriter(path, "turns", part, limit)
        loose: tuple[Stream, ...] = ("attempts", "endpoints", "tools")
        self.loose = {stream: SegmentWriter(path, stream, part, limit) for stream in loose}
        self.index = SegmentIndex(self.rows.segment)

    @classmethod
    def open(
        cls,
        run_dir: Path,
        part: str,
        *,
        report: Report,
        new_segment: bool = False,
        segment_bytes: int = SEGMENT_BYTES,
    ) -> JournalFiles:
        """Open the files of ``part`` under ``run_dir`` and repair them after a crash.

        Args:
            run_dir: the run directory; its folder ``journal`` is made.
            part: ``all``, or like ``1-of-4``.
            report: called with each repaired or broken line.
            new_segment: begin a new segment, since a previous owner may still write to the last.
            segment_bytes: size at which a segment is sealed.

        Raises:
            WriteError: the journal cannot be written.
            UsageError: it is a link, or a segment of it was packed or renamed.
        """
        path = run_dir / "journal"
        list_segments(path)  # refuses links
        files = cls(path, check_part(part), segment_bytes)
        try:
            path.mkdir(parents=True, exist_ok=True)
            files._start(report, new_segment)
        except OSError as error:
            files.close()
            raise write_error(path, error) from error
        except WriteError:
            files.close()
            raise
        return files

    def _start(self, report: Report, new_segment: bool) -> None:
        if any([self.rows.sync_earlier(), self.turns.sync_earlier()]):
            self.sync_folder()
        self.rows.start(report, new_segment=new_segment, eager=True)
        self.turns.start(report, new_segment=new_segment, eager=False)
        for writer in self.loose.values():
            writer.start(report, new_segment=new_segment, eager=False)
        self.index = open_index(self.rows.segment, report, save=True)

    def sync_folder(self) -> None:
        """Sync the folder with the names of new files, where the file system supports that.

        Raises:
            OSError: the disk refused.
        """
        descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            _sync(os.fsync, descriptor)
        finally:
            os.close(descriptor)

    def close(self) -> None:
        """Close all files, without a sync."""
        for writer in (self.rows, self.turns, *self.loose.values()):
            writer.close()
