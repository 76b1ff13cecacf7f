"""How the batches of a run stand, from its directory alone."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path

from bagent.batches.ledger import all_records
from bagent.batches.record import LIVE, BatchRecord
from bagent.store.segments import Report

_WORDS = {
    "sealed": "to be sent",
    "sending": "being sent",
    "waiting": "with the provider",
    "ended": "to be read",
    "done": "done",
}


def standing(run_dir: Path, report: Report) -> list[str]:
    """A line that counts batches, then one for each that is not done; none where there are none.

    Args:
        report: told about broken lines.
    """
    counts: Counter[str] = Counter()
    lines = []
    for record in all_records(run_dir, report):
        counts[record.state] += 1
        if record.state in LIVE:
            lines.append(_line(record))
    if not counts:
        return []
    return [
        ", ".join(f"{counts[state]} {_WORDS[state]}" for state in _WORDS if counts[state]),
        *lines,
    ]


def left_there(run_dir: Path) -> str:
    """Words about batches of a run that is put aside and that the provider goes on with, if any."""
    found = [
        record.batch_id
        for record in all_records(run_dir, lambda _: None)
        if record.state == "waiting"
    ]
    if not found:
        return ""
    more = ", ..." if len(found) > 3 else ""
    listed = f"{', '.join(map(str, found[:3]))}{more}"
    return f"its batches are still with the provider, which will bill them: {listed}"


def _line(record: BatchRecord) -> str:
    parts = [f"batch {record.number}"]
    if record.batch_id is not None:
        parts.append(f"{record.batch_id} {record.word or 'made'}")
    else:
        parts.append(_WORDS[record.state])
    rows = f"{record.rows:,} rows"
    parts.append(f"{record.ended:,} of {rows}" if record.state == "waiting" else rows)
    if record.failed:
        parts.append(f"{record.failed:,} of them failed")
    if record.sent_at is not None:
        parts.append(f"sent {_when(record.sent_at)}")
    if record.looked_at is not None:
        parts.append(f"looked at {_when(record.looked_at)}")
    return ", ".join(parts)


def _when(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))
