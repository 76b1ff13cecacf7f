"""The first lines of the page of a run: one bar, the main numbers, and rows over time."""

from __future__ import annotations

import time
from typing import Any

from bagent.observe.formatting import duration, money
from bagent.report.html import Html, join, note, number, section
from bagent.report.overview import Throughput
from bagent.report.queries import BUCKETS, ReportDb
from bagent.report.render import part, share
from bagent.report.svg import stacked

SHORT = 20.0
"""In a shorter run, in seconds, ticks are seconds from its start."""


def headline(db: ReportDb, sums: dict[str, Any], over: Throughput | None) -> Html:
    """One bar of ok and failed rows, four numbers, and a line of further counts."""
    state = {
        "ok": sums["ok"],
        "accepted": sums["rows"] - sums["ok"] - sums["failed"],
        "failed": sums["failed"],
        "remaining": 0,
        "total_is_exact": True,
    }
    unit = sums["unit"] + " of all stages" * (sums["stages"] > 1)
    working = (
        sums["seconds"] - sum(high - low for low, high in over.pauses) * over.seconds
        if over
        else 0.0
    )
    facts = [(unit, f"{sums['rows']:,}"), ("time", duration(sums["seconds"]))]
    if working > 0:
        facts.append((f"{unit} a second", number(sums["rows"] / working)))
        if sums["completion_tokens"]:
            facts.append(("answer tokens a second", number(sums["completion_tokens"] / working)))
    if sums["cost_usd"] is not None:
        facts.append(("cost", money(sums["cost_usd"])))
    return join([part("totals_bar", state), part("facts", facts), note(_further(db, sums))])


def _further(db: ReportDb, sums: dict[str, Any]) -> str:
    """Return counts beside the main ones."""
    parts = []
    if sums["prompt_tokens"] is not None:
        text = f"{sums['prompt_tokens']:,} prompt tokens"
        if sums["cached_tokens"]:
            text += f" ({share(sums['cached_tokens'], sums['prompt_tokens'])} cached)"
        parts.append(text)
    if sums["completion_tokens"] is not None:
        parts.append(f"{sums['completion_tokens']:,} answer tokens")
    if sums["copied"]:
        parts.append(f"{sums['copied']:,} copied from equal requests")
    retries = db.row("select count(*) filter (try > 1) as again from attempts")["again"]
    parts.append(f"{retries:,} retries")
    return ", ".join(parts)


def timeline(db: ReportDb, sums: dict[str, Any], over: Throughput | None) -> Html:
    """Rows over time with pauses shaded, and answer tokens a second."""
    if over is None:
        return Html("")
    parts = [part("throughput_chart", over)]
    if sums["completion_tokens"] and sums["seconds"]:
        parts.append(_tokens(db, sums))
    return section("Timeline", *parts)


def _tokens(db: ReportDb, sums: dict[str, Any]) -> Html:
    step = sums["seconds"] / BUCKETS
    bucket = f"least({BUCKETS - 1}, floor((finished_at - {sums['began']}) / {step}))::int"
    rows = db.rows(
        f"""select {bucket} as bucket, coalesce(sum(completion_tokens), 0)::bigint as tokens
            from results where finished_at is not null group by 1"""
    )
    counts = {row["bucket"]: row["tokens"] for row in rows}
    values = [counts.get(index, 0) / step for index in range(BUCKETS)]
    ticks = _ticks(sums["began"], sums["seconds"])
    return stacked("answer tokens a second", [("tokens", "accent", values)], ticks)


def _ticks(began: float, seconds: float) -> list[tuple[float, str]]:
    shares = (0.0, 0.25, 0.5, 0.75, 1.0)
    if seconds < SHORT:
        return [(at, f"{at * seconds:.1f}s") for at in shares]
    form = "%H:%M:%S" if seconds < 12 * 3600 else "%d %b %H:%M"
    return [(at, time.strftime(form, time.gmtime(began + at * seconds))) for at in shares]
