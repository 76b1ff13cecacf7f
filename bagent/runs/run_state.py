"""The state of a run, read from its directory: counts, speed, remaining rows, and next steps."""

from __future__ import annotations

import shlex
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from msgspec.structs import asdict

from bagent.batches.record import status_lines
from bagent.errors import EXIT_OK, EXIT_ROWS_FAILED, EXIT_STOPPED
from bagent.observe.formatting import counted
from bagent.observe.next_step import Advice, mending, next_step
from bagent.runs.prompt_fields import long_field
from bagent.store.journal.segments import Report
from bagent.store.lock import is_live, owners
from bagent.store.results import RunSummary, summary
from bagent.store.run_dir import (
    RunDir,
    RunInfo,
    merge_changes,
)
from bagent.store.totals import (
    RunProgress,
    Totals,
    cache_share,
    count_tools,
    read_progress,
    stage_causes,
)


def describe(run: RunDir, report: Report) -> dict[str, Any]:
    """Return the state of a run, read from its directory alone.

    Args:
        run: the run directory.
        report: called where ``run.json`` is damaged.
    """
    notes: list[str] = []
    info = run.load_or_report(report)
    counts = summary(run.path, notes.append, info)
    totals = counts.totals
    live = [owner for owner in owners(run.path).values() if is_live(owner, time.time())]
    code = info.exit_code if info else None
    if live:
        state = "running"
    elif code is None:
        state = "interrupted"
    else:
        state = "ended" if code in (0, 1) else "stopped"
    progress = read_progress(run.path, info.parts if info else ())
    total, exact, remaining = _size(progress, totals, state)
    share, share_by = _cache_share(run, counts)
    starts = info.starts if info else []
    speed, eta = _speed_and_eta(progress if state == "running" else None, remaining)
    if speed is None:
        speed = counts.rows_per_second
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
        "copied": sum(start.copied for start in starts),
        "absent": _absent(info) if info else 0,
        "changes": _changes(info),
        "unit": info.unit if info else "row",
        "rows_per_s": None if speed is None else round(speed, 3),
        "prompt_tokens": counts.prompt_tokens,
        "completion_tokens": counts.completion_tokens,
        "cache_hit_rate": None if share is None else round(share, 4),
        "cache_hit_rate_by": share_by,
        "cost_usd": counts.cost_usd,
        "cost_unknown": counts.cost_unknown,
        "started": _when(min((start.at for start in starts), default=counts.first_at)),
        "last": _when(counts.last_at),
        "tools": {name: asdict(count) for name, count in count_tools(run.path).items()},
        "owners": [f"process {record.pid} on {record.host}" for record in live],
        "batches": status_lines(run.path, notes.append),
        "notes": notes,
        "directory": str(run.path),
    }


def run_title(run: RunDir, info: RunInfo | None) -> str:
    """Return the name of the job, and that of the run in parentheses if it is another one."""
    name = run.path.name
    return name if info is None or info.name == name else f"{info.name} ({name})"


def _cache_share(run: RunDir, counts: RunSummary) -> tuple[float | None, str | None]:
    """Return the share of cached prompt tokens, and what says so: ``answers`` or ``counters``.

    The counters of endpoints are taken where most answers do not say; they count all clients.
    """
    said = counts.cached_of_tokens
    own = (counts.cached_tokens or 0) / said if said else None
    if own is not None and 2 * said >= (counts.prompt_tokens or 0):
        return own, "answers"
    share = cache_share(run.path)
    if share is not None:
        return share, "counters"
    return own, None if own is None else "answers"


def _changes(info: RunInfo | None) -> list[dict[str, object]]:
    """Describe the changes of the job that kept what was finished."""
    return [
        {"at": _when(change.at), "changed": change.changed, "finished": change.finished}
        for change in merge_changes(info.changes if info else ())
    ]


def _size(
    progress: RunProgress | None, totals: Totals, state: str
) -> tuple[int | None, bool, int | None]:
    """Return how many rows there are, whether that is exact, and how many have no result.

    An ended run has a result for each row; else they are what its last start knew of its end.
    """
    if state == "ended":
        return totals.rows, True, 0
    if progress is None or progress.remaining is None:
        return None, False, None
    if progress.total is None:
        return totals.rows + progress.remaining, progress.total_is_exact, progress.remaining
    total = max(progress.total, totals.rows)
    return total, progress.total_is_exact, total - totals.rows


def _speed_and_eta(
    progress: RunProgress | None, remaining: int | None
) -> tuple[float | None, float | None]:
    """Return the rows a second of the running start as it shows them, and the seconds left."""
    if progress is None or remaining is None or not progress.remaining or not progress.eta_s:
        return None, None
    # Several parts end with the slowest of them.
    share = remaining / progress.remaining
    return progress.rows_per_s, round(progress.eta_s * share, 1)


def _dropped(info: RunInfo | None) -> dict[str, int]:
    """Return the failed rows that stages left out, over the parts of the last start."""
    latest = {start.part: start for start in info.starts} if info else {}
    counts: Counter[str] = Counter()
    for part in info.parts if info else ():
        counts.update(latest[part].dropped if part in latest else {})
    return dict(counts)


def cut_range(info: RunInfo) -> tuple[int, int] | None:
    """Return the fewest and the most tokens of the truncated answers of a run's starts."""
    ranges = [start.cut_at for start in info.starts if start.cut_at is not None]
    return (min(low for low, _ in ranges), max(high for _, high in ranges)) if ranges else None


def _absent(info: RunInfo) -> int:
    """Return how many results had no row in the input that was last read completely."""
    ended = (s for s in reversed(info.starts) if s.exit_code in (EXIT_OK, EXIT_ROWS_FAILED))
    last = next(ended, None)
    return last.absent if last is not None else 0


def notes_of_results(info: RunInfo, run: str) -> Iterator[tuple[str, str]]:
    """Yield labelled lines about results of another job or of rows that left the input."""
    for change in merge_changes(info.changes):
        if change.finished:
            rows = counted(change.finished, info.unit)
            yield "changed", f"{', '.join(change.changed)}; {rows} finished before that and kept"
    if absent := absent_text(info, run):
        yield "absent", absent


def absent_text(info: RunInfo, run: str) -> str:
    """Return what to know about results whose rows left the input; empty where there are none.

    Args:
        info: the run.
        run: how it is named in a command.
    """
    count = _absent(info)
    if not count:
        return ""
    fewer = any("answers" in change.changed for change in info.changes)
    description = "no longer in the input or asked for" if fewer else "no longer in the input"
    unit = "answer" if fewer else info.unit
    text = f"{description}, but counted: {counted(count, unit)} of earlier starts"
    # Results of later stages, and further answers of rows that stayed, need not lack an input.
    if not info.keep_input or fewer or len(info.stages) > 1:
        return text
    results = f"bagent results {shlex.quote(run)} --where"
    return f'{text}; {results} "input is null" shows them, "input is not null" the others'


def next_lines(run: RunDir, state: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return what to do next with a run, as its summary says it; the last is a command.

    Args:
        run: the run directory.
        state: as :func:`describe` returns it.
    """
    advice = _advice(run, state)
    if advice is None:
        return []
    info = run.load_or_report(lambda _: None)
    last = info.starts[-1].reason if info else ""
    reason = [("reason", last)] if last else []
    staged = info is not None and len(info.stages) > 1
    causes = stage_causes(run.path, None) if staged else state["by_kind"]
    absent = absent_text(info, str(run.path)) if info else ""
    notes = [*reason, *([("absent", absent)] if absent else [])]
    return [*notes, *next_step(advice, causes)]


def mending_commands(
    run: RunDir, state: Mapping[str, Any], counts: Mapping[str, int]
) -> dict[str, tuple[str, str]]:
    """Return for each kind of failure what to change and the command that mends it.

    Empty for a run of another user, whose command is not safe to type.

    Args:
        run: the run directory.
        state: as :func:`describe` returns it.
        counts: how many rows failed by kind.
    """
    advice = _advice(run, state)
    if advice is None:
        return {}
    return {kind: mending(advice, kind, number) for kind, number in counts.items()}


def _advice(run: RunDir, state: Mapping[str, Any]) -> Advice | None:
    """Return what the next step depends on; None where no command is known or safe to type."""
    info = run.load_or_report(lambda _: None)
    if info is None or not info.starts or not info.starts[-1].command or not run.is_own(info):
        return None
    start, job = info.starts[-1], info.job
    sampling, agent = job.get("sampling") or {}, job.get("agent") or {}
    code = state["exit_code"]
    if code is None and state["state"] != "running":
        code = EXIT_STOPPED  # killed
    path = str(run.path)
    return Advice(
        exit_code=code,
        run=path,
        results=path,
        command=start.command,
        action=start.action,
        resent=frozenset(start.resent),
        max_tokens=sampling.get("max_tokens"),
        max_turns=agent.get("max_turns"),
        cut_at=cut_range(info),
        own_bodies=not job.get("prompt") and len(info.stages) < 2,
        none_ok=not state["ok"],
        long_field=long_field(run, info) if "context_overflow" in state["by_kind"] else "",
    )


def _by_stage(
    counts: Mapping[str, tuple[int, int]], order: Sequence[str]
) -> dict[str, dict[str, int]]:
    """Return counts in the order of the job's stages, without those that have not begun."""
    names = dict.fromkeys([name for name in order if name in counts] + list(counts))
    return {name: {"ok": counts[name][0], "failed": counts[name][1]} for name in names}


def _when(at: float | None) -> str | None:
    return None if at is None else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))
