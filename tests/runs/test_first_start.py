"""What the first start of a run leaves when it cannot begin."""

from __future__ import annotations

from support.jobs import write_job
from support.replies import error_body, ok, status


def test_a_start_that_finds_no_server_or_model_leaves_no_run(job_dir, bagent, fs):
    fs.set_script({"*": [status(404, error_body(404, "The model `m9` does not exist."))]})
    write_job(job_dir, fs.url, 2, model="m9")
    assert bagent(["run", "job.yaml"]).code == 2
    write_job(job_dir, None, 2)
    assert bagent(["run", "job.yaml"]).code == 2
    assert "no runs under ./runs" in bagent(["status"]).err


def test_a_run_that_was_there_stays_when_a_later_start_is_wrong(job_dir, bagent, fs):
    fs.default = ok("yes")
    write_job(job_dir, fs.url, 2)
    assert bagent(["run", "job.yaml"]).code == 0
    write_job(job_dir, None, 3)
    assert bagent(["run", "job.yaml", "--on-change", "continue"]).code == 2
    assert "2 ok" in bagent(["status", "job", "--follow"]).out


def test_a_new_run_beside_one_in_the_folder_of_its_job_is_noted(job_dir, bagent, fs):
    fs.default = ok("yes")
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
