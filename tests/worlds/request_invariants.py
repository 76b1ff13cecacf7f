"""Invariants of single requests: their time limits, and the tokens that they may take."""

from __future__ import annotations

from worlds.evidence import (
    Problems,
    attempts_of,
    invariant,
    invariant_for,
    new_results,
    sent_by_row,
    sent_in,
    unit_of,
)
from worlds.history import History
from worlds.network import Sent
from worlds.replies import MAX_TOKENS, base_kind

NOTICED = 1.0
"""Seconds within which a time limit that is over ends a request."""


@invariant_for("single", "schema", "lists", "agents", "stages")
def time_limits_are_kept(history: History) -> Problems:
    """``limits.timeout`` ends a request that has no answer in time: as a whole, before its first
    token, or between two pieces; and none before."""
    job = history.world.job
    for start in history.starts:
        for sent in sent_in(history, start.number):
            due = _due(history, sent)
            over = start.ended if sent.over is None else min(sent.over, start.ended)
            if over > due + NOTICED and not start.suspended and not start.woken:
                yield f"row {sent.rows}: sent at {sent.at}, due at {due}, ended at {over}"
        limits = (job.timeout, job.first_token, job.idle)
        shortest = min(limit for limit in limits if limit is not None)
        attempts = attempts_of(history, start)
        for attempt in attempts:
            seconds = attempt["done"] - attempt["sent"]
            if attempt.get("error_kind") != "timeout" or seconds > shortest - 0.1:
                continue
            if job.row_seconds is not None and not any(
                unit_of(history, later) == unit_of(history, attempt)
                for later in attempts
                if later["sent"] > attempt["done"]
            ):
                continue  # the time of the row was over
            if attempt.get("status_code") in (None, 200):
                yield f"start {start.number}: {attempt} timed out after {seconds} s"


def _due(history: History, sent: Sent) -> float:
    """Return when a request has to have ended."""
    job = history.world.job
    dues = [sent.at + job.timeout]
    if job.stream and sent.status in (None, 200):
        if job.first_token is not None and sent.first_at is None and sent.done is None:
            dues.append(sent.at + job.first_token)
        if job.idle is not None and sent.first_at is not None:
            dues.append(sent.first_at + job.idle)
    return min(dues)


@invariant_for("single", "schema")
def a_short_answer_may_grow_once(history: History) -> Problems:
    """With ``output.grow`` an answer that was cut off is asked for again with so many times the
    tokens, once; a row is truncated only after that. All other requests have the same limit."""
    grow = history.world.job.grow
    for start in history.starts:
        results = new_results(history, start)
        for row, requests in sent_by_row(history, start.number).items():
            limit = MAX_TOKENS
            for sent in requests:
                if sent.limit != limit:
                    yield f"row {row}: {sent.limit} tokens at {sent.at}, expected {limit}"
                    break
                cut = sent.arrived and base_kind(sent.reply) in ("short", "length")
                limit = int(MAX_TOKENS * grow) if cut and grow is not None else limit
            last, truncated = requests[-1].limit, results.get(row, {}).get("status") == "truncated"
            if grow is not None and truncated and (limit == MAX_TOKENS or last != limit):
                yield f"row {row} is truncated, and had {last} tokens"


@invariant
def tools_keep_their_rate(history: History) -> Problems:
    """``rate_limit`` of a tool spreads its runs over the whole run."""
    rate, last = history.world.job.tool_rate, dict[int, float]()
    for run in history.tool_runs if rate is not None else ():
        if run.tool == "act":
            if run.began < last.get(run.start, -1.0e9) + 1.0 / rate - 0.01:
                yield f"{run} began, the one before at {last[run.start]}"
            last[run.start] = run.began
