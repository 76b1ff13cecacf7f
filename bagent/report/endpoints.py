"""The comparison of endpoints for report and view: speed, errors, load over time."""

from __future__ import annotations

from collections.abc import Container, Mapping
from statistics import median_high
from typing import Any

import msgspec

from bagent.duck import literal
from bagent.observe.formatting import milliseconds
from bagent.observe.live_state import FEWEST, SLOW, failing, times_the_others
from bagent.report.html import Html, note, number, percent, section, table
from bagent.report.overview import ENDPOINT_KINDS, EndpointEnd
from bagent.report.queries import BUCKETS, FEW, WEAK, ReportDb
from bagent.report.svg import meter, sparkline

MOST = 60

FEW_FOR_TAIL = 100
"""Successful attempts from which the slowest hundredth means something."""

_HEADS = {
    "endpoint": "endpoint",
    "state": "state",
    "slower": "times the others",
    "attempts": "attempts",
    "failed_percent": "attempts failed",
    "most_error": "mostly",
    "rows_percent": "rows failed",
    "meter": "",
    "p50_ms": "p50",
    "p99_ms": "p99",
    "first_token_ms": "first token",
    "tokens": "tokens",
    "tokens_per_busy_s": "tokens/s a request",
    "curve": "in flight over time",
}
"""Columns of the table and their titles."""


_ORDER = ("down", "failing", "slow", "slow at times", "ok")
"""States of endpoints, the worst first."""


class StrikingEndpoint(msgspec.Struct, frozen=True):
    """What stands out at an endpoint."""

    endpoint: str
    health: str
    """``failing``, ``slow`` or ``slow at times``."""

    message: str
    """What was measured, for people."""

    weak: bool = False
    """It follows from few attempts."""


class ServedEndpoint(msgspec.Struct, frozen=True):
    """One endpoint over the whole run."""

    endpoint: str
    rows: int
    failed: int
    """The rows that failed there in the end, for any reason."""

    p50_ms: float | None
    """The median time of its successful attempts."""

    slower: float | None
    """That time relative to the others', see :func:`endpoint_rows`; None without others."""

    health: str
    """``ok``, or the worst that stands out: ``down``, ``failing``, ``slow``, ``slow at times``."""

    message: str
    """What stands out, for people; empty where nothing does."""


def endpoint_rows(db: ReportDb) -> list[dict[str, Any]]:
    """Return every endpoint with its numbers, the slowest first.

    ``slower`` is the time of an attempt relative to the others' median, None without others. It
    is taken stage by stage: a stage with longer answers makes no endpoint slow. ``failed`` counts
    the attempts that failed for a reason of the endpoint, ``rows_failed`` the rows that failed in
    the end, for any reason.
    """
    kinds = ", ".join(map(literal, sorted(ENDPOINT_KINDS)))
    rows = db.rows(
        f"""select endpoint, count(*) as attempts,
                  count(*) filter (error_kind in ({kinds})) as failed,
                  mode(error_kind) filter (error_kind in ({kinds})) as most_error,
                  any_value(ended.n) as "rows", any_value(ended.failed) as rows_failed,
                  any_value(ended.kind) as rows_error,
                  quantile_disc((done - sent) * 1000, 0.5) filter (error_kind is null) as p50_ms,
                  quantile_disc((done - sent) * 1000, 0.99) filter (error_kind is null) as p99_ms,
                  quantile_disc((first_token - sent) * 1000, 0.5) as first_token_ms,
                  sum(completion_tokens)::bigint as tokens,
                  sum(completion_tokens) / nullif(sum(done - sent), 0) as tokens_per_busy_s
           from attempts left join (
               select endpoint, count(*) as n, count(error_kind) as failed,
                      mode(error_kind) as kind
               from results where copied_from is null group by endpoint) as ended using (endpoint)
           group by endpoint order by p50_ms desc nulls first, endpoint"""
    )
    slower = _slower(db)
    for row in rows:
        row["slower"] = slower.get(row["endpoint"])
        row["failed_percent"] = 100 * row["failed"] / row["attempts"]
        row["rows_percent"] = 100 * row["rows_failed"] / row["rows"] if row["rows"] else None
    return sorted(rows, key=lambda row: -(row["slower"] or 0.0)) if len(slower) > 1 else rows


def _slower(db: ReportDb) -> dict[str, float]:
    stages: dict[str, dict[str, dict[str, Any]]] = {}
    for row in db.rows(
        f"""select stage, endpoint, count(*) as n, quantile_disc(done - sent, 0.5) as p50
            from attempts where error_kind is null and done is not null
            group by stage, endpoint having count(*) >= {FEWEST} order by stage, endpoint"""
    ):
        stages.setdefault(row["stage"], {})[row["endpoint"]] = row
    sums: dict[str, tuple[float, int]] = {}
    for rows in stages.values():
        ratios = times_the_others({endpoint: row["p50"] for endpoint, row in rows.items()})
        for endpoint, ratio in ratios.items():
            total, count = sums.get(endpoint, (0.0, 0))
            n = rows[endpoint]["n"]
            sums[endpoint] = total + n * ratio, count + n
    return {endpoint: total / count for endpoint, (total, count) in sums.items()}


def striking(rows: list[dict[str, Any]], down: Container[str]) -> list[StrikingEndpoint]:
    """Return what stands out at the endpoints, the slow ones first.

    Args:
        rows: as :func:`endpoint_rows` returns them.
        down: the endpoints that did not come back, of which nothing is returned.
    """
    rows = [row for row in rows if row["endpoint"] not in down]
    slow, others = [], []
    tails = times_the_others(
        {
            row["endpoint"]: row["p99_ms"]
            for row in rows
            if row["p99_ms"] is not None and row["attempts"] - row["failed"] >= FEW
        }
    )
    shares = failing({row["endpoint"]: (row["attempts"], row["failed"]) for row in rows})
    rows_shares = failing({r["endpoint"]: (r["rows"] or 0, r["rows_failed"] or 0) for r in rows})
    for row in rows:
        name, weak = row["endpoint"], row["attempts"] < FEW
        if name in shares:
            text = _failing("attempts", row["most_error"], *shares[name])
            others.append(StrikingEndpoint(name, "failing", text, weak))
        elif name in rows_shares:
            text = _failing("rows", row["rows_error"], *rows_shares[name])
            others.append(StrikingEndpoint(name, "failing", text, weak))
        tail = tails.get(name, 0.0)
        if (row["slower"] or 0.0) > SLOW:
            tokens = _tokens(row, rows)
            text = (
                f"half of its attempts take longer than {milliseconds(row['p50_ms'])},"
                f" {row['slower']:.1f} times the median of the others"
                + (f" ({tokens})" if tokens else "")
            )
            slow.append(StrikingEndpoint(name, "slow", text, weak))
        elif tail > 2 * SLOW and row["attempts"] - row["failed"] >= FEW_FOR_TAIL:
            text = (
                "one attempt in a hundred takes longer than"
                f" {milliseconds(row['p99_ms'])}, {tail:.1f} times as long as at the others"
            )
            others.append(StrikingEndpoint(name, "slow at times", text))
    return slow + others


def findings(rows: list[dict[str, Any]], down: Mapping[str, EndpointEnd]) -> list[str]:
    """Describe the endpoints that stand out; see :func:`striking`."""
    messages = [f"{end.endpoint} {end.message}" for end in down.values()]
    messages += [
        f"{WEAK if each.weak else ''}{each.endpoint} is {each.health}: {each.message}"
        for each in striking(rows, down)
    ]
    return messages[:6]


def endpoint_states(
    rows: list[dict[str, Any]], down: Mapping[str, EndpointEnd]
) -> list[ServedEndpoint]:
    """Return every endpoint; those that stand out come first.

    Args:
        rows: as :func:`endpoint_rows` returns them.
        down: the endpoints that did not come back.
    """
    stands_out: dict[str, tuple[str, str]] = {}
    for each in sorted(striking(rows, down), key=lambda each: _ORDER.index(each.health)):
        stands_out.setdefault(each.endpoint, (each.health, each.message))
    stands_out |= {name: ("down", end.message) for name, end in down.items()}
    states = [
        ServedEndpoint(
            row["endpoint"],
            row["rows"] or 0,
            row["rows_failed"] or 0,
            row["p50_ms"],
            row["slower"],
            *stands_out.get(row["endpoint"], ("ok", "")),
        )
        for row in rows
    ]
    attempted = {row["endpoint"] for row in rows}
    states += [
        ServedEndpoint(name, 0, 0, None, None, "down", end.message)
        for name, end in down.items()
        if name not in attempted
    ]
    return sorted(states, key=lambda s: (_ORDER.index(s.health), -(s.slower or 0.0), s.endpoint))


def _failing(what: str, kind: str, share: float, others_share: float) -> str:
    return (
        f"{percent(100 * share)} of its {what} failed (mostly {kind}),"
        f" {percent(100 * others_share)} elsewhere"
    )


def _tokens(row: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    speeds = [o["tokens_per_busy_s"] for o in rows if o is not row and o["tokens_per_busy_s"]]
    if not speeds or not row["tokens_per_busy_s"]:
        return ""
    return (
        f"{number(row['tokens_per_busy_s'])} tokens a second in each request,"
        f" the others {number(median_high(speeds))}"
    )


def endpoints(db: ReportDb, rows: list[dict[str, Any]], down: Mapping[str, EndpointEnd]) -> Html:
    """Make the section; endpoints that did not come back are first.

    Args:
        db: the tables of a run.
        rows: as :func:`endpoint_rows` returns them.
        down: the endpoints that did not come back.
    """
    attempted = {row["endpoint"] for row in rows}
    states = {
        each.endpoint: each.message if each.health == "down" else each.health
        for each in endpoint_states(rows, down)
        if each.health != "ok" or each.slower is not None
    }
    rows = [
        *({"endpoint": name, "attempts": 0} for name in down if name not in attempted),
        *(row for row in rows if row["endpoint"] in down),
        *(row for row in rows if row["endpoint"] not in down),
    ]
    if not rows:
        return Html("")
    longest = max(row.get("p50_ms") or 0.0 for row in rows) or 1.0
    curves = _curves(db)
    table_rows = [
        {
            **row,
            "state": states.get(row["endpoint"]),
            "meter": meter((row.get("p50_ms") or 0.0) / longest),
            "curve": sparkline(curves.get(row["endpoint"], [])) or None,
        }
        for row in rows[:MOST]
    ]
    more = f" {len(rows) - MOST:,} faster ones are left out." if len(rows) > MOST else ""
    return section(
        "Endpoints",
        note(
            "Times are of successful attempts, from sending to the whole answer; times the others:"
            " the median attempt relative to the other endpoints' in the same stage. Attempts"
            " failed: the endpoint did not answer, or not as it should; most are sent again. Rows"
            f" failed: those that came to nothing in the end, for any reason.{more}"
        ),
        table(table_rows, _HEADS),
    )


def _curves(db: ReportDb) -> dict[str, list[float]]:
    """Rows in flight over time for each endpoint, in equal steps."""
    span = db.row('select min("at") as low, max("at") as high from endpoints')
    if span["low"] is None or span["high"] <= span["low"]:
        return {}
    steps = BUCKETS // 2
    step = (span["high"] - span["low"]) / steps
    curves: dict[str, list[float]] = {}
    for row in db.rows(
        f"""select endpoint, avg(in_flight) as n,
                   least({steps - 1}, floor(("at" - {span["low"]}) / {step}))::int as place
            from endpoints group by endpoint, place order by endpoint, place"""
    ):
        curve = curves.setdefault(row["endpoint"], [])
        curve += [curve[-1] if curve else 0.0] * (row["place"] - len(curve))
        curve.append(float(row["n"]))
    return curves
