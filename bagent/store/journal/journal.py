"""The journal: append-only JSON lines, the only truth about a run.

A row is finished once its line is written; :class:`Syncer` brings the lines to the disk a few
times a second, so that a row never waits for the disk.
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
    """Appends whole lines to the segments of one stream, the last of which it holds open."""

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
    """Sync; a file system that has no such thing counts as synced."""
    sync = getattr(os, "fdatasync", os.fsync)
    try:
        sync(descriptor)
    except OSError as error:
        if error.errno not in _UNSYNCABLE:
            raise


FLUSH_SECONDS = 1.0
"""How long attempts, samples and tool records may wait in memory."""

_FLUSH_BYTES = 64 * 1024


class Journal:
    """The journal of one part of a run, opened for writing by its one owner.

    Every method but :meth:`sync` belongs to one thread. After a :class:`WriteError` the journal
    takes nothing more (each further write raises it again) and stays readable.
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
        self.edited: EditedRows | None = None
        """Finds what a new outcome replaces; None where no earlier start wrote anything."""
        self.on_tombstone: Callable[[int], None] = lambda _: None
        """Called with each unit that :meth:`write_tombstone` writes."""
        self.redact = Redactor()
        """Masks the secrets of the run in errors; answers are written as they came."""

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
        """Open the journal of ``part`` under ``run_dir`` and mend what a crash left behind.

        Args:
            run_dir: the run directory; its folder ``journal`` is made.
            part: ``all``, or like ``1-of-4``.
            clock: seconds; decides when buffered records are due.
            report: told what was mended or is broken, one line each.
            new_segment: begin a new segment even if the last one has room; for a run that was
                taken over from an owner that may still wake up and write.
            segment_bytes: size from which a segment is sealed.

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
        """Write the line of a finished row; its location, for :meth:`read_at`.

        Secrets are masked in the error of ``outcome`` itself: it is told to others after this.

        Raises:
            WriteError: the line could not be written whole; nothing of it is left.
        """
        outcome.error = self.redact.optional(outcome.error)
        if self.edited is not None:
            for unit in self.edited.replaced_units(outcome):
                self.write_tombstone(unit, outcome.stage, outcome.answer, row=outcome.row)
        return self._write(outcome)

    def write_tombstone(self, unit: int, stage: str, answer: int = 0, *, row: int = 0) -> None:
        """Write that no line of this unit before this one counts any more.

        Raises:
            WriteError: as for :meth:`write`.
        """
        key = f"{unit ^ salt_of(stage, answer):016x}"
        void: Any = TOMBSTONE
        # A segment's place among those of other parts follows from the times in it.
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
        """Inside, lines of rows are held back, and written with one system call at the end.

        For outcomes that came with one answer: they are worth as much as one line. Nothing may be
        awaited inside.

        Raises:
            WriteError: as for :meth:`write`; what still fits is written.
        """
        if self._pending is not None:
            yield
            return
        self._pending, self._pending_bytes = [], 0
        try:
            yield
        finally:
            try:
                self._release()
            finally:
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
        """Write the lines that were held back."""
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
                for entry in pending:  # perhaps some of them fit
                    self._append([entry])
        except WriteError as error:
            raise self._fail(error) from error.__cause__

    def _append(self, lines: list[tuple[Outcome, bytes]]) -> int:
        """Write lines in one call, and index them; the location of the first."""
        writer = self._rows
        if writer.size >= self._limit:
            self._seal()
        at = start = writer.append(b"".join([line for _, line in lines]))
        for outcome, line in lines:
            self._index.add(outcome, at, len(line))
            at += len(line)
        return writer.number << 32 | start

    def write_turn(self, turn: Turn) -> None:
        """Write one whole turn of a conversation that goes on (synced like rows).

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
        """Note one row's part in one request; written with others, not synced."""
        attempt.error = self.redact.optional(attempt.error)
        self._buffer("attempts", attempt)

    def write_sample(self, sample: EndpointSample) -> None:
        """Note the state of an endpoint; written with others, not synced."""
        self._buffer("endpoints", sample)

    def write_tool(self, record: ToolRecord) -> None:
        """Note one tool call; written with others, not synced."""
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
        """Write buffered records that have waited for a second; call it often.

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
        """Close the full segment of rows, with its index beside it, and begin the next."""
        self._index.save()
        self._rows.begin_next()
        self._new_files = True
        self._index = SegmentIndex(self._rows.segment)

    def sync(self) -> None:
        """Bring rows and turns to the disk (``fdatasync``) if any were written since.

        Safe from another thread.

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
        """Bring the index of the open segment beside it, so that nobody need read its lines."""
        if self._rows.descriptor >= 0:
            self._index.save()

    def read_at(self, location: int) -> Outcome:
        """The outcome at a location of this part's journal.

        Raises:
            msgspec.DecodeError: there is no whole line at that place.
            WriteError: lines that were held back could not be written.
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
        """Write what is buffered, sync, save the index and close the files.

        Raises:
            WriteError: something could not be written, and no call has said so yet.
        """
        if self._closed:
            return
        try:
            if self._failed is None:
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
    """Syncs a journal about every ``interval`` seconds until it is stopped or the disk refuses.

    A refusal is kept by the journal, whose next write or close raises it.
    """

    def __init__(self, journal: Journal, interval: float = 0.05) -> None:
        super().__init__(name="journal-sync", daemon=True)
        self._journal = journal
        self._interval = interval
        self._stopping = threading.Event()

    def run(self) -> None:
        """Sync until stopped, and once more at the end."""
        try:
            while not self._stopping.wait(self._interval):
                self._journal.sync()
            self._journal.sync()
        except WriteError:
            return

    def stop(self) -> None:
        """Sync for the last time and end the thread."""
        self._stopping.set()
        self.join()


def _sync_directory(path: Path) -> None:
    """Make new file names last; where a file system cannot do that there is nothing to lose."""
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
