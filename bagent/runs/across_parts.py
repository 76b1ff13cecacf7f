"""What only all parts of a run together can tell: rows that went from one part to another."""

from __future__ import annotations

import time
from collections import defaultdict
from pathlib import Path

from bagent.runs.prepare import STAGE
from bagent.store.edited import replaced
from bagent.store.index import open_indexes
from bagent.store.journal import Journal
from bagent.store.owner import Owner
from bagent.store.segments import Report


def take_back_replaced(run_dir: Path, report: Report) -> int:
    """Take back the outcomes of edited rows that are of another part now; returns how many.

    A row's part follows from its key, and that changes with its text: the part that has it now
    does not look into what another one wrote. Each is taken back in the journal it stands in,
    whose order is sure. Call it once all parts have ended.

    Raises:
        OwnedError: a live process has one of the parts.
        WriteError: the disk refuses.
    """
    found: dict[str, list[int]] = defaultdict(list)
    for line in replaced(open_indexes(run_dir, report), STAGE):
        found[line.held_by.segment.part].append(line.unit)
    for part, units in found.items():
        owner = Owner.acquire(run_dir, part)
        try:
            journal = Journal.open(
                run_dir, part, clock=time.monotonic, report=report, new_segment=owner.took_over
            )
            try:
                for unit in units:
                    journal.take_back(unit, STAGE)
            finally:
                journal.close()
        finally:
            owner.release()
    return sum(map(len, found.values()))
