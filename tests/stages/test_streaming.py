"""Stages work side by side: what is ready goes on, whatever else is still on its way."""

from __future__ import annotations

import time

import pytest

from support.cli import Running
from support.fake_server import FakeServer
from support.replies import gated, ok
from support.stage_jobs import RUN, outcomes, write_stages

FIRST = {"kind": "map", "name": "first", "prompt": "one id={{ id }} {{ text }}"}
SECOND = {"kind": "map", "name": "second", "prompt": "two id={{ id }} <{{ first }}>"}
SUM = {"kind": "reduce", "name": "sum", "fanin": 2, "prompt": "sum {{ level }}\n{{ responses }}"}


def wait_for(server: FakeServer, start: str, count: int) -> None:
    """Block until so many requests begin with ``start``."""
    deadline = time.monotonic() + 20
    while sum(seen.prompts[0].startswith(start) for seen in server.requests) < count:
        assert time.monotonic() < deadline, [seen.prompts[0] for seen in server.requests]
        time.sleep(0.02)


@pytest.mark.process("concurrent")
def test_rows_and_full_groups_go_on_while_a_row_before_them_is_in_flight(tmp_path):
    with FakeServer({"r5": [gated(ok("late")), ok("late")], "*": [ok("short")]}) as server:
        write_stages(tmp_path, server.url, 6, [FIRST, SECOND, SUM])
        with Running(RUN, tmp_path) as running:
            wait_for(server, "two", 5)
            wait_for(server, "sum 1", 2)
            wait_for(server, "sum 2", 1)
            server.release()
            assert running.finish().code == 0
    assert [line["id"] for line in outcomes(tmp_path, "sum")][-1] == "sum:3.0"
