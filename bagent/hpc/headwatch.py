"""Whether the batch script still lives, seen from the other nodes of its job.

``--no-kill`` lets a SLURM job outlive lost nodes, which is what engines want. It also lets the job
outlive its first node, and with it the script: it would stay, doing nothing, until its time is up.
So the script renews a file, and the engines' supervisors give the job back when it no longer does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from bagent.hpc.allocation import Allocation
from bagent.hpc.asking import Ask, ask

LOOK_SECONDS = 2.0

STAGGER_SECONDS = 0.5
"""Between nodes that give the job back: the first one that does ends the others."""

LONGEST_STAGGER = 30.0


async def until_gone(
    alive: Path,
    seconds: float,
    clock: Callable[[], float],
    pause: Callable[[], float] = lambda: LOOK_SECONDS,
) -> None:
    """Return once the file has not changed for ``seconds`` by ``clock``.

    Times of a shared disk and of this node need not agree, so only changes count.
    """
    seen, since = None, clock()
    while clock() - since < seconds:
        await asyncio.sleep(pause())
        now = await asyncio.to_thread(_changed, alive)
        if now is not None and now != seen:
            seen, since = now, clock()


def _changed(path: Path) -> int | None:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return None


async def give_back(here: Allocation, position: int, ask: Ask = ask) -> None:
    """Let SLURM start the job anew, on other nodes; PBS does so by itself.

    Args:
        here: the job.
        position: of this node among the job's, from 0.
        ask: runs a program of the scheduler.
    """
    if here.scheduler == "slurm" and here.job_id is not None:
        await asyncio.sleep(min(LONGEST_STAGGER, position * STAGGER_SECONDS))
        await asyncio.to_thread(ask, ["scontrol", "requeue", here.job_id])
