"""Rows that are mended, edited or removed between two starts of the same command."""

from __future__ import annotations

from support.jobs import results, results_by_id, write_job, write_rows
from support.jobs import rows as usual_rows
from support.replies import echo

RUN = ["run", "job.yaml", "--progress", "plain"]
NO_TABLES = {"duckdb": False, "parquet": False}
NAMES = ("r2", "r3", "r7")


def test_rows_mended_edited_or_removed_leave_nothing_of_what_they_were(fs, job_dir, bagent):
    fs.set_script({"*": [echo()]})
    write_job(job_dir, fs.url, results=NO_TABLES)
    values = usual_rows(6)
    values[1] = {"id": "r2"}
    values[2] = {"id": "r3"}
    path = write_rows(job_dir / "rows.jsonl", values)
    path.write_bytes(path.read_bytes() + b'{"id": "r7", "text": "cut o\n')
    assert bagent(RUN).code == 1
    assert len(fs.requests) == 4

    values[1]["text"] = "mended"
    del values[2]
    values[-1]["text"] = "edited"
    write_rows(path, [*values, {"id": "r7", "text": "cut off"}])
    ended = bagent(RUN)
    assert ended.code == 0, ended.err
    # r6 has moved up by the row that is gone, so its old answer cannot be told from another row's.
    assert len(fs.requests) == 7
    values[-1]["text"] = "edited again"
    write_rows(path, [*values, {"id": "r7", "text": "cut off"}])
    assert bagent(RUN).code == 0
    assert len(fs.requests) == 8
    texts = {name: [row["text"] for row in results(job_dir) if row["id"] == name] for name in NAMES}
    assert texts == {"r2": ["id=r2 mended"], "r3": [], "r7": ["id=r7 cut off"]}


def test_what_a_limit_leaves_out_is_not_taken_for_removed(fs, job_dir, bagent):
    fs.set_script({"*": [echo()]})
    values = [*usual_rows(3), {"id": "r4"}]
    write_job(job_dir, fs.url, values, results=NO_TABLES)
    assert bagent(RUN).code == 1
    bagent([*RUN, "--limit", "2"])
    assert results_by_id(job_dir)["r4"]["error_kind"] == "template"
