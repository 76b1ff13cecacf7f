"""Which rows are finished: an index over all lines of a journal that takes 8 bytes a row.

A unit is a (row key, stage, answer), named by 64 bits. Its first ok line is its outcome, whatever
came later; without one, its last line is.
"""

from __future__ import annotations

import difflib
import sys
from array import array
from bisect import bisect_left
from collections import Counter
from collections.abc import (
    Callable,
    Collection,
    Container,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
    Sized,
)
from dataclasses import dataclass
from pathlib import Path

from bagent.errors import JobError
from bagent.store.journal.codec import ERROR_KINDS, OK_CODE, STATUSES, kind_of, salt_of, status_of
from bagent.store.journal.segment_index import SegmentIndex, open_index
from bagent.store.journal.segments import Report, list_segments, part_order
from bagent.store.journal.supersession import UNIT_BITS, OutcomeRanges
from bagent.types import EXTERNAL_KINDS, PASSING_KINDS

_CHUNK = 2048
_MOST_CHUNKS = 32


def units_of(keys: Sequence[int], stage: str, answer: int) -> array[int]:
    """The unit of each row key, as ``unit_of`` makes it, all at once."""
    numbers = keys if isinstance(keys, array) else array("Q", keys)
    salts = salt_of(stage, answer).to_bytes(8, sys.byteorder) * len(numbers)
    # One exclusive or of two long numbers: to do it number by number costs six times as much.
    mixed = int.from_bytes(numbers.tobytes(), "little") ^ int.from_bytes(salts, "little")
    units = array("Q")
    units.frombytes(mixed.to_bytes(len(salts), "little"))
    return units


class SequentialLookup:
    """Follows the lines of a journal beside the questions, and holds what was not asked for yet.

    Rows are mostly asked about in about the order in which they were written, so what is held is
    about what was in flight at a time, and a look at it costs a fifth of one at all units. Where
    the order is another one, each line is still read once only.

    Args:
        indexes: the segments in the order in which they were begun.
        void: of which segments (by place) a line was taken back.
        has: whether a unit is finished.
        chunk: lines that are read at a time.
    """

    def __init__(
        self,
        indexes: list[SegmentIndex],
        void: Container[int],
        has: Callable[[int], bool],
        chunk: int = _CHUNK,
    ) -> None:
        self._indexes = indexes
        self._void = void
        self._has = has
        self._chunks = self._finished()
        self._read_ahead: set[int] = set()
        self._chunk = self._ahead = chunk

    def has_all(self, units: Iterable[int]) -> bool:
        """Whether all these units are finished."""
        requested = set(units)
        ahead = self._read_ahead
        target = len(requested) + self._ahead
        while len(ahead) < target:
            chunk = next(self._chunks, None)
            if chunk is None:
                break
            ahead.update(chunk)
        before = len(ahead)
        ahead -= requested
        if before - len(ahead) == len(requested):
            return True
        if not all(map(self._has, requested)):
            return False
        # They are further on, or were passed: look further, unless what is held is of no use.
        self._ahead *= 2
        if self._ahead > _MOST_CHUNKS * self._chunk:
            self._ahead = self._chunk
            ahead.clear()
        return True

    def _finished(self) -> Iterator[Collection[int]]:
        """Units of finished lines in the order of writing, some at a time."""
        step = self._chunk
        for number, index in enumerate(self._indexes):
            units = index.column("units")
            codes = index.column("codes") if index.failures else None
            for start in range(0, len(units), step):
                chunk = units[start : start + step]
                if number in self._void:
                    yield list(filter(self._has, chunk))
                elif codes is None:
                    yield chunk
                else:
                    yield self._without_resent(chunk, codes[start : start + step])

    def _without_resent(self, units: array[int], codes: array[int]) -> list[int]:
        """Without the failures that are taken up again."""
        lines = zip(units, codes, strict=True)
        return [unit for unit, code in lines if not code or self._has(unit)]


_PART_BITS = 13


@dataclass(frozen=True, slots=True)
class ResumePolicy:
    """Which outcomes count as finished when a run goes on; ok always does.

    Args:
        ended: the run had ended with 0 or 1: besides what failed for a passing reason, the kinds
            in ``again`` are sent again.
        retry: error kinds or statuses to send again, and no others; None leaves it to the rest.
        skip_failed: whatever failed is left as it is, unless ``retry`` names it.
        again: the kinds, besides passing ones, that may come out otherwise.
        accept_truncated: truncated answers are finished.
    """

    ended: bool = False
    retry: frozenset[str] | None = None
    skip_failed: bool = False
    again: frozenset[str] = EXTERNAL_KINDS
    accept_truncated: bool = False

    @classmethod
    def parse(
        cls,
        retry: str | None,
        *,
        skip_failed: bool = False,
        ended: bool = False,
        again: frozenset[str] = EXTERNAL_KINDS,
        accept_truncated: bool = False,
    ) -> ResumePolicy:
        """A policy from the words of ``--retry KIND[,KIND]|all``.

        Raises:
            JobError: a word is no error kind and no status.
        """
        kinds = None if retry is None else _parse_kinds(retry)
        return cls(ended, kinds, skip_failed, again, accept_truncated)

    def is_finished(self, status: str, kind: str | None) -> bool:
        """Whether an outcome is left as it is."""
        if status == "ok":
            return True
        accepted = status == "truncated" and (kind is None or self.accept_truncated)
        if self.retry is not None:
            named = kind in self.retry or status in self.retry
            return not named or (accepted and self.retry == _ALL_KINDS)
        if self.skip_failed or accepted:
            return True
        return kind not in PASSING_KINDS and not (self.ended and kind in self.again)

    def finished_codes(self) -> frozenset[int]:
        """The codes of :func:`bagent.store.journal.codec.code_of` that are left as they are."""
        codes = range(len(STATUSES) << 5)
        return frozenset(c for c in codes if self.is_finished(status_of(c), kind_of(c)))


_ALL_KINDS = frozenset({*ERROR_KINDS, *STATUSES[1:]})


def _parse_kinds(names: str) -> frozenset[str]:
    valid = list(dict.fromkeys((*ERROR_KINDS, *STATUSES[1:])))
    kinds = {word.strip() for word in names.split(",") if word.strip()}
    if "all" in kinds:
        return _ALL_KINDS
    for word in sorted(kinds):
        if word not in valid:
            near = difflib.get_close_matches(word, valid, 1)
            hint = f"did you mean {near[0]}?" if near else f"all, {', '.join(valid)}"
            raise JobError(f"--retry: no such kind of failure: {word}", hint=hint)
    return frozenset(kinds)


class UnitSet:
    """A set of 64-bit numbers in 8 bytes each, cut by the highest bits.

    The numbers are hashes already, so every part gets about as many. A part is sorted when a
    number is first looked for in it: mostly few are.

    Args:
        expected: about how many numbers will come.
    """

    def __init__(self, expected: int) -> None:
        self.bits = self.bits_for(expected)
        """Parts differ in so many of the highest bits."""
        self._shift = UNIT_BITS - self.bits
        self._parts = [array("Q") for _ in range(1 << self.bits)]
        self._sorted = bytearray(1 << self.bits)
        self._count = 0

    @staticmethod
    def bits_for(expected: int) -> int:
        """How many bits part so many numbers into parts of some thousand."""
        return max(0, expected.bit_length() - _PART_BITS)

    def __len__(self) -> int:
        """How many different numbers there are, as of the last :meth:`settle`."""
        return self._count

    def has(self, number: int) -> bool:
        """Whether the number is in the set, as of the last :meth:`settle`."""
        at = number >> self._shift
        part = self._parts[at] if self._sorted[at] else self._sort(at)
        position = bisect_left(part, number)
        return position < len(part) and part[position] == number

    def _sort(self, at: int) -> array[int]:
        part = self._parts[at] = array("Q", sorted(self._parts[at]))
        self._sorted[at] = 1
        return part

    def add_all(self, numbers: Iterable[int]) -> None:
        """Add numbers, in any order; they count once :meth:`settle` was called."""
        parts, shift = self._parts, self._shift
        for number in numbers:
            parts[number >> shift].append(number)

    def fill(self, at: int, numbers: array[int]) -> None:
        """Make these numbers, each there once, a part: they count at once."""
        self._count += len(numbers) - len(self._parts[at])
        self._parts[at] = numbers
        self._sorted[at] = 0

    def settle(self) -> None:
        """Count what was added, without repeats."""
        self._count = 0
        for at, part in enumerate(self._parts):
            once = set(part)
            if len(once) < len(part):
                self._parts[at] = array("Q", once)
            self._sorted[at] = 0
            self._count += len(once)


class HashMap:
    """From 64-bit numbers to 64-bit numbers in 32 bytes a pair; the first value stays.

    Open addressing: the numbers are hashes already, so a remainder spreads them well enough
    (Knuth, The Art of Computer Programming, volume 3, 6.4, algorithm L). 0 marks a free place
    and counts as 1.
    """

    def __init__(self, capacity: int) -> None:
        self._size = 2 * capacity + 7
        self._keys = array("Q", [0]) * self._size
        self._values = array("Q", [0]) * self._size
        self._count = 0

    def __len__(self) -> int:
        """How many names there are."""
        return self._count

    def add(self, key: int, value: int) -> None:
        """Add a pair unless the key is there; no more than ``capacity`` different keys."""
        key = key or 1
        slot = self._slot(key)
        if not self._keys[slot]:
            self._keys[slot] = key
            self._values[slot] = value
            self._count += 1

    def find(self, key: int) -> int | None:
        """The value of a key, or None."""
        slot = self._slot(key or 1)
        return self._values[slot] if self._keys[slot] else None

    def _slot(self, key: int) -> int:
        slot = key % self._size
        while (stored := self._keys[slot]) and stored != key:
            slot += 1
            if slot == self._size:
                slot = 0
        return slot


class DoneIndex:
    """The finished units of a journal, and the counts of all current outcomes.

    ``codes`` counts the current outcomes by ``code_of``. ``failed_units``
    are the units whose current outcome is not ok, in no order, with their codes in
    ``failed_codes``; ``taken_up`` are those of them that are not finished.
    """

    def __init__(
        self,
        indexes: list[SegmentIndex],
        done: UnitSet,
        codes: Counter[int],
        near: SequentialLookup,
        failed_units: array[int],
        failed_codes: bytearray,
        finished: frozenset[int],
    ) -> None:
        self.indexes = indexes
        self.codes = codes
        self.failed_units = failed_units
        self.failed_codes = failed_codes
        self._finished = finished
        self._done = done
        self._near = near
        self.has = done.has

    def has_all(self, units: Iterable[int]) -> bool:
        """Whether all these units are finished; fast where they come in the order of writing."""
        return self._near.has_all(units)

    def __len__(self) -> int:
        """How many units are finished."""
        return len(self._done)

    @property
    def statuses(self) -> dict[str, int]:
        """How many current outcomes have each status."""
        return _summed((status_of(code), n) for code, n in self.codes.items())

    @property
    def kinds(self) -> dict[str, int]:
        """How many current outcomes have each error kind."""
        kinds = ((kind_of(code), n) for code, n in self.codes.items())
        return _summed((kind, n) for kind, n in kinds if kind is not None)

    @property
    def taken_up(self) -> array[int]:
        """The units that failed and are not finished, in no order."""
        failed = zip(self.failed_units, self.failed_codes, strict=True)
        return array("Q", (unit for unit, code in failed if code not in self._finished))


def _summed(pairs: Iterable[tuple[str, int]]) -> dict[str, int]:
    counts: Counter[str] = Counter()
    for name, number in pairs:
        counts[name] += number
    return dict(counts)


def open_indexes(
    run_dir: Path,
    report: Report,
    *,
    part: str | None = None,
    save: bool = False,
    seen_by: str | None = None,
) -> list[SegmentIndex]:
    """The indexes of all row segments of a run directory, in the order they were begun.

    Args:
        run_dir: the run directory.
        report: told about broken lines.
        part: only this part; None means all.
        save: write missing index files of sealed segments.
        seen_by: leave out the other parts of this part's division (the same N of I/N): a row is
            in one of them only, so none of theirs is one of its own.
    """
    segments = list_segments(run_dir / "journal", "rows", part)
    if seen_by is not None:
        division = part_order(seen_by)[0]
        segments = [s for s in segments if s.part == seen_by or part_order(s.part)[0] != division]
    growing = {s.part: s.number for s in segments}
    indexes = [open_index(s, report, save=save and s.number < growing[s.part]) for s in segments]
    return _by_time(indexes)


def _by_time(indexes: list[SegmentIndex]) -> list[SegmentIndex]:
    """Parts of an earlier start come first; within a part the order of numbers stays."""
    reached: dict[str, float] = {}
    keyed = []
    for position, index in enumerate(indexes):
        part = index.segment.part
        reached[part] = max(reached.get(part, 0.0), index.totals.first or 0.0)
        keyed.append((reached[part], position, index))
    return [index for _, _, index in sorted(keyed, key=lambda k: k[:2])]


def load_index(
    run_dir: Path,
    part: str | None,
    policy: ResumePolicy,
    *,
    report: Report,
    save: bool = True,
    seen_by: str | None = None,
) -> DoneIndex:
    """Read which units are finished.

    Args:
        run_dir: the run directory.
        part: one part's journal, or None for those of all parts.
        policy: which failures count as finished.
        report: told about broken lines, as ``FILE:LINE: ...``.
        save: write missing index files beside sealed segments.
        seen_by: as in :func:`open_indexes`.
    """
    indexes = open_indexes(run_dir, report, part=part, save=save, seen_by=seen_by)
    return done_index(indexes, policy)


def done_index(indexes: list[SegmentIndex], policy: ResumePolicy) -> DoneIndex:
    """Which units are finished, of indexes in the order in which their lines were written."""
    done = UnitSet(sum(map(len, indexes)))
    outcomes = OutcomeRanges(indexes, done.bits)
    counts: Counter[int] = Counter()
    finished = policy.finished_codes()
    failed_units, failed_codes = array("Q"), bytearray()
    for at, (ok, bad) in enumerate(outcomes.ranges()):
        _count(counts, ok, bad)
        ok.extend(unit for unit, code in bad.items() if code in finished)
        failed_units.extend(bad)
        failed_codes.extend(bad.values())
        done.fill(at, ok)
    near = SequentialLookup(indexes, outcomes.void, done.has)
    return DoneIndex(indexes, done, counts, near, failed_units, failed_codes, finished)


def count_outcomes(indexes: list[SegmentIndex]) -> Counter[int]:
    """How many current outcomes have each code, of indexes in the order of writing.

    Memory: some MB, however many there are.
    """
    outcomes = OutcomeRanges(indexes, UnitSet.bits_for(sum(map(len, indexes))))
    counts: Counter[int] = Counter()
    for ok, bad in outcomes.ranges():
        _count(counts, ok, bad)
    return counts


def _count(counts: Counter[int], ok: Sized, bad: Mapping[int, int]) -> None:
    if len(ok):
        counts[OK_CODE] += len(ok)
    counts.update(bad.values())
