"""The finished outcomes of earlier starts by unit, for stages that go on with what they say."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from bagent.store.codec import decode_outcome, salt_of
from bagent.store.current import CurrentLines
from bagent.store.index import DoneIndex, HashMap
from bagent.store.segments import Report, locate
from bagent.types import Outcome


class EarlierOutcomes:
    """Finds the current outcome of each finished unit of a journal as it is when this is made.

    Memory: 32 bytes a line.

    Args:
        run_dir: the run directory.
        done: which units are finished.
        report: told about broken lines.
    """

    def __init__(self, run_dir: Path, done: DoneIndex, report: Report) -> None:
        self._lines = CurrentLines(run_dir, report)
        self._places = HashMap(self._lines.lines)
        superseded = self._lines.superseded()
        for number, index in enumerate(self._lines.indexes):
            segment = index.segment
            base = locate(self._lines.parts.index(segment.part), segment.number, 0)
            lost = superseded.get(number)
            units, offsets = index.column("units"), index.column("offsets")
            for ordinal, (unit, offset) in enumerate(zip(units, offsets, strict=True)):
                if (lost is None or not lost[ordinal]) and done.has(unit):
                    self._places.add(unit, base | offset)

    def find(self, unit: int) -> int | None:
        """The place of a finished unit's outcome, None where it is not finished."""
        return self._places.find(unit)

    def keys_of(self, stage: str) -> Iterator[int]:
        """The row keys of all current outcomes of a stage with one answer a row, good or bad."""
        salt = salt_of(stage, 0)
        superseded = self._lines.superseded()
        for number, index in enumerate(self._lines.indexes):
            if stage not in index.stage_names:
                continue
            wanted, lost = index.stage_names.index(stage), superseded.get(number)
            columns = zip(index.column("units"), index.column("stages"), strict=True)
            for ordinal, (unit, found) in enumerate(columns):
                if found == wanted and (lost is None or not lost[ordinal]):
                    yield unit ^ salt

    def read_at(self, place: int) -> Outcome:
        """The outcome at a place.

        Raises:
            msgspec.DecodeError: the line broke since.
        """
        return decode_outcome(self._lines.read_at(place))

    def close(self) -> None:
        """Close the segments."""
        self._lines.close()
