"""The whole job file: keys and their values, short forms, what excludes what."""

from __future__ import annotations

from operator import attrgetter

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
    ("agent: {command: [x], tools: [{builtin: sql}]}\n", "18: agent.command: command and tools "),
    (
        "agent: {tools: [{builtin: sql, command: x}]}\n",
        "17: agent.tools[0]: a tool has exactly one",
    ),
    ("agent: {tools: [{builtin: sql}, {builtin: sql}]}\n", "8: agent: two tools are named sql"),
    (
        "agent: {tools: [{mcp: [], name: x}]}\n",
        "23: agent.tools[0].mcp: expected at least one text",
    ),
    ("output: s.json\n", "9: output: expected a mapping of keys, got the text"),
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


def key(path, value):
    """A job with the YAML text ``value`` at the dotted ``path``."""
    *sections, last = path.split(".")
    lines = ["input: rows.jsonl", "prompt: 'Say {{ text }}'"]
    for depth, section in enumerate(sections):
        lines.append(f"{'  ' * depth}{section}:")
    lines.append(f"{'  ' * len(sections)}{last}: {value}")
    return "\n".join(lines) + "\n"


ACCEPTED = [
    ("sampling.max_tokens", "0x10", 16),
    ("sampling.top_p", "1", 1.0),
    ("sampling.seed", "08", 8),
    ("sampling.seed", "-9223372036854775808", -(2**63)),
    ("sampling.stop", "x", ("x",)),
    ("sampling.stop", "[a, 08, 1e2]", ("a", "08", "1e2")),
    ("sampling.reasoning_effort", "none", "none"),
    ("limits.concurrency", "1e2", 100),
    ("limits.concurrency", "auto", "auto"),
    ("limits.row", "1h30m", 5400.0),
    ("limits.row", "none", None),
    ("limits.row", "5M", 300.0),
    ("limits.stop_after_failures", "3", 3),
    ("model", "2024-01-01", "2024-01-01"),
    ("id", "1.0", "1.0"),
    ("dedupe", "false", False),
    ("cluster.walltime", "01:30:00", 5400.0),
    ("cluster.ports", "[8000, 8005]", (8000, 8005)),
    ("cluster.modules", "cray-python", ("cray-python",)),
]


@pytest.mark.parametrize(("path", "value", "result"), ACCEPTED)
def test_a_value_is_read(load, path, value, result):
    value_found = attrgetter(path)(load(key(path, value)))
    assert value_found == result
    assert type(value_found) is type(result)


REFUSED = [
    ("cluster.ports", "9-8", 'expected a range of ports within 1-65535, got the text "9-8"'),
    ("hostfile", "[a]", "expected a path, got a list"),
    ("sampling.temperature", "true", "expected a number, got true"),
    ("sampling.max_tokens", "1_000", 'expected a whole number, got the text "1_000" (write 1000)'),
    ("sampling.temperature", '"0.1"', 'expected a number, got the text "0.1" (remove the quotes)'),
    ("sampling.temperature", "1e999", "expected a finite number, got 1e999"),
    ("sampling.top_p", "0", "must be more than 0, got 0"),
    ("sampling.max_tokens", "0", "must be at least 1, got 0"),
    ("sampling.seed", "9223372036854775808", "must be at most 9223372036854775807, got 92"),
    ("sampling.logprobs", '"true"', 'expected true or false, got the text "true" (did you mean'),
    ("answers", "1001", "must be at most 1000, got 1001"),
    ("limits.row", "1:30", "expected a duration like 10s, 5m or 1h30m or none, got the text"),
    ("limits.row", '"10"', "expected a duration like 10s, 5m or 1h30m or none, got the text"),
    ("results.allow_failures", "101%", "must be at most 100, got 101"),
    ("results.allow_failures", "-1", "must be at least 0, got -1"),
    ("results.allow_failures", "x", "expected a number of rows or a share like 5%, got the text"),
    ("hostfile", "''", "expected a path, got an empty text"),
    ("limits.row", "0", "must be more than 0, got 0 (none = no limit)"),
    ("model", "true", "expected text, got true (quote it to make it text)"),
    ("model", "''", "expected text, got an empty one"),
    ("stream", "on", 'expected auto, true or false, got the text "on" (write true)'),
    ("name", "a/b", '"a/b" cannot name a run (no / or '),
    ("cluster.ports", "70000", "must be at most 65535, got 70000"),
]


@pytest.mark.parametrize(("path", "value", "message"), REFUSED)
def test_a_wrong_value_is_refused_with_key_line_and_value(fault, path, value, message):
    depth = path.count(".")
    line = 3 + depth
    column = 2 * depth + len(path.rpartition(".")[2]) + 3
    assert fault(key(path, value)).startswith(f"job.yaml:{line}:{column}: {path}: {message}")


def test_a_number_that_json_lacks_is_found_in_free_values_at_any_depth(fault):
    message = "sampling.extra.g[1].a: expected a finite number, got .nan"
    assert fault(key("sampling.extra.g", "[1, {a: .nan}]")) == f"job.yaml:5:16: {message}"


@pytest.mark.parametrize(
    "blank", ["sampling:", "limits: {timeout: }", "output: ~", "limits: {retries: null}"]
)
def test_a_blank_key_or_section_is_its_default(load, minimal, blank):
    assert load(minimal + blank + "\n").model_dump() == load(minimal).model_dump()
    assert load(minimal + "limits: {timeout: none}\n").limits.timeout.total is None
