"""The page of a load test."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from bagent.bench.metrics import HEATMAP_BINS
from bagent.bench.thresholds import load_changes, setting_differences, verdict_changes
from bagent.bench.verdict import fleet_text, rank_endpoints
from bagent.observe.formatting import duration
from bagent.report import html
from bagent.report.html import Html, note, number, section, table
from bagent.report.svg import Axes, Cell, Series, lines, strip

Numbers = Mapping[str, Any]

_LOADS = {
    "load": "load",
    "requests": "requests",
    "ok_share": "ok",
    "rps": "req/s",
    "output_tok_s": "out tok/s",
    "peak_tok_s": "peak tok/s",
    "ttft_p50_ms": "TTFT p50",
    "ttft_p99_ms": "TTFT p99",
    "tpot_p50_ms": "TPOT p50",
    "tpot_p99_ms": "TPOT p99",
    "itl_p99_ms": "ITL p99",
    "icl_p99_ms": "ICL p99",
    "e2e_p50_ms": "E2E p50",
    "e2e_p99_ms": "E2E p99",
    "lag_p99_ms": "lag p99",
    "goodput_rps": "goodput req/s",
    "input_tokens": "in tokens",
    "output_tokens": "out tokens",
    "cached_share": "cached",
    "hit_rate": "cache hits",
    "conversations_s": "conversations/s",
    "conversation_p50_ms": "whole p50",
}
_TURNS = {
    "load": "load",
    "turn": "turn",
    **{
        name: _LOADS[name]
        for name in (
            *("requests", "ok_share", "ttft_p50_ms", "ttft_p99_ms", "tpot_p50_ms"),
            *("e2e_p50_ms", "e2e_p99_ms", "goodput_rps"),
            *("input_tokens", "output_tokens", "cached_share"),
        )
    },
}
_ENDPOINTS = {
    "endpoint": "endpoint",
    "verdict": "verdict",
    "speed": "speed by median",
    "requests": "requests",
    "ok_share": "ok",
    "rps": "req/s",
    "output_tok_s": "out tok/s",
    "tok_s_gpu": "tok/s a GPU",
    "ttft_p50_ms": "TTFT p50",
    "ttft_p99_ms": "TTFT p99",
    "tpot_p50_ms": "TPOT p50",
    "in_flight_mean": "in flight",
    "share": "share of fair",
    "waiting_max": "most waiting",
    "kv_max": "most KV in use",
    "hit_rate": "cache hits",
    "preemptions": "preempted",
    "engine": "engine",
}
_NOT_OK = {"endpoint": "endpoint", "verdict": "verdict", "reason": "reason"}
_FAILURES = {
    "endpoint": "endpoint",
    "load": "load",
    "kind": "kind",
    "code": "HTTP",
    "n": "number",
    "example": "reason",
}
MOST_ROWS = 200
"""Endpoints and kinds of failure on a page: a fleet has thousands, and a browser its limits."""


def page(summary: Numbers, heat: Sequence[Numbers], old: Numbers | None) -> str:
    """Make the page of a summary.

    Args:
        heat: see :func:`bagent.bench.metrics.heatmap`.
        old: an older summary to compare with.
    """
    fleet = summary["fleet"]
    counts = ", ".join(f"{fleet[w]} {w}" for w in ("ok", "slow", "failing", "dead") if fleet[w])
    models = ", ".join(summary["models"]) or "no model"
    listed, remaining = rank_endpoints(summary["endpoints"], MOST_ROWS)
    loads = summary["loads"]
    parts = [
        _about(summary),
        *(note(message, "warn") for message in _warnings(summary)),
        _not_ok(summary["endpoints"]),
        section(
            "Endpoints over time",
            strip(
                "Time for an output token, by endpoint over time",
                _slices(listed, heat),
                float(summary["seconds"]),
            ),
            name="heat",
        ),
        section("Loads", table(loads, _LOADS), html.charts(*_charts(loads)) if loads else ""),
        section("Turns", table(summary.get("turns") or (), _TURNS)),
        section("Endpoints", _verdicts(listed, _ENDPOINTS), note(remaining)),
        _failures(summary["failures"]),
        _compared(old, summary) if old is not None else Html(""),
        _definitions(summary),
    ]
    return html.page(f"bagent bench: {models}", parts, heading=f"{models}: {counts}")


def _about(summary: Numbers) -> Html:
    """What was sent, from where, by which command, and the fleet in one line."""
    plan = summary["plan"]
    sizes = f"{plan['input_tokens']} tokens in, {plan['output_tokens']} out"
    if "job" in plan["ways"]:
        sizes = "rows of a job"
    elif plan.get("speeds"):
        sizes = f"{plan['trace']['requests']} requests as recorded in {plan['trace']['source']}"
    elif plan.get("turns", 1) > 1:
        sizes += f", {plan['turns']} turns with {duration(plan['think'])} of thinking between"
    origin = (
        f"{summary['started_at'][:19]} UTC, from {summary['client']['host']}, {sizes},"
        f" seed {plan['seed']}, bagent {summary['bagent']}"
    )
    # The counts, before the first semicolon, are the heading already.
    fleet = fleet_text(summary).partition("; ")[2]
    command = Html(f"<p><code>{escape(summary['command'])}</code></p>")
    return html.join([note(origin), command, note(fleet)])


def _warnings(summary: Numbers) -> list[str]:
    messages = []
    if summary["simulated"]:
        messages.append("Simulated endpoints: these numbers say nothing of any hardware.")
    limited = [f"{load}: {', '.join(why)}" for load, why in summary["client_limited"].items()]
    if limited:
        messages.append(f"CLIENT-LIMITED, results invalid: {'; '.join(limited)}")
    messages += summary.get("warnings", ())
    if summary["stopped"]:
        messages.append("Stopped early: this is what was measured by then.")
    return messages


def _not_ok(endpoints: Sequence[Numbers]) -> Html:
    endpoints = [endpoint for endpoint in endpoints if endpoint["verdict"] != "ok"]
    listed, _ = rank_endpoints(endpoints, MOST_ROWS)
    return section(f"Not ok: {len(endpoints):,}", _verdicts(listed, _NOT_OK))


def _verdicts(endpoints: Sequence[Numbers], heads: Mapping[str, str]) -> Html:
    """A table of endpoints with coloured verdicts."""
    rows = [
        {**e, "verdict": Html(f'<b class="{escape(e["verdict"])}">{escape(e["verdict"])}</b>')}
        for e in endpoints
    ]
    return table(rows, heads)


def _charts(loads: Sequence[Numbers]) -> list[Html]:
    """Latency and goodput against rate, and throughput against latency.

    A line never mixes open and closed loops: at the same rate they are not the same load. A chart
    without a line of two points is left out: the table has its numbers.
    """
    closed = [load for load in loads if load["rate"] is None]
    opened = [load for load in loads if load["rate"] is not None]
    by_rate = [{**load, "offered": load["rate"] or load["rps"]} for load in opened or closed]
    rate = "requests/s offered, open loops" if opened else "requests/s served, closed loops"
    charts: list[tuple[str, Axes, list[Series]]] = [
        (
            "Latency against rate",
            Axes(rate, "ms", log=True),
            [
                _series("E2E p50", by_rate, "offered", "e2e_p50_ms"),
                _series("E2E p99", by_rate, "offered", "e2e_p99_ms"),
                _series("TTFT p50", by_rate, "offered", "ttft_p50_ms"),
            ],
        ),
        (
            "Throughput and its price: the knee",
            Axes("E2E p50, ms", "output tokens/s"),
            [_series("output tokens/s", closed or opened, "e2e_p50_ms", "output_tok_s")],
        ),
        (
            "Goodput against rate",
            Axes(rate, "requests/s"),
            [
                _series("ended well", by_rate, "offered", "rps"),
                _series("kept the SLO", by_rate, "offered", "goodput_rps"),
            ],
        ),
    ]
    return [
        lines(title, axes, series)
        for title, axes, series in charts
        if any(len(line.points) > 1 for line in series)
    ]


def _series(name: str, loads: Sequence[Numbers], x: str, y: str) -> Series:
    points = sorted(
        (float(load[x]), float(load[y]), str(load["load"]))
        for load in loads
        if load.get(x) is not None and load.get(y) is not None
    )
    labels = [f"{load}: {number(across)}, {name} {number(up)}" for across, up, load in points]
    return Series(name, [(across, up) for across, up, _ in points], labels)


def _slices(endpoints: Sequence[Numbers], heat: Sequence[Numbers]) -> list[tuple[str, list[Cell]]]:
    """The rows of the heat strip, each slice compared with the median endpoint in it."""
    slices = {(sample["endpoint"], sample["bin"]): sample for sample in heat}
    medians = _medians(heat)
    names = [endpoint["endpoint"] for endpoint in endpoints]
    return [
        (name, [_slice(slices.get((name, index)), medians[index]) for index in range(HEATMAP_BINS)])
        for name in names
    ]


def _slice(sample: Numbers | None, median: float | None) -> Cell:
    if sample is None:
        return Cell(None, False, "no request there")
    ms = sample["pace_ms"]
    level = max(0.0, math.log10(ms / median)) if ms and median else None
    label = f"{sample['ok']} ok, {sample['bad']} not"
    if ms:
        label += f", {number(ms)} ms a token"
    return Cell(level, sample["bad"] > 0, label)


def _medians(heat: Sequence[Numbers]) -> list[float | None]:
    """The median time for a token in each slice.

    A slice with one endpoint takes the median before it: none is compared with itself.
    """
    times: list[list[float]] = [[] for _ in range(HEATMAP_BINS)]
    for sample in heat:
        if sample["pace_ms"] and sample["bin"] < HEATMAP_BINS:
            times[sample["bin"]].append(sample["pace_ms"])
    medians: list[float | None] = []
    last: float | None = None
    for values in times:
        if len(values) > 1 or last is None:
            last = statistics.median_low(values) if values else last
        medians.append(last)
    return medians


def _failures(rows: Sequence[Numbers]) -> Html:
    remaining = len(rows) - MOST_ROWS
    more = f"{remaining:,} more rows: summary.json has every one" if remaining > 0 else ""
    return section("Failures", table(rows[:MOST_ROWS], _FAILURES), note(more))


def _compared(old: Numbers, summary: Numbers) -> Html:
    rows = [
        {
            "load": change.load,
            "name": change.name,
            "before": change.before,
            "now": change.now,
            "change": None if change.change is None else f"{100 * change.change:+.1f} %",
        }
        for change in load_changes(old, summary)
    ]
    return section(
        f"Compared with {str(old.get('started_at', 'an older test'))[:19]}",
        *(note(message, "warn") for message in setting_differences(old, summary)),
        *(note(message) for message in verdict_changes(old, summary)[:MOST_ROWS]),
        table(rows),
    )


def _definitions(summary: Numbers) -> Html:
    terms = "".join(
        f"<dt>{escape(name)}</dt><dd>{escape(definition)}</dd>"
        for name, definition in summary["definitions"].items()
    )
    limits = [f"{name} at most {ms:g} ms" for name, ms in summary["plan"]["slo"].items() if ms]
    slo = ", ".join(limits) or "none: every request that ended well is good"
    folded = f"<details><summary>what each number means</summary><dl>{terms}</dl></details>"
    return section("Definitions", Html(folded), note(f"SLO: {slo}"))
