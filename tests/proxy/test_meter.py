"""What is kept of requests: each has one row, in its result and in its attempts."""

from __future__ import annotations

import asyncio
import json
import signal
from contextlib import ExitStack

import pytest

from bagent.proxy.meter import Meter, Record
from support.fake_server import FakeServer
from support.proxy_calls import ask, post_chat, rows_of, running_proxy, through
from support.replies import gated, ok, status


def attempts_of(run):
    """The row, name and try of each attempt."""
    lines = "".join(p.read_text() for p in sorted(run.glob("journal/attempts-*.jsonl")))
    found = [json.loads(line) for line in lines.splitlines()]
    return [(one["row"], one["id"], one["try"]) for one in found]


def test_attempts_of_requests_that_overlap_have_the_row_of_their_result(tmp_path):
    async def work(proxy, session):
        slow = asyncio.ensure_future(
            ask(proxy, session, row="slow", headers={"X-Bagent-Row": "slow"})
        )
        await asyncio.to_thread(fs.wait_for, 2)
        for name in ("quick", "last"):
            await ask(proxy, session, row=name, headers={"X-Bagent-Row": name})
        fs.release()
        return (await slow)[0]

    script = {"slow": [status(503), gated(ok("yes"))], "*": [ok("yes")]}
    with FakeServer(script) as fs:
        assert through([fs.url, fs.url], work, tmp_path / "run") == 200
    rows = {row["id"]: row["row"] for row in rows_of(tmp_path / "run")}
    assert rows == {"slow": 0, "quick": 1, "last": 2}
    attempts = attempts_of(tmp_path / "run")
    assert sorted(attempts) == [(0, "slow", 1), (0, "slow", 2), (1, "quick", 1), (2, "last", 1)]


def noted(run, *names):
    """A start of a meter with a request of each of these names."""
    meter = Meter(run, ["e"], print)
    for name in names:
        record = Record(name, "/chat/completions", 1.0)
        record.tries, record.endpoint = 1, "e"
        meter.attempt(record, 1.0, 200, None)
        meter.request(record)
    meter.close(0)


def test_rows_are_numbered_on_after_a_start_that_ended(tmp_path):
    noted(tmp_path, "a", "b")
    noted(tmp_path, "c")
    assert {row["id"]: row["row"] for row in rows_of(tmp_path)} == {"a": 0, "b": 1, "c": 2}


@pytest.mark.process("kill")
def test_rows_are_numbered_on_after_a_start_that_was_killed(tmp_path):
    with ExitStack() as stack:
        proxy = running_proxy(stack, tmp_path, stack.enter_context(FakeServer()))
        assert [post_chat(proxy.out.strip()) for _ in range(3)] == [200] * 3
        proxy.send(signal.SIGKILL)
        proxy.finish()
    noted(tmp_path / "run", "later")
    rows = rows_of(tmp_path / "run")  # the last of the three may not have been written yet
    assert [row["row"] for row in rows] == list(range(len(rows)))
    assert len(rows) >= 3 and rows[-1]["id"] == "later"
