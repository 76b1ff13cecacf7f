"""The index of the input that one process makes for those that share its rows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from bagent.runs.context import RunOptions, open_input, prepare
from bagent.runs.parallel.workers import FEWEST, share_input_index
from support.jobs import rows, write_job


@pytest.fixture
def prepared(job_dir):
    write_job(job_dir, "http://127.0.0.1:9/v1", 40)
    (job_dir / "runs/job/journal").mkdir(parents=True)

    def make(**more):
        return prepare(RunOptions(job=Path("job.yaml"), cwd=job_dir, **more))

    return make


def test_parts_that_use_the_index_have_all_rows_once_between_them(prepared, job_dir):
    found = []
    with share_input_index(prepared(), FEWEST) as path:
        assert path == str(job_dir / "runs/job/journal/input-all-shared.pieces")
        for part in range(1, FEWEST + 1):
            source = open_input(prepared(input_index=path, shard=f"{part}/{FEWEST}"))
            source.remember(job_dir / "own", None)
            found += [row.id for batch in source.batches() for row in batch]
    assert sorted(found) == sorted(row["id"] for row in rows(40))
    assert not (job_dir / "own").exists()


@pytest.mark.parametrize(
    ("parts", "options", "folder"),
    [(FEWEST - 1, {}, "runs/job"), (FEWEST, {"limit": 10}, "runs/job"), (FEWEST, {}, "nowhere")],
    ids=["few parts", "a selection of rows", "no run directory"],
)
def test_an_input_is_not_indexed_where_that_saves_nothing(
    prepared, job_dir, parts, options, folder
):
    job = replace(prepared(**options), run_dir=job_dir / folder)
    with share_input_index(job, parts) as path:
        assert path is None
