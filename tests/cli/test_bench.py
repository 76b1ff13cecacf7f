"""``bagent bench`` as a user meets it."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from bagent.fleet.hostfile import read_hostfile
from support.cli import Running
from support.fake_server import FakeServer
from support.replies import ok
from support.simulated_fleets import DEAD, addresses, simulated

pytestmark = pytest.mark.slow  # minutes: run with the real parts


QUICK = ["--duration", "0.6s", "--input-tokens", "40", "--output-tokens", "8", "--warmup", "1"]
MEASURED = (0, 3)
"""Exit codes of a test that was sent to its end: a machine that is busy with other things makes
its client the limit, and 3 says so."""


@pytest.fixture
def hosts(job_dir: Path) -> Iterator[Path]:
    """A hostfile of two simulated engines."""
    with simulated("replicas=2&decode=400") as sim:
        path = job_dir / "hosts.txt"
        path.write_text("".join(f"{one} rack=1\n" for one in addresses(sim)))
        yield path


def test_a_mixed_fleet_names_the_slow_and_the_dead_and_writes_the_good(bagent, job_dir, hosts):
    with simulated("decode=400&slow=10") as bad:
        lines = [*hosts.read_text().splitlines(), *addresses(bad), DEAD]
        hosts.write_text("".join(f"{line}\n" for line in lines))
        args = ["--hostfile", "hosts.txt", "--preset", "quick", *QUICK, "-o", "out"]
        done = bagent(["bench", *args, "--write-hostfile", "good.hosts"])
    assert done.code in MEASURED, done.err
    assert (done.code == 3) == ("CLIENT-LIMITED" in done.err)
    assert (job_dir / "good.hosts").exists(), done.err
    good = read_hostfile(job_dir / "good.hosts")
    assert [f"{one.name} rack={one.tags['rack']}" for one in good] == lines[:2]
    if done.code == 3:
        assert (job_dir / "good.hosts").read_text().startswith("# The client was the limit of")
        assert done.err.splitlines()[-1].startswith("next: the same command on a client with more")
    else:
        assert done.err.splitlines()[-1] == "next: bagent run JOB.yaml --hostfile good.hosts"
    loads, endpoints = done.out.split("\n\n")[:2]
    assert [line.split()[0] for line in loads.splitlines()[2:]] == ["c=1", "c=8"]
    assert [line.split()[1] for line in endpoints.splitlines()[2:]] == ["ok", "ok", "slow", "dead"]
    assert "2 ok, 1 slow, 1 dead" in done.err and "SIMULATED" in done.err
    names = {path.name for path in (job_dir / "out").iterdir()}
    assert names >= {"summary.json", "report.html", "bench.duckdb", "requests.parquet"}
    assert names >= {"endpoints.csv", "loads.csv", "requests-0.jsonl"}


def test_a_condition_that_holds_is_1_and_an_older_test_is_compared(bagent, hosts):
    args = ["bench", "--hostfile", "hosts.txt", *QUICK, "--concurrency", "1"]
    first = bagent([*args, "-o", "one", "--fail-if", "ok_share<1"])
    assert first.code in MEASURED, first.err
    second = bagent([*args, "-o", "two", "--compare", "one", "--fail-if", "ttft_p50_ms>0.001"])
    assert second.code in (1, 3), second.err
    assert "failed: ttft_p50_ms>0.001: ttft_p50_ms is" in second.err
    assert "c=1   output_tok_s" in second.out and " %" in second.out
    again = bagent([*args, "-o", "two"])
    assert again.code == 2 and "two holds another load test (name another: -o two-2)" in again.err


def test_ctrl_c_ends_the_load_and_the_report_is_made_of_what_there_is(job_dir, hosts):
    args = ["bench", "--hostfile", "hosts.txt", "--concurrency", "2", "--duration", "5m", "-o", "o"]
    for more in ([], ["--workers", "2"]):
        folder = f"o{len(more)}"
        with Running([*args[:-1], folder, "--warmup", "0", *more], job_dir) as running:
            running.wait_for_err("done, 0 failed")
            running.send(signal.SIGINT)
            done = running.finish(30)
        assert done.code in (75, 3), done.err
        assert "the report is made of what there is" in done.err
        summary = json.loads((job_dir / folder / "summary.json").read_text())
        assert summary["stopped"] and summary["loads"][0]["ok"] > 0


def test_rows_of_a_job_are_sent_as_a_run_would_send_them(bagent, job_dir):
    (job_dir / "rows.jsonl").write_text('{"word": "tea"}\n{"word": "salt"}\n')
    schema = "{type: object, properties: {n: {type: integer}}, required: [n]}"
    with FakeServer({"*": [ok('{"n": 1}')]}, allow_faults=True) as fs:
        (job_dir / "h.txt").write_text(f"{fs.address}\n")
        (job_dir / "job.yaml").write_text(
            'hostfile: h.txt\ninput: rows.jsonl\nprompt: {user: "Say {{ word }}"}\n'
            f"output: {{schema: {schema}}}\nsampling: {{temperature: 0, max_tokens: 9}}\n"
        )
        done = bagent(
            ["bench", "--job", "job.yaml", "--requests", "4", "--concurrency", "1", "-o", "o"]
        )
        bodies = [seen.body for seen in fs.requests[1:]]
    assert done.code in MEASURED, done.err
    asked = [body["messages"][-1]["content"] for body in bodies]
    assert sum("tea" in words for words in asked) >= 2
    assert sum("salt" in words for words in asked) >= 2
    assert all(body["max_tokens"] == 9 and body["stream"] for body in bodies)
    assert all(body["response_format"]["type"] == "json_schema" for body in bodies)


def test_a_fleet_without_an_answer_is_1_and_writes_no_hostfile(bagent, job_dir):
    (job_dir / "h.txt").write_text(f"{DEAD}\n")
    done = bagent(["bench", "--hostfile", "h.txt", "-o", "o", "--write-hostfile", "g"])
    assert done.code == 1, done.err
    assert "0 of 1 ready" in done.err and "dead" in done.out
    assert "no endpoint is ok: g is not written" in done.err
    assert not (job_dir / "g").exists()
    assert json.loads((job_dir / "o" / "summary.json").read_text())["loads"] == []
