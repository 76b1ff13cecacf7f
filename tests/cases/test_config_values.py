"""Values in job files: what YAML readers take for something else, and names in every prompt."""

from __future__ import annotations

import pytest

from support.cli import run_bagent
from support.jobs import write_job, write_rows
from support.replies import echo
from support.run_outcomes import NO_TABLES, RUN, error_of

pytestmark = pytest.mark.slow


@pytest.fixture
def job_text(fs, job_dir):
    """Writes a job file from its text after five lines, with two rows beside it."""
    fs.set_script({"*": [echo()]})
    write_rows(job_dir / "rows.jsonl", 2)

    def write(text: str) -> None:
        head = f"backend: {fs.url}\nname: job\nmodel: m\ninput: rows.jsonl\n"
        (job_dir / "job.yaml").write_text(
            head + "results: {duckdb: false, parquet: false}\n" + text
        )

    return write


@pytest.mark.parametrize(
    "value", ["[yes, on, OFF, n]", "[2024-01-01, 010, 1_000, 12:30:45]", '["1e-5", "true", "~"]']
)
def test_words_that_older_readers_turn_into_something_else_stay_words(fs, job_dir, job_text, value):
    job_text("prompt: 'id={{ id }}'\nsampling: {stop: " + value + "}\n")
    done = run_bagent(RUN, job_dir)
    words = [word.strip(' "') for word in value.strip("[]").split(",")]
    if done.code == 2:  # refused with the place of the value is as good as taken as a word
        assert error_of(done).startswith("job.yaml:7:")
        assert fs.requests == []
        return
    assert done.code == 0, done.err
    assert fs.requests[0].body["stop"] == words


@pytest.mark.parametrize(
    ("value", "sent"), [("1E-1", 0.1), ("1.e-1", 0.1), (".5", 0.5), ("+1e0", 1.0), ("'0.5'", 0.5)]
)
def test_each_way_to_write_a_number_is_sent_as_a_number_or_refused(
    fs, job_dir, job_text, value, sent
):
    job_text("prompt: 'id={{ id }}'\nsampling: {temperature: " + value + "}\n")
    done = run_bagent(RUN, job_dir)
    if done.code == 2:
        assert "temperature" in error_of(done)
        assert fs.requests == []
        return
    assert done.code == 0, done.err
    assert fs.requests[0].body["temperature"] == sent
    assert not isinstance(fs.requests[0].body["temperature"], str)


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("prompt: x\nlimits:\n  retries: 1\n  retries: 2\n", "9:3"),
        ("prompt: x\nsampling: {temprature: 0}\n", "7:12"),
        ("prompt: x\noutput: {shcema: s.json}\n", "7:10"),
        ("prompt: x\nlimits: {retries: -1}\n", "7:19"),
        ("prompt: x\nsampling: {max_tokens: .nan}\n", "7:24"),
        ("prompt:\n  system: 'Be {{ txet }}'\n  user: '{{ text }}'\n", "7:"),
        ("prompt:\n  messages:\n    - {role: user, content: '{{ txet }}'}\n", "8:"),
        ("prompt: 'a {% if txet %}b{% endif %}'\n", "6:"),
        ("prompt: '{{ text | lowr }}'\n", "6:"),
    ],
)
def test_mistakes_deeper_in_the_file_name_their_place(fs, job_dir, job_text, text, place):
    job_text(text)
    error = error_of(run_bagent(RUN, job_dir))
    assert error.startswith(f"job.yaml:{place}"), error
    assert fs.requests == []


@pytest.mark.parametrize("text", ["", "- a\n- b\n", "just words\n", "a: 1\n---\nb: 2\n", "a: [1\n"])
def test_a_file_that_is_no_job_is_one_line(fs, job_dir, text):
    (job_dir / "job.yaml").write_text(text)
    assert "job.yaml" in error_of(run_bagent(RUN, job_dir))


def test_a_name_that_may_be_missing_can_be_guarded(fs, job_dir):
    fs.set_script({"*": [echo()]})
    prompt = {
        "user": "id={{ id }} {{ note | default('-') }}{% if x is defined %}{{ x }}{% endif %}"
    }
    write_job(job_dir, fs.url, 1, prompt=prompt, results=NO_TABLES)
    done = run_bagent(RUN, job_dir)
    assert done.code == 0, done.err
    assert fs.requests[0].prompts == ("id=r1 -",)
