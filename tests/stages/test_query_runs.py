"""The sql stage as a user runs it."""

from __future__ import annotations

import signal

import pytest

from support.cli import Running, run_bagent
from support.fake_server import FakeServer
from support.replies import echo
from support.stage_jobs import RUN, outcomes, run_scripted, run_stages, write_stages

FIRST = {"kind": "map", "name": "first", "prompt": "one id={{ id }} {{ text }}"}


def query(text: str) -> dict[str, str]:
    return {"kind": "sql", "name": "ask", "query": text}


def test_a_query_that_fails_on_its_rows_stops_with_duckdbs_message_and_keeps_them(tmp_path):
    wrong = "SELECT CAST(text AS INTEGER) FROM first"
    with FakeServer({"*": [echo()]}) as server:
        done = run_stages(tmp_path, server.url, 3, [FIRST, query(wrong)])
        assert done.code == 76
        assert "stage ask:" in done.err
        assert "Could not convert string" in done.err
        write_stages(tmp_path, server.url, 3, [FIRST, query("SELECT id, text FROM first")])
        again = run_bagent([*RUN, "--on-change", "continue"], tmp_path)
        assert again.code == 0, again.err
        assert len(server.requests) == 3
    assert [line["output"]["text"] for line in outcomes(tmp_path, "ask")] == [
        f"one id=r{n} text number {n}" for n in (1, 2, 3)
    ]


def test_a_changed_query_replaces_its_rows_and_each_counts_once(tmp_path):
    first = "SELECT id, row AS n, CASE WHEN row = 0 THEN 'no' END AS error FROM first"
    with FakeServer({"*": [echo()]}) as server:
        done = run_stages(tmp_path, server.url, 3, [FIRST, query(first)])
        assert done.code == 1, done.err
        write_stages(tmp_path, server.url, 3, [FIRST, query("SELECT id, 1 - row AS n FROM first")])
        again = run_bagent([*RUN, "--on-change", "continue"], tmp_path)
    assert again.code == 0, again.err
    assert "stage ask: 3 ok" in again.err
    assert "3 rows: 3 ok, 0 failed" in again.err


def test_ids_are_text_in_every_table(tmp_path):
    rows = [{"id": name, "text": "x"} for name in (20240101, "2024-01-02")]
    text = "SELECT i.id, i.row FROM first f JOIN input i USING (id) ORDER BY i.row"
    run_scripted(tmp_path, rows, [FIRST, query(text)])
    found = [line["output"]["id"] for line in outcomes(tmp_path, "ask")]
    assert found == ["20240101", "2024-01-02"]


def test_a_query_joins_stages_and_the_input_and_its_rows_go_on(tmp_path):
    text = (
        "SELECT f.id, upper(i.text) AS loud FROM first f JOIN input i USING (id)"
        " WHERE f.status = 'ok' ORDER BY f.row DESC LIMIT 2"
    )
    tell = {"kind": "map", "name": "tell", "prompt": "{{ loud }} of {{ ask.id }}"}
    run_scripted(tmp_path, 3, [FIRST, query(text), tell])
    assert [line["id"] for line in outcomes(tmp_path, "ask")] == ["r3", "r2"]
    told = {line["id"]: line["text"] for line in outcomes(tmp_path, "tell")}
    assert told == {"r3": "TEXT NUMBER 3 of r3", "r2": "TEXT NUMBER 2 of r2"}


def test_a_query_that_finds_nothing_says_so(tmp_path):
    with FakeServer({"*": [echo()]}) as server:
        nothing = query("SELECT id FROM first WHERE false")
        done = run_stages(tmp_path, server.url, 2, [FIRST, nothing])
    assert done.code == 0
    assert "stage ask: the query gave no rows" in done.err


@pytest.mark.process("signal")
def test_a_long_query_ends_with_the_run(tmp_path):
    slow = "SELECT sum(a.range * b.range) AS n FROM range(10000000) a, range(10000000) b, first"
    with FakeServer({"*": [echo()]}) as server:
        write_stages(tmp_path, server.url, 2, [FIRST, query(slow)])
        with Running(RUN, tmp_path) as running:
            server.wait_for(2, "finished")
            running.wait_for_err("results in")
            running.send(signal.SIGTERM)
            assert running.finish(timeout=30).code == 75
