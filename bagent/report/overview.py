"""The main numbers of a run, its throughput, and the endpoints that went down."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from bagent.duck import literal
from bagent.observe.formatting import counted, duration, money, rate, retries_text
from bagent.report.html import Html, join, note, number, part, section, share, time_of_day
from bagent.report.queries import ANSWERED, ReportDb
from bagent.types import PASSING_KINDS

STEPS = 60
"""Steps of the throughput over time."""

RECENT_STEPS = 20
"""Steps whose speeds give the range of the time to the end."""

GAP = 30.0
"""Seconds without a finished row, beside a share of the run, that count as a pause."""

GAP_SHARE = 0.05

ENDPOINT_KINDS = PASSING_KINDS | {"auth"}
"""Failures of the endpoint; the others are of the row, its answer, or the job."""


class Throughput(msgspec.Struct, frozen=True):
    """Finished rows in equal steps of time."""

    began: float
    seconds: float
    ok: list[int]
    failed: list[int]
    tokens: list[int]
    """Answer tokens of the rows that ended in each step."""

    pauses: list[tuple[float, float]]
    """(from, to) of times without a finished row, as shares of the whole."""

    ends: list[EndpointEnd] = []
    """The endpoints that went down or left meanwhile."""


class EndpointEnd(msgspec.Struct, frozen=True):
    """When an endpoint went down or left for good."""

    endpoint: str
    at: float | None
    """In Unix seconds; None if it never answered."""

    event: str
    """The same for people: ``died after 09:31:12 UTC``."""

    more: str = ""
    """What else is known, such as the reason."""

    @property
    def message(self) -> str:
        """The event, and what else is known of it."""
        return self.event + self.more


def down_endpoints(db: ReportDb) -> dict[str, EndpointEnd]:
    """Return when each endpoint that was not healthy at its last sample went down or left."""
    down = db.rows(
        """select endpoint, max("at") filter (healthy) as healthy_at,
                  arg_max(reason, "at") as reason,
                  max("at") filter (reason = 'left the hostfile') as removed
           from endpoints group by endpoint
           having not coalesce(arg_max(healthy, "at"), false) order by endpoint"""
    )
    if not down:
        return {}  # most runs: the large tables are not read
    kinds = ", ".join(map(literal, sorted(ENDPOINT_KINDS)))
    answered = db.rows(
        "select endpoint, max(done) as last from attempts where error_kind is null"
        " group by endpoint"
    )
    failed = db.rows(
        f"select endpoint, count(*) as lost from results where error_kind in ({kinds})"
        " group by endpoint"
    )
    last = {row["endpoint"]: row["last"] for row in answered}
    lost = {row["endpoint"]: row["lost"] for row in failed}
    return {
        row["endpoint"]: _end(row, last.get(row["endpoint"]), lost.get(row["endpoint"], 0))
        for row in down
    }


def _end(row: dict[str, Any], last_answer: float | None, lost: int) -> EndpointEnd:
    endpoint, removed, healthy_at = row["endpoint"], row["removed"], row["healthy_at"]
    if removed is not None and removed >= (healthy_at or 0.0):
        return EndpointEnd(endpoint, removed, f"left the hostfile at {time_of_day(removed)} UTC")
    reason = f" ({row['reason']})" if row["reason"] else ""
    up = max((at for at in (healthy_at, last_answer) if at is not None), default=None)
    if up is None:
        return EndpointEnd(endpoint, None, "never answered", reason)
    rows = f"{counted(lost, 'row')} failed there" if lost else "no row was lost"
    more = f", did not come back{reason}; {rows}"
    return EndpointEnd(endpoint, up, f"died after {time_of_day(up)} UTC", more)


def throughput(db: ReportDb, down: Mapping[str, EndpointEnd]) -> Throughput | None:
    """Return the finished rows over time; None where no row has a time.

    Args:
        db: the tables of a run.
        down: as :func:`down_endpoints` returns them.
    """
    span = db.row("select min(started_at) as began, max(finished_at) as ended from results")
    began, ended = span["began"], span["ended"]
    if began is None or ended is None or ended <= began:
        return None
    seconds = ended - began
    step = seconds / STEPS
    rows = db.rows(
        f"""select least({STEPS - 1}, greatest(0, floor((finished_at - {began!r}) / {step!r})))::int
                   as bin, count(*) filter (error_kind is null) as ok,
                   count(*) filter (error_kind is not null) as failed,
                   coalesce(sum(completion_tokens), 0)::bigint as tokens
            from results where finished_at is not null group by 1"""
    )
    by_step = {row["bin"]: row for row in rows}
    ok, failed, tokens = (
        [by_step[index][name] if index in by_step else 0 for index in range(STEPS)]
        for name in ("ok", "failed", "tokens")
    )
    ends = [end for end in down.values() if end.at is not None and began < end.at < ended]
    pauses = _pauses(ok, failed, step, seconds)
    return Throughput(began, seconds, ok, failed, tokens, pauses, ends)


def costs(db: ReportDb) -> tuple[float, float, int] | None:
    """Return the sum of the costs of answers, of their squares, and how many; None if unknown."""
    row = db.row(
        f"""select sum(cost_usd) as spent, sum(cost_usd * cost_usd) as squares,
                   count(cost_usd) as known, count(*) as answers
            from results where {ANSWERED}"""
    )
    if not row["known"] or row["known"] < row["answers"]:
        return None
    return row["spent"], row["squares"], row["known"]


def seconds_range(over: Throughput, remaining: int) -> tuple[float, float] | None:
    """Return the seconds to the end by the faster and slower quarters of the last steps."""
    step = over.seconds / STEPS
    recent = [a + b for a, b in zip(over.ok, over.failed, strict=True)][-RECENT_STEPS - 1 : -1]
    speeds = sorted(rows / step for rows in recent if rows)
    if len(speeds) < RECENT_STEPS // 2 or not remaining:
        return None
    quarter = len(speeds) // 4
    return remaining / speeds[-quarter - 1], remaining / speeds[quarter]


def _pauses(
    ok: Sequence[int], failed: Sequence[int], step: float, seconds: float
) -> list[tuple[float, float]]:
    """Return stretches without a finished row, such as the time between two starts."""
    pauses, start = [], None
    for index, total in enumerate([*map(sum, zip(ok, failed, strict=True)), 1]):
        if not total and start is None:
            start = index
        elif total and start is not None:
            length = (index - start) * step
            if length >= GAP and length >= GAP_SHARE * seconds:
                pauses.append((start / STEPS, index / STEPS))
            start = None
    return pauses


def headline(
    db: ReportDb, sums: dict[str, Any], worked_s: float | None, rows_per_s: float | None
) -> Html:
    """One bar of ok and failed rows, four numbers, and a line of further counts.

    Args:
        worked_s: how long the run worked, without pauses; None where unknown.
        rows_per_s: its speed as ``status`` has it; None where unknown.
    """
    state = {
        "ok": sums["ok"],
        "accepted": sums["rows"] - sums["ok"] - sums["failed"],
        "failed": sums["failed"],
        "remaining": 0,
        "total_is_exact": True,
    }
    unit = sums["unit"] + " of all stages" * (sums["stages"] > 1)
    seconds = worked_s or sums["seconds"]
    facts = [(unit, f"{sums['rows']:,}"), ("time", duration(seconds))]
    if rows_per_s is None and seconds > 0:
        rows_per_s = sums["rows"] / seconds
    if rows_per_s is not None:
        ended = "rows" if sums["stages"] > 1 else unit
        facts.append((f"{ended} a second", rate(rows_per_s)))
    if sums["completion_tokens"] and seconds > 0:
        facts.append(("answer tokens a second", number(sums["completion_tokens"] / seconds)))
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
    parts.append(retries_text(retries))
    return ", ".join(parts)


def timeline(over: Throughput | None) -> Html:
    """Rows over time with pauses and deaths of endpoints, and answer tokens a second."""
    if over is None:
        return Html("")
    return section("Timeline", part("throughput_chart", over), part("tokens_chart", over))
