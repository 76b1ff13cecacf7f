"""JSON lines of ``results`` in input order, merged from the journal and the input.

Both are read in the order of rows, so neither is held in memory. If the input was reordered, rows
are found by key in a copy on disk.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple, Protocol

import msgspec

from bagent.errors import BagentError
from bagent.store.journal.codec import (
    FINISHED_CODES,
    OK_CODE,
    clean,
    decode_brief,
    decode_outcome_line,
    salt_of,
)
from bagent.store.journal.done_index import HashMap
from bagent.store.journal.reader import Block, JournalReader, slices
from bagent.types import Row

ReadInput = Callable[[], Iterator[list[Row]]]
"""Reads the input rows in batches, ascending by index."""

_ENCODE = msgspec.json.Encoder().encode
_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])
_LONG_FIELD = 16 * 1024
"""Fields longer than this many bytes are removed from lines that are too long."""


class InputText(NamedTuple):
    """The input of a row: its JSON text, or the bytes of an unreadable line."""

    text: bytes | None = None
    raw: bytes | None = None


_NOTHING = InputText()


class InputRows:
    """Finds the input of journal lines that come in the order of rows.

    Args:
        read: reads the input from its start; called again for each stage.
        spool: path of the copy, which is made only if rows have moved.
    """

    def __init__(self, read: ReadInput, spool: Path) -> None:
        self.problem: str | None = None
        self._read = read
        self._spool_path = spool
        self._spool: tuple[HashMap, BinaryIO] | None = None
        self._rows: Iterator[Row] = iter(())
        self._row: Row | None = None
        self._reached = -1
        self._begun = False

    def find(self, row: int, key: str, line: bytes) -> InputText:
        """Return the input of a journal line; empty if there is none.

        Args:
            row: its row number.
            key: its key, 16 hex digits.
            line: the line; rows with parents are not from the input.
        """
        if self.problem is not None:
            return _NOTHING
        try:
            input_row = self._at(row)
            if input_row is not None and input_row.key == int(key, 16):
                return _text_of(input_row)
            if decode_outcome_line(line).parents:
                return _NOTHING
            return self._by_key(int(key, 16))
        except (BagentError, OSError) as error:
            self.problem = str(error)
            return _NOTHING

    def _at(self, row: int) -> Row | None:
        if row < self._reached or not self._begun:
            self._begun = True
            self._rows = (row for batch in self._read() for row in batch)
            self._row = next(self._rows, None)
        self._reached = row
        while self._row is not None and self._row.index < row:
            self._row = next(self._rows, None)
        return self._row if self._row is not None and self._row.index == row else None

    def _by_key(self, key: int) -> InputText:
        places, handle = self._spool or self._make_spool()
        offset = places.find(key)
        if offset is None:
            return _NOTHING
        handle.seek(offset)
        size = int.from_bytes(handle.read(8), "little")
        content = handle.read(size)
        return InputText(content[1:]) if content[:1] == b"D" else InputText(None, content[1:])

    def _make_spool(self) -> tuple[HashMap, BinaryIO]:
        keys, offsets = array("Q"), array("Q")
        handle = self._spool_path.open("w+b")
        offset = 0
        for batch in self._read():
            for row in batch:
                text, raw = _text_of(row)
                content = b"D" + text if text is not None else b"B" + (raw or b"")
                handle.write(len(content).to_bytes(8, "little") + content)
                keys.append(row.key)
                offsets.append(offset)
                offset += 8 + len(content)
        places = HashMap(len(keys))
        for key, offset in zip(keys, offsets, strict=True):
            places.add(key, offset)
        self._spool = (places, handle)
        return self._spool

    def close(self) -> None:
        """Close the copy, if any."""
        if self._spool is not None:
            self._spool[1].close()


def _text_of(row: Row) -> InputText:
    if row.error is not None and row.raw is not None:
        return InputText(None, row.raw)
    try:
        return InputText(_ENCODE(row.data))
    except UnicodeEncodeError:
        return InputText(_ENCODE(clean(row.data)))


class InputFinder(Protocol):
    """Finds the input of journal lines that come in the order of stages and rows."""

    problem: str | None

    def find(self, row: int, key: str, line: bytes) -> InputText:
        """Return the input of a journal line; empty if there is none."""

    def close(self) -> None:
        """Close open files."""


class RowFeed:
    """Makes the lines of the ``results`` table, and the files of failed rows.

    Args:
        lines: the journal.
        rows: the input; None if it is not read.
        keep_input: add the input to the lines.
        longest: lines longer than this many bytes lose their long fields.
    """

    def __init__(
        self, lines: JournalReader, rows: InputFinder | None, *, keep_input: bool, longest: int
    ) -> None:
        self.line_count = 0
        self.shortened: list[str] = []
        """Rows whose long fields were removed."""
        self.failed = 0
        self.bad = 0
        self._lines = lines
        self._rows = rows
        self._keep = keep_input
        self._longest = longest
        self._several = len(lines.stages()) > 1
        self._written: set[int] = set()
        self._mended = mended(lines) if self._several and rows is not None else frozenset()
        self._last_written: int | None = None

    def pieces(
        self, failed: BinaryIO, bad_lines: BinaryIO
    ) -> Iterator[Sequence[bytes | memoryview]]:
        """Yield the lines in order of stage, row and answer, in blocks, each with its newline.

        Only lines that get their input are parsed here; DuckDB finds other broken ones.

        Args:
            failed: receives the input rows that are not ok.
            bad_lines: receives the input lines that could not be read.
        """
        for block in self._lines.blocks():
            texts = block.texts
            if self._rows is not None and (self._keep or any(block.codes)):
                codes = enumerate(block.codes)
                ordinals = [n for n, code in codes if self._keep or code != OK_CODE]
                for n in ordinals:
                    texts[n] = self._with_input(self._rows, block, n, (failed, bad_lines))
            lengths = [*map(len, texts)]
            self.line_count += len(texts)
            if max(lengths, default=0) > self._longest:
                for n, length in enumerate(lengths):
                    if length > self._longest:
                        texts[n] = self._shorten(bytes(texts[n]))
                        lengths[n] = len(texts[n])
            for part in slices(lengths):
                yield texts[part]

    def _with_input(
        self, rows: InputFinder, block: Block, number: int, files: tuple[BinaryIO, BinaryIO]
    ) -> bytes:
        line, row = bytes(block.texts[number]), block.rows[number]
        try:
            brief = decode_brief(line)
        except msgspec.DecodeError:
            return b"\n"
        text, raw = rows.find(row, brief.key, line)
        if block.codes[number] not in FINISHED_CODES and int(brief.key, 16) not in self._mended:
            self._note_failed(row, text, files[0], raw, files[1])
        return self._joined(line, text)

    def _note_failed(
        self, row: int, text: bytes | None, failed: BinaryIO, raw: bytes | None, bad: BinaryIO
    ) -> None:
        if row == self._last_written or row in self._written:
            return
        self._last_written = row
        if self._several:
            self._written.add(row)
        if text is not None:
            self.failed += 1
            failed.write(text + b"\n")
        elif raw is not None:
            self.bad += 1
            bad.write(raw.rstrip(b"\r\n") + b"\n")

    def _shorten(self, line: bytes) -> bytes:
        """Return the line without its long fields, and record its row."""
        try:
            fields = _FIELDS.decode(line)
        except msgspec.DecodeError:
            return b"\n"
        short = {name: value for name, value in fields.items() if len(bytes(value)) <= _LONG_FIELD}
        row, name = (bytes(short.get(name, b"")).decode() for name in ("row", "id"))
        self.shortened.append(f"row {row} ({name})" if name else f"row {row}")
        return _ENCODE(short) + b"\n"

    def _joined(self, line: bytes, text: bytes | None) -> bytes:
        if text is None or not self._keep:
            return line
        return line.rstrip()[:-1] + b',"input":' + text + b"}\n"


def mended(lines: JournalReader) -> frozenset[int]:
    """Return the keys of rows that failed in a stage but are ok in a later one.

    Stages are in the order of their first lines. Memory: the keys of failed rows.
    """
    order = {name: number for number, name in enumerate(lines.stages())}
    superseded = lines.superseded()
    failed: dict[int, int] = {}
    keys: set[int] = set()
    for good in (False, True):
        for segment, index in enumerate(lines.indexes):
            lost = superseded.get(segment)
            names = [(name, order[name]) for name in index.stage_names]
            columns = map(index.column, ("units", "codes", "stages", "answers"))
            for ordinal, (unit, code, stage, answer) in enumerate(zip(*columns, strict=True)):
                if (code in FINISHED_CODES) is not good or (lost is not None and lost[ordinal]):
                    continue
                name, number = names[stage]
                key = unit ^ salt_of(name, answer)
                if not good:
                    failed[key] = max(number, failed.get(key, 0))
                elif number > failed.get(key, number):
                    keys.add(key)
        if not failed:
            break
    return frozenset(keys)
