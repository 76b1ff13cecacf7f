"""A fleet as a user has it: servers that die and come back, join and leave, while a run goes on."""

from __future__ import annotations

import shlex
from contextlib import ExitStack
from pathlib import Path

import pytest

from support.cli import Running, run_bagent
from support.fake_server import FakeServer
from support.jobs import results, write_job
from support.replies import close, ok, slow, status

pytestmark = pytest.mark.slow

GUIDE = (Path(__file__).parents[2] / "bagent" / "guides" / "fleets.md").read_text(encoding="utf-8")


def fleet_job(folder, servers, rows, **keys):
    """Write a job over the servers, which stand in ``hosts.txt``; returns the command."""
    (folder / "hosts.txt").write_text("".join(f"{fs.address}\n" for fs in servers))
    usual = {"limits": {"per_endpoint": 8}, "batching": {"mode": "single"}}
    fleet = {"backend": "vllm", "hostfile": str(folder / "hosts.txt")}
    return ["run", write_job(folder, "", rows, **fleet, **usual | keys)]


def started(stack, count, script=None):
    return [
        stack.enter_context(FakeServer(script or {"*": [slow(0.1, ok())]}, allow_faults=True))
        for _ in range(count)
    ]


def test_four_endpoints_each_killed_and_revived_in_turn_lose_no_row(tmp_path):
    with ExitStack() as stack:
        # slow at first, so that rows are left however long a server takes to come back
        servers = started(stack, 4, {"*": [slow(0.4, ok())]})
        command = fleet_job(tmp_path, servers, 5000)
        running = stack.enter_context(Running(command, tmp_path))
        for fs in servers:
            seen = sum(len(each.requests) for each in servers)
            fs.wait_for(len(fs.requests) + 40)
            fs.stop()
            others = [each for each in servers if each is not fs]
            for each in others:
                each.wait_for(len(each.requests) + 40)
            fs.restart()
            fs.wait_for(len(fs.requests) + 20, timeout=60.0)
            assert sum(len(each.requests) for each in servers) > seen
        for fs in servers:
            fs.set_script({"*": [ok()]})
        done = running.finish(timeout=120)
    assert done.code == 0, done.err
    rows = results(tmp_path)
    assert len({row["id"] for row in rows}) == 5000
    assert {row["status"] for row in rows} == {"ok"}
    assert "does not answer" in done.err
    assert "answers again" in done.err


def test_an_endpoint_written_into_the_hostfile_joins_and_one_taken_out_leaves(tmp_path):
    with ExitStack() as stack:
        old, new = started(stack, 2)
        command = fleet_job(tmp_path, [old], 2500)
        hosts = tmp_path / "hosts.txt"
        running = stack.enter_context(Running(command, tmp_path))
        old.wait_for(50)
        hosts.write_text(f"{old.address}\n{new.address}\n")
        new.wait_for(50, timeout=60.0)
        hosts.write_text("")  # half written: the old list stays
        new.wait_for(len(new.requests) + 200)
        hosts.write_text(f"{new.address}\n")
        done = running.finish(timeout=120)
        asked = len(old.requests)
    assert done.code == 0, done.err
    assert len(results(tmp_path)) == 2500
    assert f"hosts.txt changed: {new.address} joined, 2 endpoints now" in done.err
    assert f"hosts.txt changed: {old.address} removed, 1 endpoint now" in done.err
    assert asked < 2000


def test_a_stage_that_selects_endpoints_follows_the_hostfile_within_its_selection(tmp_path):
    with ExitStack() as stack:
        old, other, new = started(stack, 3)
        one = {"kind": "map", "name": "one", "prompt": "{{ text }}", "select": {"role": "a"}}
        two = {"kind": "map", "name": "two", "prompt": "{{ text }}?", "select": {"role": "b"}}
        stages = [one, two | {"from": "input"}]
        command = fleet_job(tmp_path, [old], 1000, prompt=None, stages=stages)
        hosts = tmp_path / "hosts.txt"
        hosts.write_text(f"{old.address} role=a\n{other.address} role=b\n")
        running = stack.enter_context(Running(command, tmp_path))
        old.wait_for(50)
        hosts.write_text(f"{new.address} role=a\n{other.address} role=b\n")
        new.wait_for(50, timeout=60.0)
        done = running.finish(timeout=120)
        asked = [len(old.requests), len(new.requests), len(other.requests)]
    assert done.code == 0, done.err
    assert f"changed: {new.address} joined, {old.address} removed, 1 endpoint now" in done.err
    assert asked[0] < 900
    assert asked[2] < 1100, "the second stage goes nowhere else"
    assert sum(asked) >= 2000


@pytest.mark.parametrize("bad", [status(404), status(500), close()])
def test_one_of_three_endpoints_that_is_wrong_takes_few_requests_and_no_row(tmp_path, bad):
    with ExitStack() as stack:
        good = started(stack, 2)
        (wrong,) = started(stack, 1, {"*": [bad]})
        command = fleet_job(tmp_path, [wrong, *good], 600, limits=None)
        done = run_bagent(command, tmp_path)
        asked = len(wrong.requests)
    assert done.code == 0, done.err
    assert {row["status"] for row in results(tmp_path)} == {"ok"}
    assert asked < 128  # once as many as may be in flight there, and a few that try it again


def test_shares_groups_and_limits_can_be_read_by_sql(tmp_path):
    with ExitStack() as stack:
        servers = started(stack, 2)
        command = fleet_job(
            tmp_path,
            servers,
            400,
            prompt={"raw": "id={{ id }} {{ text }}"},
            limits=None,
            batching={"size": 20},
        )
        done = run_bagent(command, tmp_path)
        assert done.code == 0, done.err
        query = "select endpoint, count(*) as n, max(group_size) as most from attempts group by 1"
        found = run_bagent(["query", "job", query, "--format", "jsonl"], tmp_path)
        told = GUIDE.split("Shares, group sizes and limits by SQL")[1].split("```")[1]
        shown = [shlex.split(line) for line in told.splitlines() if line.startswith("bagent query")]
        answers = [
            run_bagent(["query", "job", words[3], "--format", "jsonl"], tmp_path) for words in shown
        ]
    assert [one.err for one in answers if one.code] == []
    assert len(answers) == 4
    assert sum(row["rows"] for row in answers[0].lines()) == 400
    shares = found.lines()
    assert sum(row["n"] for row in shares) == 400
    assert all(row["most"] == 20 for row in shares)
    assert {row["endpoint"] for row in shares} == {fs.address for fs in servers}
