"""Each endpoint beside the others: speed, errors, load over time."""

from __future__ import annotations

from typing import Any

from bagent.observe.report.ask import BUCKETS, Ask, median
from bagent.observe.report.charts import meter, sparkline
from bagent.observe.report.html import Html, note, section, table

MOST = 60
SLOW = 1.5
"""So many times the median of all endpoints is worth a word."""


def endpoint_rows(ask: Ask) -> list[dict[str, Any]]:
    """Every endpoint with its numbers, the slowest first."""
    return ask.rows(
        """select endpoint, count(*) as tries, count(*) filter (error_kind is not null) as failed,
                  100.0 * count(*) filter (error_kind is not null) / count(*) as failed_percent,
                  mode(error_kind) as most_error,
                  quantile_cont((done - sent) * 1000, 0.5) filter (error_kind is null) as p50_ms,
                  quantile_cont((done - sent) * 1000, 0.99) filter (error_kind is null) as p99_ms,
                  quantile_cont((first_token - sent) * 1000, 0.5) as first_token_ms,
                  sum(completion_tokens)::bigint as tokens,
                  sum(completion_tokens) / nullif(sum(done - sent), 0) as tokens_per_busy_s
           from attempts group by endpoint order by p50_ms desc nulls first, endpoint"""
    )


def findings(rows: list[dict[str, Any]]) -> list[str]:
    """Endpoints that stand out, in words."""
    words = []
    known = [row["p50_ms"] for row in rows if row["p50_ms"] is not None]
    if len(known) > 1:
        usual = median(known)
        words += [
            f"{row['endpoint']} is slow: half of its answers take longer than"
            f" {row['p50_ms']:,.0f} ms, {row['p50_ms'] / usual:.1f} times the median endpoint"
            for row in rows
            if row["p50_ms"] is not None and usual > 0 and row["p50_ms"] > SLOW * usual
        ]
    failed = sum(row["failed"] for row in rows)
    tries = sum(row["tries"] for row in rows)
    for row in rows if len(rows) > 1 else ():
        share = row["failed"] / row["tries"]
        others = (failed - row["failed"]) / max(1, tries - row["tries"])
        if row["failed"] >= 5 and share > 2 * others + 0.01:
            words.append(
                f"{row['endpoint']} fails {100 * share:.3g} % of its tries"
                f" (mostly {row['most_error']}), the others {100 * others:.3g} %"
            )
    return words[:6]


def endpoints(ask: Ask, rows: list[dict[str, Any]]) -> Html:
    """The table of endpoints."""
    if not rows:
        return Html("")
    longest = max((row["p50_ms"] or 0.0 for row in rows), default=0.0) or 1.0
    curves = _curves(ask)
    shown = []
    for row in rows[:MOST]:
        curve = curves.get(row["endpoint"], [])
        shown.append(
            {
                "endpoint": row["endpoint"],
                "tries": row["tries"],
                "failed_percent": row["failed_percent"],
                "mostly": row["most_error"],
                "p50": meter((row["p50_ms"] or 0.0) / longest),
                "p50_ms": row["p50_ms"],
                "p99_ms": row["p99_ms"],
                "first_token_ms": row["first_token_ms"],
                "tokens": row["tokens"],
                "tokens_per_busy_s": row["tokens_per_busy_s"],
                "in flight over time": sparkline(curve, max(curve, default=0.0)) or None,
            }
        )
    heads = {name: name.removesuffix("_ms").replace("_", " ") for name in shown[0]}
    heads |= {"p50": "", "failed_percent": "failed", "tokens_per_busy_s": "tokens/s a request"}
    more = f" {len(rows) - MOST:,} faster ones are left out." if len(rows) > MOST else ""
    return section(
        "Endpoints",
        note(f"Times are of tries that went well, from sending to the whole answer.{more}"),
        table(shown, heads),
    )


def _curves(ask: Ask) -> dict[str, list[float]]:
    """Rows in flight over time for each endpoint, in equal steps."""
    span = ask.row('select min("at") as low, max("at") as high from endpoints')
    if span["low"] is None or span["high"] <= span["low"]:
        return {}
    steps = BUCKETS // 2
    step = (span["high"] - span["low"]) / steps
    curves: dict[str, list[float]] = {}
    for row in ask.rows(
        f"""select endpoint, avg(in_flight) as n,
                   least({steps - 1}, floor(("at" - {span["low"]}) / {step}))::int as place
            from endpoints group by endpoint, place order by endpoint, place"""
    ):
        curve = curves.setdefault(row["endpoint"], [])
        curve += [curve[-1] if curve else 0.0] * (row["place"] - len(curve))
        curve.append(float(row["n"]))
    return curves
