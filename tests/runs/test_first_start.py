"""What the first start of a run leaves when it cannot begin."""

from __future__ import annotations

import pytest

from support.jobs import results_by_id, write_job
from support.replies import error_body, ok, status


def test_a_start_that_finds_no_server_or_model_leaves_no_run(job_dir, bagent, fs):
    fs.set_script({"*": [status(404, error_body(404, "The model `m9` does not exist."))]})
    write_job(job_dir, fs.url, 2, model="m9")
    assert bagent(["run", "job.yaml"]).code == 2
    write_job(job_dir, None, 2)
    assert bagent(["run", "job.yaml"]).code == 2
    assert "no runs under ./runs" in bagent(["status"]).err


def test_a_run_that_was_there_stays_when_a_later_start_is_wrong(job_dir, bagent, fs):
    write_job(job_dir, fs.url, 2)
    assert bagent(["run", "job.yaml"]).code == 0
    write_job(job_dir, None, 3)
    assert bagent(["run", "job.yaml", "--on-change", "continue"]).code == 2
    assert "2 ok" in bagent(["status", "job", "--follow"]).out


@pytest.mark.parametrize("option", ["--set=model=m9", "--reuse=nowhere"])
def test_a_refused_start_leaves_the_run_that_it_was_to_replace(job_dir, bagent, fs, option):
    fs.default = ok("yes")
    write_job(job_dir, fs.url, 2)
    assert bagent(["run", "job.yaml"]).code == 0
    (job_dir / "runs/job/notes.txt").write_text("the user's own")
    fs.set_script({"*": [status(404, error_body(404, "The model `m9` does not exist."))]})
    done = bagent(["run", "job.yaml", "--fresh", option])
    assert done.code == 2, done.err
    assert [path.name for path in (job_dir / "runs").iterdir()] == ["job"]
    assert (job_dir / "runs/job/notes.txt").exists()
    assert len(results_by_id(job_dir)) == 2


@pytest.mark.parametrize(
    ("output", "obstacle"),
    [
        ("afile", "afile is a file"),
        ("afile/x/run", "afile is a file"),
        ("broken", "broken is a link to nowhere, which does not exist"),
        ("broken/run", "broken is a link to nowhere, which does not exist"),
    ],
)
def test_what_is_in_the_way_of_the_folder_of_a_run_is_named(job_dir, bagent, fs, output, obstacle):
    (job_dir / "afile").write_text("")
    (job_dir / "broken").symlink_to("nowhere")
    write_job(job_dir, fs.url, 1)
    done = bagent(["run", "job.yaml", "-o", output])
    assert done.code == 2
    assert f"{obstacle} (name the folder of the run" in done.err
    write_job(job_dir, fs.url, 1, results={"dir": output})
    done = bagent(["run", "job.yaml"])
    assert (done.code, obstacle in done.err) == (2, True)
    assert fs.requests == []


def test_a_limit_of_zero_is_named_as_the_cause_of_no_rows(job_dir, bagent, fs):
    write_job(job_dir, fs.url, 2)
    done = bagent(["run", "job.yaml", "--limit", "0"])
    assert done.code == 0
    assert "--limit 0 selects none of the input's rows" in done.err
    assert "has no rows" not in done.err


def test_a_new_run_beside_one_in_the_folder_of_its_job_is_noted(job_dir, bagent, fs):
    folder = job_dir / "genes"
    folder.mkdir()
    write_job(folder, fs.url, 2)
    command = ["run", "genes/job.yaml", "--progress", "plain"]
    note = "this is a new run; the one of this name in the job's folder: -o genes/runs/job"
    first = bagent([*command, "-o", "genes/runs/job"])
    assert (first.code, note in first.err) == (0, False)
    for is_new in (True, False):
        done = bagent(command)
        assert (done.code, note in done.err) == (0, is_new)
