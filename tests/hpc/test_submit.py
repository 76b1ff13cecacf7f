"""What bagent submit checks of the run before it makes a script."""

from __future__ import annotations

import pytest

from support.jobs import write_job


@pytest.fixture(autouse=True)
def job(job_dir):
    cluster = {"walltime": "10m", "engine": "serve", "gpus_per_node": 0}
    write_job(job_dir, "", 1, backend=None, prompt="say {{ text }}", cluster=cluster)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--set", "input=none.jsonl"], "none.jsonl: there is no such file"),
        (["--set", "id=nope"], "no field 'nope'"),
        (["--set", "prompt={{ nope }}"], "nope is not in the first"),
        (["--", "--limt", "3"], "no such option: --limt (did you mean --limit?)"),
        (["--", "-i", "-"], "a batch job has no standard input"),
        (["--", "--hostfile", "h.txt"], "the script starts its own engines"),
        (["--hostfile", "h.txt"], "for servers that run already: bagent run"),
    ],
)
def test_what_the_run_would_refuse_is_refused_before_a_script(job_dir, bagent, options, message):
    done = bagent(["submit", "job.yaml", "--scheduler", "slurm", "--go", *options])
    assert done.code == 2 and done.out == ""
    assert message in done.err
    assert not (job_dir / "runs").exists()


def test_a_job_with_a_hostfile_that_is_not_there_still_makes_a_script(job_dir, bagent):
    options = ["--set", "hostfile=later.txt", "--scheduler", "slurm", "--", "--limit", "3"]
    done = bagent(["submit", "job.yaml", *options])
    assert done.code == 0, done.err
    assert "RUN_OPTIONS=(--set hostfile=later.txt --limit 3)" in done.out
