"""The finished units of a journal, in 8 bytes a unit.

A unit is a (row key, stage, answer), named by 64 bits. Its outcome is its first ok line, or its
last line if none is ok. :class:`ResumePolicy` says which outcomes are sent again.
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
    """Return the unit of each row key, as ``unit_of`` does for one."""
    numbers = keys if isinstance(keys, array) else array("Q", keys)
    salts = salt_of(stage, answer).to_bytes(8, sys.byteorder) * len(numbers)
    # One exclusive or of two long integers is six times faster than one per key.
    mixed = int.from_bytes(numbers.tobytes(), "little") ^ int.from_bytes(salts, "little")
    units = array("Q")
    units.frombytes(mixed.to_bytes(len(salts), "little"))
    return units


class SequentialLookup:
    """Answers lookups that come in about the order of the journal, five times faster than a search.

    It reads the journal's units ahead of the lookups and drops those that were looked up, so the
    set in memory stays about as large as the number of rows in flight. Lookups in another order
    fall back to ``has``; each line is read once in any case.

    Args:
        indexes: the segments in the order of their first lines.
        void: numbers of the segments that have tombstoned lines.
        has: whether a unit is finished.
        chunk: lines read at a time.
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
        """Return whether all these units are finished."""
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
        # The units are further on, or were passed: read further, up to a limit.
        self._ahead *= 2
        if self._ahead > _MOST_CHUNKS * self._chunk:
            self._ahead = self._chunk
            ahead.clear()
        return True

    def _finished(self) -> Iterator[Collection[int]]:
        """Yield units of finished lines in chunks, in the order of writing."""
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
        """Leave out failures that are sent again."""
        lines = zip(units, codes, strict=True)
        return [unit for unit, code in lines if not code or self._has(unit)]


_PART_BITS = 13


@dataclass(frozen=True, slots=True)
class ResumePolicy:
    """Which outcomes count as finished when a run resumes; ok always does.

    Args:
        ended: the run had ended with 0 or 1: kinds in ``again`` are sent again too.
        retry: error kinds or statuses to send again, and no others; None: decided by the other
            arguments.
        skip_failed: no failure is sent again, unless ``retry`` names it.
        again: kinds, besides passing ones, whose outcome may differ next time.
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
        """Make a policy from the value of ``--retry KIND[,KIND]|all``.

        Raises:
            JobError: a name is neither an error kind nor a status, or failed rows are skipped too.
        """
        if skip_failed and retry is not None:
            raise JobError(
                "--skip-failed sends no failed row again, and --retry sends some",
                hint="leave one of them out",
            )
        kinds = None if retry is None else _parse_kinds(retry)
        return cls(ended, kinds, skip_failed, again, accept_truncated)

    def is_finished(self, status: str, kind: str | None) -> bool:
        """Return whether an outcome is final."""
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
        """Return the codes (see ``code_of``) of final outcomes."""
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
    """A set of 64-bit hashes in 8 bytes each, divided into parts by the highest bits.

    A part is sorted at the first lookup in it; most parts never are.

    Args:
        expected: about how many numbers will be added.
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
        """Return how many bits divide so many numbers into parts of some thousand."""
        return max(0, expected.bit_length() - _PART_BITS)

    def __len__(self) -> int:
        """Return the number of distinct members as of the last :meth:`settle`."""
        return self._count

    def has(self, number: int) -> bool:
        """Return whether a number was in the set at the last :meth:`settle`."""
        at = number >> self._shift
        part = self._parts[at] if self._sorted[at] else self._sort(at)
        position = bisect_left(part, number)
        return position < len(part) and part[position] == number

    def _sort(self, at: int) -> array[int]:
        part = self._parts[at] = array("Q", sorted(self._parts[at]))
        self._sorted[at] = 1
        return part

    def add_all(self, numbers: Iterable[int]) -> None:
        """Add numbers in any order; they count after the next :meth:`settle`."""
        parts, shift = self._parts, self._shift
        for number in numbers:
            parts[number >> shift].append(number)

    def fill(self, at: int, numbers: array[int]) -> None:
        """Set a part to these distinct numbers, which count at once."""
        self._count += len(numbers) - len(self._parts[at])
        self._parts[at] = numbers
        self._sorted[at] = 0

    def difference(self, numbers: array[int]) -> list[int]:
        """Return the members that are not among ``numbers``; fast where these are all of them."""
        # Other numbers, which are hashes, have the same sum once in 2**64 times.
        if len(numbers) == self._count and sum(numbers) == sum(map(sum, self._parts)):
            return []
        others: list[array[int]] = [array("Q") for _ in self._parts]
        for number in numbers:
            others[number >> self._shift].append(number)
        pairs = zip(self._parts, others, strict=True)
        return [number for part, other in pairs for number in set(part).difference(other)]

    def settle(self) -> None:
        """Remove duplicates and update the count."""
        self._count = 0
        for at, part in enumerate(self._parts):
            once = set(part)
            if len(once) < len(part):
                self._parts[at] = array("Q", once)
            self._sorted[at] = 0
            self._count += len(once)


class HashMap:
    """A map of 64-bit hashes to 64-bit numbers in 32 bytes a pair; the first value of a key stays.

    Open addressing with linear probing (Knuth, TAOCP volume 3, 6.4, algorithm L). 0 marks a free
    slot; the key 0 is stored as 1.
    """

    def __init__(self, capacity: int) -> None:
        self._size = 2 * capacity + 7
        self._keys = array("Q", [0]) * self._size
        self._values = array("Q", [0]) * self._size
        self._count = 0

    def __len__(self) -> int:
        """Return the number of keys."""
        return self._count

    def add(self, key: int, value: int) -> None:
        """Add a pair unless the key exists; at most ``capacity`` distinct keys."""
        key = key or 1
        slot = self._slot(key)
        if not self._keys[slot]:
            self._keys[slot] = key
            self._values[slot] = value
            self._count += 1

    def find(self, key: int) -> int | None:
        """Return the value of a key, or None."""
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

    ``codes`` counts the current outcomes by ``code_of``; ``failed_units`` are the units whose
    current outcome is not ok, unordered, with their codes in ``failed_codes``.
    """

    def __init__(
        self,
        indexes: list[SegmentIndex],
        done: UnitSet,
        codes: Counter[int],
        near: SequentialLookup,
        failed_units: array[int],
        failed_codes: bytearray,
    ) -> None:
        self.indexes = indexes
        self.codes = codes
        self.failed_units = failed_units
        self.failed_codes = failed_codes
        self._done = done
        self._near = near
        self.has = done.has
        self.not_among = done.difference

    def has_all(self, units: Iterable[int]) -> bool:
        """Return whether all units are finished; fast for lookups in the order of writing."""
        return self._near.has_all(units)

    def answered_requests(self, part: str, most: int) -> Iterator[tuple[int, int]]:
        """Yield request hash and location of ok lines of one part, oldest first.

        It reads the newest segments, until they have ``most`` lines.
        """
        newest: list[SegmentIndex] = []
        for index in reversed(self.indexes):
            if index.segment.part == part:
                newest.insert(0, index)
                if sum(map(len, newest)) >= most:
                    break
        for index in newest:
            yield from index.ok_locations("requests", 0)

    def __len__(self) -> int:
        """Return how many units are finished."""
        return len(self._done)


def open_indexes(
    run_dir: Path,
    report: Report,
    *,
    part: str | None = None,
    save: bool = False,
    seen_by: str | None = None,
) -> list[SegmentIndex]:
    """Return the indexes of all row segments of a run, in the order of their first lines.

    Args:
        run_dir: the run directory.
        report: called with each broken line.
        part: only this part; None means all.
        save: write missing index files of sealed segments.
        seen_by: leave out the other parts of this part's division (the same N of I/N), which hold
            none of its rows.
    """
    segments = list_segments(run_dir / "journal", "rows", part)
    if seen_by is not None:
        division = part_order(seen_by)[0]
        segments = [s for s in segments if s.part == seen_by or part_order(s.part)[0] != division]
    growing = {s.part: s.number for s in segments}
    indexes = [open_index(s, report, save=save and s.number < growing[s.part]) for s in segments]
    return _by_time(indexes)


def _by_time(indexes: list[SegmentIndex]) -> list[SegmentIndex]:
    """Sort by start; segments of one part stay in the order of their numbers."""
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
        part: one part's journal; None for all parts.
        policy: which failures count as finished.
        report: called with each broken line, as ``FILE:LINE: ...``.
        save: write missing index files beside sealed segments.
        seen_by: as in :func:`open_indexes`.
    """
    indexes = open_indexes(run_dir, report, part=part, save=save, seen_by=seen_by)
    return done_index(indexes, policy)


def done_index(indexes: list[SegmentIndex], policy: ResumePolicy) -> DoneIndex:
    """Return the finished units of indexes in the order of writing."""
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
    return DoneIndex(indexes, done, counts, near, failed_units, failed_codes)


def count_outcomes(indexes: list[SegmentIndex]) -> Counter[int]:
    """Count the current outcomes by code, in a few MB, of indexes in the order of writing."""
    outcomes = OutcomeRanges(indexes, UnitSet.bits_for(sum(map(len, indexes))))
    counts: Counter[int] = Counter()
    for ok, bad in outcomes.ranges():
        _count(counts, ok, bad)
    return counts


def _count(counts: Counter[int], ok: Sized, bad: Mapping[int, int]) -> None:
    if len(ok):
        counts[OK_CODE] += len(ok)
    counts.update(bad.values())
