"""Nodes that notice that their job's script is gone, and give the job back."""

from __future__ import annotations

import asyncio
import os

from bagent.hpc.allocation import Allocation
from bagent.hpc.engines import (
    EngineProcess,
    EngineState,
    HeadNode,
    read_states,
    requeue,
    supervise,
    until_gone,
)


def test_under_slurm_the_job_is_requeued_and_elsewhere_nothing_is_asked():
    asked = []

    def ask(words):
        asked.append(list(words))
        return ""

    asyncio.run(requeue(Allocation("slurm", "77"), 0, ask))
    asyncio.run(requeue(Allocation("pbs", "78"), 0, ask))
    asyncio.run(requeue(Allocation(), 0, ask))
    assert asked == [["scontrol", "requeue", "77"]]


def test_engines_are_stopped_when_the_script_is_gone(tmp_path):
    engine = EngineProcess(("sleep", "600"), {}, 0, 8000, serves=False)
    head = HeadNode(tmp_path / "alive", 0.0, 1)
    assert asyncio.run(supervise([engine], tmp_path, "n2", 3, head)) == 0
    (state,) = read_states(tmp_path)
    assert isinstance(state, EngineState)
    assert state.state == "stopped"


def test_a_script_is_gone_once_its_file_has_not_changed_for_so_long(tmp_path):
    alive = tmp_path / "alive"
    alive.touch()
    now, looks = 0.0, []

    def pause():
        nonlocal now
        now += 10
        looks.append(now)
        if now <= 50:
            os.utime(alive, ns=(0, int(now)))
        if now == 80:
            alive.unlink()
        return 0

    asyncio.run(until_gone(alive, 60, lambda: now, pause))
    assert looks[-1] == 110
