"""Files of a batch in the run directory.

``LABEL.requests`` is sent, and removed once the provider has it. ``LABEL.rows`` holds a line for
each request: the row and the state of its conversation. ``LABEL.copies`` are rows with an equal
request. ``LABEL.answers`` is the provider's output. Only the batch being read is in memory, 8 bytes
a row.
"""

from __future__ import annotations

import json
import os
from array import array
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import msgspec

from bagent.agents.conversation import ConversationState
from bagent.backends.profile import Form
from bagent.batches.record import sync_folder
from bagent.store.journal.codec import unit_of
from bagent.store.journal.segments import read_line, whole_lines, write_error
from bagent.text.json import decode_json
from bagent.types import Row

FOLDER = "batches"
"""Folder of the files in the run directory."""


class BatchItem(msgspec.Struct):
    """A row in a batch; ``of`` is the line whose answer a copy takes."""

    row: Row
    answer: int
    state: ConversationState = msgspec.field(default=ConversationState(), name="kept")
    of: int | None = None

    def unit(self, stage: str) -> int:
        """Return the (row, answer) unit of the item."""
        return unit_of(self.row.key, stage, self.answer)


def encode_item(item: BatchItem) -> bytes:
    """Return the line of an item. Lone surrogates and NaN survive."""
    return json.dumps(msgspec.to_builtins(item), separators=(",", ":")).encode() + b"\n"


def decode_item(line: bytes) -> BatchItem:
    """Parse a line. Raises ValueError if it is broken."""
    try:
        return msgspec.convert(decode_json(line), BatchItem)
    except msgspec.ValidationError as error:
        raise ValueError(str(error)) from None


class BatchFiles:
    """The paths of a batch's files."""

    def __init__(self, run_dir: Path, label: str) -> None:
        folder = run_dir / FOLDER
        self.requests = folder / f"{label}.requests"
        self.rows = folder / f"{label}.rows"
        self.copies = folder / f"{label}.copies"
        self.answers = folder / f"{label}.answers"

    def remove(self) -> None:
        """Remove all files."""
        for path in (self.requests, self.rows, self.copies, self.answers):
            with suppress(OSError):
                path.unlink()

    def append_copy(self, item: BatchItem) -> None:
        """Add a row that takes the answer of another one.

        Raises:
            WriteError: the disk refuses.
        """
        try:
            with self.copies.open("ab") as handle:
                handle.write(encode_item(item))
        except OSError as error:
            raise write_error(self.copies, error) from error


class BatchFileWriter:
    """Writes an open batch; ``again`` counts rows of an earlier batch.

    Raises:
        WriteError: the disk refuses.
    """

    def __init__(self, files: BatchFiles, number: int, group: str, form: Form) -> None:
        self.files = files
        self.number = number
        self.group = group
        self.form = form
        self.rows = 0
        self.bytes = 0
        self.tokens = 0
        self.most_usd = 0.0
        self.again = 0
        try:
            files.rows.parent.mkdir(parents=True, exist_ok=True)
            files.remove()
            self._requests = files.requests.open("wb")
            self._rows = files.rows.open("wb")
        except OSError as error:
            raise write_error(files.rows, error) from error

    def add(self, line: bytes, item: BatchItem) -> None:
        """Append a request (a line without its end) as number ``rows``."""
        try:
            self._requests.write(line + b"\n")
            self._rows.write(encode_item(item))
        except OSError as error:
            raise write_error(self.files.rows, error) from error
        self.rows += 1
        self.bytes += len(line) + 1

    def seal(self) -> None:
        """Sync all files to disk."""
        try:
            for handle in (self._requests, self._rows):
                handle.flush()
                os.fsync(handle.fileno())
                handle.close()
            if self.files.copies.exists():
                with self.files.copies.open("rb+") as copies:
                    os.fsync(copies.fileno())
            sync_folder(self.files.rows.parent)
        except OSError as error:
            raise write_error(self.files.rows, error) from error

    def drop(self) -> None:
        """Discard the batch."""
        for handle in (self._requests, self._rows):
            with suppress(OSError):
                handle.close()
        self.files.remove()


class BatchFileReader:
    """Reads the rows of a sealed batch by number, and their copies.

    Raises:
        OSError: the files are not there.
    """

    def __init__(self, files: BatchFiles) -> None:
        self._rows = os.open(files.rows, os.O_RDONLY | os.O_CLOEXEC)
        self._copies = -1
        self._of: dict[int, array[int]] = {}
        self._offsets = array("Q")
        with files.rows.open("rb") as handle:
            size = os.fstat(handle.fileno()).st_size
            self._offsets.extend(offset for offset, _ in whole_lines(handle, 0, size))
        if files.copies.exists():
            self._copies = os.open(files.copies, os.O_RDONLY | os.O_CLOEXEC)
            for _, offset, item in _items(files.copies):
                if item.of is not None:
                    self._of.setdefault(item.of, array("Q")).append(offset)

    def __len__(self) -> int:
        return len(self._offsets)

    def item(self, number: int) -> BatchItem:
        """Return the row of request ``number``, from 0."""
        return decode_item(read_line(self._rows, self._offsets[number]))

    def copies(self, number: int) -> Iterator[BatchItem]:
        """Yield the rows with an equal request."""
        for offset in self._of.get(number, ()):
            yield decode_item(read_line(self._copies, offset))

    def close(self) -> None:
        """Close the files."""
        os.close(self._rows)
        if self._copies >= 0:
            os.close(self._copies)


def read_rows(files: BatchFiles) -> list[tuple[BatchItem, list[BatchItem]]]:
    """Return all rows of a sealed batch, each with its copies.

    Raises:
        OSError: the files are not there.
    """
    reader = BatchFileReader(files)
    try:
        return [(reader.item(n), list(reader.copies(n))) for n in range(len(reader))]
    finally:
        reader.close()


def _items(path: Path) -> Iterator[tuple[int, int, BatchItem]]:
    """Yield the number and the offset of each line with its item."""
    with path.open("rb") as handle:
        lines = whole_lines(handle, 0, os.fstat(handle.fileno()).st_size)
        for number, (offset, line) in enumerate(lines):
            with suppress(ValueError):  # torn by a crash; its row is read again
                yield number, offset, decode_item(line)


def batch_items(files: BatchFiles) -> Iterator[tuple[int, BatchItem]]:
    """Yield the items of a batch, each after the number of its line; copies come last."""
    for path in (files.rows, files.copies):
        if path.exists():
            for number, _, item in _items(path):
                yield number, item
