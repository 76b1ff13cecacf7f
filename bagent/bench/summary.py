"""From raw rows to ``summary.json``: numbers, verdicts, and what they were measured with."""

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
from bagent.bench import metrics as measure
from bagent.bench.monitors import limits_met
from bagent.bench.plan import BenchPlan
from bagent.bench.prompts import AnswerPlan
from bagent.bench.runner import TestRecord
from bagent.bench.tables import WORDS, BenchTables
from bagent.bench.thresholds import SCHEMA_VERSION
from bagent.bench.verdict import EndpointStats, EndpointVerdict, Verdict, judge, main_kinds
from bagent.fleet.health_check import HealthResult

LoadSummary = Mapping[str, Any]

SHORTER = 0.02
"""Answers that are shorter than requested by more than this share are not of that length."""

FEW = 0.1
"""Answers of an endpoint that came in one piece by chance: below this share of all."""


def warnings(
    endpoints: Sequence[LoadSummary], most: int | None = None, requested: float | None = None
) -> list[str]:
    """What is to be known of the numbers, from those of each endpoint over all loads.

    Args:
        most: tokens that an answer was allowed; None where answers had different limits.
        requested: tokens that an answer should have; None where answers had different lengths.
    """
    found = []
    estimated = {one["endpoint"]: one["estimated"] for one in endpoints if one["estimated"]}
    if estimated:
        found.append(
            f"output tokens of {_of(estimated)} are estimated by the pieces that came: "
            "the server tells no usage"
        )
    usage_incomplete = {
        one["endpoint"]: one["usage_incomplete"] for one in endpoints if one["usage_incomplete"]
    }
    if usage_incomplete:
        found.append(
            f"the usage of {_of(usage_incomplete)} tells fewer tokens than pieces came: tokens a"
            " second and TPOT are wrong there"
        )
    too_many = {
        one["endpoint"]: one["ok"]
        for one in endpoints
        if most is not None and (one["output_tokens"] or 0) > most
    }
    if too_many:
        found.append(
            f"the usage of {_of(too_many)} tells more output tokens than the {most} that an answer "
            "may have: tokens a second and TPOT are wrong there"
        )
    if requested is not None:
        found += _shorter(endpoints, requested)
    whole = {
        one["endpoint"]: one["not_streamed"]
        for one in endpoints
        if one["not_streamed"] > FEW * one["ok"]
    }
    if whole:
        found.append(
            f"answers to {_of(whole)} came in one piece: TTFT is the whole time there and TPOT is "
            "not known (something on the way buffers streams, or the server sends none)"
        )
    return found


def _shorter(endpoints: Sequence[LoadSummary], requested: float) -> list[str]:
    """What is to be known of answers that ended before the length that was requested."""
    short = [
        one
        for one in endpoints
        if one["ok"]
        and one["output_tokens"] is not None
        and one["output_tokens"] < requested * (1 - SHORTER)
    ]
    if not short:
        return []
    answers = sum(one["ok"] for one in short)
    mean = sum(one["output_tokens"] * one["ok"] for one in short) / answers
    where = _of({one["endpoint"]: one["ok"] for one in short})
    return [
        f"the answers to {where} have {mean:.1f} output tokens on average, not the {requested:g} "
        "that were requested: times and rates are those of shorter answers (the server does not "
        "take ignore_eos, or is not known to)"
    ]


def _of(counts: Mapping[str, int]) -> str:
    """``12 requests at a:1``, ``40 requests at 3 endpoints (a:1, b:1, ...)``."""
    names, number = list(counts), sum(counts.values())
    where = names[0] if len(names) == 1 else f"{len(names):,} endpoints ({', '.join(names[:2])}"
    if len(names) > 1:
        where += ", ...)" if len(names) > 2 else ")"
    return f"{number:,} request{'s' * (number != 1)} at {where}"


SIMULATED = "bagent.sim"
"""In the version that simulated endpoints tell."""

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

Numbers = dict[str, Any]


def summarise(
    tables: BenchTables,
    plan: BenchPlan,
    course: TestRecord,
    called: Sequence[HealthResult],
    command: str,
) -> Numbers:
    """The whole summary as JSON values; the keys of each load and endpoint are its columns."""
    servers = measure.server_numbers(tables)
    loads = _loads(tables, plan, servers)
    by_endpoint = [
        row for row in measure.load_numbers(tables, plan.slo, "endpoint") if row["endpoint"]
    ]  # "" had none with room
    failures = measure.failures(tables)
    judged = _judged(tables, plan, called, main_kinds(failures))
    endpoints = _endpoints(servers, by_endpoint, called, judged)
    states = measure.client_states(tables)
    limited = {state.load: limits_met(state) for state in states if limits_met(state)}
    fleet: Numbers = dict.fromkeys(("ok", "slow", "failing", "dead"), 0)
    for one in judged:
        fleet[one.verdict] += 1
    fleet |= _spread(endpoints)
    found = course.saturation
    fleet["best_rate"] = found.best_rate if found else None
    fleet["sustained_rate"] = found.sustained_rate if found else None
    return {
        "schema_version": SCHEMA_VERSION,
        "bagent": __version__,
        "command": command,
        "started_at": datetime.fromtimestamp(course.started_at, UTC).isoformat(),
        "client": {
            "host": platform.node(),
            "system": platform.platform(),
            "python": platform.python_version(),
            "cores": os.cpu_count(),
            "workers": plan.workers,
        },
        "simulated": any(_simulated(one) for one in called),
        "stopped": course.stopped,
        "plan": msgspec.to_builtins(plan),
        "salt": course.salt,
        "seconds": max((one.ended for one in course.stages), default=0.0)
        - min((one.began for one in course.stages), default=0.0),
        "models": sorted({one.model for one in called if one.ready and one.model}),
        "prompts": msgspec.to_builtins(course.lengths),
        "fleet": fleet,
        "saturation": msgspec.to_builtins(found) if found else None,
        "warnings": warnings(by_endpoint, _most_tokens(plan), _requested_tokens(plan)),
        "client_limited": limited,
        "client_states": msgspec.to_builtins(states),
        "loads": loads,
        "turns": measure.load_numbers(tables, plan.slo, "load, turn") if plan.turns > 1 else [],
        "endpoints": endpoints,
        "failures": failures,
        "servers": servers,
        "definitions": WORDS,
    }


def _most_tokens(plan: BenchPlan) -> int | None:
    """The tokens that an answer may have; None where that differs."""
    if plan.speeds or "job" in plan.ways:
        return None
    return AnswerPlan(plan.output_tokens, plan.as_json).most


def _requested_tokens(plan: BenchPlan) -> float | None:
    """The tokens that each free answer should have; None where that differs.

    JSON ends where it ends.
    """
    return None if _most_tokens(plan) is None or plan.as_json else plan.output_tokens


def _simulated(one: HealthResult) -> bool:
    return bool(one.known and one.known.version and SIMULATED in one.known.version)


def _loads(tables: BenchTables, plan: BenchPlan, servers: Sequence[Numbers]) -> list[Numbers]:
    """The numbers of each load, with the lowest and highest of its repeats."""
    gaps, peaks = measure.gap_numbers(tables), measure.peak_tokens(tables)
    loads = measure.load_numbers(tables, plan.slo)
    talks = measure.conversations(tables, plan.turns) if plan.turns > 1 else {}
    for one in loads:
        one |= gaps.get(one["load"], {}) | talks.get(one["load"], {})
        one["peak_tok_s"] = peaks.get(one["load"])
        own = [row for row in servers if row["load"] == one["load"]]
        one["hit_rate"] = _hit_rate(own)
    if plan.repeats > 1:
        repeats = measure.load_numbers(tables, plan.slo, "load, repeat")
        for one in loads:
            own = [each for each in repeats if each["load"] == one["load"]]
            for name in _SPREAD:
                values = [each[name] for each in own if each[name] is not None]
                one[f"{name}_repeats"] = values
                one[f"{name}_median"] = statistics.median(values) if values else None
    return loads


def _judged(
    tables: BenchTables, plan: BenchPlan, called: Sequence[HealthResult], causes: Mapping[str, str]
) -> list[EndpointVerdict]:
    not_ready = {one.endpoint.name: _not_ready(one) for one in called if not one.ready}
    for name, words in measure.dead_endpoints(tables).items():
        not_ready[name] = EndpointVerdict(name, "dead", words)
    gpus = _gpus(called)
    models = {one.endpoint.name: one.model for one in called}
    spreads = measure.pace_spreads(tables)
    seen = [
        EndpointStats(
            one["endpoint"],
            one["load"],
            one["requests"],
            one["ok"],
            one["failed"],
            one["tokens"],
            _per_gpu(one["output_tok_s"], gpus.get(one["endpoint"])),
            one["pace_p50_ms"] or one["e2e_sent_p50_ms"],
            closed=one["rate"] is None,
            model=models.get(one["endpoint"]),
            spread=spreads.get((one["load"], one["endpoint"])),
            in_flight=one["in_flight_mean"] or 1.0,
        )
        for one in measure.load_numbers(tables, plan.slo, "load, endpoint")
    ]
    return judge([one.endpoint.name for one in called], not_ready, seen, causes)


def _not_ready(one: HealthResult) -> EndpointVerdict:
    verdict: Verdict = "dead" if one.state in ("dead", "silent") else "failing"
    return EndpointVerdict(one.endpoint.name, verdict, f"{one.state}: {one.reason}")


def _gpus(called: Sequence[HealthResult]) -> dict[str, int]:
    """GPUs by endpoint, where every endpoint's line tells them (``gpus=``)."""
    found = {one.endpoint.name: one.endpoint.tags.get("gpus") for one in called}
    if any(value is None for value in found.values()):
        return {}
    return {name: int(value) for name, value in found.items() if value}


def _per_gpu(value: float | None, gpus: int | None) -> float | None:
    return value / gpus if value is not None and gpus else value


def _endpoints(
    counters: Sequence[Numbers],
    rows: Sequence[Numbers],
    called: Sequence[HealthResult],
    judged: Sequence[EndpointVerdict],
) -> list[Numbers]:
    """A row for each endpoint of the hostfile, over all loads."""
    numbers = {one["endpoint"]: one for one in rows}
    servers = _server_totals(counters)
    gpus = _gpus(called)
    sent = sum(one["requests"] for one in numbers.values())
    fair = sent / len(numbers) if numbers else 0
    found = []
    for one, verdict in zip(called, judged, strict=True):
        name = one.endpoint.name
        own = numbers.get(name, {})
        row: Numbers = {
            "endpoint": name,
            "verdict": verdict.verdict,
            "reason": verdict.reason,
            "speed": verdict.speed,
            **{key: own.get(key) for key in _ENDPOINT},
            "share": own["requests"] / fair if own and fair else None,
            "tok_s_gpu": _per_gpu(own.get("output_tok_s"), gpus[name]) if name in gpus else None,
            **servers.get(name, {"kv_max": None, "waiting_max": None, "hit_rate": None}),
            "preemptions": servers.get(name, {}).get("preemptions"),
            "engine": one.known.engine if one.known else None,
            "version": one.known.version if one.known else None,
            "model": one.model,
            "url": one.endpoint.url,
            "tags": dict(one.endpoint.tags),
        }
        found.append(row)
    return found


def _server_totals(rows: Sequence[Mapping[str, Any]]) -> dict[str, Numbers]:
    """What the counters told of each endpoint over all loads."""
    by_name: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for row in rows:
        by_name[row["endpoint"]].append(row)
    found: dict[str, Numbers] = {}
    for name, own in by_name.items():
        found[name] = {
            "kv_max": _most(own, "kv_max"),
            "waiting_max": _most(own, "waiting_max"),
            "hit_rate": _hit_rate(own),
            "preemptions": _sum(own, "preemptions"),
        }
    return found


def _hit_rate(rows: Sequence[Mapping[str, Any]]) -> float | None:
    hits, queries = _sum(rows, "cache_hits"), _sum(rows, "cache_queries")
    return hits / queries if hits is not None and queries else None


def _sum(rows: Sequence[Mapping[str, Any]], name: str) -> float | None:
    known = [row[name] for row in rows if row[name] is not None]
    return float(sum(known)) if known else None


def _most(rows: Sequence[Mapping[str, Any]], name: str) -> float | None:
    return max((row[name] for row in rows if row[name] is not None), default=None)


def _spread(endpoints: Sequence[Mapping[str, Any]]) -> Numbers:
    """How different the answering endpoints are: highest by lowest output tokens a second, and
    the standard deviation by the mean (CV)."""
    rates = [one["output_tok_s"] for one in endpoints if one["output_tok_s"]]
    if len(rates) < 2:
        return {"max_by_min": None, "cv": None}
    mean = statistics.fmean(rates)
    return {"max_by_min": max(rates) / min(rates), "cv": statistics.stdev(rates) / mean}
