"""``bagent status``."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bagent.cli import options as opt
from bagent.errors import UsageError

if TYPE_CHECKING:
    from bagent.store.run_dir import RunDir


def status(
    run: opt.RunName = None,
    json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object for each run.")
    ] = False,
    follow: Annotated[
        bool, typer.Option("--follow", help="Print a line whenever the state changes.")
    ] = False,
    interval: Annotated[
        float,
        typer.Option(
            "--interval", min=0.1, metavar="SECONDS", help="With --follow: read this often."
        ),
    ] = 2.0,
) -> None:
    """Show how far a run is; without RUN, list the runs under ./runs.

    Only the run directory is read, so the run may belong to another process or host.

    Example: bagent status review --follow
    """
    from bagent.cli.render.tables import write_rows
    from bagent.runs.run_state import describe
    from bagent.store.run_dir import find_run, list_runs

    runs_dir = Path("runs")
    if follow:
        follow_run(find_run(run, runs_dir), interval, json=json)
        return
    runs = list_runs(runs_dir) if run is None else [find_run(run, runs_dir)]
    if not runs:
        typer.echo("no runs under ./runs (bagent run job.yaml begins one)", err=True)
        return
    states = (
        [describe(runs[0], _log)] if run is not None else list(filter(None, map(_described, runs)))
    )
    if not states:
        return
    if json:
        write_rows(list(states[0]), [list(state.values()) for state in states], "jsonl")
    elif run is None:
        columns = [*("run", "state", "exit_code", "ok", "accepted", "failed", "dropped")]
        columns += ["remaining", "rows_per_s", "last"]
        write_rows(columns, [[_cell(state, name) for name in columns] for state in states], "table")
    else:
        _print_run(runs[0], states[0])


def _print_run(run: RunDir, state: dict[str, Any]) -> None:
    """Print the state of one run, a line for each value, and what to do next."""
    from bagent.cli.render.tables import write_rows
    from bagent.observe.formatting import tools_text
    from bagent.runs.run_state import next_lines
    from bagent.store.totals import count_tools

    pairs: list[tuple[str, object]] = [("rows", _rows_text(state))]
    for name, value in state.items():
        if value not in (None, {}, []) and name not in _NOT_ALONE:
            pairs += _lines_of(name, value, state)
    pairs += [("batches", line) for line in state["batches"]]
    if state["tools"]:
        pairs.append(("tools", tools_text(count_tools(run.path))))
    if state["prompt_tokens"] and state["cache_hit_rate"] is None:
        pairs.append(("cache_hit_rate", "unknown"))
    write_rows(("what", "value"), pairs, "table")
    for label, text in next_lines(run, state):
        typer.echo(f"{label:<10}  {text}")  # not in the table, which would cut a command


def _lines_of(name: str, value: Any, state: Mapping[str, Any]) -> list[tuple[str, object]]:
    """Return the lines of one value of a state: mostly one."""
    from bagent.observe.formatting import percent, rate

    if name == "copied":
        text = f"{value:,} from equal requests, not sent; tokens are of others"
        return [(name, text)] if value else []
    if name == "changes":
        return [(f"{', '.join(c['changed'])} changed", _change_text(c)) for c in value]
    if name == "by_stage":
        return [(f"stage {stage}", counts) for stage, counts in value.items()]
    if name == "rows_per_s":
        return [(name, rate(value))]
    if name == "cost_usd":
        return [(name, _cost_text(state, str(value)))]
    if name == "cache_hit_rate":
        by = state["cache_hit_rate_by"]
        note = ", by the endpoints' counters, of all their clients" if by == "counters" else ""
        return [(name, f"{percent(value)}{note}")]
    return [(name, value)]


_NOT_ALONE = ("absent", "batches", "tools", "unit", "cache_hit_rate_by", "cost_unknown")
"""Values that have no line of their own."""


def _cost_text(state: Mapping[str, Any], cost: str) -> str:
    """Return the cost, with the number of answers that it leaves out."""
    from bagent.observe.formatting import counted

    unknown = state["cost_unknown"]
    return f"{cost}, and {counted(unknown, 'answer')} of unknown cost" if unknown else cost


def _change_text(change: Mapping[str, Any]) -> str:
    from bagent.observe.formatting import counted

    rows = counted(change["finished"], "row")
    return f"{change['at']}, {rows} finished before it and kept"


def _cell(state: Mapping[str, Any], name: str) -> object:
    """Return a value of the list of runs; an estimate is marked."""
    if name == "dropped":
        return sum(state["dropped"].values()) or None
    if name == "remaining" and state["remaining"] and not state["total_is_exact"]:
        return f"~{state['remaining']}"
    if name == "rows_per_s" and state[name] is not None:
        from bagent.observe.formatting import rate

        return rate(state[name])
    return state[name]


def _described(run: RunDir) -> dict[str, object] | None:
    """Describe one run of several; None, with a message, where it cannot be read."""
    from bagent.runs.run_state import describe

    try:
        return describe(run, _log)
    except UsageError as error:
        _log(str(error))
        return None


FOLLOW_SHARE = 10.0
"""The least ratio of the pause to the time of a look: large journals are read less often."""


STAGES = 8
"""Stages in a line of ``--follow``."""


def follow_run(run: RunDir, interval: float, *, json: bool) -> None:
    """Print the state whenever it changes, until no process works on the run."""
    from bagent.cli.render.tables import write_rows
    from bagent.runs.run_state import describe

    last_state: dict[str, object] = {}
    while True:
        started = time.monotonic()
        state = describe(run, _log)
        if state != last_state:
            if json:
                write_rows(list(state), [list(state.values())], "jsonl")
            else:
                typer.echo(state_line(state))
                sys.stdout.flush()
            last_state = state
        if state["state"] != "running":
            return
        time.sleep(max(interval, FOLLOW_SHARE * (time.monotonic() - started)))


def state_line(state: dict[str, Any]) -> str:
    """Write a state of :func:`describe` in one line."""
    from bagent.observe.formatting import duration, kinds, rate, visible

    parts = [_rows_text(state)]
    if state["failed"]:
        parts[0] += f" ({kinds(state['by_kind'], 3)})"
    stages = []
    for stage, count in list(state["by_stage"].items())[:STAGES]:
        bad = f", {count['failed']:,} failed" if count["failed"] else ""
        stages.append(f"{visible(stage, 30)} {count['ok']:,} ok{bad}")
    if stages:
        parts.append(f"[{', '.join(stages)}]")
    if state["eta_s"] is not None:
        parts.append(f"ETA {duration(state['eta_s'])}")
    if state["rows_per_s"] is not None:
        parts.append(f"{rate(state['rows_per_s'])} {state['unit']}s/s")
    if state["completion_tokens"] is not None:
        parts.append(f"{state['completion_tokens']:,} tokens")
    if state["cost_usd"] is not None:
        parts.append(_cost_text(state, f"${state['cost_usd']:,.4g}"))
    if state["batches"]:
        parts.append(f"batches: {state['batches'][0]}")
    code = "" if state["exit_code"] is None else f", exit code {state['exit_code']}"
    when = time.strftime("%H:%M:%S")
    return f"{when} {state['run']} {state['state']}{code}: {', '.join(parts)}"


def _rows_text(state: Mapping[str, Any]) -> str:
    from bagent.observe.formatting import totals_text
    from bagent.store.totals import Totals

    totals = Totals(state["ok"], state["accepted"], state["failed"])
    return totals_text(
        totals,
        total=state["total"],
        exact=state["total_is_exact"],
        remaining=state["remaining"],
        unit=state["unit"],
    )


def _log(message: str) -> None:
    typer.echo(f"bagent: {message}", err=True)
