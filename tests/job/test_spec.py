"""The whole job file: keys, defaults, short forms, what excludes what."""

from __future__ import annotations

import pytest

UNKNOWN = [
    ("limits:\n  timeout:\n    totl: 1\n", "5:5: unknown key totl (did you mean total?)"),
    ("api_key: x\n", "3:1: unknown key api_key (it belongs to backend: {url: ..., api_key_env:"),
    ("sampling: {logit_bias: {}}\n", "3:12: unknown key logit_bias (other request fields go under"),
    ("batching: {zzz: 1}\n", "3:12: unknown key zzz (known: mode by size s3_uri role_arn "),
    ("backend: {url: vllm, api_key: x}\n", "3:22: unknown key api_key (keep keys out of job files"),
]


@pytest.mark.parametrize(("text", "message"), UNKNOWN)
def test_an_unknown_key_names_its_place_and_the_near_name(fault, minimal, text, message):
    assert fault(minimal + text).startswith(f"job.yaml:{message}")


def test_several_faults_are_told_by_the_first_in_the_file(fault):
    text = "input: x\nanswers: 0\nprompt: hi\nmodle: x\nlimits: {retries: -1}\n"
    assert fault(text) == "job.yaml:2:10: answers: must be at least 1, got 0 (and 2 more)"


@pytest.mark.parametrize(
    ("written", "failed", "rows", "allowed"),
    [
        ("0", 1, 5, False),
        ("2", 2, 5, True),
        ("5%", 5, 100, True),
        ("0.5 %", 1, 200, True),
    ],
)
def test_failures_are_allowed_by_number_or_share(load, minimal, written, failed, rows, allowed):
    results = load(minimal + f"results: {{allow_failures: {written}}}\n").results
    assert results.allow_failures.allows(failed, rows) is allowed


def test_sampling_gives_the_fields_of_a_request(load, minimal):
    assert load(minimal).sampling.request_fields() == {}
    job = load(minimal + "sampling: {temperature: 0, stop: x, extra: {top_a: 1}}\n")
    assert job.sampling.request_fields() == {"temperature": 0.0, "stop": ["x"], "top_a": 1}


CONFLICTS = [
    ("sampling: {extra: {temperature: 1}}\n", "19: sampling.extra: temperature is a known name"),
    ("sampling: {extra: {n: 2}}\n", "19: sampling.extra: extra may not set n (write answers: N "),
    ("sampling: {top_logprobs: 3}\n", "26: sampling.top_logprobs: top_logprobs needs logprobs"),
    (
        "agent: {tools: [{builtin: shell}]}\n",
        "17: agent.tools[0]: the tool shell runs code (write ",
    ),
    ("agent: {tools: [{command: [ls]}]}\n", "17: agent.tools[0]: a command needs a name (write "),
    (
        "agent: {tools: [{name: t, command: [t, -f, 'a={fiel}'],"
        " parameters: {properties: {file: {type: string}}}}]}\n",
        "44: agent.tools[0].command[2]: {fiel} is no parameter (did you mean file? {{fiel}} is ",
    ),
    ("agent: {tools: [{python: a.py}]}\n", "26: agent.tools[0].python: expected file.py:function"),
    ("topology: judge\nstages: [{kind: map}]\n", "11: topology: topology and stages exclude each"),
    (
        "cluster: {engines_per_node: 2, nodes_per_engine: 2}\n",
        "50: cluster.nodes_per_engine: engines_per_node and nodes_per_engine exclude each other",
    ),
]


@pytest.mark.parametrize(("text", "message"), CONFLICTS)
def test_what_does_not_go_together_is_refused(fault, minimal, text, message):
    assert fault(minimal + text).startswith(f"job.yaml:3:{message}")


@pytest.mark.parametrize(
    ("command", "parameters"),
    [
        ("[awk, '{{print}}', '{file}']", "{properties: {file: {type: string}}}"),
        ("[find, -exec, '{}', '{ x }']", "{type: object}"),
        ("[grep, '{pattern}']", "null"),
    ],
)
def test_braces_of_a_command_are_parameters_or_say_that_they_are_not(
    load, minimal, command, parameters
):
    entry = f"{{name: t, command: {command}, parameters: {parameters}}}"
    assert load(f"{minimal}agent: {{tools: [{entry}]}}\n").agent.tools[0].name == "t"
