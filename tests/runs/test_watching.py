"""Looks at engines' loads while a run goes on; the clock jumps, engines tell at once or late."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import suppress

from bagent.backends.engines.metrics import EngineLoad
from bagent.fleet.limits.load_feedback import LoadFeedback
from bagent.runs.hostfile_reload import watch_loads
from support.jumping_loop import run_jumping
from support.scripted_fleet import always, setup


class Told:
    """Engines in which nothing waits; each tells so after its own seconds."""

    def __init__(self, seconds):
        self.seconds = seconds

    def due(self, endpoint):
        return True

    async def read(self, endpoint, limit, model):
        await asyncio.sleep(self.seconds[endpoint.name])
        return EngineLoad(at=0.0, waiting=0, running=8)


def grown(seconds, until):
    """The limits of the engines at last, and what was sent when these grew from 8 rows to 16."""

    async def main():
        s = setup({name: always(seconds=500.0) for name in seconds}, limit=8, growing=True)
        for state in s.states:
            state.feedback = LoadFeedback()
        for row in range(60):
            s.fleet.submit(s.call(row))
        watching = asyncio.ensure_future(watch_loads(s.fleet, Told(seconds), None))
        await asyncio.sleep(until)
        watching.cancel()
        with suppress(asyncio.CancelledError):
            await watching
        sent = s.backend.sent[16:32]
        await s.fleet.drain(0)
        return [state.limit.value for state in s.states], sent

    return run_jumping(main())


def test_engines_that_begin_together_grow_before_either_takes_more():
    limits, sent = grown({"e0": 0.0, "e1": 0.2}, 1.0)
    assert limits == [16, 16]
    assert Counter(name for _, name, _ in sent) == {"e0": 8, "e1": 8}
    assert len({at for at, _, _ in sent}) == 1


def test_an_engine_that_tells_late_keeps_nobody_from_growing():
    limits, sent = grown({"e0": 0.0, "e1": 4.0}, 9.0)
    assert limits[0] > 8
    assert {name for _, name, _ in sent[:8]} == {"e0"}
    assert sent[0][0] < 1005.0  # the second look, which begins when the first is over
