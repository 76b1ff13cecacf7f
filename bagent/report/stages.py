"""The section that compares the stages of a run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bagent.report.html import Html, note, section, table
from bagent.report.queries import ANSWERED, ReportDb
from bagent.report.svg import meter

MOST = 60


def stage_rows(db: ReportDb, order: Sequence[str]) -> list[dict[str, Any]]:
    """Return every stage with its numbers: first those in ``order``, then by when they began."""
    positions = {name: index for index, name in enumerate(order)}
    rows = db.rows(
        f"""select stage, count(distinct row) as "rows", count(*) as results,
                   count(*) filter (status = 'ok') as ok,
                   count(*) filter (error_kind is not null) as failed,
                   100.0 * count(*) filter (error_kind is not null) / count(*) as failed_percent,
                   count(*) filter (parents_failed > 0) as with_failed_parents,
                   count(*) filter (copied_from is not null) as copied,
                   mode(error_kind) as most_error,
                   case when max(turns) > 1 then avg(turns) filter (turns > 0) end as turns,
                   quantile_disc(latency_ms, 0.5) filter ({ANSWERED}) as p50_ms,
                   avg(prompt_tokens) as prompt_tokens, avg(completion_tokens) as answer_tokens,
                   sum(cost_usd) as cost_usd, min(coalesce(started_at, finished_at)) as began,
                   max(finished_at) as ended
            from results group by stage order by began, stage limit {MOST}"""
    )
    return sorted(rows, key=lambda row: positions.get(row["stage"], len(positions)))


def findings(rows: list[dict[str, Any]]) -> list[str]:
    """Describe the stages with many failures."""
    if len(rows) < 2:
        return []
    messages = []
    for row in rows:
        if row["failed"] == row["results"]:
            messages.append(f"stage {row['stage']} has no good row: all {row['results']:,} failed")
        elif row["failed_percent"] > 10:
            messages.append(
                f"stage {row['stage']}: {row['failed']:,} of {row['results']:,} rows"
                f" ({row['failed_percent']:.3g} %) failed, mostly {row['most_error']}"
            )
        if row["with_failed_parents"]:
            messages.append(
                f"stage {row['stage']}: {row['with_failed_parents']:,} of {row['results']:,} rows"
                " were made of rows some of which had failed"
            )
    return messages[:6]


def stages(rows: list[dict[str, Any]], sums: dict[str, Any]) -> Html:
    """Make the section; empty where there is one stage."""
    if len(rows) < 2:
        return Html("")
    seconds = max(sums["seconds"], 1e-9)
    table_rows = []
    for row in rows:
        cells = {k: v for k, v in row.items() if k not in ("began", "ended")}
        for name in ("with_failed_parents", "copied", "failed_percent"):
            if not any(other[name] for other in rows):
                del cells[name]
        if all(other["rows"] == other["results"] for other in rows):
            del cells["results"]
        if row["began"] is not None and row["ended"] is not None:
            low, high = ((row[at] - sums["began"]) / seconds for at in ("began", "ended"))
            cells["at work"] = meter(high, low)
        table_rows.append(cells)
    explanation = (
        "Tokens are means of a row; at work: from the first row's start to the last one's end."
    )
    return section("Stages", note(explanation), table(table_rows))
