"""Where the turns of unfinished conversations stand in the journal, and reading them from there."""

from __future__ import annotations

import os
from array import array
from collections.abc import Callable
from pathlib import Path

import msgspec

from bagent.store.journal.codec import unit_of
from bagent.store.journal.segments import Report, Segment, list_segments, read_line, whole_lines
from bagent.types import Turn


class _Head(msgspec.Struct):
    key: str
    stage: str
    answer: int
    turn: int
    at: float = 0.0


class TurnIndex:
    """The places of the turns of conversations that are not finished; texts stay on disk.

    Some 100 bytes a turn are kept. Use it in one thread.
    """

    def __init__(self, segments: list[Segment]) -> None:
        self._segments = segments
        # Of each unit: turn, segment, offset, and so on, in the order of writing.
        self._places: dict[int, array[int]] = {}

    @classmethod
    def load(cls, run_dir: Path, is_done: Callable[[int], bool], *, report: Report) -> TurnIndex:
        """Read what the journal under ``run_dir`` holds now.

        Args:
            run_dir: the run directory.
            is_done: whether a unit (:func:`bagent.store.journal.codec.unit_of`) is finished.
            report: told about broken lines.
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
                    except (msgspec.DecodeError, ValueError):
                        if line:
                            report(f"{segment.path}: broken line at byte {offset}, left out")
                        continue
                    if not is_done(unit):
                        if several:
                            entries.append((head.at, unit, head.turn, number, offset))
                        else:
                            index._add(unit, head.turn, number, offset)
        # Parts that were divided anew may have gone on with one another's conversations.
        for _, unit, turn, number, offset in sorted(entries, key=lambda entry: entry[0]):
            index._add(unit, turn, number, offset)
        return index

    def _add(self, unit: int, turn: int, segment: int, offset: int) -> None:
        """A later line for the same or an earlier turn takes the place of what came before."""
        places = self._places.get(unit)
        if places is None:
            places = self._places[unit] = array("q")
        while places and places[-3] >= turn:
            del places[-3:]
        if turn > 0:
            places.extend((turn, segment, offset))
        if not places:
            del self._places[unit]

    def __len__(self) -> int:
        return len(self._places)

    def pop(self, unit: int) -> list[Turn]:
        """The turns of a conversation in their order, once: they are then forgotten here.

        Raises:
            msgspec.DecodeError: the journal was changed meanwhile.
        """
        places = self._places.pop(unit, None)
        if places is None:
            return []
        turns = []
        for start in range(0, len(places), 3):
            _, number, offset = places[start : start + 3]
            descriptor = os.open(self._segments[number].path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                line = read_line(descriptor, offset)
            finally:
                os.close(descriptor)
            turns.append(msgspec.json.decode(line.lstrip(b"\0"), type=Turn))
        return turns
