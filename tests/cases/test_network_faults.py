"""Waiting times in odd forms, servers that stall in odd places, and odd settings around a run."""

from __future__ import annotations

import socket
import time
from email.utils import formatdate

import pytest

from support.cli import no_locks_env, run_bagent
from support.fake_server import FakeServer
from support.forward_proxy import ForwardProxy
from support.jobs import results_by_id, write_job
from support.replies import delta, echo, error_body, hang, ok, status, stream, wire
from support.run_outcomes import NO_TABLES, RUN, run_rows, statuses

pytestmark = pytest.mark.slow


def test_waits_in_every_form_are_kept(fs, job_dir):
    in_three = time.strftime("%a %b %e %H:%M:%S %Y", time.gmtime(time.time() + 5))
    forms = {
        "blank": ({"Retry-After": " 1 "}, 1.0),
        "small": ({"retry-after": "0.7"}, 0.7),
        "ms": ({"retry-after-ms": "900"}, 0.9),
        "zone": ({"Retry-After": formatdate(time.time() + 5, localtime=True)}, 0.5),
        "asctime": ({"Retry-After": in_three}, 0.5),
    }
    script = {name: [status(503, headers=head), echo()] for name, (head, _) in forms.items()}
    fs.set_script(script)
    rows = [{"id": name, "text": ""} for name in script]
    write_job(job_dir, fs.url, rows, results=NO_TABLES)
    done = run_bagent(RUN, job_dir)
    assert done.code == 0, done.err
    for name, (_, told) in forms.items():
        first, second = fs.of(name)
        assert told <= second.received - first.answered < told + 9, name


def test_one_throttled_row_holds_back_the_others_too(fs, job_dir):
    fs.set_script({"r1": [status(429, headers={"Retry-After": "2"}), echo()], "*": [echo()]})
    write_job(job_dir, fs.url, 6, limits={"concurrency": 1}, results=NO_TABLES)
    done = run_bagent(RUN, job_dir)
    assert done.code == 0, done.err
    told = fs.of("r1")[0].answered
    assert all(seen.received - told >= 2 for seen in fs.requests if seen.received > told)


def test_a_limit_told_inside_a_good_status_is_waited_for_too(fs, job_dir):
    body = error_body(429, "Rate limit reached.")
    fs.set_script({"*": [status(200, body), echo()]})
    write_job(job_dir, fs.url, 4, limits={"retries": 0}, results=NO_TABLES)
    done, found = run_rows(job_dir)
    assert done.code == 0, done.err
    assert set(statuses(found).values()) == {"ok"}


def test_throttling_and_failures_have_budgets_of_their_own(fs, job_dir):
    throttled = status(429, headers={"Retry-After": "0.1"})
    fs.set_script(
        {
            "r1": [throttled, throttled, throttled, status(500), ok("good")],
            "r2": [throttled, status(500), throttled, status(500), ok("late")],
            "*": [echo()],
        }
    )
    write_job(job_dir, fs.url, 3, limits={"retries": 1}, results=NO_TABLES)
    done, found = run_rows(job_dir)
    assert done.code == 1
    assert found["r1"]["text"] == "good"
    assert (found["r2"]["status"], found["r2"]["error_kind"]) == ("failed", "overloaded")


def test_stalls_at_each_point_of_an_answer_end_with_the_limit(fs, job_dir):
    head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
    fs.set_script(
        {
            "first-token": [stream([": waiting\n\n", delta("x", "stop")], gap=3), ok("good")],
            "silent": [hang(), ok("good")],
            "after-status": [wire(head + b"Content-Length: 90\r\n\r\n{"), ok("good")],
        }
    )
    rows = [{"id": n, "text": ""} for n in ("first-token", "silent", "after-status")]
    limits = {"retries": 1, "timeout": {"first_token": "1s", "total": "20s", "idle": "1s"}}
    write_job(job_dir, fs.url, rows, limits=limits, stream=True, results=NO_TABLES)
    done, found = run_rows(job_dir)
    assert done.code == 0, done.err
    assert {row["text"] for row in found.values()} == {"good"}
    assert all(fs.count(row["id"]) == 2 for row in rows)
    assert done.seconds < 12


def test_a_limit_may_be_lifted_by_the_word_for_it(fs, job_dir):
    fs.set_script({"*": [echo()]})
    limits = {"timeout": {"total": "none", "idle": "none", "first_token": "none"}}
    write_job(job_dir, fs.url, 2, limits=limits, results=NO_TABLES)
    assert run_bagent(RUN, job_dir).code == 0


def test_a_dead_endpoint_beside_a_good_one_costs_no_row(fs, job_dir):
    fs.set_script({"*": [echo()]})
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        dead = f"http://127.0.0.1:{probe.getsockname()[1]}/v1"
        (job_dir / "hosts.txt").write_text(f"{dead}\n{fs.url}\n")
        write_job(
            job_dir,
            fs.url,
            8,
            backend=None,
            hostfile="hosts.txt",
            results=NO_TABLES,
            limits={"retries": 0},
        )
        done = run_bagent([*RUN, "--wait-hosts", "1s"], job_dir)
    assert done.code == 0, done.err
    assert len(fs.requests) == len(results_by_id(job_dir)) == 8


@pytest.mark.parametrize(
    "no_proxy", ["*", "127.0.0.1", "10.0.0.0/8,127.0.0.0/8 ", "localhost,127.0.0.1:{port}", ""]
)
def test_near_endpoints_are_reached_under_every_form_of_exception(fs, job_dir, no_proxy):
    fs.set_script({"*": [echo()]})
    write_job(job_dir, fs.url, 2, results=NO_TABLES)
    dead = "http://127.0.0.1:9"
    port = fs.address.rpartition(":")[2]
    env = {"HTTP_PROXY": dead, "https_proxy": dead, "no_proxy": no_proxy.format(port=port)}
    assert run_bagent([*RUN, "--wait-hosts", "1s"], job_dir, env=env).code == 0


@pytest.mark.parametrize(
    ("no_proxy", "through"), [("other.test", True), ("10.0.0.0/16", True), ("10.9.0.0/16", False)]
)
def test_addresses_inside_a_named_range_alone_skip_the_proxy(fs, job_dir, no_proxy, through):
    fs.set_script({"*": [echo()]})
    write_job(job_dir, "http://10.9.8.7:8000/v1", 2, results=NO_TABLES)
    with ForwardProxy({"10.9.8.7:8000": fs.address}) as proxy:
        env = {"http_proxy": proxy.url, "no_proxy": no_proxy}
        limits = ["--set", "limits.timeout.connect=1s", "--wait-hosts", "1s"]
        done = run_bagent([*RUN, *limits], job_dir, env=env)
        assert done.code == 0 or not through, done.err
        assert bool(proxy.seen) == through


def test_other_refusals_of_locks_are_no_trouble_either(fs, job_dir, tmp_path):
    fs.set_script({"*": [echo()]})
    write_job(job_dir, fs.url, 4)
    for number, error in enumerate(("EOPNOTSUPP", "EIO"), 1):
        env = no_locks_env(tmp_path / error, error)
        done = run_bagent([*RUN, "--limit", str(2 * number)], job_dir, env=env)
        assert done.code == 0, done.err
    assert len(fs.requests) == len(results_by_id(job_dir)) == 4


def test_scratch_space_that_does_not_exist_costs_no_row(fs, job_dir, tmp_path):
    fs.set_script({"*": [echo()]})
    write_job(job_dir, fs.url, 3)
    env = {"TMPDIR": str(tmp_path / "gone"), "XDG_CACHE_HOME": "/proc/none"}
    done = run_bagent(RUN, job_dir, env=env)
    assert done.code == 0, done.err
    assert "Traceback" not in done.err
    assert len(results_by_id(job_dir)) == 3


def test_a_quota_shared_by_two_runs_costs_neither_a_row(tmp_path):
    with FakeServer({"*": [echo()]}, rate=20) as fs:
        folders = [tmp_path / name for name in ("one", "two")]
        for folder in folders:
            folder.mkdir()
            limits = {"concurrency": 20, "retries": 1}
            write_job(folder, fs.url, 25, limits=limits, results=NO_TABLES)
        from support.cli import Running

        with Running(RUN, folders[0]) as first:
            second = run_bagent(RUN, folders[1])
            assert first.finish().code == second.code == 0, second.err
        assert len(fs.requests) < 50 * 3
