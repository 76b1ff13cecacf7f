"""An index of the turns of unfinished conversations in the journal."""

from __future__ import annotations

import mmap
import os
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from bagent.files import open_regular
from bagent.store.journal.codec import unit_of
from bagent.store.journal.segments import Report, Segment, list_segments, read_line, whole_lines
from bagent.types import Turn


class _Head(msgspec.Struct):
    key: str
    stage: str
    answer: int
    turn: int
    at: float = 0.0


def turns_of_row(run_dir: Path, row: int, stage: str, answer: int) -> dict[str, list[Turn]]:
    """Find the turns of one row's conversations, also finished ones, without an index.

    Returns:
        The turns in order by key; stages may make several rows of one input row.
    """
    mark = msgspec.json.encode({"row": row, "stage": stage, "answer": answer})[1:-1] + b","
    turns: dict[str, list[Turn]] = {}
    for segment in list_segments(run_dir / "journal", "turns"):
        for line in _lines_with(segment.path, mark):
            try:
                turn = _decode_turn(line)
            except msgspec.DecodeError:
                continue
            earlier = [t for t in turns.get(turn.key, []) if t.turn < turn.turn]
            turns[turn.key] = [*earlier, turn] if turn.turn > 0 else []
    return turns


def _lines_with(path: Path, mark: bytes) -> Iterator[bytes]:
    """Yield the lines of a file that contain ``mark``."""
    with open_regular(path) as file:
        if not os.fstat(file.fileno()).st_size:
            return
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            position = content.find(mark)
            while position >= 0:
                start = content.rfind(b"\n", 0, position) + 1
                end = content.find(b"\n", position)
                if end < 0:
                    return
                yield content[start:end]
                position = content.find(mark, end)


class TurnIndex:
    """The offsets of the turns of unfinished conversations: about 100 bytes of memory a turn.

    Not thread-safe.
    """

    def __init__(self, segments: list[Segment]) -> None:
        self._segments = segments
        # For each unit: turn, segment, offset of each of its lines, in the order of writing.
        self._refs: dict[int, array[int]] = {}

    @classmethod
    def load(cls, run_dir: Path, is_done: Callable[[int], bool], *, report: Report) -> TurnIndex:
        """Read the turns of the journal under ``run_dir``.

        Args:
            run_dir: the run directory.
            is_done: whether a unit (:func:`bagent.store.journal.codec.unit_of`) is finished.
            report: called with each broken line.
        """
        index = cls(list_segments(run_dir / "journal", "turns"))
        decoder = msgspec.json.Decoder(_Head)
        several = len({segment.part for segment in index._segments}) > 1
        entries: list[tuple[float, int, int, int, int]] = []
        for number, segment in enumerate(index._segments):
            with segment.path.open("rb") as handle:
                lines = whole_lines(handle, 0, segment.path.stat().st_size)
                for offset, line in lines:
                    try:
                        head = decoder.decode(line.lstrip(b"\0"))
                        unit = unit_of(int(head.key, 16), head.stage, head.answer)
                        if is_done(unit):
                            continue
                        _decode_turn(line)
                    except (msgspec.DecodeError, ValueError, RecursionError):
                        if line:
                            report(f"{segment.path}: broken line at byte {offset}, left out")
                    else:
                        if several:
                            entries.append((head.at, unit, head.turn, number, offset))
                        else:
                            index._add(unit, head.turn, number, offset)
        # After a new division into parts, a part may continue another's conversations.
        for _, unit, turn, number, offset in sorted(entries, key=lambda entry: entry[0]):
            index._add(unit, turn, number, offset)
        return index

    def _add(self, unit: int, turn: int, segment: int, offset: int) -> None:
        """Add a line; it rerefs lines of the same and of later turns."""
        refs = self._refs.get(unit)
        if refs is None:
            refs = self._refs[unit] = array("q")
        while refs and refs[-3] >= turn:
            del refs[-3:]
        if turn > 0:
            refs.extend((turn, segment, offset))
        if not refs:
            del self._refs[unit]

    def __len__(self) -> int:
        return len(self._refs)

    def pop(self, unit: int) -> list[Turn]:
        """Remove and return the turns of a conversation, in order.

        Raises:
            msgspec.DecodeError: the journal was changed meanwhile.
        """
        refs = self._refs.pop(unit, None)
        if refs is None:
            return []
        turns = []
        for start in range(0, len(refs), 3):
            _, number, offset = refs[start : start + 3]
            descriptor = os.open(self._segments[number].path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                line = read_line(descriptor, offset)
            finally:
                os.close(descriptor)
            turns.append(_decode_turn(line))
        return turns


def _decode_turn(line: bytes) -> Turn:
    """Return the turn of a journal line.

    Raises:
        msgspec.DecodeError: the line is not a complete turn.
    """
    try:
        return msgspec.json.decode(line.lstrip(b"\0"), type=Turn)
    except (UnicodeDecodeError, RecursionError) as error:
        raise msgspec.DecodeError(str(error)) from error
