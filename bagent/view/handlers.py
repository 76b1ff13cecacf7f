"""What each address answers."""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import duckdb
import msgspec
from aiohttp import web

from bagent.errors import BagentError, UsageError
from bagent.observe.counters import cost_range
from bagent.observe.formatting import duration, money, rate
from bagent.report import answer_fields, endpoints, failures, fields, html, overview
from bagent.report.field_stats import LONGEST_VALUE, Traits
from bagent.report.overview import seconds_range
from bagent.report.queries import WEAK, ReportDb
from bagent.report.suspects import Suspect, count_all, find_suspects
from bagent.runs.prompt_fields import names_in_prompts
from bagent.runs.run_state import mending_commands, next_lines, run_title
from bagent.store.query import read_unchanged
from bagent.store.tables.schema import STATUSES
from bagent.store.totals import answer_stage
from bagent.view.catalog import RunCatalog, ViewedRun
from bagent.view.compare import compare_runs, word_diff
from bagent.view.filters import NUMBER_SORT, TEXT_LENGTH, TEXT_SORT, FieldTest, RowFilter
from bagent.view.row import RowDetails, find_row, find_same, read_transcript
from bagent.view.rows import (
    RowColumns,
    RowKey,
    RowPage,
    count_rows,
    distinct,
    export,
    list_rows,
    neighbours,
    row_columns,
)

TEMPLATES = Path(__file__).parent / "templates"

EVENT_SECONDS = 1.0
IDLE_SECONDS = 5.0
"""The pause between two looks at a run that is running, and at one that is not."""

EVENT_SHARE = 10.0
"""The least ratio of the pause between two looks at a run to the time of one."""


class Handlers:
    """The handlers of all addresses.

    Args:
        catalog: the runs.
    """

    def __init__(self, catalog: RunCatalog) -> None:
        self._catalog = catalog

    async def runs(self, request: web.Request) -> web.Response:
        """Answer with the list of runs; of a single run, lead to its page."""
        if self._catalog.single is not None:
            raise web.HTTPFound(f"{_base(request)}/run/{quote(self._catalog.single, safe='')}/")
        states, problems = await asyncio.to_thread(self._states)
        return _page("runs.html", request, states=states, problems=problems)

    def _states(self) -> tuple[list[dict[str, Any]], list[str]]:
        states, problems = [], []
        for run in self._catalog.runs():
            try:
                states.append(self._catalog.states.of(run))
            except BagentError as error:
                problems.append(f"{run.path.name}: {error.message}")
        return states, problems

    async def run(self, request: web.Request) -> web.Response:
        """Answer with the page of a run."""
        viewed = self._viewed(request)
        viewed.tables.renew_if_due()
        state = await asyncio.to_thread(viewed.state)
        steps = await asyncio.to_thread(next_lines, viewed.run, state)
        return _page(
            "run.html",
            request,
            run=viewed,
            title=run_title(viewed.run, viewed.info()),
            state=state,
            steps=steps,
            live=live_values(state, await _prospects(viewed, state)),
        )

    async def overview(self, request: web.Request) -> web.Response:
        """Answer with causes of failure, speed and endpoints, a part of the page of a run."""
        viewed = self._viewed(request)
        values = await viewed.tables.ask(_overview, key="overview")
        state = await asyncio.to_thread(viewed.state)
        counts: Counter[str] = Counter()
        for cause in values["causes"]:
            counts[cause.kind] += cause.rows
        mending = await asyncio.to_thread(mending_commands, viewed.run, state, dict(counts))
        return _page("overview.html", request, run=viewed, state=state, mending=mending, **values)

    async def answers(self, request: web.Request) -> web.Response:
        """Answer with the distributions of the answers, a part of the page of a run."""
        viewed = self._viewed(request)
        info = viewed.info()
        stage = request.query.get("stage") or answer_stage(info)
        names = answer_fields.property_names(info.answer_columns)

        def profiles(db: ReportDb) -> list[answer_fields.FieldProfile]:
            return answer_fields.profile_answers(db, stage, names)

        return _page(
            "answers.html",
            request,
            run=viewed,
            profiles=await viewed.tables.ask(profiles, key=("answers", stage)),
            stages=info.stages,
            stage=stage,
            has_schema=bool(info.answer_columns),
            bar_filter=partial(_bar_filter, stage),
            missing_filter=partial(_missing_filter, stage),
        )

    async def findings(self, request: web.Request) -> web.Response:
        """Answer with doubtful answers, and what rows share that failed or have long answers."""
        viewed = self._viewed(request)
        topics = await viewed.tables.ask(partial(_find, viewed), key="findings")
        return _page("findings.html", request, run=viewed, topics=topics)

    async def events(self, request: web.Request) -> web.StreamResponse:
        """Stream the state of a run whenever it changed, also by a new start."""
        viewed = self._viewed(request)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        with suppress(ConnectionError):
            async for event in _events(viewed):
                await response.write(event)
        return response

    async def rows(self, request: web.Request) -> web.Response:
        """Answer with one page of rows."""
        viewed = self._viewed(request)
        viewed.tables.renew_if_due()
        row_filter = RowFilter.parse(request.query)
        after = RowKey.parse(request.query.get("after", ""))
        usual = await viewed.tables.ask(_ListValues.of, key="list")
        columns = usual.columns.with_filtered(row_filter)
        problem = None
        try:
            listed = await viewed.tables.ask(lambda db: list_rows(db, row_filter, columns, after))
        except (BagentError, duckdb.Error) as error:
            if not row_filter.sql:
                raise
            listed, problem = RowPage(), explain_error(error)
        return _page(
            "rows.html",
            request,
            run=viewed,
            status=200 if problem is None else 400,
            problem=problem,
            page=listed,
            columns=columns,
            filter=row_filter,
            after=after,
            endpoints=usual.endpoints,
            kinds=usual.kinds,
            stages=viewed.info().stages,
            statuses=list(STATUSES),
            sort_names=_sort_names(columns, usual.numeric),
        )

    async def count(self, request: web.Request) -> web.Response:
        """Answer with the number of rows of a filter."""
        viewed = self._viewed(request)
        row_filter = RowFilter.parse(request.query)
        key = ("count", row_filter.url())
        count = await viewed.tables.ask(lambda db: count_rows(db, row_filter), key=key)
        return web.json_response({"count": count})

    async def export(self, request: web.Request) -> web.StreamResponse:
        """Stream the rows of a filter as a file."""
        viewed = self._viewed(request)
        form = request.match_info["form"]
        row_filter = RowFilter.parse(request.query)
        await viewed.tables.ready()
        pieces = export(viewed.tables, row_filter, form)
        first = await asyncio.to_thread(next, pieces, b"")
        kind = "text/csv; charset=utf-8" if form == "csv" else "application/x-ndjson"
        response = web.StreamResponse(headers=_download(kind, f"{viewed.name}.{form}"))
        await response.prepare(request)
        try:
            while first:
                await response.write(first)
                first = await asyncio.to_thread(next, pieces, b"")
        finally:
            await asyncio.to_thread(pieces.close)
        return response

    async def row(self, request: web.Request) -> web.Response:
        """Answer with everything about one row."""
        viewed = self._viewed(request)
        key = _required_key(request)
        row_filter = RowFilter.parse(request.query)
        details = await viewed.tables.ask(lambda db: find_row(db, key))
        if details is None:
            raise UsageError("there is no such row in this run any more")
        before, after = await viewed.tables.ask(lambda db: neighbours(db, row_filter, key))
        work = asyncio.to_thread(_prompt_and_transcript, viewed, details)
        prompt, transcript = await work
        other, pieces = await self._other(request, key, details.result)
        return _page(
            "row.html",
            request,
            run=viewed,
            key=key,
            details=details,
            result=details.result,
            prompt=prompt,
            transcript=transcript,
            before=before,
            after=after,
            filter=row_filter,
            other=other,
            pieces=pieces,
            key_of=RowKey.of,
        )

    async def _other(
        self, request: web.Request, key: RowKey, result: Mapping[str, Any]
    ) -> tuple[dict[str, Any] | None, list[tuple[str, str]]]:
        """Return the same row of the compared run, and both answers word by word."""
        name = request.query.get("with", "")
        if not name:
            return None, []
        other_run = self._catalog.find(name)
        other = await other_run.tables.ask(lambda db: find_same(db, key))
        if other is None:
            return {"run": name, "status": None}, []
        texts = [answer_text(result), answer_text(other)]
        pieces = await asyncio.to_thread(word_diff, texts[0], texts[1])
        return {**other, "run": name}, [*pieces]

    async def text(self, request: web.Request) -> web.Response:
        """Answer with one whole text of a row as a file."""
        viewed = self._viewed(request)
        key = _required_key(request)
        name = request.query.get("column", "text")
        if name not in ("text", "reasoning", "output", "input", "error"):
            raise UsageError(f"{name} is no text of a row")
        details = await viewed.tables.ask(lambda db: find_row(db, key))
        if details is None:
            raise UsageError("there is no such row in this run any more")
        value = details.result[name]
        body = html.json_text(value if value is not None else "")
        headers = _download("text/plain; charset=utf-8", f"{name}.txt")
        return web.Response(body=body.encode("utf-8", "replace"), headers=headers)

    async def compare(self, request: web.Request) -> web.Response:
        """Answer with two runs side by side."""
        names = [request.query.get("a", ""), request.query.get("b", "")]
        if not all(names) or names[0] == names[1]:
            raise UsageError(
                "choose two runs to compare", hint="the list of runs has a box for each"
            )
        first, second = [self._catalog.find(name) for name in names]
        for viewed in (first, second):
            if not await viewed.tables.ready():
                raise UsageError(f"{viewed.name}: {viewed.tables.problem or 'no tables yet'}")
        after = RowKey.parse(request.query.get("after", ""))
        only = request.query.get("only", "different")
        with first.tables.results_file() as file_a, second.tables.results_file() as file_b:
            compare = partial(compare_runs, (file_a, file_b), only, after)
            folders = [file_a.parent, file_b.parent]
            comparison = await asyncio.to_thread(read_unchanged, folders, compare)
        return _page(
            "compare.html", request, first=first, second=second, comparison=comparison, only=only
        )

    def _viewed(self, request: web.Request) -> ViewedRun:
        return self._catalog.find(request.match_info["run"])


def _overview(db: ReportDb) -> dict[str, Any]:
    down = overview.down_endpoints(db)
    return {
        "causes": failures.causes(db),
        "throughput": overview.throughput(db, down),
        "endpoints": endpoints.endpoint_states(endpoints.endpoint_rows(db), down),
    }


async def _prospects(viewed: ViewedRun, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return what tells the time and cost of the rest of a run; empty without one, or tables."""
    tables = viewed.tables
    if state["state"] != "running" or not tables.version:
        return {}
    throughput = (await tables.ask(_overview, key="overview"))["throughput"]
    return {"throughput": throughput, "costs": await tables.ask(overview.costs, key="costs")}


class _Finding(NamedTuple):
    """What stands out, for people."""

    message: str
    more: str = ""
    """A second line; empty where there is none."""

    query: str = ""
    """The query string that lists its rows; empty where none can."""


def _find(viewed: ViewedRun, db: ReportDb) -> dict[str, list[_Finding]]:
    """Return what stands out by topic."""
    info = viewed.info()
    alike = failures.causes(db)
    last_stage = answer_stage(info)
    suspects = find_suspects(db, last_stage, answer_fields.property_names(info.answer_columns))
    in_prompt = names_in_prompts(info.job, files=viewed.run.is_own(info))
    traits = Traits(db, in_prompt, [suspect.condition for suspect in suspects])
    shared = fields.shared_by_suspects(traits, suspects)
    doubtful = [
        _Finding(
            suspect.message,
            f"What these rows share: {common}" if common else "",
            _suspect_filter(suspect),
        )
        for suspect, common in zip(suspects, shared, strict=True)
    ]
    if total := count_all(db, suspects):
        doubtful.append(_Finding(total))
    several = last_stage is not None

    def with_queries(findings: Sequence[fields.FieldFinding]) -> list[_Finding]:
        return [
            _Finding(each.message.removeprefix(WEAK), "", _finding_filter(each, several))
            for each in findings
        ]

    return {
        "Failures": with_queries(fields.shared_by_causes(traits, alike)),
        "Answers that may be wrong": doubtful,
        "Long answers": with_queries(fields.long_answers(traits)),
    }


def _prompt_and_transcript(viewed: ViewedRun, details: RowDetails) -> tuple[Any, Any]:
    prompt = viewed.prompts.render(details.result, details.parents)
    transcript = read_transcript(viewed.run, details.key, details.tool_calls)
    return prompt, transcript


def answer_text(result: Mapping[str, Any]) -> str:
    """Return the answer of a result for people: indented JSON, the text, or the error."""
    if result["output"] is not None:
        return html.pretty(result["output"])
    return str(result["text"] or result["error"] or "")


class _ListValues(NamedTuple):
    """What the list of rows and its menus have of all rows."""

    columns: RowColumns
    numeric: frozenset[str]
    """The properties of the answer that are numbers."""

    endpoints: list[str]
    kinds: list[str]

    @classmethod
    def of(cls, db: ReportDb) -> _ListValues:
        """Return those of the tables of a run."""
        kinds = answer_fields.answer_columns(db)
        numeric = frozenset(name for name, kind in kinds.items() if answer_fields.is_number(kind))
        return cls(row_columns(db), numeric, distinct(db, "endpoint"), distinct(db, "error_kind"))


def _sort_names(columns: RowColumns, numeric: frozenset[str]) -> dict[str, str]:
    """Return the name to sort by for each column of the list."""
    names = {
        name: (NUMBER_SORT if name in numeric else TEXT_SORT) + name for name in columns.answers
    }
    return {**names, "": TEXT_LENGTH}


def _test_filter(stage: str | None, test: FieldTest, **more: tuple[str, ...]) -> str:
    """Return the query string that lists the rows of a stage, or of all, that pass a test."""
    stages = () if stage is None else (stage,)
    return msgspec.structs.replace(RowFilter(stages=stages, tests=(test,)), **more).url()


def _bar_filter(
    stage: str | None, profile: answer_fields.FieldProfile, bar: answer_fields.FieldBar
) -> str:
    """Return the query string that lists the rows of a bar."""
    return _test_filter(stage, _bar_test(profile, bar))


def _bar_test(profile: answer_fields.FieldProfile, bar: answer_fields.FieldBar) -> FieldTest:
    if bar.value is not None:
        return FieldTest("answer", profile.name, "is", bar.value)
    if profile.name is None:
        return FieldTest("text", None, "length", None, bar.low, bar.high)
    operation = {"numbers": "between", "items": "items"}.get(profile.kind, "length")
    return msgspec.convert(["answer", profile.name, operation, None, bar.low, bar.high], FieldTest)


def _suspect_filter(suspect: Suspect) -> str:
    """Return the query string that lists the rows of answers that may be wrong."""
    test = _bar_test(suspect.profile, suspect.bar)
    if suspect.bar.value == "":
        test = FieldTest("answer", suspect.profile.name, "blank")
    endpoints = () if suspect.endpoint is None else (suspect.endpoint,)
    return _test_filter(suspect.stage, test, endpoints=endpoints)


def _finding_filter(finding: fields.FieldFinding, several_stages: bool) -> str:
    """Return the query string that lists the rows of a finding; empty where none can."""
    stat = finding.stat
    if stat is None or not stat.of_input or len(stat.value or "") >= LONGEST_VALUE:
        return ""
    test = FieldTest("input", stat.field, "missing")
    if stat.low is not None and stat.high is not None:
        units = {"characters": "length", "items": "items"}
        end = math.nextafter(stat.high, math.inf) if stat.unit == "" else stat.high + 1
        operation = units.get(stat.unit, "between")
        test = msgspec.convert(["input", stat.field, operation, None, stat.low, end], FieldTest)
    elif stat.value is not None:
        test = FieldTest("input", stat.field, "is", stat.value)
    causes = () if finding.cause is None else (finding.cause,)
    return _test_filter(stat.stage if several_stages else None, test, causes=causes)


def _missing_filter(stage: str | None, profile: answer_fields.FieldProfile) -> str:
    return _test_filter(stage, FieldTest("answer", profile.name, "missing"))


async def _events(viewed: ViewedRun) -> AsyncIterator[bytes]:
    """Yield the state whenever it changed."""
    last: Any = None
    while True:
        started = time.monotonic()
        state = await asyncio.to_thread(viewed.state)
        running = state["state"] == "running"
        viewed.tables.renew_if_due(running=running)
        prospects = await _prospects(viewed, state)
        values = {**live_values(state, prospects), "version": viewed.tables.version}
        if values != last:
            yield b"data: " + msgspec.json.encode(values) + b"\n\n"
            last = values
        else:
            yield b": alive\n\n"
        pause = EVENT_SECONDS if running else IDLE_SECONDS
        await asyncio.sleep(max(pause, EVENT_SHARE * (time.monotonic() - started)))


def live_values(state: Mapping[str, Any], prospects: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a page shows of a state, as text where it is for people.

    Args:
        state: as :func:`bagent.runs.run_state.describe` returns it.
        prospects: ``throughput`` and ``costs`` of a run that goes on, by its tables, or nothing.
    """
    eta, cost, speed, remaining = (
        state[name] for name in ("eta_s", "cost_usd", "rows_per_s", "remaining")
    )
    over, costs = prospects.get("throughput"), prospects.get("costs")
    times = seconds_range(over, remaining) if remaining and over else None
    at_end = None
    if remaining and costs:
        spent, squares, answers = costs
        at_end = cost_range(spent, squares, answers, remaining)
        if at_end is not None and cost is not None:
            newer = max(0.0, cost - spent)  # the tables are older than the state
            at_end = (at_end[0] + newer, at_end[1] + newer)
    counts = {name: state[name] for name in ("ok", "accepted", "failed")}
    total = sum(counts.values()) + (remaining or 0)
    return {
        "state": state["state"],
        **counts,
        **{f"{name}_share": html.share(count, total) for name, count in counts.items()},
        "remaining": remaining,
        "eta": _range(times, duration) or ("" if eta is None else duration(eta)),
        "cost": "" if cost is None else money(cost),
        "cost_at_end": _range(at_end, money),
        "speed": "" if speed is None else rate(speed),
        "tokens": state["completion_tokens"],
    }


def _range(bounds: tuple[float, float] | None, write: Callable[[float], str]) -> str:
    if bounds is None:
        return ""
    low, high = map(write, bounds)
    return low if low == high else f"{low} to {high}"


def _required_key(request: web.Request) -> RowKey:
    key = RowKey.parse(request.query.get("key", ""))
    if key is None:
        raise UsageError("the address names no row")
    return key


def _download(kind: str, name: str) -> dict[str, str]:
    plain = "".join(
        char if (char.isascii() and char.isalnum()) or char in "-_." else "_" for char in name
    )
    return {
        "Content-Type": kind,
        "Content-Disposition": f'attachment; filename="{plain}"',
    }


def _base(request: web.Request) -> str:
    return f"/{request.path.split('/')[1]}"


def explain_error(error: BagentError | duckdb.Error) -> tuple[str, str]:
    """Return the message and the hint for an error."""
    if isinstance(error, BagentError):
        return error.message, getattr(error, "hint", "") or ""
    if isinstance(error, duckdb.InterruptException):
        return "the query took too long and was stopped", "narrow the filter"
    return str(error).splitlines()[0], ""


def _page(template: str, request: web.Request, *, status: int = 200, **values: Any) -> web.Response:
    run = values.get("run")
    here = f"{_base(request)}/run/{quote(run.name, safe='')}" if run is not None else ""
    text = html.template_page(TEMPLATES, template, base=_base(request), here=here, **values)
    return web.Response(text=text, content_type="text/html", status=status)
