"""The section on tools and turns."""

from __future__ import annotations

from typing import Any

from bagent.report.html import Html, heading, note, section, table
from bagent.report.queries import STAGE, ReportDb
from bagent.store.tables.schema import same_unit

MOST = 12
FEWEST = 3
OFTEN = 0.1
"""A tool has a finding from this number and this share of failed calls on."""

_OF = """t.row = m.row and t.stage = m.stage and t.answer = m.answer
    and coalesce(t.id = m.id, true)"""
"""SQL: an attempt or call ``t`` of a row ``m``; runs of earlier versions have no ids there."""


def findings(calls: list[dict[str, Any]]) -> list[str]:
    """Describe the tools that fail often."""
    return [
        f"{row['failed']:,} of {row['calls']:,} calls of {row['name']} failed"
        + f": mostly {row['commonest_error']}" * (row["commonest_error"] != "failed")
        for row in calls
        if row["failed"] >= FEWEST and row["failed"] > OFTEN * row["calls"]
    ][:4]


def agents(db: ReportDb, calls: list[dict[str, Any]]) -> Html:
    """Make the section; empty where no row had a second turn and no tool was called."""
    turns = db.rows(
        f"""select {STAGE} as stage, turns, count(*) as "rows",
                  count(*) filter (status = 'ok') as ok, avg(completion_tokens) as answer_tokens,
                  quantile_disc(latency_ms, 0.5) as whole_p50_ms
           from results where turns > 0 and stage in (select stage from tool_calls
                union select stage from results where turns > 1)
           group by results.stage, turns order by results.stage, turns limit 60"""
    )
    if not calls and not turns:
        return Html("")
    explanation = "A turn is one request of a row: after tools, or to ask again for a valid answer."
    return section(
        "Tools and turns" if calls else "Turns",
        table(calls),
        heading("rows by their number of turns") if turns else "",
        note(explanation),
        table(turns),
        _longest(db),
        name="tools",
    )


def tool_rows(db: ReportDb) -> list[dict[str, Any]]:
    """Return every tool with its calls, the most called first."""
    return db.rows(
        """select name, count(*) as calls, count(distinct (row, stage, id, answer)) as "rows",
                  count(*) filter (shared) as shared, count(*) filter (cached) as cached,
                  count(error) as failed, quantile_disc(latency_ms, 0.5) as p50_ms,
                  quantile_disc(latency_ms, 0.99) as p99_ms,
                  left(mode(error), 200) as commonest_error
           from tool_calls group by name order by calls desc limit 40"""
    )


def _longest(db: ReportDb) -> Html:
    """The rows with most turns: their tools, and how long model and tools took."""
    rows = db.rows(
        f"""with most as (
                select id, row, stage, {STAGE} as shown_stage, answer, status, error_kind, turns,
                       latency_ms from results
                where turns > 1 order by turns desc, latency_ms desc, row limit {MOST}),
            called as (
                select m.row, m.stage, m.id, m.answer, sum(t.latency_ms) as tools_ms,
                       left(string_agg(name, ', ' order by started), 160) as tools
                from most as m join tool_calls as t on {_OF} group by all),
            asked as (
                select m.row, m.stage, m.id, m.answer, sum(t.done - t.sent) * 1000 as model_ms
                from most as m join attempts as t on {_OF} group by all)
            select coalesce(most.id, 'row ' || most.row) as id, shown_stage as stage, status,
                   error_kind, turns, tools, latency_ms as whole_ms, model_ms, tools_ms
            from most left join called on {same_unit("called", "most")}
                 left join asked on {same_unit("asked", "most")}
            order by turns desc, latency_ms desc, most.row"""
    )
    if not rows:
        return Html("")
    calls = any(row["tools_ms"] is not None for row in rows)
    explanation = "The whole may be less than model and tools together: calls run side by side."
    return Html(
        heading("rows with most turns") + (note(explanation) if calls else "") + table(rows)
    )
