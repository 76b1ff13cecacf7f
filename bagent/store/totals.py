"""The totals of a run, shared by the summary, ``status``, progress and the exit code.

A row counts by its current outcome, whichever start wrote it. Of a job with several stages only
the rows of the last one count. The journal also gives the share of prefix caches and the number of
tool calls. Progress files say how far each part of a run is.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from bagent.files import open_regular, read_regular, write_atomic
from bagent.store.journal.codec import (
    ACCEPTED_CODE,
    FINISHED_CODES,
    OK_CODE,
    code_of,
    kind_of,
    status_of,
)
from bagent.store.journal.done_index import count_outcomes, open_indexes
from bagent.store.journal.reader import JournalReader, Selection
from bagent.store.journal.segments import list_segments, whole_lines
from bagent.store.run_dir import RunInfo

HEAD = TAIL = 1 << 20
"""Bytes read at the start and the end of each file: samples of thousands of endpoints."""

TRUNCATED_CODE = code_of("truncated", "truncated")


class _Sample(msgspec.Struct):
    endpoint: str
    at: float
    cache_hits: int | None = None
    cache_queries: int | None = None


_decode_sample = msgspec.json.Decoder(_Sample).decode


def cache_share(run_dir: Path) -> float | None:
    """Return the share (0 to 1) of prompt tokens found in prefix caches; None if not reported.

    It compares the first and last sample of each endpoint; a restarted one counts from its restart.
    """
    firsts: dict[str, _Sample] = {}
    lasts: dict[str, _Sample] = {}
    for segment in list_segments(run_dir / "journal", "endpoints"):
        for sample in _samples(segment.path):
            first, last = firsts.get(sample.endpoint), lasts.get(sample.endpoint)
            if first is None or sample.at < first.at:
                firsts[sample.endpoint] = sample
            if last is None or sample.at > last.at:
                lasts[sample.endpoint] = sample
    hits = queries = 0
    for name, last in lasts.items():
        first = firsts[name]
        restarted = (last.cache_queries or 0) < (first.cache_queries or 0)
        hits += (last.cache_hits or 0) - (0 if restarted else first.cache_hits or 0)
        queries += (last.cache_queries or 0) - (0 if restarted else first.cache_queries or 0)
    return hits / queries if queries else None


def _samples(path: Path) -> Iterator[_Sample]:
    """Yield samples with counters from the start and end of a file; partial lines are skipped."""
    with open_regular(path) as file:
        lines = file.read(HEAD).split(b"\n")
        size = file.seek(0, 2)
        if size > HEAD:
            file.seek(max(HEAD, size - TAIL))
            lines += file.read().split(b"\n")
    for line in lines:
        try:
            sample = _decode_sample(line)
        except msgspec.DecodeError:
            continue
        if sample.cache_hits is not None and sample.cache_queries is not None:
            yield sample


class ToolCount(msgspec.Struct):
    """Calls of one tool, how many failed, and the last error."""

    calls: int = 0
    failed: int = 0
    error: str | None = None


class _Call(msgspec.Struct):
    name: str
    error: str | None = None


_decode_call = msgspec.json.Decoder(_Call).decode


def count_tools(run_dir: Path, part: str | None = None) -> dict[str, ToolCount]:
    """Return the counts of each called tool, by name.

    Args:
        run_dir: the run directory.
        part: one part's journal, or None for those of all parts.
    """
    counts: dict[str, ToolCount] = {}
    for segment in list_segments(run_dir / "journal", "tools", part):
        with segment.path.open("rb") as handle:
            for _, line in whole_lines(handle, 0, segment.path.stat().st_size):
                try:
                    call = _decode_call(line)
                except msgspec.DecodeError:
                    continue
                count = counts.setdefault(call.name, ToolCount())
                count.calls += 1
                if call.error is not None:
                    count.failed += 1
                    count.error = call.error
    return counts


def accept_truncated(codes: Mapping[int, int]) -> Counter[int]:
    """Return the counts by outcome code for a job that accepts truncated answers."""
    counts = Counter(codes)
    counts[ACCEPTED_CODE] += counts.pop(TRUNCATED_CODE, 0)
    return counts


class Totals(msgspec.Struct, frozen=True):
    """Counts of rows with a result.

    ``accepted`` rows have a truncated answer that the job accepts. ``by_status`` counts all rows,
    ``by_kind`` the failed ones.
    """

    ok: int = 0
    accepted: int = 0
    failed: int = 0
    by_status: dict[str, int] = {}
    by_kind: dict[str, int] = {}

    @property
    def rows(self) -> int:
        """The number of rows with a result."""
        return self.ok + self.accepted + self.failed

    @classmethod
    def of(cls, codes: Mapping[int, int]) -> Totals:
        """Return the totals of outcomes counted by code (see ``code_of``)."""
        statuses: Counter[str] = Counter()
        kinds: Counter[str] = Counter()
        for code, number in codes.items():
            if number <= 0:
                continue
            statuses[status_of(code)] += number
            if code not in (OK_CODE, ACCEPTED_CODE):
                kinds[kind_of(code) or status_of(code)] += number
        ok, accepted = max(0, codes.get(OK_CODE, 0)), max(0, codes.get(ACCEPTED_CODE, 0))
        return cls(ok, accepted, kinds.total(), dict(statuses), dict(kinds))


class LastStage(msgspec.Struct, frozen=True):
    """The last stage of a job; ``may_be_empty`` is set for a query, which may select no rows."""

    name: str
    may_be_empty: bool = False

    def codes(self, run_dir: Path, part: str | None) -> Counter[int]:
        """Count its current outcomes by code; those of all stages if no row reached it.

        Args:
            run_dir: the run directory.
            part: one part's journal, or None for those of all parts.
        """
        with JournalReader(run_dir, lambda _: None) as lines:
            counts = _count(lines, Selection(stages=frozenset({self.name})), part)
            if not counts and not self.may_be_empty:
                counts = _count(lines, Selection(), part)
                for code in FINISHED_CODES:
                    counts.pop(code, None)
        return counts


def _count(lines: JournalReader, selection: Selection, part: str | None) -> Counter[int]:
    return Counter(
        ref.code
        for ref in lines.written(selection)
        if part is None or lines.indexes[ref.segment].segment.part == part
    )


def last_stage_of(info: RunInfo | None) -> LastStage | None:
    """Return the last stage of a run; None if it has only one."""
    if info is None or len(info.stages) < 2:
        return None
    return LastStage(info.stages[-1], info.query_last)


def answer_stage(info: RunInfo | None) -> str | None:
    """Return the stage whose answers are the run's; None where there is one stage."""
    last = last_stage_of(info)
    return None if last is None else last.name


def run_codes(
    run_dir: Path, part: str | None, last: LastStage | None, *, accept: bool = False
) -> Counter[int]:
    """Count the rows of a run by the codes of their current outcomes.

    Args:
        run_dir: the run directory.
        part: one part's journal, or None for those of all parts.
        last: the last stage; None if the job has one stage.
        accept: the job accepts truncated answers.
    """
    if last is not None:
        counts = last.codes(run_dir, part)
    else:
        counts = count_outcomes(open_indexes(run_dir, lambda _: None, part=part))
    return accept_truncated(counts) if accept else counts


def stage_causes(run_dir: Path, part: str | None) -> dict[str, int]:
    """Count the failed rows of all stages by kind.

    ``bad_input`` is left out if there is another kind: rows made of failed rows have it.
    """
    kinds = dict(Totals.of(run_codes(run_dir, part, None)).by_kind)
    if len(kinds) > 1:
        kinds.pop("bad_input", None)
    return kinds


def accepts_truncated(job: Mapping[str, Any]) -> bool:
    """Return whether a resolved job, as ``run.json`` has it, accepts truncated answers."""
    output = job.get("output")
    return isinstance(output, dict) and output.get("truncated") == "accept"


PROGRESS_INTERVAL_S = 5.0
"""Seconds between two writes, few enough for a parallel file system."""


class RunProgress(msgspec.Struct, frozen=True):
    """The progress of a start at ``at`` (Unix seconds); an unknown number is None.

    The fields are those of :class:`bagent.observe.Snapshot`.
    """

    at: float
    total: int | None
    total_is_exact: bool
    remaining: int | None
    eta_s: float | None
    part_total: int | None = None
    """Results that the rows of this part need, finished or not."""

    rows_per_s: float | None = None
    """The speed that displays show; None where nothing remains, or the job has stages."""


class ProgressFile:
    """Writes the progress of one part of a run every few seconds.

    Args:
        run_dir: the run directory.
        part: ``all``, or like ``1-of-4``.
    """

    def __init__(self, run_dir: Path, part: str) -> None:
        self._path = _path(run_dir, part)
        self._due = 0.0

    def write(self, progress: RunProgress, *, last: bool = False) -> None:
        """Write the file if it is due or ``last``; errors are ignored."""
        if not last and time.monotonic() < self._due:
            return
        self._due = time.monotonic() + PROGRESS_INTERVAL_S
        with contextlib.suppress(OSError):
            write_atomic(self._path, msgspec.json.encode(progress))


def read_progress(run_dir: Path, parts: Iterable[str]) -> RunProgress | None:
    """Return the combined progress of ``parts``; None if one of them has written none.

    The total of several parts is the sum of their own rows, which do not depend on when each part
    wrote its progress. Parts whose time has passed add no speed.
    """
    parts_progress = []
    for part in parts:
        try:
            data = read_regular(_path(run_dir, part))
            parts_progress.append(msgspec.json.decode(data, type=RunProgress))
        except (OSError, msgspec.DecodeError):
            return None
    if len(parts_progress) < 2:
        return parts_progress[0] if parts_progress else None
    remaining = [p.remaining for p in parts_progress if p.remaining is not None]
    etas = [p.at + p.eta_s for p in parts_progress if p.eta_s is not None]
    at = max(p.at for p in parts_progress)
    totals = [p.part_total for p in parts_progress if p.part_total is not None]
    speeds = [p.rows_per_s for p in parts_progress if p.rows_per_s is not None]
    return RunProgress(
        at=at,
        total=sum(totals) if len(totals) == len(parts_progress) else None,
        total_is_exact=all(p.total_is_exact for p in parts_progress),
        remaining=sum(remaining) if len(remaining) == len(parts_progress) else None,
        eta_s=max(0.0, max(etas) - at) if len(etas) == len(parts_progress) else None,
        rows_per_s=sum(speeds) if speeds else None,
    )


def _path(run_dir: Path, part: str) -> Path:
    return run_dir / ("progress.json" if part == "all" else f"progress-{part}.json")
