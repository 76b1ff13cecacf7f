"""Stages and topologies: keys, names, order, and the job as a stage sees it."""

from __future__ import annotations

import pytest

BASE = "input: x\nprompt: Say {{ text }}\nbackend: vllm://h:1\nmodel: big\n"


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ("[§{prompt: x}]", "stages[0].kind is missing"),
        ("[§{kind: sql}]", "stages[0]: a sql stage needs query"),
        ("§{kind: map}", "stages: expected a list, got a mapping"),
        ("[{kind: map, name: §row}]", "stages[0].name: the name row means something else in "),
        ("[§{kind: loop}]", "stages[0]: a loop stage needs sections"),
        ("[{kind: §mapp, prompt: x}]", "stages[0].kind: expected map, broadcast, expand, reduce, "),
        ("[{kind: map, until: §x}]", "stages[0].until: until belongs to kind reduce or loop, not "),
        ("[§{kind: expand}]", "stages[0]: an expand stage needs one of items and split"),
        (
            "[{kind: expand, split: {field: a, tokens: 5, overlap: §5}}]",
            "stages[0].split.overlap: overlap must be less than tokens (5)",
        ),
        ("[{kind: map, name: §'a b'}]", "stages[0].name: the name a b cannot be used in prompts"),
        ("[{kind: map, name: a}, {kind: map, name: §a}]", "stages[1].name: two stages are named a"),
        (
            "[{kind: map, name: note}, {kind: map, from: §noet}]",
            "stages[1].from: stage map2 reads noet, which is no stage before it (did you mean ",
        ),
    ],
)
def test_a_wrong_stage_is_refused_at_its_place(fault, stages, message):
    line = f"stages: {stages}"
    column = line.index("§") + 1
    error = fault(BASE + line.replace("§", "") + "\n")
    assert error.startswith(f"job.yaml:5:{column}: {message}")


def test_a_stage_that_asks_needs_a_prompt_from_somewhere(load, fault):
    stages = "stages: [{kind: map, name: first}]\n"
    assert fault("input: x\n" + stages) == "job.yaml:2:10: stages[0]: stage first has no prompt"
    assert load("input: x\nprompt: y\n" + stages).stages[0].prompt is None
    assert load("input: x\nagent: {command: [claude]}\n" + stages).agent.command == ("claude",)


def test_a_stage_sees_the_job_with_its_own_keys(load):
    text = """\
sampling: {temperature: 0, seed: 1}
limits: {retries: 3, timeout: {idle: 5, total: 50}}
stages: [{kind: map, model: small, sampling: {temperature: 1}, limits: {timeout: {total: 9}}}]
"""
    job = load(BASE + text)
    stage = job.for_stage(job.stages[0])
    assert (stage.model, stage.sampling.temperature, stage.sampling.seed) == ("small", 1.0, 1)
    limits = stage.limits
    assert (limits.retries, limits.timeout.idle, limits.timeout.total) == (3, 5, 9)
    assert stage.prompt == job.prompt
    assert (job.model, job.sampling.temperature) == ("big", 0.0)


def test_a_stage_may_ask_a_fleet_or_another_server(load):
    stages = "stages: [{kind: map, hostfile: fleet}, {kind: map, backend: sim}, {kind: map}]\n"
    job = load(BASE + stages)
    fleet, sim, same = (job.for_stage(stage) for stage in job.stages)
    assert (str(fleet.hostfile), fleet.backend.base) == ("fleet", None)
    assert (sim.hostfile, sim.backend.kind) == (None, "sim")
    assert same.backend == job.backend
