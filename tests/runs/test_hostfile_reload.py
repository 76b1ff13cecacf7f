"""Polling of engines' loads, on a clock that jumps, and a hostfile that changes."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import suppress
from types import SimpleNamespace

from bagent.backends.endpoint import Endpoint
from bagent.backends.engines.metrics import EngineLoad
from bagent.fleet.limits.load_feedback import LoadFeedback
from bagent.runs.hostfile_reload import HostfileFollower
from bagent.runs.load_polling import watch_loads
from support.jumping_loop import run_jumping
from support.scripted_fleet import always, setup


class ReportingEngines:
    """Engines in which nothing waits; each tells so after its own seconds."""

    def __init__(self, seconds, running=8):
        self.seconds = seconds
        self.running = running

    def due(self, endpoint):
        return True

    async def read(self, endpoint, limit, model):
        await asyncio.sleep(self.seconds[endpoint.name])
        return EngineLoad(at=0.0, waiting=0, running=self.running)


def grown(seconds, until, running=8):
    """The limits of the engines at last, and what was sent when these grew from 8 rows to 16."""

    async def main():
        s = setup({name: always(seconds=500.0) for name in seconds}, limit=8, growing=True)
        for state in s.states:
            state.feedback = LoadFeedback()
        for row in range(60):
            s.request(s.call(row))
        engines = ReportingEngines(seconds, running)
        watching = asyncio.ensure_future(watch_loads(s.fleet, engines, None))
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


def test_rows_in_a_servers_front_end_are_no_reason_to_send_it_more():
    assert grown({"e0": 0.0}, 11.0, running=2)[0] == [8]
    assert grown({"e0": 0.0}, 11.0, running=8)[0] > [8]


def test_an_engine_that_tells_late_keeps_nobody_from_growing():
    limits, sent = grown({"e0": 0.0, "e1": 4.0}, 9.0)
    assert limits[0] > 8
    assert {name for _, name, _ in sent[:8]} == {"e0"}
    assert sent[0][0] < 1005.0  # the second look, which begins when the first is over


def test_a_list_with_a_key_that_is_not_set_counts_for_nothing_until_it_is_mended(
    tmp_path, monkeypatch
):
    """Of the list only what the job selects joins and leaves."""
    monkeypatch.setattr("bagent.runs.hostfile_reload.HOSTFILE_SECONDS", 0.02)
    monkeypatch.setattr("bagent.fleet.hostfile.SETTLE_SECONDS", 0.1)
    hosts = tmp_path / "hosts.txt"
    hosts.write_text("a role=x\nb role=x\nc\n")
    used = [Endpoint(f"{name}:8000", f"http://{name}:8000/v1", tags={"role": "x"}) for name in "ab"]
    changes: list[str] = []
    fleet = SimpleNamespace(
        join=lambda states: changes.extend(f"+{state.name}" for state in states),
        leave=lambda names: changes.extend(f"-{name}" for name in names),
    )

    async def main():
        notices = asyncio.Queue()
        follower = HostfileFollower(hosts, None, {}, notices.put_nowait, used, {"role": "x"})
        following = asyncio.create_task(follower.follow(fleet, lambda endpoints: endpoints))
        await asyncio.sleep(0)
        hosts.write_text("a role=x\nc role=x api_key_env=NOT_SET\n")
        refused = await asyncio.wait_for(notices.get(), 20)
        assert changes == []
        hosts.write_text("a role=x\nb\nc role=x\nd\n")
        told = await asyncio.wait_for(notices.get(), 20)
        following.cancel()
        return refused, told

    refused, told = asyncio.run(main())
    assert changes == ["-b:8000", "+c:8000"]
    assert "NOT_SET is not set (export it, with the API key)" in refused
    assert refused.endswith("; the 2 endpoints stay as they were")
    assert told == "hosts.txt changed: c:8000 joined, b:8000 removed, 2 endpoints now"
