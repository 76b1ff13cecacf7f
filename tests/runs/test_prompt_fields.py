from __future__ import annotations

import json

import pytest

from bagent.runs.prompt_fields import long_field, names_in_prompts
from bagent.store.run_dir import RunDir, RunInfo
from support.jobs import write_job
from support.replies import status


def test_the_names_that_prompts_use_are_found_in_texts_and_files(tmp_path):
    file = tmp_path / "system.md"
    file.write_text("{% if style is defined %}Write in {{ style }}{% endif %}")
    job = {"prompt": {"user": "{{ title }} of {{ row_count | default('notes') }}"}}
    found = names_in_prompts(
        job | {"stages": [{"prompt": {"system": {"file": str(file)}}}]}, files=True
    )
    assert found is not None
    assert {"title", "style", "row_count"} <= found
    assert "notes" not in found


def test_a_prompt_that_uses_the_whole_row_or_a_lost_file_tells_nothing_of_fields(tmp_path):
    assert names_in_prompts({"prompt": {"user": "{{ row }}"}}, files=True) is None
    assert names_in_prompts({"prompt": {"user": "words"}}, files=True) is None
    lost = {"prompt": {"user": "{{ a }}", "system": {"file": str(tmp_path / "gone.md")}}}
    assert names_in_prompts(lost, files=True) is None


@pytest.mark.parametrize(
    ("user", "field"),
    [
        ("{{ title }}: {{ log }}", "log"),
        ("{{ title }}", ""),  # the long field is in no prompt
        ("{{ row }}", "notes"),
    ],
)
def test_the_long_field_of_failed_rows_is_one_that_the_prompt_uses(tmp_path, user, field):
    run = RunDir.create(tmp_path / "job")
    rows = [{"title": "t", "log": "l" * 5000 * n, "notes": "n" * 9000, "n": n} for n in range(2)]
    run.failed.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert long_field(run, RunInfo("job", job={"prompt": {"user": user}})) == field
    run.failed.unlink()
    assert long_field(run, RunInfo("job")) == ""


TOO_LONG = "maximum context length is 512 tokens, however you requested 900 tokens"


@pytest.mark.tables
def test_rows_too_long_for_the_context_name_their_long_field(fs, job_dir, bagent):
    fs.set_script({"*": [status(400, {"error": {"message": TOO_LONG}})]})
    write_job(job_dir, fs.url, 2, prompt={"user": "{{ text }}"})
    rows = [{"id": f"r{n}", "text": f"r{n} " + "long " * 900} for n in range(2)]
    (job_dir / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    ended = bagent(["run", "job.yaml", "--progress", "none"])
    cause = (
        "2 rows too long for the context (context_overflow): shorten the field text in the"
        " prompt, such as {{ text[:2000] }}"
    )
    assert f"cause       {cause}\n" in ended.err
    assert cause in bagent(["status", "job"]).out
