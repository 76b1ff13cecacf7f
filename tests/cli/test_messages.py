"""Messages that tell how to mend what is wrong."""

from __future__ import annotations

import pytest

from bagent.cli import process
from support.jobs import write_job


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            {"prompt": "{{ Gene Symbol }} is"},
            "a name with blanks is written {{ row['Gene Symbol'] }}",
        ),
        ({"steps": [{"prompt": "a"}]}, "it belongs to topology: {name: pipeline, steps: [...]}"),
        ({"fanin": 4}, "it belongs to topology: {name: ..., fanin: ...}, or to a stage"),
    ],
    ids=["a name with blanks", "steps", "fanin"],
)
def test_a_mistake_in_a_job_names_what_to_write(job_dir, bagent, keys, message):
    write_job(job_dir, "sim", 2, **keys)
    done = bagent(["check", "job.yaml"])
    assert done.code == 2
    assert message in done.err


def test_a_column_that_the_whole_row_hides_is_a_warning(job_dir, bagent):
    rows = [{"id": "r1", "row": "x"}]
    write_job(job_dir, "sim", rows, prompt="{{ row }}", model=None)
    done = bagent(["check", "job.yaml"])
    assert "the column row is {{ row.row }}" in done.out + done.err
    write_job(job_dir, "sim", rows, prompt="{{ row.row }}", model=None)
    done = bagent(["check", "job.yaml"])
    assert "the column row is" not in done.out + done.err


def test_a_row_that_alone_is_not_utf8_is_to_be_mended(job_dir, bagent):
    (job_dir / "rows.csv").write_bytes(b"id,text\n1,caf\xe9\n2,caf\xc3\xa9\n")
    write_job(job_dir, "sim", None, input="rows.csv", prompt="{{ text }}", model=None)
    done = bagent(["run", "job.yaml"])
    assert done.code == 1
    assert "not UTF-8, as other lines are (mend this line)" in done.err
    assert "iconv" not in done.err


def test_a_folder_of_a_run_is_not_named_as_a_file_of_data(job_dir, bagent):
    write_job(job_dir, "sim", 1, model=None)
    done = bagent(["run", "job.yaml", "-o", "answers.jsonl"])
    assert done.code == 2
    assert "(-o - > answers.jsonl, or afterwards bagent results -o answers.jsonl)" in done.err
    assert not (job_dir / "answers.jsonl").exists()


def test_a_bug_names_the_option_that_shows_where(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["bagent", "run"])
    process.report_fault(ValueError("odd"))
    message = capsys.readouterr().err
    assert "bagent has a bug: ValueError: odd (the same command with --debug shows" in message
