"""Rows that failed and came out well later: what was made of the failure is made again."""

from __future__ import annotations

from support.cli import run_bagent
from support.fake_server import FakeServer
from support.jobs import results, write_job
from support.replies import echo, ok, status
from support.stage_jobs import NO_TABLES, RUN, run_stages

LEAF = {"kind": "map", "name": "leaf", "prompt": "leaf id={{ id }} {{ text }}"}
MORE = {"kind": "map", "name": "more", "prompt": "more <{{ leaf }}>"}
SUM = {"kind": "reduce", "name": "sum", "prompt": "sum {{ n }}:\n{{ responses }}", "fanin": 2}


def current(folder, stage):
    return [row for row in results(folder) if row["stage"] == stage]


def test_what_was_made_of_a_failure_is_made_again_once_it_is_mended(tmp_path):
    script = {"r3": [status(400)] * 2 + [echo()], "*": [echo()]}
    with FakeServer(script, allow_faults=True) as server:
        assert run_stages(tmp_path, server.url, 4, [LEAF, MORE, SUM]).code == 0
        for _ in range(2):
            before = len(server.requests)
            assert run_bagent([*RUN, "--retry", "all"], tmp_path).code == 0
        asked = [seen.prompts[0] for seen in server.requests[before:]]
    assert [prompt.split()[0] for prompt in asked] == ["leaf", "more", "sum", "sum"]
    assert all(row["status"] == "ok" for row in results(tmp_path))
    assert [row["id"] for row in current(tmp_path, "more")] == ["r1", "r2", "r3", "r4"]
    last = current(tmp_path, "sum")[-1]
    assert '"failed"' not in last["text"]
    assert "more <leaf id=r3" in last["text"].replace("\\", "")
    assert len(current(tmp_path, "sum")) == 3


def test_a_vote_is_counted_again_where_an_answer_was_mended(tmp_path):
    script = {"r1": [ok("no"), status(400), status(400), ok("yes"), ok("yes")]}
    with FakeServer(script, allow_faults=True) as server:
        write_job(
            tmp_path,
            server.url,
            1,
            prompt="id={{ id }}",
            topology="self_consistency",
            answers=3,
            dedupe=False,
            results=NO_TABLES,
            limits={"concurrency": 1},
        )
        assert run_bagent(RUN, tmp_path).code == 1
        assert [row["output"]["winner"] for row in current(tmp_path, "vote")] == ["no"]
        assert run_bagent([*RUN, "--retry", "all"], tmp_path).code == 0
    [vote] = current(tmp_path, "vote")
    assert (vote["output"]["winner"], vote["output"]["failed"]) == ("yes", 0)


def test_groups_that_changed_leave_no_old_answer_behind(tmp_path):
    stages = [LEAF, {**SUM, "on_failure": "drop"}]
    script = {"r2": [status(400), echo()], "*": [echo()]}
    with FakeServer(script, allow_faults=True) as server:
        assert run_stages(tmp_path, server.url, 3, stages).code == 1
        assert [len(row["parents"]) for row in current(tmp_path, "sum")] == [2]
        assert run_bagent([*RUN, "--retry", "all"], tmp_path).code == 0
    found = current(tmp_path, "sum")
    assert [row["parents"][:2] for row in found] == [
        ["leaf:r1:0", "leaf:r2:0"],
        ["sum:sum:1.0:0", "leaf:r3:0"],
    ]
    assert [row["parents_failed"] for row in found] == [0, 0]
