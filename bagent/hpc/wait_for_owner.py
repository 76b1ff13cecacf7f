"""Waiting until a part of a run is free: its owner may have been on a node that is gone.

From another host a dead owner cannot be told from a slow one before its file is stale.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

from bagent.store.lock import STALE_SECONDS, is_live, owners

LOOK_SECONDS = 0.5
WAIT_SECONDS = 2 * STALE_SECONDS
"""Twice what a dead owner needs to be seen to be dead; one that still lives then stays."""


def wait_until_vacant(
    run_dir: Path, part: str | None = None, stop: Callable[[], bool] = lambda: False
) -> bool:
    """Wait while a live process owns ``part`` (None: any part) of a run; False where one still
    does in the end.

    Args:
        run_dir: the run directory; there may be none yet.
        part: ``all`` or like ``1-of-4``.
        stop: ends the waiting early.
    """
    end = time.monotonic() + WAIT_SECONDS
    said = False
    while True:
        found = {p: r for p, r in owners(run_dir).items() if part in (None, p)}
        live = [record for record in found.values() if is_live(record, time.time())]
        if not live:
            return True
        if time.monotonic() >= end or stop():
            return False
        if not said:
            said = True
            where = f"process {live[0].pid} on {live[0].host}"
            sys.stderr.write(f"waiting for {where}, or until it is seen to be gone\n")
        time.sleep(LOOK_SECONDS)


def vacant_step(argv: list[str]) -> int:
    """Wait for what an earlier start of this job may have left behind. Always 0: ``bagent run``
    says what is wrong where somebody else is at work."""
    parser = argparse.ArgumentParser(prog="bagent.hpc vacant")
    parser.add_argument("run_dir", type=Path)
    wait_until_vacant(parser.parse_args(argv).run_dir)
    return 0
