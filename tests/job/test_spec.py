"""The whole job file: keys, defaults, short forms, what excludes what."""

from __future__ import annotations

import pickle

import pytest

from bagent.job.spec.paths import AllowFailures

FULL = """\
name: gene-review
backend: vllm
hostfile: hosts.txt
model: auto
input: genes.jsonl
id: gene_id
where: "length(description) > 0"
prompt:
  system: {file: reviewer.md}
  user: "Review {{ symbol }}: {{ description }}"
answers: 1
output: {schema: review.json, enforce: auto, describe: auto, retries: 2, grow: 1}
sampling: {temperature: 0, max_tokens: 512, seed: 1, extra: {ignore_eos: true, bias: {a: 08}}}
batching: {mode: auto, size: auto}
dedupe: auto
stream: auto
agent:
  max_turns: 6
  tools:
    - {builtin: http_get, allow_hosts: [example.org], rate_limit: 5/s, cache: 60s}
    - {builtin: read_file, root: data}
    - {python: "tools.py:look_up", timeout: 10s}
    - {name: grep, description: search, command: [grep, "{pattern}"],
       parameters: {type: object, properties: {pattern: {type: string}}}}
    - {command: claude_code}
    - {mcp: "npx server --flag"}
    - {mcp: {url: "https://example.org/mcp", headers: {X-A: b}}}
  compact: {at: 0.85, model: }
topology: map
limits: {concurrency: auto, per_endpoint: auto, retries: 5, hedge: off,
  timeout: {connect: 10s, first_token: 5m, idle: 2m, total: 30m}}
results: {dir: runs, keep_input: true, parquet: true, duckdb: true, allow_failures: 0}
cluster: {account: A, queue: prod, nodes: 4, walltime: 1h, engine: vllm serve m,
  engines_per_node: 2, ports: 8000-8001, gpu_mask: CUDA_VISIBLE_DEVICES, stage: /tmp/m,
  modules: [a]}
"""


@pytest.fixture
def full(load, tmp_path):
    (tmp_path / "reviewer.md").write_text("You review genes.\n")
    (tmp_path / "review.json").write_text('{"type": "object"}')
    (tmp_path / "tools.py").write_text("def look_up(name: str) -> str: ...\n")
    return load(FULL)


def test_the_defaults_are_those_of_a_written_out_job(load, minimal):
    job = load(minimal)
    assert (job.name, job.model, job.answers) == ("job", "auto", 1)
    assert (job.backend, job.hostfile, job.id, job.where) == (None, None, None, None)
    assert job.output.model_dump(exclude={"schema_"}) == {
        "enforce": "auto",
        "describe": "auto",
        "retries": 2,
        "grow": 1.0,
        "truncated": None,
    }
    assert job.limits.model_dump() == {
        "concurrency": "auto",
        "per_endpoint": "auto",
        "retries": 5,
        "hedge": "off",
        "timeout": {"connect": 10.0, "first_token": 300.0, "idle": 120.0, "total": 1800.0},
        "row": None,
        "retry_after_max": 120.0,
        "rpm": None,
        "tpm": None,
        "budget_usd": None,
        "stop_after_failures": None,
    }
    assert (job.dedupe, job.stream, job.topology.name) == ("auto", "auto", "map")
    assert (job.batching.mode, job.batching.size) == ("auto", "auto")
    assert job.results.allow_failures == AllowFailures(0)
    assert job.sampling.request_fields() == {}


def test_a_job_can_be_sent_to_another_process(full):
    again = pickle.loads(pickle.dumps(full))
    assert again == full
    assert again.fingerprint_parts() == full.fingerprint_parts()


UNKNOWN = [
    ("modle: x\n", "job.yaml:3:1: unknown key modle (did you mean model?)"),
    ("limits:\n  timeout:\n    totl: 1\n", "job.yaml:5:5: unknown key totl (did you mean total?)"),
    (
        "agent:\n  tools:\n    - {builtin: sql, roott: x}\n",
        "job.yaml:5:22: unknown key roott (did you mean root?)",
    ),
    ("host-file: x\n", "job.yaml:3:1: unknown key host-file (did you mean hostfile?)"),
    (
        "temperature: 1\n",
        "job.yaml:3:1: unknown key temperature (it belongs to sampling: {temperature: ...})",
    ),
    (
        "api_key: x\n",
        "job.yaml:3:1: unknown key api_key (it belongs to backend: {url: ..., api_key_env:"
        " NAME_OF_THE_VARIABLE})",
    ),
    (
        "sampling: {logit_bias: {}}\n",
        "job.yaml:3:12: unknown key logit_bias (other request fields "
        "go under extra: {logit_bias: ...})",
    ),
    (
        "batching: {zzz: 1}\n",
        "job.yaml:3:12: unknown key zzz (known: mode by size s3_uri role_arn service_tier prefix)",
    ),
    (
        "backend: {url: vllm, api_key: x}\n",
        "job.yaml:3:22: unknown key api_key (keep keys out of job files: api_key_env: NAME)",
    ),
]


@pytest.mark.parametrize(("text", "message"), UNKNOWN)
def test_an_unknown_key_names_its_place_and_the_near_name(fault, minimal, text, message):
    assert fault(minimal + text) == message


def test_several_faults_are_told_by_the_first_in_the_file(fault):
    text = "input: x\nanswers: 0\nprompt: hi\nmodle: x\nlimits: {retries: -1}\n"
    assert fault(text) == "job.yaml:2:10: answers: must be at least 1, got 0 (and 2 more)"


def test_no_timeout_must_be_said(load, minimal):
    timeout = load(minimal + "limits: {timeout: none}\n").limits.timeout
    assert set(timeout.model_dump().values()) == {None}
    assert load(minimal + "limits: {timeout: null}\n").limits.timeout.total == 1800.0


@pytest.mark.parametrize(
    ("written", "failed", "rows", "allowed"),
    [
        ("0", 1, 5, False),
        ("2", 2, 5, True),
        ("5%", 5, 100, True),
        ("0.5 %", 1, 200, True),
        ("5%", 0, 0, True),
    ],
)
def test_failures_are_allowed_by_number_or_share(load, minimal, written, failed, rows, allowed):
    results = load(minimal + f"results: {{allow_failures: {written}}}\n").results
    assert results.allow_failures.allows(failed, rows) is allowed


def test_sampling_gives_the_fields_of_a_request(load, minimal):
    job = load(minimal + "sampling: {temperature: 0, stop: x, extra: {top_a: 1}}\n")
    assert job.sampling.request_fields() == {"temperature": 0.0, "stop": ["x"], "top_a": 1}


CONFLICTS = [
    (
        "agent: {command: [x], tools: [{builtin: sql}]}\n",
        "job.yaml:3:18: agent.command: command and tools exclude each other",
    ),
    (
        "output: schema.json\n",
        'job.yaml:3:9: output: expected a mapping of keys, got the text "schema.json"',
    ),
    (
        "sampling: {extra: {temperature: 1}}\n",
        "job.yaml:3:19: sampling.extra: temperature is a "
        "known name (write sampling: {temperature: ...})",
    ),
    (
        "sampling: {extra: {n: 2}}\n",
        "job.yaml:3:19: sampling.extra: extra may not set n (write "
        "answers: N at the top of the job)",
    ),
    (
        "sampling: {top_logprobs: 3}\n",
        "job.yaml:3:26: sampling.top_logprobs: top_logprobs needs logprobs: true",
    ),
    (
        "agent: {tools: [{builtin: shell}]}\n",
        "job.yaml:3:17: agent.tools[0]: the tool shell runs "
        "code (write allow_code: true if the job may run code on this machine)",
    ),
    (
        "agent: {tools: [{builtin: sql, command: x}]}\n",
        "job.yaml:3:17: agent.tools[0]: a tool has exactly one of builtin, python, command, mcp",
    ),
    (
        "agent: {tools: [{command: [ls]}]}\n",
        "job.yaml:3:17: agent.tools[0]: a command needs a name (write name: NAME)",
    ),
    (
        "agent: {tools: [{name: t, command: [t, -f, 'a={fiel}'],"
        " parameters: {properties: {file: {type: string}}}}]}\n",
        "job.yaml:3:44: agent.tools[0].command[2]: {fiel} is no parameter"
        " (did you mean file? {{fiel}} is the text itself)",
    ),
    (
        "agent: {tools: [{builtin: sql}, {builtin: sql}]}\n",
        "job.yaml:3:8: agent: two tools are named sql (give one of them another name:)",
    ),
    (
        "agent: {tools: [{python: tools.py}]}\n",
        'job.yaml:3:26: agent.tools[0].python: expected file.py:function, got the text "tools.py"',
    ),
    (
        "agent: {tools: [{mcp: [], name: x}]}\n",
        "job.yaml:3:23: agent.tools[0].mcp: expected at least one text, got an empty list",
    ),
    (
        "topology: judge\nstages: [{kind: map}]\n",
        "job.yaml:3:11: topology: topology and stages exclude each other",
    ),
    (
        "cluster: {engines_per_node: 2, nodes_per_engine: 2}\n",
        "job.yaml:3:50: "
        "cluster.nodes_per_engine: engines_per_node and nodes_per_engine exclude each other",
    ),
    (
        "output: {schema: 5}\n",
        "job.yaml:3:18: output.schema: expected a schema's path or the schema itself, got 5",
    ),
]


@pytest.mark.parametrize(("text", "message"), CONFLICTS)
def test_what_does_not_go_together_is_refused(fault, minimal, text, message):
    assert fault(minimal + text) == message


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
