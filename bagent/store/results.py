"""Reading results from the journal without DuckDB, also while a run runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec

from bagent.errors import UsageError
from bagent.store.journal.codec import (
    FINISHED_CODES,
    STATUSES,
    OutcomeLine,
    clean,
    decode_brief,
    decode_outcome,
    decode_outcome_line,
    status_of,
)
from bagent.store.journal.done_index import HashMap, count_outcomes
from bagent.store.journal.reader import JournalReader, LineRef, SegmentLines, Selection
from bagent.store.journal.segments import Report
from bagent.store.run_dir import RunInfo, working_seconds
from bagent.store.tables.row_feed import InputFinder
from bagent.store.tables.schema import RESULTS
from bagent.store.totals import (
    LastStage,
    Totals,
    accept_truncated,
    accepts_truncated,
    last_stage_of,
)
from bagent.text.suggest import did_you_mean
from bagent.types import Json, Outcome

RESULT_NAMES: tuple[str, ...] = tuple(name for name in RESULTS if name != "input")
"""The columns of a result in order, less ``input``, which is added on request."""

FindInput = Callable[[Path], InputFinder | None]

_RECENT_LINES = 1000
_RECENT_PARTS = 32


@dataclass(frozen=True, slots=True)
class ResultQuery:
    """A filter and an order of results.

    Args:
        statuses: only these; None means all. ``failed`` stands for all failures, as in totals.
        stages: only these; None means all.
        ordered: by stage, row and answer; else in the order of finishing.
        first: only the first so many lines of each segment.
    """

    statuses: frozenset[str] | None = None
    stages: frozenset[str] | None = None
    ordered: bool = False
    first: SegmentLines | None = None

    def selection(self) -> Selection:
        """Return the filter in codes of the index."""
        codes = None
        if self.statuses is not None:
            all_codes = range(len(STATUSES) << 5)
            codes = frozenset(c for c in all_codes if status_of(c) in self.statuses)
            if "failed" in self.statuses:
                codes |= set(all_codes) - FINISHED_CODES
        return Selection(self.stages, codes, self.first)


def check_statuses(names: Iterable[str], option: str) -> frozenset[str]:
    """Return statuses as a set.

    Args:
        names: the statuses.
        option: what names them, for the message.

    Raises:
        UsageError: there is no such status.
    """
    statuses = frozenset(names)
    for name in sorted(statuses - set(STATUSES), key=str):
        hint = did_you_mean(str(name), STATUSES) or ", ".join(STATUSES)
        raise UsageError(f"{option} {name}: no such status", hint=hint)
    return statuses


def iter_line_refs(lines: JournalReader, query: ResultQuery) -> Iterator[LineRef]:
    """Yield the locations of the results that a query selects."""
    return (lines.ordered if query.ordered else lines.written)(query.selection())


def iter_results(
    run_dir: Path,
    query: ResultQuery | None = None,
    *,
    report: Report,
    find_input: FindInput | None = None,
) -> Iterator[dict[str, Any]]:
    """Yield the current results as dicts with the columns of ``results``.

    ``output`` is raw JSON (``msgspec.Raw``) or None. Broken lines are reported and left out.
    Memory: an index of the lines.

    Args:
        run_dir: the run directory.
        query: which results, in which order; None means all, in the order of finishing.
        report: called with each broken line.
        find_input: makes an input finder, given a path for a copy of the input; results then have
            ``input`` as raw JSON. The copy is needed only if the results are not ``ordered``.
    """
    with JournalReader(run_dir, report) as lines, _Inputs(find_input, report) as inputs:
        for ref in iter_line_refs(lines, query or ResultQuery()):
            line = lines.read(ref)
            try:
                outcome = decode_outcome_line(line)
            except msgspec.DecodeError:
                path = lines.indexes[ref.segment].segment.path
                report(f"{path}: broken line at byte {ref.offset}, left out")
                continue
            result = result_of(outcome)
            if inputs.rows is not None:
                text = inputs.rows.find(ref.row, outcome.key, line).text
                result["input"] = msgspec.Raw(text) if text is not None else None
            yield result


def result_of(outcome: Outcome | OutcomeLine) -> dict[str, Any]:
    """Return an outcome as a dict with the columns of ``results``, less ``input``."""
    result = {name: getattr(outcome, name) for name in RESULT_NAMES}
    output = outcome.output
    if output is not None and not bytes(output):
        result["output"] = None
    return result


class _Inputs:
    """The input finder, if any, and the temporary folder for its copy of the input."""

    def __init__(self, find_input: FindInput | None, report: Report) -> None:
        self.rows: InputFinder | None = None
        self._report = report
        self._directory: TemporaryDirectory[str] | None = None
        if find_input is not None:
            self._directory = TemporaryDirectory(prefix="bagent-")
            self.rows = find_input(Path(self._directory.name) / "input")

    def __enter__(self) -> _Inputs:
        return self

    def __exit__(self, *_: object) -> None:
        if self.rows is not None:
            self.rows.close()
            if self.rows.problem is not None:
                self._report(f"the input could not be read again: {self.rows.problem}")
        if self._directory is not None:
            self._directory.cleanup()


def iter_outcomes(
    run_dir: Path, query: ResultQuery | None = None, *, report: Report
) -> Iterator[Outcome]:
    """Yield the current outcomes, for a stage that reads those of an earlier one."""
    with JournalReader(run_dir, report) as lines:
        for ref in iter_line_refs(lines, query or ResultQuery()):
            try:
                yield decode_outcome(lines.read(ref))
            except msgspec.DecodeError:
                path = lines.indexes[ref.segment].segment.path
                report(f"{path}: broken line at byte {ref.offset}, left out")


class AnswerStore:
    """Finds ok outcomes by unit or request hash, in 32 bytes of memory an ok line.

    Args:
        run_dir: the run directory, or another run's (``--reuse``).
        report: called with each broken line.
        by_request: look up by ``request_hash``, else by unit.
    """

    def __init__(self, run_dir: Path, report: Report, *, by_request: bool) -> None:
        self._lines = JournalReader(run_dir, report)
        column = "requests" if by_request else "units"
        self._places = HashMap(self._lines.lines)
        for index in self._lines.indexes:
            part = self._lines.parts.index(index.segment.part)
            for name, location in index.ok_locations(column, part):
                self._places.add(name, location)

    def __len__(self) -> int:
        """Return the number of outcomes."""
        return len(self._places)

    def find(self, name: int) -> Outcome | None:
        """Return the first ok outcome of a unit or request hash (as an integer), or None."""
        location = self._places.find(name)
        if location is None:
            return None
        try:
            return decode_outcome(self._lines.read_at(location))
        except msgspec.DecodeError:
            return None

    def close(self) -> None:
        """Close the segments."""
        self._lines.close()


@dataclass(frozen=True, slots=True)
class RunSummary:
    """The counts of a run.

    ``totals`` are defined by :mod:`bagent.store.totals`. ``statuses`` and ``kinds`` count the
    current outcomes of all stages; ``stages`` has (ok, not ok) of each stage, and is empty if there
    is only one. Tokens and cost are sums over all lines, including superseded ones; they are None
    if no line has any. ``without_tokens`` lines have no token counts. ``rows_per_second`` is the
    speed over the time that the starts worked; of a run that goes on, over its last lines. None if
    unknown.
    """

    totals: Totals = field(default_factory=Totals)
    statuses: dict[str, int] = field(default_factory=dict)
    kinds: dict[str, int] = field(default_factory=dict)
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    cached_of_tokens: int = 0
    """Prompt tokens of the answers that say how many were cached."""
    completion_tokens: int | None = None
    reasoning_tokens: int | None = None
    cost_usd: float | None = None
    cost_unknown: int = 0
    """Lines with tokens and no cost; 0 where no line has one."""
    without_tokens: int = 0
    first_at: float | None = None
    last_at: float | None = None
    rows_per_second: float | None = None
    stages: dict[str, tuple[int, int]] = field(default_factory=dict)

    @property
    def finished(self) -> int:
        """The number of units with an outcome."""
        return sum(self.statuses.values())


def summary(run_dir: Path, report: Report, info: RunInfo | None = None) -> RunSummary:
    """Count a run from its journal, in bounded memory.

    Args:
        run_dir: the run directory.
        report: called with each broken line.
        info: the content of ``run.json``; None if it cannot be read.
    """
    last = last_stage_of(info)
    seconds = working_seconds(info.starts) if info is not None else None
    accept = info is not None and accepts_truncated(info.job)
    with JournalReader(run_dir, report) as lines:
        current = count_outcomes(lines.indexes)
        codes = current if last is None else last.codes(run_dir, None)
        counted = Totals.of(accept_truncated(codes) if accept else codes)
        of_stages = Totals.of(current)
        totals = [index.totals for index in lines.indexes]
        count = lines.lines
        unknown = sum(t.unknown for t in totals)
        has_tokens, costed = count > unknown, sum(t.costed for t in totals)
        firsts = [t.first for t in totals if t.first is not None]
        lasts = [t.last for t in totals if t.last is not None]
        return RunSummary(
            totals=counted,
            statuses=of_stages.by_status,
            kinds=of_stages.by_kind,
            prompt_tokens=sum(t.prompt for t in totals) if has_tokens else None,
            cached_tokens=sum(t.cached for t in totals) if has_tokens else None,
            cached_of_tokens=sum(t.cached_of for t in totals),
            completion_tokens=sum(t.completion for t in totals) if has_tokens else None,
            reasoning_tokens=sum(t.reasoning for t in totals) if has_tokens else None,
            cost_usd=sum(t.cost for t in totals) if costed else None,
            cost_unknown=max(0, count - unknown - costed) if costed else 0,
            without_tokens=unknown,
            first_at=min(firsts, default=None),
            last_at=max(lasts, default=None),
            rows_per_second=counted.rows / seconds if seconds else _speed(lines, last),
            stages=lines.counts() if len(lines.stages()) > 1 else {},
        )


def _speed(lines: JournalReader, last: LastStage | None) -> float | None:
    """Return the rows a second over the last thousand lines; of several stages, of the last one."""
    indexes = list(enumerate(lines.indexes))
    indexes = [(number, index) for number, index in indexes if index.totals.last is not None]
    indexes.sort(key=lambda item: -(item[1].totals.last or 0.0))
    parts: set[str] = set()
    times: list[float] = []
    for number, index in indexes:
        if index.segment.part not in parts and len(parts) < _RECENT_PARTS:
            parts.add(index.segment.part)
            times += _last_times(lines, number, last)
    times = sorted(times)[-_RECENT_LINES:]
    span = times[-1] - times[0] if times else 0.0
    return (len(times) - 1) / span if span > 0 else None


def _last_times(lines: JournalReader, segment: int, last: LastStage | None) -> Iterator[float]:
    """Yield when the last thousand rows of a segment ended."""
    index = lines.indexes[segment]
    offsets, lengths = index.column("offsets"), index.column("lengths")
    for ordinal in range(max(0, len(index) - _RECENT_LINES), len(index)):
        line = lines.read(LineRef(0, 0, segment, offsets[ordinal], lengths[ordinal], 0))
        try:
            header = decode_brief(line)
        except msgspec.DecodeError:
            continue
        if header.finished_at is not None and (last is None or header.stage == last.name):
            yield header.finished_at


def encode_result(result: dict[str, Any]) -> bytes:
    """Return a result as one line of JSON, with its newline."""
    value: Json = result
    try:
        return msgspec.json.encode(value) + b"\n"
    except UnicodeEncodeError:  # a lone surrogate in the input
        return msgspec.json.encode(clean(value)) + b"\n"
