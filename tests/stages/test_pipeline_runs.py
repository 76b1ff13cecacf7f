"""Stages one after another, as a user runs them."""

from __future__ import annotations

from stages.support_stages import outcomes, run_stages, texts
from support.fake_server import FakeServer
from support.replies import echo, status

FIRST = {"kind": "map", "name": "first", "prompt": "one id={{ id }} {{ text }}"}
SECOND = {"kind": "map", "name": "second", "prompt": "two id={{ id }} <{{ first }}> {{ text }}"}


def test_a_second_stage_sees_what_the_first_one_answered_and_the_fields(tmp_path):
    with FakeServer({"*": [echo()]}) as server:
        done = run_stages(tmp_path, server.url, 3, [FIRST, SECOND])
    assert done.code == 0, done.err
    assert texts(tmp_path, "second")["r2"] == ("two id=r2 <one id=r2 text number 2> text number 2")
    assert {line["id"]: line["parents"] for line in outcomes(tmp_path, "second")} == {
        "r1": ["first:r1:0"],
        "r2": ["first:r2:0"],
        "r3": ["first:r3:0"],
    }


def test_a_failed_row_is_shown_to_the_next_stage(tmp_path):
    with FakeServer({"r2": [status(400), echo()], "*": [echo()]}, allow_faults=True) as server:
        done = run_stages(tmp_path, server.url, 3, [FIRST, SECOND])
    assert done.code == 0, done.err
    told = texts(tmp_path, "second")["r2"]
    assert '{"id":"r2","status":"failed","error":' in told


def test_a_failed_row_is_dropped_where_the_stage_says_so(tmp_path):
    with FakeServer({"r2": [status(400)], "*": [echo()]}, allow_faults=True) as server:
        done = run_stages(tmp_path, server.url, 3, [FIRST, {**SECOND, "on_failure": "drop"}])
    assert sorted(texts(tmp_path, "second")) == ["r1", "r3"]
    assert "stage second: 1 row that failed before were dropped" in done.err
