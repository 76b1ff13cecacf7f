"""The top of the page: what came out, how fast, what it cost; the run over time."""

from __future__ import annotations

import time
from collections.abc import Sequence
from html import escape
from typing import Any

from bagent.observe.report.ask import ANSWERED, BUCKETS, Ask, quantiles
from bagent.observe.report.charts import histogram, stacked
from bagent.observe.report.html import Html, join, note, number, section, table
from bagent.observe.words import duration, milliseconds, money

SHORT = 20.0
"""Seconds of a run whose times of day would look alike."""

TOTALS = f"""
    select count(*) as "rows", count(*) filter (status = 'ok') as ok,
           count(distinct stage) as stages,
           count(*) filter (copied_from is not null) as copied,
           count(*) filter ({ANSWERED}) as answered,
           min(started_at) as began, max(finished_at) as ended,
           sum(prompt_tokens)::bigint as prompt_tokens, sum(cached_tokens)::bigint as cached_tokens,
           sum(completion_tokens)::bigint as completion_tokens, sum(cost_usd) as cost_usd,
           count(*) filter (cost_usd is null and {ANSWERED}) as without_cost,
           sum(attempts)::bigint as attempts, avg(latency_ms) as latency_ms
    from results"""


def totals(ask: Ask) -> dict[str, Any]:
    """Counts and sums over all rows."""
    found = ask.row(TOTALS)
    found["ended"] = found["ended"] or found["began"]
    began = found["began"] if found["began"] is not None else found["ended"]
    found["began"] = began
    found["seconds"] = max(0.0, found["ended"] - began) if began is not None else 0.0
    return found


def cards(ask: Ask, sums: dict[str, Any]) -> Html:
    """The main numbers, large."""
    rows, seconds = sums["rows"], sums["seconds"]
    bad = rows - sums["ok"]
    words = [
        ("results of all stages" if sums["stages"] > 1 else "rows", f"{rows:,}"),
        ("ok", _share(sums["ok"], rows)),
        ("not ok", _share(bad, rows)),
        ("from first to last", duration(seconds)),
    ]
    if seconds > 0:
        words.append(("rows a second", number(rows / seconds)))
        if sums["completion_tokens"]:
            words.append(("answer tokens a second", number(sums["completion_tokens"] / seconds)))
    for name, label in (("prompt_tokens", "prompt tokens"), ("completion_tokens", "answer tokens")):
        if sums[name] is not None:
            words.append((label, f"{sums[name]:,}"))
    if sums["cached_tokens"] and sums["prompt_tokens"]:
        words.append(("prompt tokens cached", _share(sums["cached_tokens"], sums["prompt_tokens"])))
    if sums["copied"]:
        words.append(("copied from equal requests", f"{sums['copied']:,}"))
    retries = ask.row("select count(*) filter (try > 1) as again from attempts")["again"]
    words.append(("tries after the first", f"{retries:,}"))
    if sums["cost_usd"] is not None:
        words.append(("cost", money(sums["cost_usd"])))
    inner = "".join(f"<div><b>{escape(v)}</b><span>{escape(k)}</span></div>" for k, v in words)
    return Html(f'<div class="cards">{inner}</div>')


def _share(part: int, whole: int) -> str:
    percent = 100 * part / whole if whole else 0.0
    return f"{part:,} ({percent:.3g} %)" if part and whole else f"{part:,}"


def timeline(ask: Ask, sums: dict[str, Any]) -> Html:
    """Rows and tokens a second over the whole time, in equal steps."""
    if not sums["seconds"]:
        return Html("")
    step = sums["seconds"] / BUCKETS
    place = f"least({BUCKETS - 1}, floor((finished_at - {sums['began']}) / {step}))::int"
    found = {
        row["bucket"]: row
        for row in ask.rows(
            f"""select {place} as bucket, count(*) filter (status = 'ok') as ok,
                       count(*) filter (status <> 'ok') as bad,
                       coalesce(sum(completion_tokens), 0)::bigint as tokens
                from results where finished_at is not null group by 1"""
        )
    }

    def values(name: str) -> list[float]:
        return [found[i][name] / step if i in found else 0.0 for i in range(BUCKETS)]

    ticks = _clock_ticks(sums["began"], sums["seconds"])
    rows = [("ok", "good", values("ok")), ("not ok", "bad", values("bad"))]
    parts = [stacked("rows a second", rows, ticks)]
    if sums["completion_tokens"]:
        parts.append(
            stacked("answer tokens a second", [("tokens", "accent", values("tokens"))], ticks)
        )
    return section("Timeline", *parts)


def _clock_ticks(began: float, seconds: float) -> list[tuple[float, str]]:
    shares = (0.0, 0.25, 0.5, 0.75, 1.0)
    if seconds < SHORT:
        return [(share, f"{share * seconds:.1f}s") for share in shares]
    form = "%H:%M:%S" if seconds < 12 * 3600 else "%d %b %H:%M"
    return [(share, time.strftime(form, time.gmtime(began + share * seconds))) for share in shares]


def _milliseconds(value: float) -> str:
    return milliseconds(value)


_TIMES = {"latency_ms": "whole answer", "ttft_ms": "first token", "queue_ms": "waiting before it"}
_TOKENS = {
    "prompt_tokens": "prompt tokens",
    "completion_tokens": "answer tokens",
    "reasoning_tokens": "reasoning tokens",
}


def distributions(ask: Ask) -> Html:
    """How long answers took and how long they are."""
    source = f"(select * from results where {ANSWERED})"
    times = [_quantiles(ask, c, words, source, "_ms") for c, words in _TIMES.items()]
    tokens = [_quantiles(ask, c, words, source, "") for c, words in _TOKENS.items()]
    charts = [
        histogram(f"rows by time to the {words}", ask.bins(column, source), _milliseconds)
        for column, words in list(_TIMES.items())[:2]
    ]
    charts += [
        histogram(f"rows by {words}", ask.bins(column, source), number)
        for column, words in list(_TOKENS.items())[:2]
    ]
    if not any(row["answers"] for row in (*times, *tokens)):
        return Html("")
    return section(
        "Latency and tokens",
        note("The bins of the charts grow by a constant factor."),
        table([row for row in times if row["answers"]]),
        table([row for row in tokens if row["answers"]]),
        Html(f'<div class="two">{join(charts)}</div>'),
    )


def _quantiles(ask: Ask, column: str, words: str, source: str, unit: str) -> dict[str, Any]:
    found = ask.row(f"select count({column}) as answers, {quantiles(column)} from {source}")
    answers = found.pop("answers")
    return {"": words, "answers": answers, **{f"{k}{unit}": v for k, v in found.items()}}


def cost(ask: Ask, sums: dict[str, Any]) -> Html:
    """Money by stage, model and endpoint; nothing where no price is known."""
    if sums["cost_usd"] is None:
        return Html("")
    rows = ask.rows(
        """select stage, model, endpoint, count(cost_usd) as answers, sum(cost_usd) as cost_usd,
                  1000 * avg(cost_usd) as per_thousand_usd
           from results where cost_usd is not null
           group by stage, model, endpoint order by cost_usd desc limit 30"""
    )
    parts: Sequence[Html] = [table(rows)]
    if sums["without_cost"]:
        parts = [note(f"{sums['without_cost']:,} answers have no known cost."), *parts]
    return section("Cost", *parts)
