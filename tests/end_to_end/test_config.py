"""Job files as people write them: each mistake is one line with its place, and nothing is sent."""

from __future__ import annotations

import pytest

from support.cli import run_bagent
from support.jobs import write_job, write_rows
from support.replies import echo
from support.run_outcomes import NO_TABLES, RUN, error_of

HEAD = "model: fake-model\ninput: rows.jsonl\n"
PROMPT = "prompt: {user: 'id={{ id }} {{ text }}'}\n"


@pytest.fixture
def job_text(fs, job_dir):
    """Writes a job file from its text behind the backend's line, with two rows beside it."""
    fs.set_script({"*": [echo()]})
    write_rows(job_dir / "rows.jsonl", 2)

    def write(text: str) -> None:
        lines = f"backend: {fs.url}\nname: job\n{text}"
        (job_dir / "job.yaml").write_text(lines, encoding="utf-8")

    return write


PLAIN = [
    'Reply like {"score": 1}. Text: ',
    '{"a": {"b": [1, 2]}} ',
    r"$\frac{a}{b}$ and \{x\} ",
    "${HOME} costs $5, {id} ",
    "```js\nconst f = () => {}\n``` ",
    "100% done {% raw %}{{ text }} {% x %}{% endraw %} ",
    "{{ '{{' }} text {{ '}}' }} ",
]
SENT = [*PLAIN[:5], "100% done {{ text }} {% x %} ", "{{ text }} "]


def test_braces_that_are_no_tags_reach_the_model_as_they_are(fs, job_dir):
    messages = [{"role": "user", "content": text + "{{ text }}"} for text in PLAIN]
    write_job(job_dir, fs.url, 1, prompt={"messages": messages}, results=NO_TABLES)
    done = run_bagent(RUN, job_dir, env={"HOME": "/nowhere"})
    assert done.code == 0, done.err
    sent = [message["content"] for message in fs.requests[0].body["messages"]]
    assert sent == [text + "text number 1" for text in SENT]


@pytest.mark.parametrize(
    ("text", "place", "words"),
    [
        ("prompt:\n  user: |\n    Hello.\n    Text: {{ txet }}\n", "8:14", "did you mean text?"),
        ("prompt:\n  user: |\n    a {# b\n", "7:", "{% raw %}{#{% endraw %}"),
        ("prompt:\n  user: {{ text }}\n", "6:", 'write "{{ NAME }}"'),
        ("prompt:\n  user: {file: nope.md}\n", "6:16", "no such file: nope.md"),
        (PROMPT + "modle: x\n", "6:1", "did you mean model?"),
        (PROMPT + "limits: {timeout: 1:30}\n", "6:19", "1m30s"),
        (PROMPT + "where: 'txet = 1'\n", "6:8", "did you mean text?"),
    ],
)
def test_a_mistake_names_its_place_and_the_way_out(fs, job_dir, job_text, text, place, words):
    job_text(HEAD + text)
    error = error_of(run_bagent(RUN, job_dir))
    assert error.startswith(f"job.yaml:{place}"), error
    assert words in error
    assert fs.requests == []
    assert not (job_dir / "runs").exists()


@pytest.mark.parametrize(
    "option",
    [
        ["--retry", "timeouts"],
        ["--deadline", "tomorrow"],
        ["--hostfile", "nope.txt"],
        ["--name", "../x"],
        ["-o", "rows.jsonl"],
    ],
    ids=lambda option: " ".join(option),
)
def test_a_wrong_option_is_one_line_that_names_it(fs, job_dir, job_text, option):
    job_text(HEAD + PROMPT)
    error = error_of(run_bagent([*RUN, *option], job_dir))
    name = option[-1].partition("=")[0]
    assert name in error or option[0] in error
    assert fs.requests == []
    assert not (job_dir / "runs").exists()
