from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from bagent.cli.commands.report import prompts_of, settings_of
from bagent.job.load import JobRequest, load_job
from support.jobs import write_job
from support.replies import ok


def test_a_run_gets_its_page_with_every_row_and_number(bagent, fs, job_dir):
    fs.set_script({"r2": [ok("<script>alert(1)</script>")], "*": [ok("fine")]})
    write_job(job_dir, fs.url, 5)
    assert bagent(["run", "job.yaml", "--progress", "none", "-o", "run"]).code == 0
    done = bagent(["report", "run"])
    assert (done.code, done.out) == (0, "")
    assert "report.html" in done.err
    page = (job_dir / "run" / "report.html").read_text()
    assert "<h1>job (run)</h1>" in page, "its folder has another name"
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page
    assert page.count("<script>") == 1
    assert "text number 3" in page
    assert bagent(["report", "run", "-o", "out.html"]).code == 0
    assert (job_dir / "out.html").stat().st_size > 5000
    assert bagent(["report", "run", "-o", "missing/out.html"]).code == 74


JOB = """
model: m
backend: {url: "http://h:1", headers: {Authorization: "Bearer sk-abcdefghijklmnopqrstuvwxyz"}}
input: rows.jsonl
"""


@pytest.fixture
def load(tmp_path: Path):
    (tmp_path / "rows.jsonl").write_text('{"id": 1, "text": "a"}\n')
    (tmp_path / "judge.md").write_text("Is it good? {{ text }}")

    def loaded(keys: str) -> object:
        (tmp_path / "job.yaml").write_text(JOB + keys)
        return load_job(JobRequest(path=tmp_path / "job.yaml")).masked()

    return loaded


def test_each_prompt_is_named_by_its_stage_and_files_are_read(load):
    job = load(
        "stages:\n"
        "- {kind: map, name: first, prompt: {system: Be brief., user: 'Say {{ text }}'}}\n"
        "- {kind: map, name: second, prompt: {user: {file: judge.md}}}\n"
    )
    (system, first, second) = prompts_of(job)
    assert system == ("first system", "Be brief.")
    assert first == ("first user", "Say {{ text }}")
    assert second[0].startswith("second user (")
    assert second[0].endswith("judge.md, as it is now)")
    assert second[1] == "Is it good? {{ text }}"


def test_settings_are_those_that_differ_and_hold_no_secret(load):
    job = load("prompt: Say {{ text }}\nsampling: {max_tokens: 7}\n")
    text = settings_of(job)
    found = yaml.safe_load(text)
    assert found["sampling"] == {"max_tokens": 7}
    assert "limits" not in found
    assert "prompt" not in found
    assert "abcdefghij" not in text
