"""The processes of one launch share a run's rows."""

from __future__ import annotations

from support.jobs import results_by_id, rows, write_job
from support.replies import echo

RUN = ["run", "job.yaml", "--progress", "plain", "--shard", "auto"]
NO_TABLES = {"parquet": False, "duckdb": False}


def test_each_rank_of_a_launch_does_its_part_and_together_they_do_all(fs, job_dir, bagent):
    fs.set_script({"*": [echo()]})
    write_job(job_dir, fs.url, 40, results=NO_TABLES)
    sent = []
    for rank in ("0", "1", "2"):
        done = bagent(RUN, env={"PMI_RANK": rank, "PMI_SIZE": "3"})
        assert done.code == 0, done.err
        sent.append(len(fs.requests))
    assert 0 < sent[0] < sent[1] < sent[2] == 40
    assert sorted(results_by_id(job_dir)) == sorted(row["id"] for row in rows(40))
