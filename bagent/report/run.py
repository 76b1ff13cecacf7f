"""The page of a run."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from bagent.observe.formatting import milliseconds, visible
from bagent.report import answer_fields, endpoints, failures, fields, html, overview, rows, sections
from bagent.report.field_stats import Traits
from bagent.report.html import (
    Finding,
    Html,
    block,
    date_time,
    heading,
    note,
    number,
    part,
    section,
    table,
    text,
)
from bagent.report.overview import down_endpoints, throughput
from bagent.report.queries import (
    ANSWERED,
    FIRST_IDS,
    WEAK,
    ReportDb,
    quantiles,
    results_command,
)
from bagent.report.suspects import Suspect, count_all, find_suspects
from bagent.report.svg import histogram
from bagent.types import Json

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

ALIKE = 1.05
"""Endpoints whose times differ by a smaller factor take about the same time."""


PROMPTS = 40
CHARACTERS = 20_000
"""Texts of the job that are shown, and characters of each."""


class EarlierJob(msgspec.Struct, frozen=True):
    """The job of a run until it changed, while finished rows were kept."""

    until: float
    """When it changed, in Unix seconds."""
    changed: str
    """What changed: ``prompt, schema``."""
    prompts: Sequence[tuple[str, str]]
    """(owner, text) of each prompt."""


class ReportInfo(msgspec.Struct, frozen=True):
    """What the page shows beyond the tables."""

    name: str
    facts: Sequence[tuple[str, str]] = ()
    """(label, value) below the heading."""

    stages: Sequence[str] = ()
    """The names of the stages in order."""

    in_prompt: frozenset[str] | None = None
    """The names that prompts use; None where they are not known, or use the whole row."""

    prices: Sequence[Json] = ()
    """Those of each stage, as run.json holds them."""

    prompts: Sequence[tuple[str, str]] = ()
    """(owner, text) of each prompt, without secrets."""

    settings: str = ""
    """The other settings of the job as YAML, without secrets."""

    earlier: Sequence[EarlierJob] = ()
    """The jobs before each change, oldest first."""

    mending: Mapping[str, tuple[str, str]] = {}
    """What to change for each kind of failure, and the command that mends it."""

    worked_s: float | None = None
    """How long the run worked, without the pauses between its starts; None where unknown."""

    rows_per_s: float | None = None
    """Rows of the last stage a second, as ``status`` has it; None where unknown."""

    run: str = ""
    """The run as a command names it; empty where commands are not wanted."""

    properties: Mapping[str, str] = {}
    """The property of each column of ``answers``; other columns hold the whole answer."""

    @property
    def last_stage(self) -> str | None:
        """The last of several stages; None where there is one."""
        return self.stages[-1] if len(self.stages) > 1 else None


def make_page(connection: DuckDBPyConnection, about: ReportInfo) -> str:
    """Make the page.

    Args:
        connection: with the views of :func:`bagent.store.query.connect`.
        about: the run.

    Raises:
        duckdb.Error: the tables cannot be read.
    """
    db = ReportDb(connection)
    sums = totals(db)
    if not sums["rows"]:
        return _page(about, [Html("<p>No row has ended yet.</p>")])
    served, down = endpoints.endpoint_rows(db), down_endpoints(db)
    by_stage = sections.stage_rows(db, about.stages)
    alike, failed = failures.causes(db), failures.failed_rows(db)
    suspects = find_suspects(db, about.last_stage, about.properties)
    traits = Traits(db, about.in_prompt, [suspect.condition for suspect in suspects])
    calls = sections.tool_rows(db)

    shared = [fields.shared(traits, number) for number in range(failures.FAULTS)]
    reported = {key for group in shared for key in group.fields}
    by_topic: dict[str, Sequence[Finding | str]] = {
        "Endpoints": endpoints.findings(served, down) or _no_slow_one(served),
        "Failures": [
            *sections.stage_findings(by_stage),
            *failures.findings(alike, failed, sums, [group.text for group in shared]),
            *fields.failing(traits, reported),
        ],
        "Answers that may be wrong": _suspects(db, about.run, traits, suspects),
        "Long answers": [each.message for each in fields.long_answers(traits)],
        "Tools": sections.tool_findings(calls),
    }
    earlier = _rows_of_earlier_jobs(db, about.earlier)
    parts = [
        overview.headline(db, sums, about.worked_s, about.rows_per_s),
        _findings(by_topic),
        failures.failures(db, alike, failed, sums, mending=about.mending, run=about.run),
        _answers(db, about),
        sections.stages(by_stage, sums),
        overview.timeline(throughput(db, down)),
        distributions(db),
        endpoints.endpoints(db, served, down),
        fields.fields(traits),
        sections.agents(db, calls),
        sections.cost(db, sums),
        sections.by_mode(db, about.prices),
        rows.extremes(db),
        rows.sample(db, [suspect.condition for suspect in suspects]),
        _job(about, earlier),
    ]
    facts = list(about.facts)
    if sums["began"] is not None:
        began, ended = (date_time(sums[at]) for at in ("began", "ended"))
        facts.append(("rows from", f"{began} to {ended}"))
    for job, count in earlier:
        ended_before = f"{count:,} of {sums['rows']:,} {sums['unit']} ended before it"
        facts.append((f"{job.changed} changed", f"{date_time(job.until)}, {ended_before}"))
    return _page(ReportInfo(about.name, facts), parts)


def _rows_of_earlier_jobs(db: ReportDb, jobs: Sequence[EarlierJob]) -> list[tuple[EarlierJob, int]]:
    """Return each job that some results are of, with how many ended before it changed."""
    ended = "select count(*) as n from results where finished_at < "
    counts = [db.row(f"{ended}{job.until!r}")["n"] for job in jobs]
    befores = [0, *counts]
    return [
        (job, count)
        for job, count, before in zip(jobs, counts, befores, strict=False)
        if count > before
    ]


def _job(about: ReportInfo, earlier: Sequence[tuple[EarlierJob, int]]) -> Html:
    """The prompts before rows are put in, those of earlier jobs too, and the settings."""
    texts = [(f"prompt: {owner}", text) for owner, text in about.prompts[:PROMPTS]]
    for job, _ in reversed(earlier):
        texts += [
            (f"prompt until {date_time(job.until)}: {owner}", text)
            for owner, text in job.prompts[:PROMPTS]
            if (owner, text) not in about.prompts
        ]
    if about.settings:
        texts.append(("settings that differ from the defaults", about.settings))
    parts = [Html(heading(title) + block(text, CHARACTERS)) for title, text in texts]
    return section("The job", *parts, name="job")


def _suspects(db: ReportDb, run: str, traits: Traits, suspects: Sequence[Suspect]) -> list[Finding]:
    """Describe the answers of the last stage that may be wrong, with what their rows share."""
    described = []
    for suspect, common in zip(suspects, fields.shared_by_suspects(traits, suspects), strict=True):
        rows = db.row(
            f"select {FIRST_IDS} as ids, count(*) as n from results where {suspect.condition}"
        )
        described.append(
            Finding(
                suspect.message + f" | What these rows share: {common}" * bool(common),
                rows["ids"] or [],
                rows["n"],
                results_command(run, suspect.where(db)),
            )
        )
    total = count_all(db, suspects)
    return [*described, Finding(total)] if total else described


def _answers(db: ReportDb, about: ReportInfo) -> Html:
    """The distribution of every property of the answers, or the lengths of their texts."""
    last = about.last_stage
    names = about.properties
    profiles = answer_fields.profile_answers(db, last, names)
    title = "the answer" if names else "the text"
    cards = [part("field_card", p, title if p.name is None else p.name) for p in profiles]
    stage = note(f"Answers of the stage {last}.") if last and cards else Html("")
    fields = html.join([Html('<div class="fields">'), *cards, Html("</div>")])
    return section("Answers", stage, fields if cards else "", name="answers")


def _no_slow_one(served: Sequence[dict[str, Any]]) -> list[str]:
    slower = [row["slower"] for row in served if row["slower"] is not None]
    if len(slower) < 2:
        return []
    most = max(slower)
    if most < ALIKE:
        return ["no endpoint stands out: all take about the same time"]
    return [f"no endpoint stands out: the slowest takes {most:.1f} times the others' time"]


def _findings(by_topic: Mapping[str, Sequence[Finding | str]]) -> Html:
    """What stands out, by topic; `` | `` separates the lines of one finding."""
    findings = {
        title: [each if isinstance(each, Finding) else Finding(each) for each in topic]
        for title, topic in by_topic.items()
    }
    parts = []
    for title, topic in findings.items():
        if topic:
            items = "".join(map(_item, {each.message: each for each in topic}.values()))
            parts.append(Html(f'{heading(title)}<ul class="findings">{items}</ul>'))
    if any(each.message.startswith(WEAK) for topic in findings.values() for each in topic):
        parts.append(note("Weak: shown by few rows only, or by what many other rows have too."))
    return section("What stands out", *(parts or [note("Nothing.")]))


def _item(finding: Finding) -> str:
    weak = " class=weak" * finding.message.startswith(WEAK)
    some = part("some_rows", finding.ids, finding.rows, finding.command)
    return f"<li{weak}>{_lines(finding.message)}{some}</li>"


def _lines(message: str) -> str:
    return "<br>".join(text(part, 500) for part in message.split(" | "))


def _page(about: ReportInfo, parts: Sequence[Html]) -> str:
    facts = " · ".join(f"{label} {visible(value, 120)}" for label, value in about.facts)
    made = note(f"Times of day are UTC. Made {date_time(time.time())} UTC.")
    return html.page(about.name, [note(facts), *parts, made], script="page.js")


TOTALS = f"""
    select count(*) as "rows", count(*) filter (status = 'ok') as ok,
           count(*) filter (error_kind is not null) as failed,
           count(distinct stage) as stages, max(answer) > 0 as several_answers,
           count(*) filter (copied_from is not null) as copied,
           count(*) filter ({ANSWERED}) as answered,
           min(started_at) as began, max(finished_at) as ended,
           sum(prompt_tokens)::bigint as prompt_tokens, sum(cached_tokens)::bigint as cached_tokens,
           sum(completion_tokens)::bigint as completion_tokens, sum(cost_usd) as cost_usd,
           count(*) filter (cost_usd is null and {ANSWERED}) as without_cost,
           sum(attempts)::bigint as attempts, avg(latency_ms) as latency_ms
    from results"""


def totals(db: ReportDb) -> dict[str, Any]:
    """Return counts and sums over all rows; ``unit`` is what ``rows`` counts."""
    sums = db.row(TOTALS)
    several = "answers" if sums["several_answers"] else "rows"
    sums["unit"] = "results" if sums["stages"] > 1 else several
    sums["ended"] = sums["ended"] or sums["began"]
    began = sums["began"] if sums["began"] is not None else sums["ended"]
    sums["began"] = began
    sums["seconds"] = max(0.0, sums["ended"] - began) if began is not None else 0.0
    return sums


_TIMES = {"latency_ms": "whole answer", "ttft_ms": "first token", "queue_ms": "waiting before it"}
_TOKENS = {
    "prompt_tokens": "prompt tokens",
    "completion_tokens": "answer tokens",
    "reasoning_tokens": "reasoning tokens",
}


def distributions(db: ReportDb) -> Html:
    """How long answers took and how long they are."""
    source = f"(select * from results where {ANSWERED})"
    times = [_quantiles(db, c, label, source, "_ms") for c, label in _TIMES.items()]
    tokens = [_quantiles(db, c, label, source, "") for c, label in _TOKENS.items()]
    charts = [
        histogram(f"rows by time to the {label}", db.bins(column, source), milliseconds)
        for column, label in list(_TIMES.items())[:2]
    ]
    charts += [
        histogram(f"rows by {label}", db.bins(column, source, whole=True), number)
        for column, label in list(_TOKENS.items())[:2]
    ]
    if not any(row["answers"] for row in (*times, *tokens)):
        return Html("")
    return section(
        "Latency and tokens",
        note("The bins of the charts grow by a constant factor."),
        table([row for row in times if row["answers"]]),
        table([row for row in tokens if row["answers"]]),
        html.charts(*charts),
    )


def _quantiles(db: ReportDb, column: str, label: str, source: str, unit: str) -> dict[str, Any]:
    row = db.row(f"select count({column}) as answers, {quantiles(column)} from {source}")
    answers = row.pop("answers")
    return {"": label, "answers": answers, **{f"{k}{unit}": v for k, v in row.items()}}
