"""Failed and truncated answers before a judge, a vote or a reduce: no scores, and an exit of 1."""

from __future__ import annotations

import pytest

from support.cli import run_bagent
from support.fake_server import FakeServer
from support.jobs import results, write_job
from support.replies import echo, ok, status
from support.stage_jobs import NO_TABLES, RUN, outcomes, run_stages

CUT = ok("half", finish_reason="length")
JUDGE = {"prompt": "score {{ answer }}"}
REDUCE = {"prompt": "sum {{ n }}: {{ responses }}"}


def run(folder, server, topology, **keys):
    job = {"prompt": "id={{ id }} {{ text }}", "results": NO_TABLES, "dedupe": False} | keys
    write_job(folder, server.url, 4, topology=topology, **job)
    done = run_bagent(RUN, folder)
    assert "Traceback" not in done.err, done.err
    return done


@pytest.mark.parametrize(
    ("topology", "last", "seen"),
    [
        ({"name": "judge", "judge": JUDGE}, "judge", 2),
        ({"name": "tree_reduce", "reduce": REDUCE}, "reduce", 1),
        ({"name": "self_consistency"}, "vote", 4),
    ],
    ids=["judge", "tree_reduce", "vote"],
)
def test_failed_answers_are_left_out_counted_and_exit_with_1(tmp_path, topology, last, seen):
    keys = {"answers": 2} if last == "vote" else {}
    script = {"r1": [CUT], "r2": [status(400)], "*": [echo()]}
    with FakeServer(script, allow_faults=True) as server:
        done = run(tmp_path, server, topology, **keys)
        asked = [seen.prompts[0] for seen in server.requests]
        again = run_bagent(RUN, tmp_path)
        assert len(server.requests) == len(asked)
    assert (done.code, again.code) == (1, 1), done.err
    failed = 4 if last == "vote" else 2
    assert f"dropped     stage {last} left out {failed} rows that failed before it" in done.err
    assert not [prompt for prompt in asked if "half" in prompt or '"error"' in prompt]
    assert len(outcomes(tmp_path, last)) == seen
    [state] = run_bagent(["status", "job", "--json"], tmp_path).lines()
    assert state["dropped"] == {last: failed}
    assert f"stage {last} left out {failed} rows" in again.err


def test_include_is_a_choice_of_a_part_before_that_of_the_topology(tmp_path):
    judge = JUDGE | {"on_failure": "include"}
    with FakeServer({"r1": [CUT], "*": [echo()]}, allow_faults=True) as server:
        done = run(tmp_path, server, {"name": "judge", "judge": judge, "on_failure": "stop"})
    assert done.code == 0, done.err
    assert len(outcomes(tmp_path, "judge")) == 4
    assert "left out" not in done.err


def test_dropped_rows_are_failures_for_allow_failures(tmp_path):
    topology = {"name": "judge", "judge": JUDGE}
    results = {**NO_TABLES, "allow_failures": 1}
    with FakeServer({"r1": [CUT], "*": [echo()]}, allow_faults=True) as server:
        done = run(tmp_path, server, topology, results=results)
    assert done.code == 0, done.err
    assert "ended       finished, with no more failed rows than allowed" in done.err


def test_a_section_of_a_board_has_no_on_failure(tmp_path):
    section = {"name": "pro", "prompt": "say", "on_failure": "drop"}
    with FakeServer() as server:
        done = run(tmp_path, server, {"name": "blackboard", "sections": [section]})
    assert done.code == 2
    assert "on_failure" in done.err


@pytest.mark.parametrize(
    ("topology", "seen"),
    [
        ({"name": "map_reduce", "reduce": REDUCE}, '"text":"half"'),
        ({"name": "self_consistency"}, "id=r1"),
    ],
    ids=["map_reduce", "vote"],
)
def test_truncated_answers_that_a_job_accepts_are_answers_for_later_stages(
    tmp_path, topology, seen
):
    with FakeServer({"r1": [CUT], "*": [echo()]}, allow_faults=True) as server:
        done = run(tmp_path, server, topology, output={"truncated": "accept"})
        prompts = [request.prompts[0] for request in server.requests]
    assert done.code == 0, done.err
    assert "left out" not in done.err
    assert any(seen in prompt for prompt in prompts), prompts
    if topology["name"] == "self_consistency":
        assert [row["output"]["failed"] for row in outcomes(tmp_path, "vote")] == [0] * 4


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
