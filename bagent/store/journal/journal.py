"""The writer of a journal.

A row is finished once its line is written; :class:`Syncer` syncs the lines to disk a few times a
second, so that no row waits for the disk.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import msgspec

from bagent.clocks import unix
from bagent.errors import WriteError
from bagent.redaction import NO_SECRETS, Redactor
from bagent.store.journal.codec import (
    TOMBSTONE,
    decode_outcome,
    encode_outcomes,
    encode_record,
    encode_records,
    salt_of,
)
from bagent.store.journal.edited_rows import EditedRows
from bagent.store.journal.journal_files import JournalFiles
from bagent.store.journal.removed_rows import JournalEnd
from bagent.store.journal.segment_index import SegmentIndex
from bagent.store.journal.segments import (
    SEGMENT_BYTES,
    Report,
    Stream,
    read_line,
    segment_path,
    unpack_location,
    write_error,
)
from bagent.types import Attempt, EndpointSample, Outcome, ToolRecord, Turn

FLUSH_SECONDS = 1.0
"""How long samples, tool records, and attempts that ended no row are buffered."""

_FLUSH_BYTES = 64 * 1024


class Journal:
    """The journal of one part of a run, written by its owner.

    All methods except :meth:`sync` must be called in one thread. After a :class:`WriteError` every
    further write raises it again; reads still work.

    Args:
        files: its open files; :meth:`close` closes them.
        clock: seconds; decides when buffered records are written.
        redact: masks the secrets of the run in errors; answers are written unchanged.
        edited: finds the outcomes that a new one replaces; None if no earlier start wrote any.
        on_tombstone: called with each unit that :meth:`write_tombstone` writes.
    """

    def __init__(
        self,
        files: JournalFiles,
        clock: Callable[[], float],
        *,
        redact: Redactor = NO_SECRETS,
        edited: EditedRows | None = None,
        on_tombstone: Callable[[int], None] = lambda _: None,
    ) -> None:
        self.path = files.path
        self.part = files.part
        self.redact = redact
        self._files = files
        self._edited = edited
        self._on_tombstone = on_tombstone
        self._clock = clock
        self._limit = files.limit
        self._failed: WriteError | None = None
        self._sync_failed = False
        self._raised = False
        self._closed = False
        self._sync_lock = threading.Lock()
        self._rows, self._turns, self._loose = files.rows, files.turns, files.loose
        self._index = files.index
        self._buffers: dict[Stream, bytearray] = {stream: bytearray() for stream in files.loose}
        self._flushed = clock()
        self._readers: dict[int, int] = {}

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
        """Open a journal that masks and replaces nothing, as :meth:`JournalFiles.open` says."""
        files = JournalFiles.open(
            run_dir, part, report=report, new_segment=new_segment, segment_bytes=segment_bytes
        )
        return cls(files, clock)

    @property
    def end(self) -> JournalEnd:
        """Where the next line of a row will be."""
        return JournalEnd(self.part, self._rows.number, self._rows.size)

    def write(self, outcome: Outcome) -> int:
        """Write the line of a finished row, as :meth:`write_all` does; return its location."""
        return self.write_all([outcome])[0]

    def write_all(self, outcomes: Sequence[Outcome]) -> list[int]:
        """Write the lines of finished rows by one system call.

        Secrets are masked in the errors of the outcomes themselves, which are also shown elsewhere.

        Returns:
            the location of each, for :meth:`read_at`; of fewer if the disk took only the first
            lines: no part of the others remains, and the next write raises.

        Raises:
            WriteError: no line could be written.
        """
        for outcome in outcomes:
            if outcome.error is not None:
                outcome.error = self.redact(outcome.error)
        replaced = self._replaced(outcomes)
        if not replaced:
            return self._write(outcomes)
        # By the same call: after a kill, an edited row has its old result or its new one.
        locations = self._write([*replaced.values(), *outcomes])[len(replaced) :]
        for unit in replaced:
            self._on_tombstone(unit)
        if not locations and self._failed is not None:
            raise self._fail(self._failed)
        return locations

    def _replaced(self, outcomes: Sequence[Outcome]) -> dict[int, Outcome]:
        """Return the tombstones of what these outcomes replace, by unit."""
        if self._edited is None:
            return {}
        return {
            unit: _tombstone(unit, outcome.stage, outcome.answer, row=outcome.row)
            for outcome in outcomes
            for unit in self._edited.replaced_units(outcome)
        }

    def replaces(self, outcome: Outcome) -> bool:
        """Return whether an earlier start wrote an outcome of the same row with another content."""
        return self._edited is not None and bool(self._edited.replaced_units(outcome))

    def write_tombstone(self, unit: int, stage: str, answer: int = 0) -> None:
        """Write a line that removes the earlier lines of a unit.

        Raises:
            WriteError: as for :meth:`write`.
        """
        self._write([_tombstone(unit, stage, answer, row=0)])
        self._on_tombstone(unit)

    def _write(self, outcomes: Sequence[Outcome]) -> list[int]:
        lines = encode_outcomes(outcomes)
        if self._failed is not None:
            raise self._fail(self._failed)
        try:
            return self._append(outcomes, lines)
        except WriteError as error:
            if len(lines) == 1:
                raise self._fail(error) from error.__cause__
        locations: list[int] = []
        for outcome, line in zip(outcomes, lines, strict=True):  # some may fit
            try:
                locations += self._append([outcome], [line])
            except WriteError as error:
                self._fail(error)
                if not locations:
                    raise
                self._raised = False
                break
        return locations

    def _append(self, outcomes: Sequence[Outcome], lines: Sequence[bytes]) -> list[int]:
        """Write lines in one call and index them; return their locations.

        The attempts that ended these rows are written before them, so that a kill loses none.
        """
        try:
            self._flush("attempts")
        except WriteError:
            self._raised = False  # a later call raises it: the rows may still fit
        writer = self._rows
        if writer.size >= self._limit:
            self._seal()
        start = writer.append(b"".join(lines))
        lengths = list(map(len, lines))
        offsets = list(accumulate(lengths[:-1], initial=start))
        self._index.add_all(outcomes, offsets, lengths)
        return [writer.number << 32 | offset for offset in offsets]

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
            self._turns.append(line)
        except WriteError as error:
            raise self._fail(error) from error.__cause__

    def write_attempts(self, attempts: Sequence[Attempt]) -> None:
        """Buffer attempts until the next row is written; they are not synced."""
        for attempt in attempts:
            if attempt.error is not None:
                attempt.error = self.redact(attempt.error)
        self._buffer("attempts", attempts)

    def write_sample(self, sample: EndpointSample) -> None:
        """Buffer an endpoint sample; it is not synced."""
        self._buffer("endpoints", [sample])

    def write_tool(self, record: ToolRecord) -> None:
        """Buffer a tool call; it is not synced."""
        record.error = self.redact.optional(record.error)
        self._buffer("tools", [record])

    def _buffer(self, stream: Stream, records: Sequence[msgspec.Struct]) -> None:
        buffer = self._buffers[stream]
        buffer += encode_records(records)
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
        self._index = SegmentIndex(self._rows.segment)

    def sync(self) -> None:
        """Sync new rows and turns to disk; thread-safe.

        Raises:
            WriteError: the disk refused; every later write raises it too.
        """
        with self._sync_lock:
            if self._sync_failed or self._closed:
                return  # a second sync would succeed, though the system has dropped the lines
            path = self.path
            try:
                for writer in (self._rows, self._turns):
                    path = writer.segment.path
                    writer.sync()
                path = self.path
                if self._rows.is_new or self._turns.is_new:
                    self._rows.is_new = self._turns.is_new = False
                    self._files.sync_folder()
            except OSError as error:
                self._sync_failed = True
                self._failed = write_error(path, error)
                raise self._failed from error

    def save_index(self) -> None:
        """Write the index of the open segment, so that readers need not read its lines."""
        if self._rows.descriptor >= 0:
            self._index.save()

    def read_at(self, location: int) -> Outcome:
        """Return the outcome at a location in this part's journal.

        Raises:
            msgspec.DecodeError: there is no complete line at that location.
        """
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

    @property
    def failure(self) -> WriteError | None:
        """What the disk refused; nothing more is written after it."""
        return self._failed

    def _fail(self, error: WriteError) -> WriteError:
        self._failed = error
        self._raised = True
        return error

    def _close_files(self) -> None:
        self._files.close()
        for descriptor in self._readers.values():
            os.close(descriptor)
        self._readers.clear()


def _tombstone(unit: int, stage: str, answer: int, *, row: int) -> Outcome:
    """Return the record that removes the earlier lines of a unit."""
    void: Any = TOMBSTONE
    return Outcome(
        key=f"{unit ^ salt_of(stage, answer):016x}",
        row=row,
        id=None,
        source="",
        line=0,
        stage=stage,
        status=void,
        answer=answer,
        finished_at=unix(),  # segments of several parts are ordered by the times in their lines
    )


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
        while not self._stopping.wait(self._interval):
            if not self.step():
                return
        self.step()

    def step(self) -> bool:
        """Sync once; return False if that failed."""
        try:
            self._journal.sync()
        except WriteError:
            return False
        return True

    def stop(self) -> None:
        """Sync a last time and end the thread."""
        self._stopping.set()
        if self.ident is None:  # it was never started
            self.step()
        else:
            self.join()
