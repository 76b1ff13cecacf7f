"""What is checked of the rows before anything is sent."""

from __future__ import annotations

import pytest

from support.jobs import results, write_job

ROWS = [{"gene": f"g{n}", "id": f"r{n}", "text": "x"} for n in range(3)]


@pytest.mark.parametrize("command", ["run", "check"])
def test_an_id_that_no_row_has_is_2_at_its_key_and_nothing_is_sent(fs, job_dir, bagent, command):
    write_job(job_dir, fs.url, ROWS, id="genne")
    line = next(
        number
        for number, text in enumerate((job_dir / "job.yaml").read_text().splitlines(), 1)
        if text.startswith("id:")
    )
    done = bagent([command, "job.yaml"])
    assert done.code == 2
    assert f"job.yaml:{line}:1: id: no field 'genne' in the first 3 rows" in done.err
    assert "did you mean gene?" in done.err
    assert "there are gene, id, text" in done.err
    assert done.err.count("\n") == 1
    assert (fs.requests, fs.probes) == ([], [])


def test_rows_that_lack_the_id_others_have_are_named_by_content(fs, job_dir, bagent):
    rows = [{"id": "r1", "gene": "g1", "text": "x"}, {"id": "r2", "text": "y"}]
    write_job(job_dir, fs.url, rows, id="gene")
    done = bagent(["run", "job.yaml", "--progress", "plain"])
    assert done.code == 0, done.err
    first, second = (row["id"] for row in results(job_dir))
    assert first == "g1"
    assert len(second) == 16


def test_rows_in_another_form_than_the_name_says_are_told(fs, job_dir, bagent):
    write_job(job_dir, fs.url, 1)
    (job_dir / "rows.jsonl").write_text('{\n "id": "r1",\n "text": "x"\n}\n')
    done = bagent(["run", "job.yaml", "--progress", "plain"])
    assert done.code == 1
    assert "is it one JSON document over several lines?" in done.err
    assert fs.requests == []
