"""``bagent status``."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from bagent.store.rundir import RunDir


def status(
    run: Annotated[
        str | None, typer.Argument(metavar="[RUN]", help="A directory, or a name under runs.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON object a run.")] = False,
) -> None:
    """How far a run is: counts, speed, who works on it. Without RUN, the runs under ./runs.

    Example: bagent status review
    """
    from bagent.cli.printing import write_rows
    from bagent.store.rundir import find_run, list_runs

    runs_dir = Path("runs")
    runs = list_runs(runs_dir) if run is None else [find_run(run, runs_dir)]
    if not runs:
        typer.echo("no runs under ./runs (bagent run job.yaml begins one)", err=True)
        return
    found = [describe(one) for one in runs]
    if json:
        write_rows(list(found[0]), [list(one.values()) for one in found], "jsonl")
    elif run is None:
        shown = ("run", "state", "exit_code", "ok", "not_ok", "rows_per_s", "last")
        write_rows(shown, [[one[name] for name in shown] for one in found], "table")
    else:
        pairs = [(name, value) for name, value in found[0].items() if value not in (None, {}, [])]
        write_rows(("what", "value"), pairs, "table")


def describe(run: RunDir) -> dict[str, object]:
    """What there is to say about a run, from its directory alone."""
    from bagent.store.owner import is_live, owners
    from bagent.store.readers import summary

    now = time.time()
    notes: list[str] = []
    info = run.look(_say)
    counts = summary(run.path, notes.append)
    live = [record for record in owners(run.path).values() if is_live(record, now)]
    code = info.exit_code if info else None
    if live:
        state = "running"
    elif code is None:
        state = "interrupted"
    else:
        state = "ended" if code in (0, 1) else "stopped"
    ok = counts.statuses.get("ok", 0)
    return {
        "run": run.path.name,
        "state": state,
        "exit_code": None if live else code,
        "ok": ok,
        "not_ok": counts.finished - ok,
        "by_status": counts.statuses,
        "by_kind": counts.kinds,
        "rows_per_s": None if counts.rows_per_second is None else round(counts.rows_per_second, 1),
        "prompt_tokens": counts.prompt_tokens,
        "completion_tokens": counts.completion_tokens,
        "cost_usd": counts.cost_usd,
        "started": _when(counts.first_at),
        "last": _when(counts.last_at),
        "owners": [f"process {record.pid} on {record.host}" for record in live],
        "notes": notes,
        "directory": str(run.path),
    }


def _say(words: str) -> None:
    typer.echo(f"bagent: {words}", err=True)


def _when(at: float | None) -> str | None:
    return None if at is None else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))
