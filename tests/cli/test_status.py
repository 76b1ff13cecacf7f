"""``bagent status``; its counts, tokens and costs are invariants of worlds."""

from __future__ import annotations

import json
import time

import pytest

from bagent.store.journal.journal import Journal
from bagent.store.lock import RunLock
from bagent.store.run_dir import RunInfo, Start
from bagent.store.totals import ProgressFile, RunProgress
from support.cli import Running
from support.stored_runs import make_run, stored


def described(bagent, run: str) -> dict:
    done = bagent(["status", run, "--json"])
    assert done.code == 0, done.err
    return json.loads(done.out)


def test_answers_without_a_price_are_counted_beside_the_cost(bagent, job_dir):
    outcomes = [stored(0, cost_usd=0.5), stored(1), stored(2), stored(3, cost_usd=0.25)]
    make_run(job_dir / "runs" / "review", outcomes)
    state = described(bagent, "review")
    assert (state["cost_usd"], state["cost_unknown"]) == (0.75, 2)
    assert "0.75, and 2 answers of unknown cost" in bagent(["status", "review"]).out


def test_the_speed_of_an_ended_run_leaves_out_the_pause_between_its_starts(bagent, job_dir):
    starts = [Start(100.0, ended_at=104.0, exit_code=75), Start(900.0, ended_at=901.0, exit_code=0)]
    outcomes = [stored(0, prompt_tokens=10, cached_tokens=8), stored(1, prompt_tokens=10)]
    make_run(job_dir / "runs" / "paused", outcomes, starts=starts)
    state = described(bagent, "paused")
    assert state["rows_per_s"] == 2 / 5
    assert state["started"] == time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(100))
    assert (state["cache_hit_rate"], state["cache_hit_rate_by"]) == (8 / 10, "answers")
    # How long a killed start worked is unknown: the speed is that of the last lines.
    make_run(job_dir / "runs" / "killed", outcomes, starts=[Start(100.0), starts[1]])
    make_run(job_dir / "runs" / "bare", outcomes)
    assert described(bagent, "killed")["rows_per_s"] == described(bagent, "bare")["rows_per_s"]


def test_time_to_the_end_speed_and_remaining_rows_of_a_running_run_agree(bagent, job_dir):
    starts = [Start(100.0, ended_at=104.0, exit_code=75), Start(9000.0)]
    run = make_run(job_dir / "runs" / "going", [stored(0), stored(1)], starts=starts)
    ProgressFile(run.path, "all").write(RunProgress(9001.0, 102, True, 100, 20.0, rows_per_s=5.0))
    owner = RunLock.acquire(run.path, "all")
    state = described(bagent, "going")
    assert (state["remaining"], state["rows_per_s"], state["eta_s"]) == (100, 5.0, 20.0)
    owner.release()


def test_the_size_of_a_run_of_several_parts_does_not_depend_on_when_each_wrote_it(bagent, job_dir):
    """A killed run has more results than its parts last wrote, and as many rows."""
    run = make_run(job_dir / "runs" / "parts", [stored(n) for n in range(30)], starts=[])
    for part, remaining, eta in (("1-of-2", 40, 20.0), ("2-of-2", 45, 15.0)):
        speed = remaining / eta
        progress = RunProgress(9000.0, 60, True, remaining, eta, part_total=50, rows_per_s=speed)
        ProgressFile(run.path, part).write(progress)
        run.save(RunInfo("parts", starts=[Start(1.0, part=part)]), part)
    state = described(bagent, "parts")
    assert (state["total"], state["total_is_exact"], state["remaining"]) == (100, True, 70)
    owner = RunLock.acquire(run.path, "1-of-2")
    assert described(bagent, "parts")["rows_per_s"] == 5.0  # 2 of the one, 3 of the other
    owner.release()


def test_the_speed_is_that_of_all_parts_and_of_the_last_stage(bagent, job_dir):
    run = make_run(job_dir / "runs" / "parts", [stored(n) for n in range(5)], starts=[Start(1.0)])
    second = Journal.open(run.path, "2-of-2", clock=time.monotonic, report=print)
    for n in range(5):
        second.write(stored(10 + n, finished_at=1000.0 + n))
    second.close()
    assert described(bagent, "parts")["rows_per_s"] == round(9 / 4, 3)
    outcomes = [stored(n, stage="work") for n in range(9)]
    outcomes += [stored(n, stage="vote", finished_at=1000.0 + 4 * n) for n in range(3)]
    stages = {"stages": ["work", "vote"], "starts": [Start(1.0)]}
    make_run(job_dir / "runs" / "staged", outcomes, **stages)
    assert described(bagent, "staged")["rows_per_s"] == round(2 / 8, 3)


def test_several_stages_are_counted_each_and_an_answer_that_came_later_counts_once(bagent, job_dir):
    bad = {"status": "failed", "error_kind": "timeout"}
    work = [stored(0, stage="work", **bad), stored(1, stage="work", **bad), stored(1, stage="work")]
    make_run(job_dir / "runs" / "staged", [stored(0, stage="vote"), *work], stages=["vote", "work"])
    make_run(job_dir / "runs" / "single", [stored(0)])
    shown = described(bagent, "staged")
    assert shown["by_stage"] == {"vote": {"ok": 1, "failed": 0}, "work": {"ok": 1, "failed": 1}}
    assert described(bagent, "single")["by_stage"] == {}
    accepted = [stored(0, stage="work", status="truncated"), stored(0, stage="vote")]
    make_run(job_dir / "runs" / "cut", accepted, stages=["work", "vote"])
    assert described(bagent, "cut")["by_stage"]["work"] == {"ok": 1, "failed": 0}
    line = bagent(["status", "staged", "--follow"]).out
    assert "2 rows: 1 ok, 1 failed (timeout 1), [vote 1 ok, work 1 ok, 1 failed]" in line
    table = bagent(["status", "staged"]).out
    assert 'stage work         {"ok":1,"failed":1}' in table


def test_the_state_tells_running_from_ended_stopped_and_interrupted(bagent, job_dir):
    runs = job_dir / "runs"
    ends = {"ended": 0, "stopped": 75, "interrupted": None, "running": None}
    for number, (state, code) in enumerate(ends.items()):
        make_run(runs / state, [stored(0)], starts=[Start(float(number), exit_code=code)])
    owner = RunLock.acquire(runs / "running", "all")
    for state, code in ends.items():
        shown = described(bagent, state)
        assert (shown["run"], shown["state"], shown["exit_code"]) == (state, state, code)
    assert str(owner._record.pid) in described(bagent, "running")["owners"][0]
    owner.release()
    assert described(bagent, "running")["state"] == "interrupted"


def test_without_a_run_all_are_listed_latest_first(bagent, job_dir):
    for number, name in enumerate(("first", "second", "third")):
        make_run(job_dir / "runs" / name, [stored(0)], starts=[Start(float(number), exit_code=0)])
    lines = bagent(["status"]).out.splitlines()
    assert lines[0].split()[:3] == ["run", "state", "exit_code"]
    assert [line.split()[0] for line in lines[2:]] == ["third", "second", "first"]


@pytest.mark.process("concurrent")
def test_a_run_that_goes_on_is_followed_to_its_end_by_its_directory_alone(job_dir):
    make_run(job_dir / "runs" / "going", [stored(0)], starts=[Start(1.0, exit_code=75)])
    path = job_dir / "runs" / "going"
    owner = RunLock.acquire(path, "all")
    with Running(["status", "going", "--follow", "--interval", "0.1"], job_dir) as following:
        following.wait_for_out("running: at least 1 row: 1 ok")
        make_run(path, [stored(1), stored(2, status="failed", error_kind="timeout")])
        following.wait_for_out("running: at least 3 rows: 2 ok, 1 failed (timeout 1)")
        owner.release()
        done = following.finish()
    assert done.code == 0
    assert (
        "going ended, exit code 0: 3 rows: 2 ok, 1 failed (timeout 1)" in done.out.splitlines()[-1]
    )
