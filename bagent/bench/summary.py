"""``summary.json`` of a load test: numbers, verdicts, and what they were measured with."""

from __future__ import annotations

import os
import platform
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec

from bagent import __version__
from bagent.bench import metrics
from bagent.bench.monitors import client_limits
from bagent.bench.plan import AnswerPlan, BenchPlan
from bagent.bench.records import DEFINITIONS, BenchTables
from bagent.bench.runner import LoadTestRecord
from bagent.bench.thresholds import SCHEMA_VERSION
from bagent.bench.verdict import EndpointStats, EndpointVerdict, Verdict, judge, main_failure_kinds
from bagent.fleet.health_check import HealthResult

Numbers = dict[str, Any]

SHORTER = 0.02
"""Share by which answers may be shorter than requested."""

NOT_STREAMED_SHARE = 0.1
"""Share of an endpoint's answers that may come in one piece by chance."""


def warnings(
    endpoints: Sequence[Mapping[str, Any]], limit: int | None = None, requested: float | None = None
) -> list[str]:
    """Return what limits the meaning of the numbers, from those of each endpoint over all loads.

    Args:
        limit: tokens that an answer was allowed; None where answers had different limits.
        requested: tokens that an answer should have; None where answers had different lengths.
    """
    messages = []
    estimated = {row["endpoint"]: row["estimated"] for row in endpoints if row["estimated"]}
    if estimated:
        messages.append(
            f"output tokens of {_of(estimated)} are estimated by the pieces that came: "
            "the server tells no usage"
        )
    usage_incomplete = {
        row["endpoint"]: row["usage_incomplete"] for row in endpoints if row["usage_incomplete"]
    }
    if usage_incomplete:
        messages.append(
            f"the usage of {_of(usage_incomplete)} tells fewer tokens than pieces came: "
            "tokens a second and TPOT are wrong there"
        )
    too_many = {
        row["endpoint"]: row["ok"]
        for row in endpoints
        if limit is not None and (row["output_tokens"] or 0) > limit
    }
    if too_many:
        messages.append(
            f"the usage of {_of(too_many)} tells more output tokens than the {limit} "
            "that an answer may have: tokens a second and TPOT are wrong there"
        )
    if requested is not None:
        messages += _shorter(endpoints, requested)
    not_streamed = {
        row["endpoint"]: row["not_streamed"]
        for row in endpoints
        if row["not_streamed"] > NOT_STREAMED_SHARE * row["ok"]
    }
    if not_streamed:
        messages.append(
            f"answers to {_of(not_streamed)} came in one piece: TTFT is the whole time there "
            "and TPOT is not known (something on the way buffers streams, or the server sends none)"
        )
    return messages


def _shorter(endpoints: Sequence[Mapping[str, Any]], requested: float) -> list[str]:
    """Return the warning about answers that ended before the requested length."""
    short = [
        row
        for row in endpoints
        if row["ok"]
        and row["output_tokens"] is not None
        and row["output_tokens"] < requested * (1 - SHORTER)
    ]
    if not short:
        return []
    answers = sum(row["ok"] for row in short)
    mean = sum(row["output_tokens"] * row["ok"] for row in short) / answers
    where = _of({row["endpoint"]: row["ok"] for row in short})
    return [
        f"the answers to {where} have {mean:.1f} output tokens on average, not the {requested:g} "
        "that were requested: times and rates are those of shorter answers (the server does not "
        "take ignore_eos, or is not known to)"
    ]


def _of(counts: Mapping[str, int]) -> str:
    """``12 requests at a:1``, ``40 requests at 3 endpoints (a:1, b:1, ...)``."""
    names, total = list(counts), sum(counts.values())
    where = names[0] if len(names) == 1 else f"{len(names):,} endpoints ({', '.join(names[:2])}"
    if len(names) > 1:
        where += ", ...)" if len(names) > 2 else ")"
    return f"{total:,} request{'s' * (total != 1)} at {where}"


SIMULATED = "bagent.sim"
"""Part of the version that simulated endpoints report."""

_SPREAD = ("output_tok_s", "rps", "ttft_p50_ms", "e2e_p50_ms")
_ENDPOINT = (
    "requests",
    "ok",
    "failed",
    "ok_share",
    "rps",
    "output_tok_s",
    "ttft_p50_ms",
    "ttft_p99_ms",
    "tpot_p50_ms",
    "e2e_p50_ms",
    "in_flight_mean",
    "cached_share",
)


def summarise(
    tables: BenchTables,
    plan: BenchPlan,
    record: LoadTestRecord,
    health: Sequence[HealthResult],
    command: str,
) -> Numbers:
    """Return the whole summary as JSON values; the keys of loads and endpoints are their
    columns."""
    servers = metrics.server_numbers(tables)
    loads = _loads(tables, plan, servers)
    by_endpoint = [
        row for row in metrics.load_numbers(tables, plan.slo, "endpoint") if row["endpoint"]
    ]  # "" had none with room
    failures = metrics.failures(tables)
    verdicts = _judge_endpoints(tables, plan, health, main_failure_kinds(failures))
    endpoints = _endpoints(servers, by_endpoint, health, verdicts)
    states = metrics.client_states(tables)
    limited = {state.load: client_limits(state) for state in states if client_limits(state)}
    fleet: Numbers = dict.fromkeys(("ok", "slow", "failing", "dead"), 0)
    for verdict in verdicts:
        fleet[verdict.verdict] += 1
    fleet |= _spread(endpoints)
    saturation = record.saturation
    fleet["best_rate"] = saturation.best_rate if saturation else None
    fleet["sustained_rate"] = saturation.sustained_rate if saturation else None
    return {
        "schema_version": SCHEMA_VERSION,
        "bagent": __version__,
        "command": command,
        "started_at": datetime.fromtimestamp(record.started_at, UTC).isoformat(),
        "client": {
            "host": platform.node(),
            "system": platform.platform(),
            "python": platform.python_version(),
            "cores": os.cpu_count(),
            "workers": plan.workers,
        },
        "simulated": any(_simulated(result) for result in health),
        "stopped": record.stopped,
        "plan": msgspec.to_builtins(plan),
        "salt": record.salt,
        "seconds": max((stage.ended for stage in record.stages), default=0.0)
        - min((stage.began for stage in record.stages), default=0.0),
        "models": sorted({result.model for result in health if result.ready and result.model}),
        "prompts": msgspec.to_builtins(record.lengths),
        "fleet": fleet,
        "saturation": msgspec.to_builtins(saturation) if saturation else None,
        "warnings": warnings(by_endpoint, _max_tokens(plan), _requested_tokens(plan)),
        "client_limited": limited,
        "client_states": msgspec.to_builtins(states),
        "loads": loads,
        "turns": metrics.load_numbers(tables, plan.slo, "load, turn") if plan.turns > 1 else [],
        "endpoints": endpoints,
        "failures": failures,
        "servers": servers,
        "definitions": DEFINITIONS,
    }


def _max_tokens(plan: BenchPlan) -> int | None:
    """Return the tokens that an answer may have; None where that differs."""
    if plan.speeds or "job" in plan.ways:
        return None
    return AnswerPlan(plan.output_tokens, plan.as_json).max_tokens


def _requested_tokens(plan: BenchPlan) -> float | None:
    """Return the tokens that each free answer should have; None for JSON and where that differs."""
    return None if _max_tokens(plan) is None or plan.as_json else plan.output_tokens


def _simulated(result: HealthResult) -> bool:
    return bool(
        result.capabilities
        and result.capabilities.version
        and SIMULATED in result.capabilities.version
    )


def _loads(tables: BenchTables, plan: BenchPlan, servers: Sequence[Numbers]) -> list[Numbers]:
    """Return the numbers of each load, with the lowest and highest of its repeats."""
    gaps, peaks = metrics.gap_numbers(tables), metrics.peak_tokens(tables)
    loads = metrics.load_numbers(tables, plan.slo)
    conversations = metrics.conversations(tables, plan.turns) if plan.turns > 1 else {}
    for load in loads:
        load |= gaps.get(load["load"], {}) | conversations.get(load["load"], {})
        load["peak_tok_s"] = peaks.get(load["load"])
        rows = [row for row in servers if row["load"] == load["load"]]
        load["hit_rate"] = _hit_rate(rows)
    if plan.repeats > 1:
        repeats = metrics.load_numbers(tables, plan.slo, "load, repeat")
        for load in loads:
            rows = [row for row in repeats if row["load"] == load["load"]]
            for name in _SPREAD:
                values = [row[name] for row in rows if row[name] is not None]
                load[f"{name}_repeats"] = values
                load[f"{name}_median"] = statistics.median(values) if values else None
    return loads


def _judge_endpoints(
    tables: BenchTables, plan: BenchPlan, health: Sequence[HealthResult], causes: Mapping[str, str]
) -> list[EndpointVerdict]:
    not_ready = {result.endpoint.name: _not_ready(result) for result in health if not result.ready}
    for name, reason in metrics.dead_endpoints(tables).items():
        not_ready[name] = EndpointVerdict(name, "dead", reason)
    gpus = _gpus(health)
    models = {result.endpoint.name: result.model for result in health}
    spreads = metrics.pace_spreads(tables)
    stats = [
        EndpointStats(
            result["endpoint"],
            result["load"],
            result["requests"],
            result["ok"],
            result["failed"],
            result["tokens"],
            _per_gpu(result["output_tok_s"], gpus.get(result["endpoint"])),
            result["pace_p50_ms"] or result["e2e_sent_p50_ms"],
            closed=result["rate"] is None,
            model=models.get(result["endpoint"]),
            spread=spreads.get((result["load"], result["endpoint"])),
            in_flight=result["in_flight_mean"] or 1.0,
        )
        for result in metrics.load_numbers(tables, plan.slo, "load, endpoint")
    ]
    return judge([result.endpoint.name for result in health], not_ready, stats, causes)


def _not_ready(result: HealthResult) -> EndpointVerdict:
    verdict: Verdict = "dead" if result.state in ("dead", "silent") else "failing"
    return EndpointVerdict(result.endpoint.name, verdict, f"{result.state}: {result.reason}")


def _gpus(health: Sequence[HealthResult]) -> dict[str, int]:
    """Return the GPUs by endpoint, where every line of the hostfile has ``gpus=``."""
    tags = {result.endpoint.name: result.endpoint.tags.get("gpus") for result in health}
    if any(value is None for value in tags.values()):
        return {}
    return {name: int(value) for name, value in tags.items() if value}


def _per_gpu(value: float | None, gpus: int | None) -> float | None:
    return value / gpus if value is not None and gpus else value


def _endpoints(
    counters: Sequence[Numbers],
    rows: Sequence[Numbers],
    health: Sequence[HealthResult],
    verdicts: Sequence[EndpointVerdict],
) -> list[Numbers]:
    """Return a row for each endpoint of the hostfile, over all loads."""
    numbers = {result["endpoint"]: result for result in rows}
    servers = _server_totals(counters)
    gpus = _gpus(health)
    total = sum(result["requests"] for result in numbers.values())
    fair = total / len(numbers) if numbers else 0
    records = []
    for result, verdict in zip(health, verdicts, strict=True):
        name = result.endpoint.name
        row = numbers.get(name, {})
        record: Numbers = {
            "endpoint": name,
            "verdict": verdict.verdict,
            "reason": verdict.reason,
            "speed": verdict.speed,
            **{key: row.get(key) for key in _ENDPOINT},
            "share": row["requests"] / fair if row and fair else None,
            "tok_s_gpu": _per_gpu(row.get("output_tok_s"), gpus[name]) if name in gpus else None,
            **servers.get(name, {"kv_max": None, "waiting_max": None, "hit_rate": None}),
            "preemptions": servers.get(name, {}).get("preemptions"),
            "engine": result.capabilities.engine if result.capabilities else None,
            "version": result.capabilities.version if result.capabilities else None,
            "model": result.model,
            "url": result.endpoint.url,
            "tags": dict(result.endpoint.tags),
        }
        records.append(record)
    return records


def _server_totals(rows: Sequence[Mapping[str, Any]]) -> dict[str, Numbers]:
    """Return the totals of the counters of each endpoint over all loads."""
    by_name: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for row in rows:
        by_name[row["endpoint"]].append(row)
    totals: dict[str, Numbers] = {}
    for name, readings in by_name.items():
        totals[name] = {
            "kv_max": _max(readings, "kv_max"),
            "waiting_max": _max(readings, "waiting_max"),
            "hit_rate": _hit_rate(readings),
            "preemptions": _sum(readings, "preemptions"),
        }
    return totals


def _hit_rate(rows: Sequence[Mapping[str, Any]]) -> float | None:
    hits, queries = _sum(rows, "cache_hits"), _sum(rows, "cache_queries")
    return hits / queries if hits is not None and queries else None


def _sum(rows: Sequence[Mapping[str, Any]], name: str) -> float | None:
    values = [row[name] for row in rows if row[name] is not None]
    return float(sum(values)) if values else None


def _max(rows: Sequence[Mapping[str, Any]], name: str) -> float | None:
    return max((row[name] for row in rows if row[name] is not None), default=None)


def _spread(endpoints: Sequence[Mapping[str, Any]]) -> Numbers:
    """Return how different the answering endpoints are: highest by lowest rate of output tokens,
    and CV."""
    rates = [endpoint["output_tok_s"] for endpoint in endpoints if endpoint["output_tok_s"]]
    if len(rates) < 2:
        return {"max_by_min": None, "cv": None}
    mean = statistics.fmean(rates)
    return {"max_by_min": max(rates) / min(rates), "cv": statistics.stdev(rates) / mean}
