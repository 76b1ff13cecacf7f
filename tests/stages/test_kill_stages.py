"""Killed jobs of several stages go on: the same final answer, nothing finished is sent again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from support.cli import run_bagent
from support.fake_server import FakeServer
from support.replies import canned
from support.stage_jobs import RUN, outcomes, write_stages

pytestmark = pytest.mark.slow  # minutes: run with the real parts

Json = Any
IN_FLIGHT = 4
FIRST = {"kind": "map", "name": "first", "prompt": "first {{ id }}"}
LATER = "select id, count(*) as n, min(text) as said from first group by id"
SECTIONS = [
    {"name": name, "prompt": name + " {{ id }} {{ round }} {{ board }}"} for name in ("one", "two")
]
REDUCE = {"kind": "reduce", "prompt": "sum {{ n }} at {{ level }}: {{ responses }}"}
STAGES: dict[str, list[dict[str, Json]]] = {
    "split": [
        {"kind": "expand", "name": "piece", "split": {"field": "text", "tokens": 60}},
        {"kind": "map", "name": "note", "prompt": "note {{ id }} {{ text }}"},
        {**REDUCE, "name": "last", "by": "id"},
    ],
    "groups": [FIRST, {**REDUCE, "name": "last", "by": "kind", "fanin": 2}],
    "query": [
        FIRST,
        {"kind": "sql", "name": "count", "query": LATER},
        {"kind": "map", "name": "last", "prompt": "last {{ id }} {{ n }} {{ said }}"},
    ],
    "board": [{"kind": "loop", "name": "last", "max_rounds": 3, "sections": SECTIONS}],
}
ROWS = [
    {"id": f"r{n}", "kind": "ab"[n % 2], "text": " ".join(f"{n}w{m}" for m in range(60))}
    for n in range(8)
]


def finals(folder: Path) -> list[tuple[Json, ...]]:
    lines = outcomes(folder, "last")
    return sorted(
        (line["id"], line["status"], line.get("text"), str(line.get("output"))) for line in lines
    )


@pytest.mark.parametrize("name", STAGES)
def test_a_killed_run_goes_on_to_the_same_answer(tmp_path, name):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    with FakeServer({"*": [canned(delay=0.02)]}) as server:
        for folder in (whole, killed):
            folder.mkdir()
            write_stages(folder, server.url, ROWS, STAGES[name], limits={"concurrency": IN_FLIGHT})
        assert run_bagent(RUN, whole).code == 0
        needed = len(server.requests)
        for share in (0.3, 0.6, 0.9):
            sent = len(server.requests) - needed
            wanted = needed + int(needed * share) + sent // 8
            run_bagent(RUN, killed, kill_at=lambda count=wanted: server.wait_for(count))
        done = run_bagent(RUN, killed)
        assert done.code == 0, done.err
        sent = len(server.requests) - needed
    assert finals(killed) == finals(whole)
    units = [(line["stage"], line["key"], line.get("answer", 0)) for line in outcomes(killed)]
    assert len(units) == len(set(units)), "a finished row was asked about again"
    assert sent <= needed + 3 * IN_FLIGHT
