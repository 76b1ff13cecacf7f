"""Whatever stands in a job file: a job, or one line with a place; never another exception."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from bagent.errors import JobError
from bagent.job.load import JobRequest, load_job
from bagent.job.templates.prompt import Prompt

TEXT = """\
# words
x-base: &base {temperature: 0.5}
name: run
backend: {url: "vllm://h:8000", headers: {A: "b"}, query: {c: 1}}
input: [a.jsonl, 'b/*.csv']
prompt:
  messages:
    - {role: system, content: 'Be {{ kind | default("x") }}.'}
    - role: user
      content:
        - text: |
            Review {{ symbol }}:
            {% for x in items %}{{ x.name }}{% endfor %}
        - image: "{{ path }}"
answers: 2
output: {schema: {type: object}, retries: 1}
sampling: {<<: *base, max_tokens: 1e2, stop: [a, 'b'], extra: {k: [1, null]}}
agent: {tools: [{builtin: http_get, allow_hosts: [x.org]}], compact: {at: 0.5}}
limits: {timeout: {total: 1h30m, idle: }, hedge: off, row: none}
results: {allow_failures: 5%}
cluster: {walltime: 01:00:00, ports: 8000-8003}
"""
PIECES = [
    *":{}[]\"'|>-&*!%@`#\n\t ,?~<",
    "{{",
    "}}",
    "{%",
    "null",
    "1e5",
    "08",
    "${A}",
    "${",
    "<<: *base",
    "- ",
    "\n  ",
    "\u2028",
    "é",
]


def mutated(random: Random) -> str:
    text = TEXT
    for _ in range(random.randint(1, 3)):
        at = random.randrange(len(text))
        kind = random.randrange(4)
        if kind == 0:
            text = text[:at] + random.choice(PIECES) + text[at:]
        elif kind == 1:
            text = text[:at] + text[at + random.randint(1, 8) :]
        elif kind == 2:
            other = random.randrange(len(text))
            text = text[:at] + text[other : other + random.randint(1, 40)] + text[at:]
        else:
            lines = text.split("\n")
            line = random.randrange(len(lines))
            lines[line] = " " * random.randint(0, 4) + lines[line].strip()
            text = "\n".join(lines)
    return text


def test_the_unchanged_text_is_a_job(tmp_path):
    job = load_job(JobRequest(path=Path("j.yaml"), text=TEXT, cwd=tmp_path))
    assert Prompt.from_job(job).fields == {"kind", "symbol", "items", "path"}


@pytest.mark.parametrize("seed", range(8))
def test_a_damaged_job_is_a_job_or_one_line(tmp_path, seed):
    random = Random(seed)
    loaded = 0
    for _ in range(12):
        text = mutated(random)
        try:
            job = load_job(JobRequest(path=Path("j.yaml"), text=text, cwd=tmp_path))
            if job.prompt is not None:
                Prompt.from_job(job)
            job.masked()
            job.fingerprint_parts()
            loaded += 1
        except JobError as error:
            assert "\n" not in str(error)
            assert str(error.at).startswith("j.yaml"), text
    assert loaded < 12
