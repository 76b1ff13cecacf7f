"""Workers of a load test as processes."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from bagent.backends.base import Timeouts
from bagent.backends.endpoint import Endpoint
from bagent.bench.plan import AnswerPlan, BenchTarget, Lengths, LoadConfig
from bagent.bench.schedule import LoadStage
from bagent.bench.workers import ProcessWorkers
from support.simulated_fleets import DEAD


@pytest.mark.process("workers")
async def test_a_stop_ends_the_stage_and_no_worker_also_right_after_the_start(
    tmp_path: Path,
) -> None:
    config = LoadConfig(
        targets=[BenchTarget(Endpoint("e", f"http://{DEAD}/v1", {}, {}, tags={}), "m")],
        lengths={"m": Lengths(own=12, prefix=30, per_word=1.5, extra=5.0)},
        answer=AnswerPlan(8),
        timeouts=Timeouts(),
        salt="s",
        origin=time.monotonic(),
        folder=str(tmp_path),
        workers=2,
    )
    async with ProcessWorkers(config) as workers:
        workers.stop()
        shares = await workers.run(LoadStage(number=0, load="c=1", concurrency=1, seconds=600.0))
    assert len(shares) == 2
