"""Killed jobs of several stages go on: the same final answer, nothing finished is sent again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from stages.support_stages import NO_TABLES, RUN, outcomes
from support.cli import run_bagent
from support.fake_server import FakeServer
from support.jobs import write_job
from support.replies import canned

pytestmark = pytest.mark.slow  # minutes: run with the real parts

Json = Any
IN_FLIGHT = 4
ITEMS = {
    "type": "object",
    "properties": {"items": {"type": "array", "items": {"type": "string"}, "minItems": 2}},
    "required": ["items"],
}
REDUCE = {"prompt": "sum {{ n }} at {{ level }}: {{ responses }}"}
TOPOLOGIES: dict[str, dict[str, Json]] = {
    "broadcast": {"name": "broadcast", "reduce": REDUCE},
    "reduce": {"name": "reduce", "fanin": 3},
    "map_reduce": {"name": "map_reduce", "reduce": REDUCE},
    "tree_reduce": {"name": "tree_reduce", "fanin": 3, "reduce": REDUCE},
    "plan_map_reduce": {
        "name": "plan_map_reduce",
        "plan": {"prompt": "plan {{ id }}", "output": {"schema": ITEMS}},
        "reduce": REDUCE,
    },
    "pipeline": {
        "name": "pipeline",
        "steps": [{"prompt": "a {{ id }}"}, {"prompt": "b {{ step1 }}"}],
    },
    "blackboard": {
        "name": "blackboard",
        "max_rounds": 3,
        "sections": [
            {"name": "one", "prompt": "one {{ id }} {{ round }} {{ board }}"},
            {"name": "two", "prompt": "two {{ id }} {{ round }} {{ board }}"},
        ],
    },
    "self_consistency": {"name": "self_consistency"},
    "judge": {"name": "judge", "judge": {"prompt": "judge {{ answer }}"}},
}
LAST = {
    "broadcast": "reduce",
    "reduce": "reduce",
    "map_reduce": "reduce",
    "tree_reduce": "reduce",
    "plan_map_reduce": "reduce",
    "pipeline": "step2",
    "blackboard": "blackboard",
    "self_consistency": "vote",
    "judge": "judge",
}


def set_up(folder: Path, url: str, name: str) -> None:
    folder.mkdir()
    item = "{{ item }}" if name == "plan_map_reduce" else ""
    prompt = f"work {{{{ id }}}} {item}"
    write_job(
        folder,
        url,
        8,
        prompt=REDUCE["prompt"] if name == "reduce" else prompt,
        topology=TOPOLOGIES[name],
        results=NO_TABLES,
        sampling={"temperature": 0, "max_tokens": 64, "seed": 1},
        answers=3 if name == "self_consistency" else None,
        limits={"concurrency": IN_FLIGHT},
    )


def finals(folder: Path, name: str) -> list[tuple[Json, ...]]:
    found = outcomes(folder, LAST[name])
    return sorted((line["id"], line["status"], line.get("text"), str(line.get("output")))
                  for line in found)  # fmt: skip


@pytest.mark.parametrize("name", sorted(TOPOLOGIES))
def test_a_killed_run_goes_on_to_the_same_answer(tmp_path, name):
    folder = tmp_path / "killed"
    # One server for both: ids of a broadcast name it.
    with FakeServer({"*": [canned(delay=0.02)]}) as server:
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
    assert sent <= needed + 3 * IN_FLIGHT
