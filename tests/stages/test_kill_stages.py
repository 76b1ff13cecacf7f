"""Killed jobs of several stages go on: the same final answer, nothing finished is sent again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from support.cli import run_bagent
from support.fake_server import FakeServer
from support.jobs import write_job
from support.replies import canned
from support.stage_jobs import NO_TABLES, RUN, outcomes, write_stages

pytestmark = pytest.mark.slow  # minutes: run with the real parts

Json = Any
IN_FLIGHT = 4
ITEMS = {
    "type": "object",
    "properties": {"items": {"type": "array", "items": {"type": "string"}, "minItems": 2}},
    "required": ["items"],
}
REDUCE = {"prompt": "sum {{ n }} at {{ level }}: {{ responses }}"}
SECTIONS = [
    {"name": name, "prompt": name + " {{ id }} {{ round }} {{ board }}"} for name in ("one", "two")
]
STEPS = [{"prompt": "a {{ id }}"}, {"prompt": "b {{ step1 }}"}]
PLAN = {"prompt": "plan {{ id }}", "output": {"schema": ITEMS}}
TOPOLOGIES: dict[str, tuple[str, dict[str, Json]]] = {
    "broadcast": ("reduce", {"name": "broadcast", "reduce": REDUCE}),
    "reduce": ("reduce", {"name": "reduce", "fanin": 3}),
    "map_reduce": ("reduce", {"name": "map_reduce", "reduce": REDUCE}),
    "tree_reduce": ("reduce", {"name": "tree_reduce", "fanin": 3, "reduce": REDUCE}),
    "plan_map_reduce": ("reduce", {"name": "plan_map_reduce", "plan": PLAN, "reduce": REDUCE}),
    "pipeline": ("step2", {"name": "pipeline", "steps": STEPS}),
    "blackboard": ("blackboard", {"name": "blackboard", "max_rounds": 3, "sections": SECTIONS}),
    "board in turns": (
        "blackboard",
        {"name": "blackboard", "max_rounds": 2, "parallel": False, "sections": SECTIONS},
    ),
    "self_consistency": ("vote", {"name": "self_consistency"}),
    "judge": ("judge", {"name": "judge", "judge": {"prompt": "judge {{ answer }}"}}),
}
"""The last stage of each topology, and the topology."""
FIRST = {"kind": "map", "name": "first", "prompt": "first {{ id }}"}
LATER = "select id, count(*) as n, min(text) as said from first group by id"
STAGES: dict[str, list[dict[str, Json]]] = {
    "split": [
        {"kind": "expand", "name": "piece", "split": {"field": "text", "tokens": 60}},
        {"kind": "map", "name": "note", "prompt": "note {{ id }} {{ text }}"},
        {"kind": "reduce", "name": "whole", "by": "id", "prompt": REDUCE["prompt"]},
    ],
    "query": [
        FIRST,
        {"kind": "sql", "name": "count", "query": LATER},
        {"kind": "map", "name": "last", "prompt": "last {{ id }} {{ n }} {{ said }}"},
    ],
    "groups": [
        FIRST,
        {"kind": "reduce", "name": "group", "by": "kind", "fanin": 2, "prompt": REDUCE["prompt"]},
    ],
    "vectors": [FIRST, {"kind": "embed", "name": "vector"}],
}
"""Kinds of stages that no topology above has, or not like this."""

ROWS = [
    {"id": f"r{n}", "kind": "ab"[n % 2], "text": " ".join(f"{n}w{m}" for m in range(60))}
    for n in range(8)
]


def set_up(folder: Path, url: str, name: str) -> None:
    folder.mkdir()
    item = "{{ item }}" if name == "plan_map_reduce" else ""
    prompt = f"work {{{{ id }}}} {item}"
    if name in STAGES:
        write_stages(folder, url, ROWS, STAGES[name], limits={"concurrency": IN_FLIGHT})
        return
    write_job(
        folder,
        url,
        8,
        prompt=REDUCE["prompt"] if name == "reduce" else prompt,
        topology=TOPOLOGIES[name][1],
        results=NO_TABLES,
        sampling={"temperature": 0, "max_tokens": 64, "seed": 1},
        answers=3 if name == "self_consistency" else None,
        limits={"concurrency": IN_FLIGHT},
    )


def finals(folder: Path, name: str) -> list[tuple[Json, ...]]:
    last = TOPOLOGIES[name][0] if name in TOPOLOGIES else STAGES[name][-1]["name"]
    found = outcomes(folder, last)
    return sorted((line["id"], line["status"], line.get("text"), str(line.get("output")))
                  for line in found)  # fmt: skip


@pytest.mark.parametrize("name", sorted(TOPOLOGIES | STAGES))
def test_a_killed_run_goes_on_to_the_same_answer(tmp_path, name):
    folder = tmp_path / "killed"
    # One server for both: ids of a broadcast name it.
    with FakeServer({"*": [canned(delay=0.02)]}, allow_faults=name == "vectors") as server:
        set_up(tmp_path / "whole", server.url, name)
        assert run_bagent(RUN, tmp_path / "whole").code == 0
        needed = len(server.requests)
        set_up(folder, server.url, name)
        for share in (0.3, 0.6, 0.9):
            sent = len(server.requests) - needed
            wanted = needed + int(needed * share) + sent // 8
            run_bagent(RUN, folder, kill_at=lambda count=wanted: server.wait_for(count))
        done = run_bagent(RUN, folder)
        assert done.code == 0, done.err
        sent = len(server.requests) - needed
    assert finals(folder, name) == finals(tmp_path / "whole", name)
    units = [(line["stage"], line["key"], line.get("answer", 0)) for line in outcomes(folder)]
    assert len(units) == len(set(units)), "a finished row was asked about again"
    if name != "vectors":  # of which a request takes as many as are ready
        assert sent <= needed + 3 * IN_FLIGHT
