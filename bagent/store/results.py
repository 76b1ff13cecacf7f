"""Reading results from the journal without DuckDB, also while a run runs.

Outcomes become lines of an OpenAI batch's output and error files too (OpenAI's Batch API
reference). An error response is inside ``response.body``; a request without a response has
``response: null`` and a top-level ``error``. The answer to a line of a batch file is the body as
received; other answers are written as chat completions.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import msgspec

from bagent.duck import literal
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
from bagent.store.run_dir import RunDir, RunInfo, working_seconds
from bagent.store.tables.row_feed import InputFinder
from bagent.store.tables.schema import RESULTS, pointer
from bagent.store.totals import (
    LastStage,
    Totals,
    accept_truncated,
    accepts_truncated,
    last_stage_of,
)
from bagent.text.suggest import did_you_mean
from bagent.types import Json, Outcome

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection


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


_NUMBERS: dict[type, str] = {int: "BIGINT", float: "DOUBLE"}


def number_type(
    connection: DuckDBPyConnection, runs: Sequence[RunDir], tables: Sequence[str] = ("results",)
) -> str | None:
    """Return the SQL type of ids that all are numbers; None where some are texts.

    The journals say whether the first id of each run is a number; another one is taken for a number
    where it is written as DuckDB writes numbers.
    """
    kinds = set()
    for run in runs:
        first = next(iter(iter_results(run.path, report=lambda _: None)), None)
        if first is not None:
            kinds.add(_NUMBERS.get(type(first["id"])))
    kind = kinds.pop() if len(kinds) == 1 else None
    if kind is None:
        return None
    text = f"id is not null and try_cast(id as {kind})::varchar is distinct from id"
    for table in tables:
        # An unfinished result would refuse relations over this connection.
        if connection.execute(f"select 1 from {table} where {text} limit 1").fetchall():
            return None
    return kind


def id_as_json(connection: DuckDBPyConnection, runs: Sequence[RunDir]) -> str:
    """Return SQL over ``results`` for ids as JSON, each of the type that it has in its row.

    An id of a row whose input is not stored is a number only where all ids are.
    """
    infos = [run.load_or_report(lambda _: None) for run in runs]
    fields = {"id", "custom_id", *(str(info.job.get("id") or "id") for info in infos if info)}
    all_have_input = all(info and info.keep_input and len(info.stages) < 2 for info in infos)
    cases = " ".join(
        f"when input ->> {path} = id then input -> {path}"
        for path in (literal(pointer(name)) for name in sorted(fields))
    )
    kind = None if all_have_input else number_type(connection, runs)
    other = "to_json(id)" if kind is None else f"to_json(try_cast(id as {kind}))"
    return f"case {cases} else {other} end"


_STATUS = re.compile(r"HTTP (\d{3})")
_LINE_ID = "batch_req_"


def batch_line(outcome: Outcome) -> bytes:
    """Return one output line with its newline: ``{"id", "custom_id", "response", "error"}``."""
    name = outcome.id if isinstance(outcome.id, str) else msgspec.json.encode(outcome.id).decode()
    line: dict[str, Any] = {
        "id": f"{_LINE_ID}{outcome.key}-{outcome.answer}",
        "custom_id": name,
        "response": None,
        "error": None,
    }
    code = _STATUS.search(outcome.error or "")
    if outcome.response is not None:
        line["response"] = _response(200, outcome, outcome.response)
    elif _is_answered(outcome):
        line["response"] = _response(200, outcome, _completion(outcome))
    elif code is not None:
        error = {"message": outcome.error, "type": outcome.error_kind, "code": outcome.error_kind}
        line["response"] = _response(int(code[1]), outcome, {"error": error})
    else:
        line["error"] = {"code": outcome.error_kind or outcome.status, "message": outcome.error}
    return msgspec.json.encode(line) + b"\n"


def _is_answered(outcome: Outcome) -> bool:
    """Return whether a model answered; a filtered answer has no text."""
    if outcome.finish_reason is None:
        return False
    return outcome.text is not None or outcome.status == "refused" or bool(_calls(outcome))


def _response(status: int, outcome: Outcome, body: dict[str, Any] | msgspec.Raw) -> dict[str, Any]:
    return {"status_code": status, "request_id": outcome.group or outcome.key, "body": body}


def _calls(outcome: Outcome) -> list[Json]:
    """Return the tool calls that are a row's answer; empty for other answers."""
    if outcome.output is None or b'"tool_calls"' not in bytes(outcome.output):
        return []
    value = msgspec.json.decode(outcome.output)
    calls = value.get("tool_calls") if isinstance(value, dict) and len(value) == 1 else None
    return calls if isinstance(calls, list) else []


def _completion(outcome: Outcome) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": outcome.text}
    calls = _calls(outcome)
    if calls:
        message["tool_calls"] = calls
    if outcome.reasoning is not None:
        message["reasoning"] = outcome.reasoning
    if outcome.status == "refused":
        message["refusal"] = outcome.error
    prompt, completion = outcome.prompt_tokens, outcome.completion_tokens
    usage = None
    if prompt is not None or completion is not None:
        complete = prompt is not None and completion is not None
        usage = {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": (prompt or 0) + (completion or 0) if complete else None,
        }
    choice = {"index": 0, "message": message, "finish_reason": outcome.finish_reason}
    if outcome.logprobs is not None:
        choice["logprobs"] = outcome.logprobs
    return {
        "id": f"chatcmpl-{outcome.key}",
        "object": "chat.completion",
        "created": int(outcome.finished_at or 0),
        "model": outcome.model,
        "choices": [choice],
        "usage": usage,
    }
