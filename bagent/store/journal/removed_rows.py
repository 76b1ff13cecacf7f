"""Finished rows of earlier starts that the input no longer holds: removed, or edited and moved.

A row that was edited has another key, so its earlier outcome stays under the old key. Where it kept
its number, :mod:`edited_rows` removes that outcome as soon as there is a new one. Here are the rows
that moved: once all of the input was read, and all its rows have ended, the units that it does not
hold are known, and a newer outcome with the id of one of them is that of the edited row. Of a job
with stages, what was made of such a row goes with it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import msgspec

from bagent.store.journal.codec import TOMBSTONE, unit_of
from bagent.store.journal.segment_index import SegmentIndex
from bagent.store.journal.segments import list_segments, read_line, whole_lines
from bagent.types import Json

_Name = tuple[str, int, str, bytes]
"""Stage, answer, source and id: what an edited row has in common with its earlier content."""


class _Line(msgspec.Struct):
    key: str
    source: str
    stage: str
    status: str
    id: Json = None
    answer: int = 0
    finished_at: float | None = None
    parents: list[str] | None = None

    @property
    def ref(self) -> str:
        """Its name among the parents of other outcomes."""
        return f"{self.stage}:{self.id}:{self.answer}"

    @property
    def family(self) -> tuple[str, str, str]:
        """What it has in common with the other rows that one row was expanded to."""
        return self.stage, self.source, str(self.id).rpartition("/")[0]

    @property
    def name(self) -> _Name | None:
        """Its name; None for a row without an id of its own."""
        if self.id is None or self.id == self.key:
            return None
        return self.stage, self.answer, self.source, msgspec.json.encode(self.id)

    @property
    def unit(self) -> int:
        return unit_of(int(self.key, 16), self.stage, self.answer)


_decode = msgspec.json.Decoder(_Line).decode
_UNREADABLE = (OSError, EOFError, ValueError, msgspec.DecodeError)


class JournalEnd(NamedTuple):
    """Where a part of a journal ended: the number of its last segment, and the bytes in that."""

    part: str
    number: int
    size: int


def replaced_units(
    journal: Path,
    indexes: Sequence[SegmentIndex],
    removed: Iterable[int],
    since: JournalEnd | None,
    stages: Mapping[str, bool] = MappingProxyType({}),
) -> set[int]:
    """Return the units among ``removed`` that newer outcomes replace, by stage, answer, source, id.

    Two rows with one id, of which one leaves the input, look like an edited row, and count as one.

    Args:
        journal: the folder of the segments.
        indexes: the segments of earlier starts.
        removed: units of earlier starts that the input does not hold.
        since: where the lines of newer outcomes begin; None: they may be anywhere.
        stages: the stages of the job in their order, and whether one row becomes several there.
    """
    lines = [line for line in _lines_of(indexes, set(removed)) if line.name is not None]
    older: dict[_Name, list[tuple[float, int]]] = {}
    for line in lines:
        if line.name is not None:
            older.setdefault(line.name, []).append((line.finished_at or 0.0, line.unit))
    replaced: set[int] = set()
    for line in _lines_since(journal, since) if older else ():
        entries = older.get(line.name) if line.name is not None else None
        if entries is not None and line.status != TOMBSTONE:
            unit, at = line.unit, line.finished_at or 0.0
            replaced |= {other for time, other in entries if time < at and other != unit}
    return replaced | _made_of(replaced, lines, stages) if replaced and stages else replaced


def _made_of(replaced: Set[int], lines: Sequence[_Line], stages: Mapping[str, bool]) -> set[int]:
    """Return the units of ``lines`` that were made of replaced ones, or of the same row as they."""
    families = {line.family for line in lines if line.unit in replaced and stages.get(line.stage)}
    order = {name: number for number, name in enumerate(stages)}
    refs: set[str] = set()
    units: set[int] = set()
    for line in sorted(lines, key=lambda line: order.get(line.stage, -1)):
        siblings = stages.get(line.stage, False) and line.family in families
        if line.unit in replaced or siblings or not refs.isdisjoint(line.parents or ()):
            refs.add(line.ref)
            units.add(line.unit)
    return units


def located(indexes: Sequence[SegmentIndex], units: Set[int]) -> dict[int, tuple[str, int]]:
    """Return the stage and the answer's number of those units that have a line."""
    places: dict[int, tuple[str, int]] = {}
    for index in indexes if units else ():
        names, answers = index.stage_names, index.column("answers")
        stages = index.column("stages")
        for ordinal, unit in enumerate(index.column("units")):
            if unit in units:
                places[unit] = names[stages[ordinal]], answers[ordinal]
    return places


def _lines_of(indexes: Sequence[SegmentIndex], units: set[int]) -> Iterator[_Line]:
    """Yield the lines of units; those that cannot be read are left out, so that they stay."""
    for index in indexes if units else ():
        offsets = index.column("offsets")
        ordinals = [n for n, unit in enumerate(index.column("units")) if unit in units]
        if not ordinals:
            continue
        with suppress(OSError):
            descriptor = os.open(index.segment.path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                for ordinal in ordinals:
                    with suppress(*_UNREADABLE):
                        yield _decode(read_line(descriptor, offsets[ordinal]))
            finally:
                os.close(descriptor)


def _lines_since(journal: Path, since: JournalEnd | None) -> Iterator[_Line]:
    part = since.part if since is not None else None
    for segment in list_segments(journal, "rows", part):
        start = 0
        if since is not None:
            if segment.number < since.number:
                continue
            start = since.size if segment.number == since.number else 0
        with suppress(OSError), segment.path.open("rb") as handle:
            for _, text in whole_lines(handle, start, os.fstat(handle.fileno()).st_size):
                with suppress(*_UNREADABLE):
                    yield _decode(text)
