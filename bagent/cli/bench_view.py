"""A load test on the screen: tables on stdout, words on stderr."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bagent.bench.gate import Rule, broken_rules, changes, unlike
from bagent.observe.words import visible

Numbers = Mapping[str, Any]

LOADS = {
    "load": "load",
    "requests": "requests",
    "ok %": "ok_share",
    "req/s": "rps",
    "out tok/s": "output_tok_s",
    "in tok/s": "input_tok_s",
    "TTFT p50": "ttft_p50_ms",
    "p99": "ttft_p99_ms",
    "TPOT p50": "tpot_p50_ms",
    "E2E p50": "e2e_p50_ms",
    "E2E p99": "e2e_p99_ms",
    "lag p99": "lag_p99_ms",
    "goodput/s": "goodput_rps",
    "hit %": "hit_rate",
}
WHOLE = {"conversations/s": "conversations_s", "whole p50": "conversation_p50_ms"}
TURNS = {
    "load": "load",
    "turn": "turn",
    "requests": "requests",
    "ok %": "ok_share",
    "in tokens": "input_tokens",
    "cached %": "cached_share",
    "TTFT p50": "ttft_p50_ms",
    "p99": "ttft_p99_ms",
    "TPOT p50": "tpot_p50_ms",
    "E2E p50": "e2e_p50_ms",
    "E2E p99": "e2e_p99_ms",
}
ENDPOINTS = {
    "endpoint": "endpoint",
    "verdict": "verdict",
    "speed": "speed",
    "requests": "requests",
    "ok %": "ok_share",
    "req/s": "rps",
    "out tok/s": "output_tok_s",
    "TTFT p50": "ttft_p50_ms",
    "p99": "ttft_p99_ms",
    "TPOT p50": "tpot_p50_ms",
    "in flight": "in_flight_mean",
    "share": "share",
    "kv % max": "kv_max",
    "hit %": "hit_rate",
    "reason": "reason",
}
"""Column heads and the names of their numbers in the summary; times are in milliseconds."""

_COLOURS = {"ok": "green", "slow": "yellow", "failing": "red", "dead": "red"}
_PERCENT = frozenset({"ok_share", "kv_max", "hit_rate", "cached_share"})
_TEXTS = frozenset({"load", "endpoint", "verdict", "reason"})
_MOST_FAILURES = 5


def tell_end(
    summary: Numbers,
    folder: Path,
    rules: Sequence[Rule],
    old: Numbers | None,
    hostfile: Path | None,
) -> list[str]:
    """Print the tables, and say what is to be said; returns the rules of ``--fail-if`` that hold.

    Raises:
        UsageError: a rule names what was not measured.
    """
    _print({**LOADS, **(WHOLE if summary["turns"] else {})}, summary["loads"])
    if summary["turns"]:
        _print(TURNS, summary["turns"])
    _print(ENDPOINTS, summary["endpoints"])
    if old is not None:
        _print_changes(old, summary)
    sys.stdout.flush()
    _say(_fleet(summary))
    for one in summary["failures"][:_MOST_FAILURES]:
        code = f" (HTTP {one['code']})" if one["code"] not in (None, 200) else ""
        example = f": {one['example']}" if one["example"] else ""
        _say(f"  {one['n']} x {one['kind']}{code} at {one['endpoint']} in {one['load']}{example}")
    if summary["simulated"]:
        _say("SIMULATED: an endpoint is simulated; its numbers say nothing of any hardware")
    for load, reasons in summary["client_limited"].items():
        _say(f"CLIENT-LIMITED, results invalid: {load}: {', '.join(reasons)}")
    if summary["client_limited"]:
        _say("  more --workers, fewer other programs, or a client with more cores")
    broken = broken_rules(rules, summary, old) if rules else []
    for words in broken:
        _say(f"failed: {words}")
    if hostfile is not None:
        _say(f"wrote the {summary['fleet']['ok']} endpoints that are ok to {hostfile}")
    _say(f"results: {folder}/summary.json, report.html, bench.duckdb, *.csv, *.parquet")
    use = f" --hostfile {shlex.quote(str(hostfile))}" if hostfile is not None else ""
    _say(f"next: bagent run JOB.yaml{use}" if use else f"next: open {folder}/report.html")
    return broken


def _fleet(summary: Numbers) -> str:
    fleet = summary["fleet"]
    words = ", ".join(
        f"{fleet[word]} {word}" for word in ("ok", "slow", "failing", "dead") if fleet[word]
    )
    if fleet["max_by_min"]:
        words += f"; fastest / slowest {fleet['max_by_min']:.2f}, CV {fleet['cv']:.2f}"
    found = summary["saturation"]
    if found:
        words += f"; saturated at {found['best_rate']:.3g} calls/s, c={found['concurrency']}"
        if found["sustained_rate"]:
            words += f"; {found['sustained_rate']:.3g} requests/s sustained"
    return words


def _print(columns: Mapping[str, str], rows: Sequence[Numbers]) -> None:
    from bagent.cli.printing import write_rows

    shown = [[_cell(row, name) for name in columns.values()] for row in rows]
    if not sys.stdout.isatty():
        write_rows(list(columns), shown, "table")
        sys.stdout.write("\n")
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    for head, name in columns.items():
        table.add_column(head, justify="left" if name in _TEXTS else "right", overflow="fold")
    for row in shown:
        cells = [Text(cell) for cell in row]
        if row[1] in _COLOURS:
            cells[1].stylize(_COLOURS[row[1]])
        table.add_row(*cells)
    console = Console(file=sys.stdout, highlight=False)
    console.print(table)
    console.print()


def _cell(row: Numbers, name: str) -> str:
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


def _print_changes(old: Numbers, summary: Numbers) -> None:
    found = changes(old, summary)
    for words in unlike(old, summary):
        _say(f"the two tests differ: {words}")
    if not found:
        _say("nothing to compare: the two tests have no load in common")
        return
    columns = {"load": "load", "number": "name", "before": "before", "now": "now", "change": "by"}
    rows = [
        {
            "load": one.load,
            "name": one.name,
            "before": one.before,
            "now": one.now,
            "by": None if one.change is None else f"{100 * one.change:+.1f} %",
        }
        for one in found
    ]
    _print(columns, rows)


def _say(words: str) -> None:
    indent = "  " if words.startswith(" ") else ""
    sys.stderr.write(f"{indent}{visible(words)}\n")
    sys.stderr.flush()
