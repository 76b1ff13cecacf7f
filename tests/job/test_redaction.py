"""What may be written down of a job."""

from __future__ import annotations

import json
import pickle

import pytest

from bagent.job.load import JobRequest, load_job
from bagent.job.redaction import mask_command, mask_text

TEXT = """\
input: [rows.jsonl, 'x[1]/*.csv']
prompt: {system: Be brief., user: "Say {{ text }}"}
backend:
  url: vllm://host:8000
  query: {version: 1}
  headers: {X-Team: blue}
  api_key_env: MY_KEY
output: {schema: {type: object, properties: {password: {type: string}}}, grow: 2}
sampling: {temperature: 0, stop: [a], max_tokens: 5, extra: {token_ids: [1]}}
agent: {max_turns: 3, tools: [{name: t, command: [a, "{b}"], rate_limit: 5/s}, {mcp: npx x}]}
limits: {timeout: {total: none, idle: 5}, row: 1m, hedge: 3s}
results: {allow_failures: 5%}
cluster: {queue: prod, walltime: 1h, ports: 8000-8002, engine: [a, b]}
"""


def test_a_masked_job_loads_again_as_the_same_job(load, tmp_path):
    job = load(TEXT)
    assert pickle.loads(pickle.dumps(job)) == job  # how it reaches another process
    again = load_job(JobRequest(text=json.dumps(job.masked()), cwd=tmp_path))
    for name in type(job).model_fields:
        if name not in ("input", "backend", "results"):
            assert getattr(again, name) == getattr(job, name), name
    assert again.masked() == job.masked()
    assert again.fingerprint_parts() == job.fingerprint_parts()


SECRET = "s3cr3t-value/with+signs"


@pytest.mark.parametrize(
    "text",
    [
        "backend: {url: openai, headers: {Authorization: Bearer s3cr3t-value/with+signs}}\n",
        "backend: {url: openai, headers: {Cookie: s3cr3t-value/with+signs}}\n",
        "backend: 'https://me:s3cr3t-value%2Fwith+signs@host/v1'\n",
        "backend: {url: 'https://host/v1', query: {key: 's3cr3t-value/with+signs'}}\n",
        "backend: {url: vllm, proxy: 'http://me:s3cr3t-value@p:1'}\n",
        "sampling: {extra: {api_key: s3cr3t-value/with+signs}}\n",
        "agent: {tools: [{mcp: {command: x, env: {MY_TOKEN: s3cr3t-value/with+signs}}}]}\n",
        "cluster: {env: {HF_TOKEN: s3cr3t-value/with+signs}}\n",
        "sampling: {extra: {a: '${MY_KEY}'}}\n",
        "agent: {tools: [{mcp: 'npx x --with=${MY_KEY} y'}]}\n",
        "backend: 'https://host/v1/${MY_KEY}/x'\n",
        "prompt: {system: s3cr3t-value/with+signs, user: '{{ text }}'}\nmodel: '${MY_KEY}'\n",
    ],
)
def test_secrets_are_masked_wherever_they_stand(load, text):
    base = "input: x\n" if "prompt:" in text else "input: x\nprompt: y\n"
    job = load(base + text, env={"MY_KEY": SECRET})
    written = json.dumps(job.masked())
    assert "***" in written
    assert "s3cr3t-value" not in written


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("backend: {url: vllm, headers: {X-Team: blue}}", "backend.headers.X-Team"),
        ("backend: {url: vllm, headers: {X-A: 'a ${GH_PAT} b'}}", "backend.headers.X-A"),
        ("backend: {url: vllm, query: {v: '${GH_PAT}'}}", "backend.query.v"),
        ("backend: 'https://h/v1/${GH_PAT}'", "backend.url"),
        ("agent: {tools: [{mcp: 'npx x ${GH_PAT}'}]}", "agent.tools.0.mcp.command.2"),
        ("agent: {tools: [{command: [a], name: t, env: {A: '${SHORT}'}}]}", "agent.tools.0.env.A"),
        ("cluster: {env: {A: '${GH_PAT}'}}", "cluster.env.A"),
    ],
)
def test_headers_and_what_variables_put_into_carriers_are_masked(load, text, path):
    env = {"GH_PAT": "corporate", "SHORT": "ab"}
    value = load(f"input: corporate.jsonl\nprompt: y\nname: ab\n{text}\n", env=env).masked()
    assert value["input"]["path"][0].endswith("/corporate.jsonl") and value["name"] == "ab"
    for key in path.split("."):
        value = value[int(key) if key.isdecimal() else key]
    assert "***" in value and not {"corporate", "blue", "ab"} & {value, value[2:11]}


def test_hosts_and_ports_of_variables_and_harmless_headers_are_shown(load):
    text = "backend: {url: 'vllm://${HEAD_NODE}:${PORT}', headers: {User-Agent: mine}}\n"
    job = load(f"input: x\nprompt: y\n{text}", env={"HEAD_NODE": "x1000c0", "PORT": "8123"})
    assert job.masked()["backend"]["url"] == "vllm://x1000c0:8123"
    assert job.masked()["backend"]["headers"] == {"User-Agent": "mine"}


def test_a_short_secret_is_masked_only_where_it_stands_alone(load):
    job = load("input: x\nprompt: y\nmodel: '${K_TOKEN}'\nname: about\n", env={"K_TOKEN": "ab"})
    masked = job.masked()
    assert (masked["model"], masked["name"]) == ("***", "about")


@pytest.mark.parametrize(
    ("text", "masked"),
    [
        ("curl -H 'Authorization: Bearer abcdef123456'", "curl -H 'Authorization: Bearer ***'"),
        ("key sk-proj-abcdefghijklmnop1234 end", "key *** end"),
        ("hf_abcdefghijklmnopqrstuvwxyz", "***"),
        ("https://u:p@h/?a=1&token=x#f", "https://***@h/?a=1&token=***#f"),
        ("mail me@example.org", "mail me@example.org"),
    ],
)
def test_the_usual_forms_of_secrets_are_masked_in_texts(text, masked):
    assert mask_text(text) == masked


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (["--backend", "openai+http://me:hunter2@h/v1"], "--backend 'openai+http://***@h/v1'"),
        (["--set", "backend.headers.x-api-key=hunter2"], "--set 'backend.headers.x-api-key=***'"),
        (["--set=backend.query.sig=hunter2"], "'--set=backend.query.sig=***'"),
        (["--set", "backend.headers.X-Pass=hunter2"], "--set 'backend.headers.X-Pass=***'"),
        (["--set", "backend.api_key_env=MY_KEY"], "--set backend.api_key_env=MY_KEY"),
    ],
)
def test_a_command_is_shown_without_its_secrets(words, shown):
    assert mask_command(words) == shown
