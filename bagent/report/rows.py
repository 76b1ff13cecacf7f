"""The sections of single rows: the slowest, the longest, and a searchable sample."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from bagent.duck import literal
from bagent.observe.formatting import visible
from bagent.report.html import Html, block, heading, note, section, table, text
from bagent.report.queries import STAGE, ReportDb
from bagent.store.tables.schema import same_unit
from bagent.types import row_location

MOST = 12
SAMPLE = 300
SEED = 11
STAGES = 30
"""Stages that the sample covers."""
INPUT_CHARACTERS = 700
ANSWER_CHARACTERS = 1600
PAGE_CHARACTERS = 900_000
"""Characters of the whole sample, so that the page stays under 2 MB, escapes included."""

CELL_CHARACTERS = 110
"""Characters of an answer in the tables of slowest and longest rows."""

_COLUMNS = f"""coalesce(id, 'row ' || row) as id, {STAGE} as stage, status, endpoint,
    attempts, queue_ms, ttft_ms, latency_ms, prompt_tokens,
    completion_tokens, left(coalesce(text, error), {4 * CELL_CHARACTERS}) as answer"""


def extremes(db: ReportDb) -> Html:
    """Make the section of the slowest rows and the longest answers."""
    slowest = db.rows(
        f"select {_COLUMNS} from results where latency_ms is not null"
        f" order by latency_ms desc, row limit {MOST}"
    )
    longest = db.rows(
        f"select {_COLUMNS} from results where completion_tokens is not null"
        f" order by completion_tokens desc, row limit {MOST}"
    )
    if not slowest and not longest:
        return Html("")
    for row in (*slowest, *longest):
        row["answer"] = visible(row["answer"] or "", CELL_CHARACTERS)
    return section(
        "Slowest and longest rows",
        heading("slowest") if slowest else "",
        table(slowest),
        heading("longest answers") if longest else "",
        table(longest),
    )


def sample(db: ReportDb, doubtful: Sequence[str] = ()) -> Html:
    """Make the section of rows with input and answer.

    Up to a third of them failed, and up to a fifth have answers that may be wrong.

    Args:
        db: the tables of a run.
        doubtful: SQL over ``results`` of answers that may be wrong.
    """
    db.run(
        "create or replace temp table picked (stage varchar, row bigint, id varchar, answer bigint)"
    )
    for condition, count in _shares(db, doubtful):
        db.run(
            "insert into picked select stage, row, id, answer from (select stage, row, id, answer"
            f" from results where ({condition}) and not exists (from picked where"
            f" {same_unit('results', 'picked')})) using sample reservoir({count} rows)"
            f" repeatable ({SEED})"
        )
    rows = db.rows(
        f"""select id, row, source, line, stage, answer, status, error_kind, endpoint, latency_ms,
                   completion_tokens, left(input::varchar, {INPUT_CHARACTERS + 1}) as input,
                   left(coalesce(text, output::varchar), {ANSWER_CHARACTERS + 1}) as shown,
                   left(error, {ANSWER_CHARACTERS + 1}) as error
            from results semi join picked on {same_unit("results", "picked")}
            order by row, stage, id, answer limit {SAMPLE}"""
    )
    if not rows:
        return Html("")
    parts, remaining = [], PAGE_CHARACTERS
    for row in rows:
        part = _row(row)
        if len(part) > remaining:
            continue
        remaining -= len(part)
        parts.append(part)
    return section(
        "Rows",
        note(_drawn(db, doubtful)),
        Html(
            '<input type="search" id="find" placeholder="search in these rows" aria-label="search">'
        ),
        Html(
            f'<p class="note" id="shown">{len(parts)} of {len(parts)} rows of the sample</p>'
            '<div id="rows">'
        ),
        *parts,
        Html("</div>"),
        name="sample",
    )


def _drawn(db: ReportDb, doubtful: Sequence[str]) -> str:
    """Say what the sample is made of."""
    total, drawn = (
        db.row(
            'select count(*) as "rows", count(*) filter (error_kind is not null) as failed,'
            f" count(*) filter ({_any(doubtful)}) as doubtful from {source}"
        )
        for source in ("results", f"results semi join picked on {same_unit('results', 'picked')}")
    )
    if drawn["rows"] == total["rows"]:
        return "All rows."
    parts = [
        f"{drawn[name]:,} of {total[name]:,} {label}"
        for name, label in (("failed", "failed rows"), ("doubtful", "doubtful answers"))
        if total[name]
    ]
    others = drawn["rows"] - drawn["failed"] - drawn["doubtful"]
    made_of = ", ".join([*parts, f"{others:,} others"])
    return (
        f"A sample of {total['rows']:,} rows: {made_of}. Each group is drawn at random;"
        " bagent results shows all rows."
    )


def _any(conditions: Sequence[str]) -> str:
    """Return SQL for rows of any condition."""
    return " or ".join(f"({condition})" for condition in conditions) or "false"


def _shares(db: ReportDb, doubtful: Sequence[str]) -> list[tuple[str, int]]:
    """Return SQL conditions and how many rows to draw of each; every stage has its share.

    Rows that an earlier condition drew are not drawn again.
    """
    stages = [row["stage"] for row in db.rows("select distinct stage from results order by 1")]
    stages = stages[:STAGES]
    most = SAMPLE // max(1, len(stages))
    return [
        (f"stage = {literal(stage)} and ({condition})", count)
        for stage in stages
        for condition, count in (
            ("error_kind is not null", most // 3),
            *((each, max(1, most // 5 // len(doubtful))) for each in doubtful),
            ("error_kind is null", most - most // 3 - most // 5 * bool(doubtful)),
        )
    ]


def _row(row: dict[str, Any]) -> Html:
    ok = row["error_kind"] is None
    name = row["id"] if row["id"] is not None else f"row {row['row']}"
    labels = [row["stage"], row["endpoint"], row["error_kind"]]
    location = row_location(row["source"], row["line"])
    parts = [
        f'<div class="note">{escape(" · ".join(str(w) for w in (location, *labels) if w))}</div>'
    ]
    for title, value, most in (
        ("input", row["input"], INPUT_CHARACTERS),
        ("answer", row["shown"], ANSWER_CHARACTERS),
        ("error", row["error"], ANSWER_CHARACTERS),
    ):
        if value is not None:
            parts.append(f'<div class="note">{title}</div>{block(value, most)}')
    mark = f'<span class="{"ok" if ok else "not"}">{text(row["status"])}</span>'
    head = f"{mark} <b>{text(name, 120)}</b> {text(row['shown'] or row['error'], 100)}"
    return Html(f"<details><summary>{head}</summary>{''.join(parts)}</details>")
