"""Waiting for the lock of a run whose owner may have been on a lost node.

On another host a dead owner looks like a slow one until its file is stale.
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
"""Twice the time after which a dead owner is recognised."""


def wait_until_vacant(
    run_dir: Path, part: str | None = None, stop: Callable[[], bool] = lambda: False
) -> bool:
    """Wait while a live process owns ``part`` (None: any part) of a run; return False if it stays.

    Args:
        run_dir: the run directory; there may be none yet.
        part: ``all`` or like ``1-of-4``.
        stop: ends the wait early.
    """
    end = time.monotonic() + WAIT_SECONDS
    notified = False
    while True:
        records = [owner for name, owner in owners(run_dir).items() if part in (None, name)]
        live = [record for record in records if is_live(record, time.time())]
        if not live:
            return True
        if time.monotonic() >= end or stop():
            return False
        if not notified:
            notified = True
            where = f"process {live[0].pid} on {live[0].host}"
            sys.stderr.write(f"waiting for {where}, or until it is seen to be gone\n")
        time.sleep(LOOK_SECONDS)


def vacant_step(argv: list[str]) -> int:
    """Wait for an earlier start of this job. Return 0: ``bagent run`` reports other owners."""
    parser = argparse.ArgumentParser(prog="bagent.hpc vacant")
    parser.add_argument("run_dir", type=Path)
    wait_until_vacant(parser.parse_args(argv).run_dir)
    return 0
