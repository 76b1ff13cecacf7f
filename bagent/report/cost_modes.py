"""What the job's measured tokens cost by each way to send it."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from bagent.money.prices import ModeCost, Spent, StagePrice, costs_of, together
from bagent.observe.formatting import counted
from bagent.report.html import Html, note, section, table
from bagent.report.queries import ANSWERED, ReportDb
from bagent.types import Json

SPENT = f"""
    select stage, count(*) as answers,
           case when count(prompt_tokens) = count(*) then sum(prompt_tokens)::bigint end as prompt,
           case when count(cached_tokens) = count(*) then sum(cached_tokens)::bigint end as cached,
           case when count(completion_tokens) = count(*)
                then sum(completion_tokens)::bigint end as completion,
           case when count(cost_usd) = count(*) then sum(cost_usd) end as cost_usd
    from results where {ANSWERED} group by stage"""
"""Tokens by stage; null where one answer's are not known: a part of a sum is no sum."""


def by_mode(ask: ReportDb, prices: Sequence[Json]) -> Sequence[ModeCost]:
    """The table of all stages together; empty where no mode has a known cost.

    Args:
        prices: those of run.json, one of each stage.
    """
    known = {one.stage: one for one in map(_stage_price, prices)}
    parts, rows = [], 0
    for stage in ask.rows(SPENT):
        price = known.get(stage["stage"], StagePrice(stage["stage"]))
        gpu = stage["cost_usd"] if price.gpu_hour is not None else None
        spent = Spent(stage["prompt"], stage["cached"], stage["completion"], gpu)
        parts.append(costs_of(price.price, spent))
        rows += stage["answers"]
    found = together(parts, rows)
    return found if any(one.usd is not None for one in found) else ()


def _stage_price(value: Json) -> StagePrice:
    return msgspec.convert(value, StagePrice)


def modes(ask: ReportDb, prices: Sequence[Json]) -> Html:
    """The section; nothing where no price is known."""
    found = by_mode(ask, prices)
    if not found:
        return Html("")
    rows = [
        {
            "mode": one.mode,
            "cost_usd": one.usd,
            "per_thousand_usd": one.per_thousand,
            "": one.how,
        }
        for one in found
    ]
    words = "By the tokens that this run measured. Empty: no price, or not counted."
    sources = dict.fromkeys(
        f"{one.price.source} ({one.price.date})" if one.price.date else one.price.source
        for one in map(_stage_price, prices)
        if one.price is not None
    )
    if sources:
        words += f" {counted(len(sources), 'price')} from: {', '.join(sources)}."
    return section("This job by mode", note(words), table(rows))
