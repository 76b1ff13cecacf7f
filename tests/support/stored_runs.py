"""A run directory with results in it, made without a run."""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from bagent.store.journal.codec import TOMBSTONE, unit_of
from bagent.store.journal.journal import Journal
from bagent.store.run_dir import RunDir, RunInfo, Start
from bagent.types import Attempt, Outcome


def stored(row: int, **changes: Any) -> Outcome:
    """The outcome of one row; ok unless ``changes`` say otherwise."""
    values: dict[str, Any] = {
        "key": f"{row + 1:016x}",
        "row": row,
        "id": f"r{row}",
        "source": "rows.jsonl",
        "line": row + 1,
        "stage": "main",
        "status": "ok",
        "output": msgspec.Raw(b'{"score":%d}' % row) if "status" not in changes else None,
        "text": f"text {row}",
        "finish_reason": "stop",
        "prompt_tokens": 10,
        "completion_tokens": 2,
        "finished_at": 1000.0 + row,
    }
    return Outcome(**{**values, **changes})


def attempt_of(outcome: Outcome) -> Attempt:
    """The only attempt of a row, which took as long as the row."""
    sent = 1000.0 + outcome.row
    return Attempt(
        key=outcome.key,
        row=outcome.row,
        stage=outcome.stage,
        answer=outcome.answer,
        turn=1,
        try_=1,
        endpoint=outcome.endpoint or "",
        sent=sent,
        done=sent + (outcome.latency_ms or 0.0) / 1000,
        error_kind=outcome.error_kind,
        group=f"g{outcome.row}",
        group_size=1,
        id=outcome.id,
    )


def make_run(
    path: Path, outcomes: Iterable[Outcome], *, attempts: bool = False, **info: Any
) -> RunDir:
    """A run directory with these outcomes, ended with exit code 0 unless ``info`` has starts.

    ``attempts``: with the attempt of each, see :func:`attempt_of`.
    """
    run = RunDir.create(path)
    journal = Journal.open(path, "all", clock=time.monotonic, report=print)
    for outcome in outcomes:
        if attempts:
            journal.write_attempts([attempt_of(outcome)])
        journal.write(outcome)
    journal.close()
    info.setdefault("starts", [Start(at=1.0, exit_code=0)])
    run.save(RunInfo(path.name, **info))
    return run


def unit(outcome: Outcome) -> int:
    """Return the number of a row's stage and answer in the index."""
    return unit_of(int(outcome.key, 16), outcome.stage, outcome.answer)


def current_outcomes(outcomes: Iterable[Outcome]) -> dict[int, Outcome]:
    """Return the outcomes that count, by unit: a good one stays until it is taken back."""
    current: dict[int, Outcome] = {}
    for outcome in outcomes:
        status: Any = outcome.status
        before = current.get(unit(outcome))
        if status == TOMBSTONE:
            current.pop(unit(outcome), None)
        elif before is None or before.status != "ok":
            current[unit(outcome)] = outcome
    return current
