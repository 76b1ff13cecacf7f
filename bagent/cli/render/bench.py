"""A load test on the terminal: tables on stdout, messages on stderr."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bagent.bench.runner import free_folder_option
from bagent.bench.thresholds import (
    Rule,
    broken_rules,
    load_changes,
    setting_differences,
    verdict_changes,
)
from bagent.bench.verdict import failure_lines, fleet_text, rank_endpoints
from bagent.cli.render import tables
from bagent.observe.formatting import visible

Numbers = Mapping[str, Any]

_COLOURS = {"ok": "green", "slow": "yellow", "failing": "red", "dead": "red"}
_PERCENT = frozenset({"ok_share", "kv_max", "hit_rate", "cached_share"})
_TEXTS = frozenset({"load", "endpoint", "verdict", "reason", "name"})
_REASON_WIDTH = 40
"""The least width of the column of reasons, in characters."""

_GAP = 2


def print_table(
    columns: Mapping[str, str], rows: Sequence[Numbers], spare: Sequence[str] = ()
) -> list[str]:
    """Print ``rows`` on stdout; returns the heads of the columns that did not fit.

    Args:
        columns: heads, and the names of their numbers in the summary.
        spare: heads that a narrow terminal leaves out, in this order.
    """
    columns = {
        head: name
        for head, name in columns.items()
        if head not in spare or any(row.get(name) is not None for row in rows)
    }
    widths = {
        head: _REASON_WIDTH
        if name == "reason"
        else max(len(text) for text in [*head.split(), *(cell(row, name) for row in rows)])
        for head, name in columns.items()
    }
    if sys.stdout.isatty():
        _fit(widths, spare, tables.terminal_width())
    tables.print_table(
        [_column(head, columns[head], width) for head, width in widths.items()],
        [[cell(row, columns[head]) for head in widths] for row in rows],
    )
    sys.stdout.write("\n")
    return [head for head in columns if head not in widths]


def _fit(widths: dict[str, int], spare: Sequence[str], limit: int) -> None:
    """Remove spare columns until the others fit; heads wrap between words."""
    for head in spare:
        if sum(width + _GAP for width in widths.values()) - _GAP <= limit:
            break
        widths.pop(head, None)


def _column(head: str, name: str, width: int) -> tables.TableColumn:
    return tables.TableColumn(
        head,
        right=name not in _TEXTS,
        width=width,
        fill=name == "reason",
        styles=_COLOURS if name == "verdict" else {},
    )


def cell(row: Numbers, name: str) -> str:
    """Write a number or text briefly."""
    value = row.get(name)
    if value is None:
        return ""
    if isinstance(value, str):
        return visible(value)
    if name in _PERCENT:
        return f"{100 * value:.3g}"
    if isinstance(value, int):
        return str(value)
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


LOADS = {
    "load": "load",
    "requests": "requests",
    "ok %": "ok_share",
    "req/s": "rps",
    "out tok/s": "output_tok_s",
    "in tok/s": "input_tok_s",
    "TTFT p50 ms": "ttft_p50_ms",
    "TTFT p99 ms": "ttft_p99_ms",
    "TPOT p50 ms": "tpot_p50_ms",
    "E2E p50 ms": "e2e_p50_ms",
    "E2E p99 ms": "e2e_p99_ms",
    "lag p99 ms": "lag_p99_ms",
    "goodput req/s": "goodput_rps",
    "hit %": "hit_rate",
}
LOADS_SPARE = ("hit %", "in tok/s", "lag p99 ms", "TTFT p99 ms", "goodput req/s", "E2E p50 ms")
WHOLE = {"conversations/s": "conversations_s", "whole p50 ms": "conversation_p50_ms"}
TURNS = {
    "load": "load",
    "turn": "turn",
    "requests": "requests",
    "ok %": "ok_share",
    "in tokens": "input_tokens",
    "cached %": "cached_share",
    "TTFT p50 ms": "ttft_p50_ms",
    "TTFT p99 ms": "ttft_p99_ms",
    "TPOT p50 ms": "tpot_p50_ms",
    "E2E p50 ms": "e2e_p50_ms",
    "E2E p99 ms": "e2e_p99_ms",
}
TURNS_SPARE = ("TTFT p99 ms", "TPOT p50 ms")
ENDPOINTS = {
    "endpoint": "endpoint",
    "verdict": "verdict",
    "speed": "speed",
    "requests": "requests",
    "ok %": "ok_share",
    "req/s": "rps",
    "out tok/s": "output_tok_s",
    "TTFT p50 ms": "ttft_p50_ms",
    "TTFT p99 ms": "ttft_p99_ms",
    "TPOT p50 ms": "tpot_p50_ms",
    "in flight": "in_flight_mean",
    "share": "share",
    "kv % max": "kv_max",
    "hit %": "hit_rate",
    "reason": "reason",
}
ENDPOINTS_SPARE = (
    *("hit %", "kv % max", "share", "in flight", "TTFT p99 ms", "reason", "TPOT p50 ms"),
    *("req/s", "ok %", "TTFT p50 ms"),
)
"""Column heads with the names of their numbers in the summary; a narrow terminal leaves out the
spare ones, the first of them first."""

MOST_ENDPOINTS = 50
_MOST_FAILURES = 5
_MOST_TURNED = 10
_MOST_LOADS = 60


def print_end(
    summary: Numbers,
    folder: Path,
    rules: Sequence[Rule],
    old: Numbers | None,
    hostfile: Path | None,
    *,
    as_json: bool = False,
) -> list[str]:
    """Print tables, or the summary as JSON, and messages; returns the rules that hold.

    Raises:
        UsageError: a rule names what was not measured.
    """
    note = None
    if as_json:
        sys.stdout.write((folder / "summary.json").read_text(encoding="utf-8"))
    else:
        _print_loads(summary)
        note = _print_endpoints(summary["endpoints"])
        if old is not None:
            _print_changes(old, summary)
    sys.stdout.flush()
    _log(fleet_text(summary))
    if note:
        _log(f"  {note}")
    for message in failure_lines(summary["failures"], _MOST_FAILURES):
        _log(f"  {message}")
    if summary["simulated"]:
        _log("SIMULATED: an endpoint is simulated; its numbers say nothing of any hardware")
    for message in summary["warnings"]:
        _log(f"note: {message}")
    for load, reasons in summary["client_limited"].items():
        _log(f"CLIENT-LIMITED, results invalid: {load}: {', '.join(reasons)}")
    if summary["client_limited"]:
        _log("  the verdicts of the endpoints may be wrong too")
    broken = broken_rules(rules, summary, old) if rules else []
    for message in broken:
        _log(f"failed: {message}")
    if hostfile is not None:
        _log(f"wrote the {summary['fleet']['ok']} endpoints that are ok to {hostfile}")
    _log(f"results: {folder}/summary.json, report.html, bench.duckdb, *.csv, *.parquet")
    _log(_next_step(summary, folder, hostfile))
    return broken


def _next_step(summary: Numbers, folder: Path, hostfile: Path | None) -> str:
    if summary["client_limited"]:
        use = f"; {hostfile} holds the endpoints that are left" if hostfile is not None else ""
        return (
            "next: the same command on a client with more cores, with more --workers or alone,"
            " or with a lower --concurrency or --rate;"
            f" its folder may be {free_folder_option(folder)}{use}"
        )
    if hostfile is not None:
        return f"next: bagent run JOB.yaml --hostfile {shlex.quote(str(hostfile))}"
    return f"next: open {folder}/report.html"


def _print_loads(summary: Numbers) -> None:
    loads = summary["loads"][:_MOST_LOADS]
    if not loads:
        return
    print_table({**LOADS, **(WHOLE if summary["turns"] else {})}, loads, LOADS_SPARE)
    if summary["turns"]:
        print_table(TURNS, summary["turns"][:_MOST_LOADS], TURNS_SPARE)
    remaining = len(summary["loads"]) - len(loads)
    if remaining > 0:
        sys.stdout.write(f"{remaining} more loads: loads.csv has every one\n\n")


def _print_endpoints(endpoints: Sequence[Numbers]) -> str:
    """Print the endpoints, the worst of a large fleet; returns a note on the others."""
    worst, note = rank_endpoints(endpoints, MOST_ENDPOINTS)
    if "reason" in print_table(ENDPOINTS, worst, ENDPOINTS_SPARE):
        reasons = [endpoint for endpoint in worst if endpoint["verdict"] != "ok"]
        for endpoint in reasons:
            sys.stdout.write(
                visible(f"{endpoint['verdict']} {endpoint['endpoint']}: {endpoint['reason']}")
                + "\n"
            )
        sys.stdout.write("\n" if reasons else "")
    return note


def _print_changes(old: Numbers, summary: Numbers) -> None:
    metric_changes = load_changes(old, summary)
    for message in setting_differences(old, summary):
        _log(f"the two tests differ: {message}")
    verdicts = verdict_changes(old, summary)
    for message in verdicts[:_MOST_TURNED]:
        _log(f"changed: {message}")
    if len(verdicts) > _MOST_TURNED:
        _log(f"changed: {len(verdicts) - _MOST_TURNED:,} more endpoints: report.html has them")
    if not metric_changes:
        _log("nothing to compare: the two tests have no load in common")
        return
    columns = {"load": "load", "number": "name", "before": "before", "now": "now", "change": "by"}
    rows = [
        {
            "load": change.load,
            "name": change.name,
            "before": change.before,
            "now": change.now,
            "by": None if change.change is None else f"{100 * change.change:+.1f} %",
        }
        for change in metric_changes
    ]
    print_table(columns, rows)


def _log(message: str) -> None:
    indent = "  " if message.startswith(" ") else ""
    sys.stderr.write(f"{indent}{visible(message)}\n")
    sys.stderr.flush()
