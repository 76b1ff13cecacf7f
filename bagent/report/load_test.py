"""A load test as one HTML page that stands alone: no script, no network."""

from __future__ import annotations

import html
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from bagent.bench.metrics import HEATMAP_BINS
from bagent.bench.thresholds import load_changes, setting_differences, verdict_changes
from bagent.bench.verdict import fleet_text, rank_endpoints
from bagent.report.svg import Axes, Cell, Series, lines, short, strip

Numbers = Mapping[str, Any]

_STYLE = """
:root { color-scheme: light dark; --bg: #fff; --fg: #1c2126; --soft: #5c6670; --line: #dfe3e7;
  --s0: #1f6fb4; --s1: #c2571a; --s2: #2b8a3e; --h0: #cfe8d5; --h1: #e9e3a8; --h2: #f3c46a;
  --h3: #e98f45; --h4: #cf5b2e; --bad: #8f1d3f; --none: #eef0f2; --warn: #fff3cd; }
@media (prefers-color-scheme: dark) { :root { --bg: #14181c; --fg: #e4e8ec; --soft: #9aa5b0;
  --line: #2d343b; --s0: #6cb2f0; --s1: #f0975c; --s2: #6fce85; --h0: #1f4a2e; --h1: #5c5a22;
  --h2: #86621c; --h3: #a3571c; --h4: #c2481f; --bad: #e0447c; --none: #20262c;
  --warn: #4a3a0a; } }
body { background: var(--bg); color: var(--fg); font: 15px/1.45 system-ui, sans-serif;
  margin: 0 auto; max-width: 1120px; padding: 24px; }
h1 { font-size: 22px; margin: 0 0 4px; } h2 { font-size: 17px; margin: 30px 0 8px; }
p, li, dd { color: var(--soft); } .warn { background: var(--warn); color: var(--fg);
  padding: 8px 12px; border-radius: 6px; font-weight: 600; }
h1, code { overflow-wrap: anywhere; } .scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 13px; }
th, td { padding: 4px 7px; text-align: right; border-bottom: 1px solid var(--line); }
td { white-space: nowrap; } th { color: var(--soft); font-weight: 600; vertical-align: bottom; }
.text { text-align: left; } td.reason { white-space: normal; overflow-wrap: anywhere; }
.reason { min-width: 140px; text-align: left; }
.ok { color: var(--s2); } .slow { color: var(--s1); } .failing, .dead { color: var(--bad); }
.ok, .slow, .failing, .dead { font-weight: 600; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(420px, 100%), 1fr));
  gap: 20px; }
figure { margin: 16px 0 0; overflow-x: auto; } figcaption { font-weight: 600; }
svg { width: 100%; min-width: 400px; height: auto; }
svg text { fill: var(--soft); font-size: 11px; }
svg .axis { fill: var(--fg); font-size: 12px; } .grid { stroke: var(--line); }
polyline { fill: none; stroke-width: 2; }
polyline.s1 { stroke-dasharray: 8 5; } polyline.s2 { stroke-dasharray: 2 4; }
polyline.s0 { stroke: var(--s0); } polyline.s1 { stroke: var(--s1); }
polyline.s2 { stroke: var(--s2); } circle.s0 { fill: var(--s0); } circle.s1 { fill: var(--s1); }
circle.s2 { fill: var(--s2); }
.legend { list-style: none; display: flex; flex-wrap: wrap; gap: 14px; padding: 0; margin: 4px 0;
  font-size: 12px; } .key { display: inline-block; width: 11px; height: 11px; margin-right: 5px; }
.k0 { background: var(--s0); } .k1 { background: var(--s1); } .k2 { background: var(--s2); }
.h0 { fill: var(--h0); background: var(--h0); } .h1 { fill: var(--h1); }
.h2 { fill: var(--h2); background: var(--h2); } .h3 { fill: var(--h3); }
.h4 { fill: var(--h4); background: var(--h4); } .bad { fill: var(--bad); background: var(--bad); }
.none { fill: var(--none); background: var(--none); }
dt { font-weight: 600; margin-top: 6px; } dd { margin: 0; }
"""

_LOADS = {
    "load": "load",
    "requests": "requests",
    "ok": "ok_share",
    "req/s": "rps",
    "out tok/s": "output_tok_s",
    "peak tok/s": "peak_tok_s",
    "TTFT p50 ms": "ttft_p50_ms",
    "TTFT p99 ms": "ttft_p99_ms",
    "TPOT p50 ms": "tpot_p50_ms",
    "TPOT p99 ms": "tpot_p99_ms",
    "ITL p99 ms": "itl_p99_ms",
    "ICL p99 ms": "icl_p99_ms",
    "E2E p50 ms": "e2e_p50_ms",
    "E2E p99 ms": "e2e_p99_ms",
    "lag p99 ms": "lag_p99_ms",
    "goodput req/s": "goodput_rps",
    "in tokens": "input_tokens",
    "out tokens": "output_tokens",
    "cached": "cached_share",
    "cache hits": "hit_rate",
    "conversations/s": "conversations_s",
    "whole p50 ms": "conversation_p50_ms",
}
_TURNS = {
    "load": "load",
    "turn": "turn",
    "requests": "requests",
    "ok": "ok_share",
    "TTFT p50 ms": "ttft_p50_ms",
    "TTFT p99 ms": "ttft_p99_ms",
    "TPOT p50 ms": "tpot_p50_ms",
    "E2E p50 ms": "e2e_p50_ms",
    "E2E p99 ms": "e2e_p99_ms",
    "goodput req/s": "goodput_rps",
    "in tokens": "input_tokens",
    "out tokens": "output_tokens",
    "cached": "cached_share",
}
_ENDPOINTS = {
    "endpoint": "endpoint",
    "verdict": "verdict",
    "speed by median": "speed",
    "requests": "requests",
    "ok": "ok_share",
    "req/s": "rps",
    "out tok/s": "output_tok_s",
    "tok/s a GPU": "tok_s_gpu",
    "TTFT p50 ms": "ttft_p50_ms",
    "TTFT p99 ms": "ttft_p99_ms",
    "TPOT p50 ms": "tpot_p50_ms",
    "in flight": "in_flight_mean",
    "share of fair": "share",
    "most waiting": "waiting_max",
    "most KV in use": "kv_max",
    "cache hits": "hit_rate",
    "preempted": "preemptions",
    "engine": "engine",
}
_BAD = {"endpoint": "endpoint", "verdict": "verdict", "reason": "reason"}
MOST_ROWS = 200
"""Endpoints, and kinds of failure, on a page: a fleet has thousands, and a browser its limits."""

_PERCENT = frozenset({"ok_share", "kv_max", "hit_rate", "cached_share"})


def page(summary: Numbers, heat: Sequence[Numbers], old: Numbers | None) -> str:
    """The page of a summary.

    Args:
        heat: see :func:`bagent.bench.metrics.heatmap`.
        old: an older summary to compare with.
    """
    plan, fleet = summary["plan"], summary["fleet"]
    worst_endpoints, note = rank_endpoints(summary["endpoints"], MOST_ROWS)
    counts = ", ".join(f"{fleet[w]} {w}" for w in ("ok", "slow", "failing", "dead") if fleet[w])
    models = ", ".join(summary["models"]) or "no model"
    sizes = f"{plan['input_tokens']} tokens in, {plan['output_tokens']} out"
    if "job" in plan["ways"]:
        sizes = "rows of a job"
    elif plan.get("speeds"):
        sizes = f"{plan['trace']['requests']} requests as recorded in {plan['trace']['source']}"
    elif plan.get("turns", 1) > 1:
        sizes += f", {plan['turns']} turns with {plan['think']:g} s of thinking between"
    parts = [
        f"<h1>{html.escape(models)}: {html.escape(counts)}</h1>",
        f"<p>{html.escape(summary['started_at'][:19])} UTC, from "
        f"{html.escape(summary['client']['host'])}, {html.escape(sizes)}, "
        f"seed {plan['seed']}, bagent {summary['bagent']}<br><code>"
        f"{html.escape(summary['command'])}</code></p>",
        f"<p>{html.escape(fleet_text(summary).partition('; ')[2])}</p>",  # counts are the title
        *_warnings(summary),
        _bad(summary["endpoints"]),
        "<h2>Loads</h2>",
        _table(_LOADS, summary["loads"]),
        f'<div class="charts">{_charts(summary["loads"])}</div>',
        _turns(summary.get("turns")),
        "<h2>Endpoints</h2>",
        _table(_ENDPOINTS, worst_endpoints),
        f"<p>{html.escape(note)}</p>" if note else "",
        strip(
            "Time for an output token, by endpoint over time",
            *_strip(summary, worst_endpoints, heat),
        ),
        _failures(summary["failures"]),
        _compared(old, summary) if old is not None else "",
        "<h2>Definitions</h2><dl>",
        *(
            f"<dt>{html.escape(name)}</dt><dd>{html.escape(definition)}</dd>"
            for name, definition in summary["definitions"].items()
        ),
        f"</dl><p>SLO: {html.escape(_slo(plan['slo']))}</p>",
    ]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>bagent bench: {html.escape(models)}</title><style>{_STYLE}</style></head>"
        f"<body>{''.join(parts)}</body></html>\n"
    )


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
    return [f'<p class="warn">{html.escape(message)}</p>' for message in messages]


def _bad(endpoints: Sequence[Numbers]) -> str:
    """What is wrong, before all numbers."""
    endpoints_not_ok = [endpoint for endpoint in endpoints if endpoint["verdict"] != "ok"]
    listed, _ = rank_endpoints(endpoints_not_ok, MOST_ROWS)
    return (
        f"<h2>Not ok: {len(endpoints_not_ok):,}</h2>{_table(_BAD, listed)}"
        if endpoints_not_ok
        else ""
    )


def _slo(slo: Numbers) -> str:
    limits = [f"{name} at most {limit:g} ms" for name, limit in slo.items() if limit]
    return ", ".join(limits) or "none: every request that ended well is good"


def _table(columns: Mapping[str, str], rows: Sequence[Numbers]) -> str:
    used_columns = {
        head: name
        for head, name in columns.items()
        if any(row.get(name) is not None for row in rows)
    }
    texts = ("load", "endpoint", "verdict", "engine", "name", "kind")
    head = "".join(
        f'<th class="{"reason" if name == "reason" else "text" if name in texts else ""}">'
        f"{html.escape(head)}</th>"
        for head, name in used_columns.items()
    )
    body = []
    for row in rows:
        cells = []
        for name in used_columns.values():
            value = row.get(name)
            kind = "reason" if name == "reason" else "text" if name in texts else ""
            if name == "verdict":
                kind += f" {value}"
            cells.append(f'<td class="{kind}">{html.escape(_cell(name, value))}</td>')
        body.append(f"<tr>{''.join(cells)}</tr>")
    return (
        f'<div class="scroll"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(body)}</tbody></table></div>"
    )


def _cell(name: str, value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if name in _PERCENT:
        return f"{100 * value:.3g} %"
    return f"{value:,}" if isinstance(value, int) else short(value)


def _charts(loads: Sequence[Numbers]) -> str:
    """Latency and goodput against rate, and throughput against latency.

    A line never mixes open and closed loops: at the same rate they are not the same load.
    """
    closed = [load for load in loads if load["rate"] is None]
    opened = [load for load in loads if load["rate"] is not None]
    by_rate = _offered(opened or closed)
    kind = "open loops" if opened else "closed loops"
    rate = f"requests/s {'offered' if opened else 'served'}, {kind}"
    charts = [
        lines(
            "Latency against rate",
            Axes(rate, "ms", log=True),
            [
                _series("E2E p50", by_rate, "offered", "e2e_p50_ms"),
                _series("E2E p99", by_rate, "offered", "e2e_p99_ms"),
                _series("TTFT p50", by_rate, "offered", "ttft_p50_ms"),
            ],
        ),
        lines(
            "Throughput and its price: the knee",
            Axes("E2E p50, ms", "output tokens/s"),
            [_series("output tokens/s", closed or opened, "e2e_p50_ms", "output_tok_s")],
        ),
        lines(
            "Goodput against rate",
            Axes(rate, "requests/s"),
            [
                _series("ended well", by_rate, "offered", "rps"),
                _series("kept the SLO", by_rate, "offered", "goodput_rps"),
            ],
        ),
    ]
    return "".join(charts)


def _offered(loads: Sequence[Numbers]) -> list[Numbers]:
    return [{**load, "offered": load["rate"] or load["rps"]} for load in loads]


def _series(name: str, loads: Sequence[Numbers], x: str, y: str) -> Series:
    points = [
        (float(load[x]), float(load[y]), load["load"])
        for load in loads
        if load.get(x) is not None and load.get(y) is not None
    ]
    points.sort(key=lambda point: point[0])
    labels = [f"{load}: {short(across)}, {name} {short(up)}" for across, up, load in points]
    return Series(name, [(across, up) for across, up, _ in points], labels)


def _strip(
    summary: Numbers, endpoints: Sequence[Numbers], heat: Sequence[Numbers]
) -> tuple[list[tuple[str, list[Cell]]], float]:
    """The rows of the heat strip: each slice is held against the median endpoint in it."""
    fields = {(sample["endpoint"], sample["bin"]): sample for sample in heat}
    medians = _medians(heat)
    rows = []
    for sample in endpoints:
        name = sample["endpoint"]
        cells = [
            _field(fields.get((name, slice_index)), medians[slice_index])
            for slice_index in range(HEATMAP_BINS)
        ]
        rows.append((name, cells))
    return rows, float(summary["seconds"])


def _field(sample: Numbers | None, median: float | None) -> Cell:
    if sample is None:
        return Cell(None, False, "no request there")
    ms_per_token = sample["pace_ms"]
    level = 0.0 if ms_per_token and median else None
    if ms_per_token and median:
        level = max(0.0, math.log10(ms_per_token / median))
    text = f"{sample['ok']} ok, {sample['bad']} not"
    if ms_per_token:
        text += f", {short(ms_per_token)} ms a token"
    return Cell(level, sample["bad"] > 0, text)


def _medians(heat: Sequence[Numbers]) -> list[float | None]:
    """The median pace in each slice; where one endpoint is alone, that of the slice before: it is
    not to be held against itself."""
    paces: list[list[float]] = [[] for _ in range(HEATMAP_BINS)]
    for sample in heat:
        if sample["pace_ms"] and sample["bin"] < HEATMAP_BINS:
            paces[sample["bin"]].append(sample["pace_ms"])
    medians: list[float | None] = []
    last: float | None = None
    for values in paces:
        if len(values) > 1 or last is None:
            last = statistics.median_low(values) if values else last
        medians.append(last)
    return medians


def _turns(rows: Sequence[Numbers] | None) -> str:
    return f"<h2>Turns</h2>{_table(_TURNS, rows)}" if rows else ""


def _failures(rows: Sequence[Numbers]) -> str:
    if not rows:
        return ""
    columns = {
        "endpoint": "endpoint",
        "load": "load",
        "kind": "kind",
        "HTTP": "code",
        "number": "n",
        "reason": "reason",
    }
    table_rows = [{**failure, "reason": failure["example"]} for failure in rows[:MOST_ROWS]]
    remaining = len(rows) - len(table_rows)
    note = f"<p>{remaining:,} more rows: summary.json has every one</p>" if remaining > 0 else ""
    return f"<h2>Failures</h2>{_table(columns, table_rows)}{note}"


def _compared(old: Numbers, summary: Numbers) -> str:
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
    notes = "".join(
        f'<p class="warn">{html.escape(notes)}</p>' for notes in setting_differences(old, summary)
    )
    verdicts = verdict_changes(old, summary)
    notes += "".join(f"<p>{html.escape(change)}</p>" for change in verdicts[:MOST_ROWS])
    columns = {name: name for name in ("load", "name", "before", "now", "change")}
    before = html.escape(str(old.get("started_at", "an older test"))[:19])
    return f"<h2>Compared with {before}</h2>{notes}{_table(columns, rows)}"
