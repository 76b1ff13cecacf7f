"""One process notes the input for those that share its rows: nothing else may change by it."""

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


def test_parts_that_follow_the_notes_have_all_rows_once_between_them(prepared, job_dir):
    found = []
    with share_input_index(prepared(), FEWEST) as path:
        assert path == str(job_dir / "runs/job/journal/input-all-shared.pieces")
        for part in range(1, FEWEST + 1):
            source = open_input(prepared(notes=path, shard=f"{part}/{FEWEST}"))
            source.remember(job_dir / "own", None)
            found += [row.id for batch in source.batches() for row in batch]
    assert sorted(found) == sorted(row["id"] for row in rows(40))
    assert not (job_dir / "own").exists()


def test_few_parts_read_for_themselves(prepared):
    with share_input_index(prepared(), FEWEST - 1) as path:
        assert path is None


def test_an_input_of_which_rows_are_picked_is_not_noted(prepared):
    with share_input_index(prepared(limit=10), FEWEST) as path:
        assert path is None


def test_without_a_place_for_the_notes_there_are_none(prepared, job_dir):
    job = prepared()
    with share_input_index(replace(job, run_dir=job_dir / "nowhere"), FEWEST) as path:
        assert path is None
