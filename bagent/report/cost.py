"""The sections on cost: what was spent, and what each way to send the job would cost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from bagent.money.prices import ModeCost, StagePrice, StageUsage, mode_costs, sum_costs
from bagent.observe.formatting import counted
from bagent.report.html import Html, note, section, table
from bagent.report.queries import ANSWERED, STAGE, ReportDb
from bagent.types import Json

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
