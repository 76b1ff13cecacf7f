"""The short sections of a run's page: stages, tools and turns, and cost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from bagent.money.prices import ModeCost, StagePrice, StageUsage, mode_costs, sum_costs
from bagent.observe.formatting import counted
from bagent.report.html import Html, heading, note, section, table
from bagent.report.queries import ANSWERED, STAGE, ReportDb
from bagent.report.svg import meter
from bagent.store.tables.schema import same_unit
from bagent.types import Json

MOST_STAGES = 60


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
            from results group by stage order by began, stage limit {MOST_STAGES}"""
    )
    return sorted(rows, key=lambda row: positions.get(row["stage"], len(positions)))


def stage_findings(rows: list[dict[str, Any]]) -> list[str]:
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


MOST_ROWS = 12
FEWEST = 3
OFTEN = 0.1
"""A tool has a finding from this number and this share of failed calls on."""

_OF = """t.row = m.row and t.stage = m.stage and t.answer = m.answer
    and coalesce(t.id = m.id, true)"""
"""SQL: an attempt or call ``t`` of a row ``m``; runs of earlier versions have no ids there."""


def tool_findings(calls: list[dict[str, Any]]) -> list[str]:
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
                where turns > 1 order by turns desc, latency_ms desc, row limit {MOST_ROWS}),
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


SPENT = f"""
    select stage, count(*) as answers,
           case when count(prompt_tokens) = count(*) then sum(prompt_tokens)::bigint end as prompt,
           case when count(cached_tokens) = count(*) then sum(cached_tokens)::bigint end as cached,
           case when count(completion_tokens) = count(*)
                then sum(completion_tokens)::bigint end as completion,
           case when count(cost_usd) = count(*) then sum(cost_usd) end as cost_usd
    from results where {ANSWERED} group by stage"""
"""Tokens by stage; null where those of one answer are not known."""


def _mode_costs(db: ReportDb, prices: Sequence[Json]) -> Sequence[ModeCost]:
    """The cost of all stages together by mode; empty where none is known."""
    prices_by_stage = {price.stage: price for price in map(_stage_price, prices)}
    parts, rows = [], 0
    for stage in db.rows(SPENT):
        price = prices_by_stage.get(stage["stage"], StagePrice(stage["stage"]))
        gpu = stage["cost_usd"] if price.gpu_hour is not None else None
        spent = StageUsage(stage["prompt"], stage["cached"], stage["completion"], gpu)
        parts.append(mode_costs(price.price, spent))
        rows += stage["answers"]
    costs = sum_costs(parts, rows)
    return costs if any(price.usd is not None for price in costs) else ()


def _stage_price(value: Json) -> StagePrice:
    return msgspec.convert(value, StagePrice)


def by_mode(db: ReportDb, prices: Sequence[Json]) -> Html:
    """Make the section of modes; empty where no price is known.

    Args:
        prices: those of run.json, one of each stage.
    """
    costs = _mode_costs(db, prices)
    if not costs:
        return Html("")
    rows = [
        {
            "mode": cost.mode,
            "cost_usd": cost.usd,
            "per_thousand_usd": cost.per_thousand,
            "": cost.how,
        }
        for cost in costs
        if cost.usd is not None
    ]
    explanation = "By the tokens that this run measured; modes without a known price are left out."
    sources = dict.fromkeys(
        f"{cost.price.source} ({cost.price.date})" if cost.price.date else cost.price.source
        for cost in map(_stage_price, prices)
        if cost.price is not None
    )
    if sources:
        explanation += f" {counted(len(sources), 'price')} from: {', '.join(sources)}."
    return section("This job by mode", note(explanation), table(rows))


def cost(db: ReportDb, sums: dict[str, Any]) -> Html:
    """Make the section of money by stage, model and endpoint; empty where no price is known."""
    if sums["cost_usd"] is None:
        return Html("")
    rows = db.rows(
        f"""select {STAGE} as stage, model, endpoint, count(cost_usd) as answers,
                  sum(cost_usd) as cost_usd, 1000 * avg(cost_usd) as per_thousand_usd
           from results where cost_usd is not null
           group by results.stage, model, endpoint order by cost_usd desc limit 30"""
    )
    parts: Sequence[Html] = [table(rows)]
    if sums["without_cost"]:
        parts = [note(f"{sums['without_cost']:,} answers have no known cost."), *parts]
    return section("Cost", *parts)
