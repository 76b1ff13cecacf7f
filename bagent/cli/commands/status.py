"""``bagent status``."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from msgspec.structs import asdict

from bagent.cli import options as opt
from bagent.errors import EXIT_STOPPED, UsageError

if TYPE_CHECKING:
    from bagent.store.run_dir import RunDir, RunInfo, Start
    from bagent.store.totals import Totals


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
    from bagent.store.run_dir import find_run, list_runs

    runs_dir = Path("runs")
    if follow:
        follow_run(find_run(run, runs_dir), interval, json=json)
        return
    runs = list_runs(runs_dir) if run is None else [find_run(run, runs_dir)]
    if not runs:
        typer.echo("no runs under ./runs (bagent run job.yaml begins one)", err=True)
        return
    states = [describe(runs[0])] if run is not None else list(filter(None, map(_described, runs)))
    if not states:
        return
    if json:
        write_rows(list(states[0]), [list(state.values()) for state in states], "jsonl")
    elif run is None:
        columns = [*("run", "state", "exit_code", "ok", "failed", "dropped", "remaining")]
        columns += ["rows_per_s", "last"]
        write_rows(columns, [[_cell(state, name) for name in columns] for state in states], "table")
    else:
        _print_run(runs[0], states[0])


def _print_run(run: RunDir, state: dict[str, Any]) -> None:
    """Print the state of one run, a line for each value, and what to do next."""
    from bagent.cli.render.tables import write_rows
    from bagent.observe.formatting import tools_text
    from bagent.store.stats import count_tools

    pairs: list[tuple[str, object]] = [("rows", _rows_text(state))]
    for name, value in state.items():
        if value in (None, {}, []) or name in ("batches", "tools", "unit"):
            continue
        if name == "changes":
            pairs += [(f"{', '.join(c['changed'])} changed", _change_text(c)) for c in value]
        elif name == "by_stage":
            pairs += [(f"stage {stage}", counts) for stage, counts in value.items()]
        else:
            pairs.append((name, value))
    pairs += [("batches", line) for line in state["batches"]]
    if state["tools"]:
        pairs.append(("tools", tools_text(count_tools(run.path))))
    if state["prompt_tokens"] and state["cache_hit_rate"] is None:
        pairs.append(("cache_hit_rate", "unknown"))
    write_rows(("what", "value"), pairs, "table")
    for label, text in next_lines(run, state):
        typer.echo(f"{label:<10}  {text}")  # not in the table, which would cut a command


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
    return state[name]


def _described(run: RunDir) -> dict[str, object] | None:
    """Describe one run of several; None, with a message, where it cannot be read."""
    try:
        return describe(run)
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

    last_state: dict[str, object] = {}
    while True:
        started = time.monotonic()
        state = describe(run)
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
        parts.append(f"${state['cost_usd']:,.4g}")
    if state["batches"]:
        parts.append(f"batches: {state['batches'][0]}")
    code = "" if state["exit_code"] is None else f", exit code {state['exit_code']}"
    when = time.strftime("%H:%M:%S")
    return f"{when} {state['run']} {state['state']}{code}: {', '.join(parts)}"


def describe(run: RunDir) -> dict[str, object]:
    """Return the state of a run, read from its directory alone."""
    from bagent.batches.record import status_lines
    from bagent.store.lock import is_live, owners
    from bagent.store.results import summary
    from bagent.store.stats import cache_share, count_tools

    now = time.time()
    notes: list[str] = []
    info = run.load_or_report(_log)
    counts = summary(run.path, notes.append, info)
    totals = counts.totals
    live = [record for record in owners(run.path).values() if is_live(record, now)]
    code = info.exit_code if info else None
    if live:
        state = "running"
    elif code is None:
        state = "interrupted"
    else:
        state = "ended" if code in (0, 1) else "stopped"
    total, exact, remaining, eta = _size(run, info, totals, state)
    share = cache_share(run.path)
    if share is None and counts.cached_tokens and counts.prompt_tokens:
        share = counts.cached_tokens / counts.prompt_tokens  # by the answers, as in the summary
    starts = info.starts if info else []
    speed = counts.rows_per_second
    if state != "running" and (seconds := _working_seconds(starts)):
        speed = totals.rows / seconds
    return {
        "run": run.path.name,
        "state": state,
        "exit_code": None if live else code,
        "total": total,
        "total_is_exact": exact,
        "ok": totals.ok,
        "accepted": totals.accepted,
        "failed": totals.failed,
        "remaining": remaining,
        "eta_s": eta,
        "by_status": totals.by_status,
        "by_stage": _by_stage(counts.stages, info.stages if info else ()),
        "by_kind": totals.by_kind,
        "dropped": _dropped(info),
        "changes": _changes(info),
        "unit": info.unit if info else "row",
        "rows_per_s": None if speed is None else round(speed, 1),
        "prompt_tokens": counts.prompt_tokens,
        "completion_tokens": counts.completion_tokens,
        "cache_hit_rate": None if share is None else round(share, 4),
        "cost_usd": counts.cost_usd,
        "started": _when(min((start.at for start in starts), default=counts.first_at)),
        "last": _when(counts.last_at),
        "tools": {name: asdict(count) for name, count in count_tools(run.path).items()},
        "owners": [f"process {record.pid} on {record.host}" for record in live],
        "batches": status_lines(run.path, notes.append),
        "notes": notes,
        "directory": str(run.path),
    }


def _changes(info: RunInfo | None) -> list[dict[str, object]]:
    """Describe the changes of the job that kept what was finished."""
    from bagent.store.run_dir import merge_changes

    return [
        {"at": _when(change.at), "changed": change.changed, "finished": change.finished}
        for change in merge_changes(info.changes if info else ())
    ]


def _size(
    run: RunDir, info: RunInfo | None, totals: Totals, state: str
) -> tuple[int | None, bool, int | None, float | None]:
    """Return how many rows there are, whether that is exact, how many have no result, and the ETA.

    An ended run has a result for each row; else they are what its last start knew of its end.
    """
    from bagent.store.run_dir import read_progress

    if state == "ended":
        return totals.rows, True, 0, None
    progress = read_progress(run.path, info.parts if info else ())
    if progress is None or progress.remaining is None:
        return None, False, None, None
    total = progress.total
    remaining = progress.remaining
    if total is not None:
        total = max(total, totals.rows)
        remaining = total - totals.rows
    else:
        total = totals.rows + remaining
    eta = None
    if state == "running" and progress.eta_s is not None:
        eta = round(max(0.0, progress.at + progress.eta_s - time.time()), 1)
    return total, progress.total_is_exact, remaining, eta


def _working_seconds(starts: Sequence[Start]) -> float | None:
    """Return how long a run worked, without pauses; None if a killed start has no end."""
    if any(start.ended_at is None for start in starts):
        return None
    seconds, until = 0.0, 0.0
    for begin, end in sorted((start.at, start.ended_at or start.at) for start in starts):
        seconds += max(0.0, end - max(begin, until))
        until = max(until, end)
    return seconds


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


def _dropped(info: RunInfo | None) -> dict[str, int]:
    """Return the failed rows that stages left out, over the parts of the last start."""
    latest = {start.part: start for start in info.starts} if info else {}
    counts: Counter[str] = Counter()
    for part in info.parts if info else ():
        counts.update(latest[part].dropped if part in latest else {})
    return dict(counts)


def next_lines(run: RunDir, state: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return what to do next with a run, as its summary says it; the last is a command.

    Args:
        run: the run directory.
        state: as :func:`describe` returns it.
    """
    from bagent.observe.summary import Advice, next_step
    from bagent.store.totals import stage_causes

    info = run.load_or_report(lambda _: None)
    # A command from another user's directory is not safe to type.
    if info is None or not info.starts or not info.starts[-1].command or not run.is_own(info):
        return []
    start, job = info.starts[-1], info.job
    sampling, agent = job.get("sampling") or {}, job.get("agent") or {}
    code = state["exit_code"]
    if code is None and state["state"] != "running":
        code = EXIT_STOPPED  # killed
    path = str(run.path)
    advice = Advice(
        exit_code=code,
        run=path,
        results=path,
        command=start.command,
        action=start.action,
        resent=frozenset(start.resent),
        max_tokens=sampling.get("max_tokens"),
        max_turns=agent.get("max_turns"),
        own_bodies=not job.get("prompt") and len(info.stages) < 2,
    )
    reason = [("reason", start.reason)] if start.reason else []
    causes = stage_causes(run.path, None) if len(info.stages) > 1 else state["by_kind"]
    return [*reason, *next_step(advice, causes)]


def _by_stage(
    counts: Mapping[str, tuple[int, int]], order: Sequence[str]
) -> dict[str, dict[str, int]]:
    """Return counts in the order of the job's stages, without those that have not begun."""
    names = dict.fromkeys([name for name in order if name in counts] + list(counts))
    return {name: {"ok": counts[name][0], "failed": counts[name][1]} for name in names}


def _log(message: str) -> None:
    typer.echo(f"bagent: {message}", err=True)


def _when(at: float | None) -> str | None:
    return None if at is None else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))
