"""The writer of a journal.

A row is finished once its line is written; :class:`Syncer` syncs the lines to disk a few times a
second, so that no row waits for the disk.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from bagent.clocks import unix
from bagent.errors import WriteError
from bagent.redaction import Redactor
from bagent.store.journal.codec import (
    TOMBSTONE,
    decode_outcome,
    encode_outcome,
    encode_record,
    salt_of,
)
from bagent.store.journal.edited_rows import EditedRows
from bagent.store.journal.segment_index import SegmentIndex, open_index
from bagent.store.journal.segments import (
    SEGMENT_BYTES,
    Report,
    Segment,
    Stream,
    check_part,
    list_segments,
    mend_tail,
    read_line,
    segment_path,
    unpack_location,
    write_error,
)
from bagent.types import Attempt, EndpointSample, Outcome, ToolRecord, Turn

_UNSYNCABLE = frozenset({errno.EINVAL, errno.ENOSYS, errno.ENOTSUP})


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
        self.retired: deque[int] = deque()

    @property
    def segment(self) -> Segment:
        """The segment that is written now."""
        path = segment_path(self.journal, self.stream, self.part, self.number)
        return Segment(self.part, self.number, path)

    def start(self, report: Report, *, new_segment: bool, eager: bool) -> None:
        """Mend the last segment and go on in it, or begin the next one."""
        segments = list_segments(self.journal, self.stream, self.part)
        if segments:
            self.number = segments[-1].number
            mend_tail(segments[-1].path, report)
            size = segments[-1].path.stat().st_size
            if not new_segment and size < self.limit:
                self.descriptor, self.size = self._open(self.number, 0), size
                return
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
                _fdatasync(descriptor)
            if self.dirty:
                self.dirty = False
                _fdatasync(self.descriptor)
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
    """Sync a file; file systems without sync are ignored."""
    sync = getattr(os, "fdatasync", os.fsync)
    try:
        sync(descriptor)
    except OSError as error:
        if error.errno not in _UNSYNCABLE:
            raise


FLUSH_SECONDS = 1.0
"""How long attempts, samples and tool records are buffered."""

_FLUSH_BYTES = 64 * 1024


class Journal:
    """The journal of one part of a run, opened for writing by its owner.

    All methods except :meth:`sync` must be called in one thread. After a :class:`WriteError` every
    further write raises it again; reads still work.
    """

    def __init__(self, path: Path, part: str, clock: Callable[[], float], limit: int) -> None:
        self.path = path
        self.part = part
        self._clock = clock
        self._limit = limit
        self._failed: WriteError | None = None
        self._raised = False
        self._closed = False
        self._sync_lock = threading.Lock()
        self._new_files = True
        self._rows = SegmentWriter(path, "rows", part, limit)
        self._turns = SegmentWriter(path, "turns", part, limit)
        loose: tuple[Stream, ...] = ("attempts", "endpoints", "tools")
        self._loose = {stream: SegmentWriter(path, stream, part, limit) for stream in loose}
        self._buffers: dict[Stream, bytearray] = {stream: bytearray() for stream in loose}
        self._flushed = clock()
        self._index = SegmentIndex(self._rows.segment)
        self._readers: dict[int, int] = {}
        self._pending: list[tuple[Outcome, bytes]] | None = None
        self._pending_bytes = 0
        self._blocks = 0
        self.edited: EditedRows | None = None
        """Finds the outcomes that a new one replaces; None if no earlier start wrote anything."""
        self.on_tombstone: Callable[[int], None] = lambda _: None
        """Called with each unit that :meth:`write_tombstone` writes."""
        self.redact = Redactor()
        """Masks the secrets of the run in errors; answers are written unchanged."""

    @classmethod
    def open(
        cls,
        run_dir: Path,
        part: str,
        *,
        clock: Callable[[], float],
        report: Report,
        new_segment: bool = False,
        segment_bytes: int = SEGMENT_BYTES,
    ) -> Journal:
        """Open the journal of ``part`` under ``run_dir`` and repair it after a crash.

        Args:
            run_dir: the run directory; its folder ``journal`` is made.
            part: ``all``, or like ``1-of-4``.
            clock: seconds; decides when buffered records are written.
            report: called with each repaired or broken line.
            new_segment: begin a new segment, since a previous owner may still write to the last.
            segment_bytes: size at which a segment is sealed.

        Raises:
            WriteError: the journal cannot be written.
            UsageError: it is a link, or a segment of it was packed or renamed.
        """
        path = run_dir / "journal"
        list_segments(path)  # refuses links
        journal = cls(path, check_part(part), clock, segment_bytes)
        try:
            path.mkdir(parents=True, exist_ok=True)
            journal._start(report, new_segment)
        except OSError as error:
            journal._close_files()
            raise write_error(path, error) from error
        except WriteError:
            journal._close_files()
            raise
        return journal

    def _start(self, report: Report, new_segment: bool) -> None:
        self._rows.start(report, new_segment=new_segment, eager=True)
        self._turns.start(report, new_segment=new_segment, eager=False)
        for writer in self._loose.values():
            writer.start(report, new_segment=new_segment, eager=False)
        self._index = open_index(self._rows.segment, report, save=True)

    def write(self, outcome: Outcome) -> int:
        """Write the line of a finished row; return its location, for :meth:`read_at`.

        Secrets are masked in the error of ``outcome`` itself, which is also shown elsewhere.

        Raises:
            WriteError: the line could not be written; no part of it remains.
        """
        outcome.error = self.redact.optional(outcome.error)
        if self.edited is not None:
            for unit in self.edited.replaced_units(outcome):
                self.write_tombstone(unit, outcome.stage, outcome.answer, row=outcome.row)
        return self._write(outcome)

    def write_tombstone(self, unit: int, stage: str, answer: int = 0, *, row: int = 0) -> None:
        """Write a line that removes the earlier lines of a unit.

        Raises:
            WriteError: as for :meth:`write`.
        """
        key = f"{unit ^ salt_of(stage, answer):016x}"
        void: Any = TOMBSTONE
        # Segments of several parts are ordered by the times in their lines.
        self._write(
            Outcome(
                key=key,
                row=row,
                id=None,
                source="",
                line=0,
                stage=stage,
                status=void,
                answer=answer,
                finished_at=unix(),
            )
        )
        self.on_tombstone(unit)

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Buffer lines of rows inside the block, and write them with one system call at its end.

        For outcomes that arrived in one response. Blocks may overlap; each writes all lines that
        were buffered before its end.

        Raises:
            WriteError: as for :meth:`write`; lines that still fit are written.
        """
        if self._pending is None:
            self._pending, self._pending_bytes = [], 0
        self._blocks += 1
        try:
            yield
        finally:
            self._blocks -= 1
            try:
                self._release()
            finally:
                if not self._blocks:
                    self._pending = None

    def _write(self, outcome: Outcome) -> int:
        entry = outcome, encode_outcome(outcome)
        if self._failed is not None:
            raise self._fail(self._failed)
        writer, pending = self._rows, self._pending
        if pending is not None and writer.size + self._pending_bytes < self._limit:
            start = writer.size + self._pending_bytes
            pending.append(entry)
            self._pending_bytes += len(entry[1])
            return writer.number << 32 | start
        self._release()
        try:
            return self._append([entry])
        except WriteError as error:
            raise self._fail(error) from error.__cause__

    def _release(self) -> None:
        """Write the buffered lines of rows."""
        pending = self._pending
        if not pending:
            return
        self._pending, self._pending_bytes = [], 0
        if self._failed is not None:
            raise self._fail(self._failed)
        try:
            try:
                self._append(pending)
            except WriteError:
                for entry in pending:  # some of them may fit
                    self._append([entry])
        except WriteError as error:
            raise self._fail(error) from error.__cause__

    def _append(self, lines: list[tuple[Outcome, bytes]]) -> int:
        """Write lines in one call and index them; return the location of the first."""
        writer = self._rows
        if writer.size >= self._limit:
            self._seal()
        at = start = writer.append(b"".join([line for _, line in lines]))
        for outcome, line in lines:
            self._index.add(outcome, at, len(line))
            at += len(line)
        return writer.number << 32 | start

    def write_turn(self, turn: Turn) -> None:
        """Write one complete turn of an unfinished conversation (synced like rows).

        Raises:
            WriteError: as for :meth:`write`.
        """
        line = encode_record(turn)
        if self._failed is not None:
            raise self._fail(self._failed)
        try:
            if self._turns.size >= self._limit:
                self._turns.begin_next()
            self._new_files |= self._turns.descriptor < 0
            self._turns.append(line)
        except WriteError as error:
            raise self._fail(error) from error.__cause__

    def write_attempt(self, attempt: Attempt) -> None:
        """Buffer an attempt; it is not synced."""
        attempt.error = self.redact.optional(attempt.error)
        self._buffer("attempts", attempt)

    def write_sample(self, sample: EndpointSample) -> None:
        """Buffer an endpoint sample; it is not synced."""
        self._buffer("endpoints", sample)

    def write_tool(self, record: ToolRecord) -> None:
        """Buffer a tool call; it is not synced."""
        record.error = self.redact.optional(record.error)
        self._buffer("tools", record)

    def _buffer(self, stream: Stream, record: msgspec.Struct) -> None:
        buffer = self._buffers[stream]
        buffer += encode_record(record)
        if len(buffer) >= _FLUSH_BYTES:
            self._flush(stream)

    def _flush(self, stream: Stream) -> None:
        buffer = self._buffers[stream]
        if not buffer:
            return
        if self._failed is not None:
            raise self._fail(self._failed)
        writer = self._loose[stream]
        try:
            if writer.size >= self._limit:
                writer.begin_next()
            writer.append(bytes(buffer))
        except WriteError as error:
            raise self._fail(error) from error.__cause__
        buffer.clear()

    def tick(self) -> None:
        """Write records buffered for a second or more; call this often.

        Raises:
            WriteError: they cannot be written.
        """
        now = self._clock()
        if now - self._flushed >= FLUSH_SECONDS:
            self._flushed = now
            for stream in self._buffers:
                self._flush(stream)

    def flush(self) -> None:
        """Write buffered records now.

        Raises:
            WriteError: they cannot be written.
        """
        for stream in self._buffers:
            self._flush(stream)

    def _seal(self) -> None:
        """Save the index of the full segment of rows, and begin the next segment."""
        self._index.save()
        self._rows.begin_next()
        self._new_files = True
        self._index = SegmentIndex(self._rows.segment)

    def sync(self) -> None:
        """Sync new rows and turns to disk; thread-safe.

        Raises:
            WriteError: the disk refused; every later write raises it too.
        """
        with self._sync_lock:
            if self._failed is not None or self._closed:
                return
            for writer in (self._rows, self._turns):
                try:
                    writer.sync()
                except OSError as error:
                    self._failed = write_error(writer.segment.path, error)
                    raise self._failed from error
            if self._new_files:
                self._new_files = False
                _sync_directory(self.path)

    def save_index(self) -> None:
        """Write the index of the open segment, so that readers need not read its lines."""
        if self._rows.descriptor >= 0:
            self._index.save()

    def read_at(self, location: int) -> Outcome:
        """Return the outcome at a location in this part's journal.

        Raises:
            msgspec.DecodeError: there is no complete line at that location.
            WriteError: buffered lines could not be written.
        """
        self._release()
        _, number, offset = unpack_location(location)
        if number == self._rows.number and self._rows.descriptor >= 0:
            return decode_outcome(read_line(self._rows.descriptor, offset))
        descriptor = self._readers.get(number)
        if descriptor is None:
            if len(self._readers) >= 16:
                os.close(self._readers.pop(next(iter(self._readers))))
            path = segment_path(self.path, "rows", self.part, number)
            descriptor = self._readers[number] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        return decode_outcome(read_line(descriptor, offset))

    def close(self) -> None:
        """Write buffered records, sync, save the index and close the files.

        Raises:
            WriteError: something could not be written, and no earlier call raised it.
        """
        if self._closed:
            return
        try:
            if self._failed is None:
                self._release()
                for stream in self._buffers:
                    self._flush(stream)
                self.sync()
                self._index.save()
            elif not self._raised:
                raise self._fail(self._failed)
        finally:
            with self._sync_lock:
                self._closed = True
                self._close_files()

    def _fail(self, error: WriteError) -> WriteError:
        self._failed = error
        self._raised = True
        return error

    def _close_files(self) -> None:
        for writer in (self._rows, self._turns, *self._loose.values()):
            writer.close()
        for descriptor in self._readers.values():
            os.close(descriptor)
        self._readers.clear()


class Syncer(threading.Thread):
    """Syncs a journal every ``interval`` seconds until it is stopped or a sync fails.

    The journal's next write or close raises that error.
    """

    def __init__(self, journal: Journal, interval: float = 0.05) -> None:
        super().__init__(name="journal-sync", daemon=True)
        self._journal = journal
        self._interval = interval
        self._stopping = threading.Event()

    def run(self) -> None:
        """Sync until stopped, and a last time then."""
        try:
            while not self._stopping.wait(self._interval):
                self._journal.sync()
            self._journal.sync()
        except WriteError:
            return

    def stop(self) -> None:
        """Sync a last time and end the thread."""
        self._stopping.set()
        self.join()


def _sync_directory(path: Path) -> None:
    """Sync a directory, where the file system supports that."""
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
