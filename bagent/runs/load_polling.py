"""Polling of the engines' load, which adapts the limits of a run."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from bagent.backends.engines.metrics import EngineLoad, LoadReader
from bagent.fleet.endpoint_state import EndpointState
from bagent.fleet.fleet import Fleet
from bagent.fleet.limits.load_feedback import POLL_SECONDS, LoadVerdict, apply_verdict

POLLS_PER_SECOND = 100.0
"""Over all engines, so each engine of a large fleet is polled less often."""

POLLS_AT_ONCE = 32

FAST_SECONDS = 12.0
FAST_BATCH_SECONDS = 4.0
FAST_POLL_SECONDS = 0.25
FAST_FLEET = 64
"""In its first 12 s a fleet of up to 64 engines is polled every 0.25 s, since short runs end before
limits that double every few seconds have grown. Limits are only raised then, since a queue may be
the first burst, and only where most rows in flight run: the front end of a vLLM server may need
seconds for them, in which the engine reports no queue. Of a batch fewer rows run, as answered ones
wait for its last, so batches are not looked at in that way, and end this after 4 s."""
READ_SECONDS = 5.0

ROUND_SECONDS = 0.25
"""Longest wait of one engine's load for those of the same round."""

MOST_COUNTED = 256
"""Largest fleet whose cache counters are read before and after a run."""

LAST_SECONDS = 1.0
"""How long the last reading may take."""

LoadSample = tuple[EndpointState, EngineLoad | None, LoadVerdict]
"""An endpoint, its load, and the consequence for its limit."""


async def watch_loads(fleet: Fleet, reader: LoadReader, model: str | None) -> None:
    """Poll the load of each busy engine and adapt its limit, until cancelled.

    Args:
        model: the requested model; a server of several reports the load of each.
    """
    gate = asyncio.Semaphore(POLLS_AT_ONCE)
    loop = asyncio.get_running_loop()
    began = loop.time()

    async def poll(state: EndpointState) -> LoadSample | None:
        async with gate:
            load = None
            if reader.due(state.endpoint):
                load = await reader.read(state.endpoint, READ_SECONDS, model)
        signal = state.feedback
        if signal is None or state.leaving:
            return None
        return state, load, signal.judge(loop.time(), load, state.in_flight, state.largest_batch)

    while True:
        busy = [state for state in fleet.states if state.feedback is not None and state.in_flight]
        batches = any(state.largest_batch for state in busy)
        fast_seconds = FAST_BATCH_SECONDS if batches else FAST_SECONDS
        fast = loop.time() - began < fast_seconds and len(busy) <= FAST_FLEET
        polls = {loop.create_task(poll(state)) for state in busy}
        # Engines that begin together must grow together, or the first to grow takes rows whose
        # prefixes the others have cached but have no room for yet.
        try:
            while polls:
                done, polls = await asyncio.wait(polls, timeout=ROUND_SECONDS)
                _apply(fleet, done, loop.time(), fast=fast)
        finally:
            for task in polls:
                task.cancel()
        pause = FAST_POLL_SECONDS if fast else POLL_SECONDS
        await asyncio.sleep(max(pause, len(busy) / POLLS_PER_SECOND))


def _apply(
    fleet: Fleet, polls: Iterable[asyncio.Task[LoadSample | None]], now: float, *, fast: bool
) -> None:
    """Adapt all limits, then update the fleet."""
    samples = [sample for poll in polls if (sample := poll.result()) is not None]
    for state, _, verdict in samples:
        admitted = verdict.admitted or state.largest_batch > 0
        if not fast or (verdict.action == "grow" and admitted):
            apply_verdict(state.limit, verdict, now)
    for state, load, verdict in samples:
        if load is not None or verdict.action != "grow":
            fleet.on_load_sample(state, load, verdict.reason)
        else:
            fleet.on_limit_change(state)


async def read_counters(fleet: Fleet, reader: LoadReader, model: str | None, reason: str) -> None:
    """Record the engines' counters, so that their growth over the run is known."""
    gate = asyncio.Semaphore(POLLS_AT_ONCE)

    async def read(state: EndpointState) -> None:
        async with gate:
            load = await reader.read(state.endpoint, READ_SECONDS, model)
        if load is not None and not state.leaving:
            fleet.on_load_sample(state, load, reason)

    own = [state for state in fleet.states if state.endpoint.own and reader.due(state.endpoint)]
    if len(own) <= MOST_COUNTED:
        await asyncio.gather(*(read(state) for state in own))
