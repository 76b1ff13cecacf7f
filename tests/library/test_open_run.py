"""Reading of a stored run by another program."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import bagent
from bagent.errors import UsageError
from support.stored_runs import make_run, stored


@pytest.fixture
def read(job_dir: Path) -> Any:
    failed = {"status": "failed", "error_kind": "timeout", "text": None}
    outcomes = [stored(1), stored(0), stored(2, **failed)]
    make_run(job_dir / "runs" / "r", outcomes, answer_columns=[("score", "BIGINT")])
    return bagent.open_run("r")


def test_a_run_is_read_as_values_and_as_frames(read):
    assert [r.output for r in read.results(statuses=["ok"])] == [{"score": 0}, {"score": 1}]
    assert read.summary().statuses == {"ok": 2, "failed": 1}
    assert list(read.df()["id"]) == ["r0", "r1", "r2"]
    assert list(read.df("answers")["score"]) == [0, 1]
    assert read.arrow("select count(*) as n from errors").to_pylist() == [{"n": 1}]
    assert read.rows("select max(score) as m from answers") == [{"m": 1}]
    with pytest.raises(UsageError, match="did you mean"):
        bagent.open_run("rr")


def test_a_run_is_read_as_a_polars_frame(read):
    polars = pytest.importorskip("polars")
    frame = read.pl("answers")
    assert isinstance(frame, polars.DataFrame)
    assert frame["score"].to_list() == [0, 1]
    assert read.pl()["status"].to_list() == ["ok", "ok", "failed"]


@pytest.mark.parametrize(
    ("ids", "expected"),
    [
        ([1, 2], [1, 2]),
        ([1, "x"], ["1", "x"]),
        ([1, "a86880d984ae8ff7"], ["1", "a86880d984ae8ff7"]),
    ],
    ids=["numbers", "mixed", "one without an id"],
)
def test_ids_are_numbers_in_a_frame_where_all_rows_have_numbers(job_dir, ids, expected):
    outcomes = [stored(row, id=id_) for row, id_ in enumerate(ids)]
    make_run(job_dir / "runs" / "ids", outcomes, answer_columns=[("score", "BIGINT")])
    opened = bagent.open_run("ids")
    assert opened.df("answers")["id"].tolist() == expected
    assert opened.arrow("select id from results").column("id").to_pylist() == expected


def test_one_status_may_be_a_text_and_an_unknown_one_is_an_error(read):
    assert [r.id for r in read.results(statuses="failed")] == ["r2"]
    with pytest.raises(UsageError, match=r"statuses fail: no such status \(did you mean failed\?"):
        read.results(statuses=["fail"])
