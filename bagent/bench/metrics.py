"""Numbers of a load test, by SQL over its raw rows; see :mod:`bagent.bench.records`."""

from __future__ import annotations

from typing import Any

from bagent.bench.monitors import ClientState
from bagent.bench.plan import Slo
from bagent.bench.records import BenchTables
from bagent.bench.routing import REFUSALS

LATENCIES = ("ttft", "ttfot", "tpot", "ntpot", "e2e", "e2e_sent", "lag", "pace")
PERCENTILES = {"p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99, "p999": 0.999}
MIN_REQUESTS = {"p99": 100, "p999": 1000}
"""Requests below which a percentile is hidden: it would be the worst one or two of them."""

HEATMAP_BINS = 60
"""Columns of the heatmap at most."""

Numbers = dict[str, Any]


def _quantiles(column: str, name: str) -> str:
    """Return select items for the percentiles, mean and maximum of a column in milliseconds."""
    items = []
    for percentile, share in PERCENTILES.items():
        value = f"quantile_cont({column}, {share})"
        minimum = MIN_REQUESTS.get(percentile)
        if minimum:
            value = f"case when count({column}) >= {minimum} then {value} end"
        items.append(f"{value} as {name}_{percentile}_ms")
    items.append(f"avg({column}) as {name}_mean_ms")
    items.append(f"max({column}) as {name}_max_ms")
    return ", ".join(items)


def _good(slo: Slo) -> str:
    """Return the SQL condition of a request that kept the SLO."""
    limits = {"ttft_ms": slo.ttft, "tpot_ms": slo.tpot, "e2e_ms": slo.e2e}
    conditions = [f"coalesce({name} <= {limit!r}, true)" for name, limit in limits.items() if limit]
    return " and ".join(["status = 'ok'", *conditions])


_WINDOWS = {
    # Stages of all endpoints count for each of them.
    "endpoint": """(select s.*, e.endpoint from stages s
        join (select distinct endpoint from requests) e
        on s."only" is null or s."only" = e.endpoint)""",
    "turn": """(select s.*, t.turn from stages s
        join (select distinct stage, turn from requests) t using (stage))""",
}
"""Tables of stages by the column that numbers are grouped by."""

COUNTS = (
    *("requests", "ok", "failed", "censored", "estimated", "not_streamed", "usage_incomplete"),
    *("opened", "good", "requests_inside", "calls_inside", "good_inside"),
)
"""Numbers that are 0 where a load sent nothing."""


_USAGE_INCOMPLETE = "status = 'ok' and list_sum(chunk_count) > 2 + 1.5 * completion_tokens"
"""The usage reports fewer tokens than pieces came. One or two more pieces are tolerated: the
token that ends the reasoning may be cut in two."""

_NOT_STREAMED = "status = 'ok' and len(chunk_at) = 1 and completion_tokens >= 2"
"""A stream that came all at once, which has no time between tokens."""


def load_numbers(tables: BenchTables, slo: Slo, keys: str = "load") -> list[Numbers]:
    """Return the numbers of each load over all its repeats, in the order of sending.

    Args:
        keys: the columns to group by: ``load``, or ``load`` with ``repeat``, ``endpoint`` or
            ``turn``.
    """
    latencies = ", ".join(_quantiles(f"{name}_ms", name) for name in LATENCIES)
    counted = "counted"
    if "endpoint" in keys:
        # A slow endpoint may have got all its requests before the window.
        counted = "true"
    counts = ", ".join(f"coalesce({name}, 0) as {name}" for name in COUNTS)
    windows = next((source for key, source in _WINDOWS.items() if key in keys), "stages")
    return tables.rows(
        f"""
        with w as (
            select {keys}, min(stage) as first_stage, sum(window_to - window_from) as seconds,
                any_value(concurrency) as concurrency, any_value(rate) as rate,
                any_value(way) as way, any_value(routing) as routing,
                max(endpoints) as endpoints, count(distinct repeat) as repeats
            from {windows} group by {keys}
        ), n as (
            select {keys}, count(*) filter ({counted}) as requests,
                count(*) filter ({counted} and status = 'ok') as ok,
                count(*) filter ({counted} and status = 'failed') as failed,
                count(*) filter ({counted} and censored) as censored,
                count(*) filter ({counted} and estimated) as estimated,
                count(*) filter ({counted} and {_NOT_STREAMED}) as not_streamed,
                count(*) filter ({counted} and {_USAGE_INCOMPLETE}) as usage_incomplete,
                count(*) filter ({counted} and opened) as opened,
                count(*) filter ({counted} and {_good(slo)}) as good,
                sum(size) filter (status = 'ok' and ended_inside) as calls_inside,
                count(*) filter (status = 'ok' and ended_inside) as requests_inside,
                count(*) filter ({_good(slo)} and ended_inside) as good_inside,
                sum(completion_tokens)::bigint as tokens,
                sum(tokens_inside) as tokens_inside, sum(prompt_inside) as prompt_inside,
                sum(tokens_inside) filter ({_good(slo)}) as good_tokens,
                sum(greatest(0, least(done, window_to) - greatest(sent, window_from)))
                    as busy_seconds,
                avg(prompt_tokens / size) filter ({counted} and status = 'ok') as input_tokens,
                avg(completion_tokens / size) filter ({counted} and status = 'ok') as output_tokens,
                sum(cached_tokens) filter ({counted}) / nullif(sum(prompt_tokens)
                    filter ({counted} and cached_tokens is not null), 0) as cached_share
            from spread_tokens group by {keys}
        ), l as (
            select {keys}, {latencies} from timed where {counted} group by {keys}
        )
        select w.*, t.* exclude ({keys}) replace ({counts}), l.* exclude ({keys}),
            coalesce(requests_inside, 0) / seconds as rps,
            coalesce(calls_inside, 0) / seconds as calls_s,
            tokens_inside / seconds as output_tok_s, prompt_inside / seconds as input_tok_s,
            (tokens_inside + prompt_inside) / seconds as total_tok_s,
            coalesce(good_inside, 0) / seconds as goodput_rps,
            good / nullif(requests, 0) as good_share, good_tokens / seconds as goodput_tok_s,
            ok / nullif(requests, 0) as ok_share, busy_seconds / seconds as in_flight_mean
        from w left join n t using ({keys}) left join l using ({keys})
        order by first_stage, {keys}
        """
    )


def pace_spreads(tables: BenchTables) -> dict[tuple[str, str], float | None]:
    """Return the standard deviation of the logarithm of the pace by load and endpoint.

    E2E replaces the pace where no request has one. The value is None below two requests.
    """
    rows = tables.rows(
        """
        select load, endpoint,
            coalesce(
                stddev_samp(ln(nullif(pace_ms, 0))), stddev_samp(ln(nullif(e2e_sent_ms, 0)))
            ) as spread
        from timed group by load, endpoint
        """
    )
    return {(row["load"], row["endpoint"]): row["spread"] for row in rows}


def gap_numbers(tables: BenchTables) -> dict[str, Numbers]:
    """Return ITL or ICL by load: ``itl`` where every stream reported its tokens per chunk."""
    rows = tables.rows(
        f"select load, bool_and(by_token) as by_token, {_quantiles('gap_ms', 'gap')} "
        "from gaps group by load"
    )
    numbers: dict[str, Numbers] = {}
    for row in rows:
        name = "itl" if row.pop("by_token") else "icl"
        load = row.pop("load")
        numbers[load] = {key.replace("gap", name, 1): value for key, value in row.items()}
    return numbers


def peak_tokens(tables: BenchTables) -> dict[str, float]:
    """Return the output tokens of the best second of each load, over all endpoints, in steps of
    50 ms."""
    rows = tables.rows(
        """
        with pieces as (
            select load, stage, sent, unnest(chunk_at) as at_us, unnest(chunk_count) as pieces,
                completion_tokens / nullif(list_sum(chunk_count), 0) as tokens_a_piece
            from timed where status = 'ok' and chunk_at is not null
        ), bins as (
            select load, stage, floor(20 * (sent + at_us / 1e6))::bigint as bin,
                sum(pieces * tokens_a_piece) as n
            from pieces group by all
        ), seconds as (
            select load, sum(n) over (
                partition by stage order by bin range between 19 preceding and current row
            ) as n from bins
        )
        select load, max(n) as peak from seconds group by load
        """
    )
    return {row["load"]: row["peak"] for row in rows}


def conversations(tables: BenchTables, turns: int) -> dict[str, Numbers]:
    """Return the numbers of conversations by load.

    ``conversations`` are those that began in the window and whose ``turns`` all ended well, with
    their durations, thinking included. ``conversations_s`` are complete ones per second, each
    counted by the part of its time that lay in the window.
    """
    rows = tables.rows(
        f"""
        with whole as (
            select load, min(scheduled) as first, max(done) as last,
                any_value(window_from) as low, any_value(window_to) as high,
                case when bool_or(counted and turn = 1)
                    then 1000 * (max(done) - min(scheduled)) end as conversation_ms
            from timed group by load, stage, worker, number
            having count(*) filter (status = 'ok') = {turns}
        ), seconds as (
            select load, sum(window_to - window_from) as seconds from stages group by load
        )
        select load, count(conversation_ms) as conversations,
            sum(greatest(0, least(last, high) - greatest(first, low)) / (last - first))
                / any_value(seconds) as conversations_s,
            {_quantiles("conversation_ms", "conversation")}
        from whole join seconds using (load) where last > first group by load
        """
    )
    return {row.pop("load"): row for row in rows}


def failures(tables: BenchTables) -> list[Numbers]:
    """Return the failures by load, endpoint and kind, with an example of the message."""
    return tables.rows(
        """
        select load, endpoint, coalesce(error_kind, 'unfinished') as kind, code, count(*) as n,
            coalesce(any_value(error) filter (status = 'failed'), any_value(error),
                'still going on when the load ended') as example
        from timed where status <> 'ok' group by all order by n desc, load, endpoint
        """
    )


def client_states(tables: BenchTables) -> list[ClientState]:
    """Return the state of the client in each load."""
    rows = tables.rows(
        """
        with lags as (
            select load, unnest(lags_us) / 1000 as lag from client join stages using (stage)
        ), late as (
            select load, quantile_cont(lag, 0.99) as loop_lag from lags group by load
        ), busy as (
            select load, min(stage) as first, max(cpu_seconds / nullif(seconds, 0)) as cpu
            from client join stages using (stage) group by load
        ), sent as (
            select load, quantile_cont(lag_ms, 0.99) as lag
            from timed join stages using (stage, load) where rate is not null group by load
        )
        select load, loop_lag, coalesce(cpu, 0) as cpu, sent.lag as lag
        from busy left join late using (load) left join sent using (load) order by first
        """
    )
    return [ClientState(row["load"], row["loop_lag"], row["cpu"], row["lag"]) for row in rows]


def server_numbers(tables: BenchTables) -> list[Numbers]:
    """Return means, maxima and deltas of the endpoints' own counters by load and endpoint.

    The delta of a counter that fell between two readings is unknown: the server was restarted.
    """
    counters = ("preemptions", "cache_hits", "cache_queries", "prompt_tokens", "generation_tokens")
    steps = ", ".join(
        f"{name} - lag({name} ignore nulls) over looks as {name}_step" for name in counters
    )
    sums = ", ".join(
        f"case when coalesce(min({name}_step), 0) >= 0 "
        f'then arg_max({name}, "at") - arg_min({name}, "at") end as {name}'
        for name in counters
    )
    totals = ", ".join(f"sum({name}) as {name}" for name in counters)
    return tables.rows(
        f"""
        with stepped as (
            select *, {steps} from servers
            window looks as (partition by stage, endpoint order by "at")
        ), one as (
            select stage, endpoint, avg(running) as running, avg(waiting) as waiting,
                max(waiting) as waiting_max, max(kv_usage) as kv_max, {sums}
            from stepped group by stage, endpoint
        )
        select load, endpoint, avg(running) as running_mean, avg(waiting) as waiting_mean,
            max(waiting_max) as waiting_max, max(kv_max) as kv_max, {totals},
            sum(cache_hits) / nullif(sum(cache_queries), 0) as hit_rate
        from one join stages using (stage) group by load, endpoint
        order by min(stage), endpoint
        """
    )


def heatmap(tables: BenchTables) -> list[Numbers]:
    """Return by endpoint and time slice the median pace of running requests, and how many ended
    well or not."""
    return tables.rows(
        f"""
        with ends as (
            select min(began) as low, (max(ended) - min(began)) / {HEATMAP_BINS} as width
            from stages
        ), slices as (
            select bin::int as bin, low + bin * width as at_from, low + (bin + 1) * width as at_to
            from ends, range({HEATMAP_BINS}) as t(bin) where width > 0
        )
        select endpoint, bin,
            (count(*) filter (status = 'ok' and done < at_to))::int as ok,
            (count(*) filter (status <> 'ok' and done < at_to))::int as bad,
            quantile_cont(coalesce(pace_ms, e2e_sent_ms), 0.5) as pace_ms
        from timed join slices on sent < at_to and done >= at_from
        group by all order by endpoint, bin
        """
    )


def dead_endpoints(tables: BenchTables) -> dict[str, str]:
    """Return the endpoints whose last requests all failed to connect, with the last error.

    A request that was cut off while it was answered may end after them.
    """
    rows = tables.rows(
        f"""
        with last as (
            select endpoint, error_kind, error, sent,
                row_number() over (partition by endpoint order by sent desc) as place
            from requests
        )
        select endpoint, arg_max(error, sent) as error from last where place <= {REFUSALS}
        group by endpoint having count(*) filter (error_kind = 'connect') = {REFUSALS}
        """
    )
    return {row["endpoint"]: row["error"] for row in rows}
