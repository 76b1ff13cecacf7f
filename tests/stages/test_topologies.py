"""Short names for stages, written out."""

from __future__ import annotations

from pathlib import Path

import pytest

from bagent.errors import JobError
from bagent.job.load import JobRequest, load_job
from bagent.job.spec.job import Job
from bagent.stages.prepare import prepare_stages
from bagent.stages.topologies import expand_topology, topology_yaml

BASE = "backend: vllm://host\nmodel: m\ninput: rows.jsonl\n"
PROMPT = (
    'prompt: "say {{ text }}"\noutput: {schema: {type: object, properties: {a: {type: string}}}}\n'
)
TOPOLOGIES = {
    "broadcast": "broadcast",
    "broadcast and reduce": "{name: broadcast, reduce: {prompt: 'all {{ responses }}'}}",
    "reduce": "{name: reduce, fanin: 4, by: [text]}",
    "map_reduce": "{name: map_reduce, reduce: {prompt: '{{ responses }}', model: big}}",
    "tree_reduce": "{name: tree_reduce, reduce: {prompt: '{{ responses }}'}}",
    "plan": "{name: plan_map_reduce, plan: {prompt: p}, reduce: {prompt: '{{ responses }}'}}",
    "pipeline": "{name: pipeline, steps: [{prompt: a}, {prompt: '{{ step1 }}', model: n}]}",
    "blackboard": "{name: blackboard, sections: [a, {name: b, prompt: c}], until: 'round > 2'}",
    "vote": "{name: self_consistency, vote: a}",
    "judge": "{name: judge, judge: {prompt: '{{ answer }}', backend: vllm://other:1}}",
}


def load(text: str) -> Job:
    return load_job(JobRequest(text=text, cwd=Path("/tmp")))


@pytest.mark.parametrize("topology", TOPOLOGIES.values(), ids=TOPOLOGIES.keys())
def test_a_topology_written_out_is_the_same_stages(topology):
    job = load(f"{BASE}{PROMPT}topology: {topology}\n")
    laid = expand_topology(job)
    text = topology_yaml(laid, job)
    again = expand_topology(load(BASE + text))
    assert topology_yaml(again, job) == text
    for one, other in zip(laid.stages, again.stages, strict=True):
        before, after = laid.base.for_stage(one.spec), again.base.for_stage(other.spec)
        for key in ("prompt", "model", "backend", "answers", "output", "sampling", "agent"):
            assert getattr(before, key) == getattr(after, key), key


def test_the_schema_of_the_rows_is_not_asked_of_the_reducer():
    stages = prepare_stages(load(f"{BASE}{PROMPT}topology: {TOPOLOGIES['map_reduce']}\n"))
    assert [stage.requests[0].schema is not None for stage in stages] == [True, False]


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ("topology: tree_reduce", "topology tree_reduce needs a prompt for its reduce stage"),
        ("topology: judge", "topology judge needs a prompt for its judge stage"),
        ("topology: pipeline", "topology pipeline needs steps"),
        ("topology: blackboard", "topology blackboard needs sections"),
        ("stages: [{kind: reduce, until: 'n < 3'}]", "until of a reduce stage is how many rows"),
        ("stages: [{kind: map, name: a}, {kind: expand, items: 'a b'}]", r"stages\[1\]\.items"),
        ("stages: [{kind: map, select: {role: a}}]", "select chooses among the endpoints of a"),
    ],
)
def test_what_lacks_something_or_is_no_expression_is_refused(keys, words):
    with pytest.raises(JobError, match=words):
        prepare_stages(load(f"{BASE}{PROMPT}{keys}\n"))
