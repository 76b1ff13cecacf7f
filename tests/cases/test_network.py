"""Servers that are slow, full or silent, and the networks between."""

from __future__ import annotations

import socket

import pytest

from support.cli import Running, run_bagent
from support.fake_server import FakeServer
from support.forward_proxy import ForwardProxy
from support.jobs import results_by_id, run_json, write_job
from support.replies import (
    close,
    cut_body,
    delta,
    echo,
    hang,
    http_date_in,
    ok,
    raw,
    slow,
    status,
    stream,
)
from support.run_outcomes import NO_TABLES, RUN, run_rows, statuses
from support.tls import site_authority

# --- too many requests ----------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("header", "told"), [(http_date_in(3), 2.0), ("1.5", 1.5)])
def test_nobody_comes_back_earlier_than_told_nor_all_at_once(fs, job_dir, header, told):
    fs.set_script({"*": [status(429, headers={"Retry-After": header}), echo()]})
    write_job(job_dir, fs.url, 20, limits={"concurrency": 20}, results=NO_TABLES)
    done = run_bagent(RUN, job_dir)
    assert done.code == 0, done.err
    again = []
    for number in range(1, 21):
        first, second = fs.of(f"r{number}")
        assert second.received - first.answered >= told, number
        again.append(second.received)
    assert max(again) - min(again) > 0.05
    assert "too many requests" in done.err


def test_a_time_that_is_none_means_the_usual_wait(fs, job_dir):
    words = ["0", "-5", "soon", "Fri, 31 Dec 1999 23:59:59 GMT", "", "inf", "1e999"]
    script = {
        f"r{n}": [status(503, headers={"Retry-After": word}), echo()]
        for n, word in enumerate(words)
    }
    fs.set_script(script)
    rows = [{"id": name, "text": ""} for name in script]
    write_job(job_dir, fs.url, rows, results=NO_TABLES)
    done, found = run_rows(job_dir)
    assert done.code == 0, done.err
    assert all(row["attempts"] == 2 for row in found.values())
    for name in script:
        first, second = fs.of(name)
        assert 0.2 < second.received - first.answered < 15


def test_a_wait_of_a_day_is_cut_to_the_setting_and_told(fs, job_dir):
    fs.set_script({"r1": [status(429, headers={"Retry-After": "86400"}), echo()], "*": [echo()]})
    limits = {"retry_after_max": "1s", "concurrency": 1}
    write_job(job_dir, fs.url, 3, limits=limits, results=NO_TABLES)
    done = run_bagent(RUN, job_dir)
    assert done.code == 0, done.err
    assert "86400" in done.err
    assert "retry_after_max" in done.err
    assert done.seconds < 30


def test_a_small_quota_takes_time_but_costs_no_row(job_dir):
    with FakeServer({"*": [echo()]}, rate=20) as fs:
        limits = {"concurrency": 50, "retries": 3}
        write_job(job_dir, fs.url, 80, limits=limits, results=NO_TABLES)
        done, found = run_rows(job_dir)
        assert done.code == 0, done.err
        assert set(statuses(found).values()) == {"ok"}
        assert len(found) == 80
        assert len(fs.requests) < 240
    assert "throttl" in done.err
    assert "too many requests" in done.err


def test_a_row_that_a_working_server_never_takes_does_not_hold_the_run(fs, job_dir):
    fs.set_script({"r2": [status(429)], "*": [echo()]})
    limits = {"retries": 0, "row": "3s"}
    write_job(job_dir, fs.url, 5, limits=limits, results=NO_TABLES)
    done, found = run_rows(job_dir)
    assert done.code == 1
    assert statuses(found)["r2"] == "failed"
    assert done.seconds < 30


@pytest.mark.slow
def test_a_server_that_is_full_for_one_row_only_holds_the_run_for_seconds(fs, job_dir):
    fs.set_script({"r2": [status(503)], "r4": [status(429)], "*": [echo()]})
    write_job(job_dir, fs.url, 5, limits={"retries": 1}, results=NO_TABLES)
    done, found = run_rows(job_dir, timeout=110)
    assert done.code == 1
    assert (found["r2"]["error_kind"], found["r4"]["error_kind"]) == ("overloaded", "rate_limited")
    assert [statuses(found)[name] for name in ("r1", "r3", "r5")] == ["ok", "ok", "ok"]
    assert done.seconds < 90


# --- silence --------------------------------------------------------------------------------------


def test_a_request_without_an_answer_ends_with_its_time_limit(fs, job_dir):
    fs.set_script({"r3": [hang()], "*": [echo()]})
    limits = {"timeout": "1s", "retries": 1}
    write_job(job_dir, fs.url, 5, limits=limits, results=NO_TABLES)
    done, found = run_rows(job_dir)
    assert done.code == 1
    assert (found["r3"]["status"], found["r3"]["error_kind"]) == ("failed", "timeout")
    assert statuses(found)["r5"] == "ok"
    assert fs.count("r3") == 2
    assert done.seconds < 20


@pytest.mark.parametrize("text", ["timeout: null", "timeout: {total: , idle: ~}"])
def test_a_time_limit_left_empty_is_the_default_and_never_none(fs, job_dir, text):
    path = write_job(job_dir, fs.url, 1, results=NO_TABLES)
    path.write_text(path.read_text() + f"limits:\n  retries: 1\n  {text}\n")
    assert run_bagent(RUN, job_dir).code == 0
    limits = run_json(job_dir / "runs/job")["job"]["limits"]["timeout"]
    assert limits == {"connect": 10.0, "first_token": 300.0, "idle": 120.0, "total": 1800.0}


def test_answers_that_break_off_or_never_end_are_sent_again(fs, job_dir):
    whole = {"choices": [{"index": 0, "message": {"content": "x"}, "finish_reason": "stop"}]}
    trickle = [": \n"] * 100
    script = {
        "half": [cut_body(status(200, whole), 20), ok("good")],
        "reset": [close(reset=True), ok("good")],
        "closed": [close(), ok("good")],
        "trickle": [stream([delta("a"), *trickle], gap=0.2), ok("good")],
        "late": [slow(30, ok("never")), ok("good")],
        "gateway": [raw("<html>504</html>", "text/html", 504), ok("good")],
    }
    fs.set_script(script)
    rows = [{"id": name, "text": ""} for name in script]
    limits = {"retries": 2, "timeout": {"total": "1.5s"}}
    write_job(job_dir, fs.url, rows, limits=limits, results=NO_TABLES)
    done, found = run_rows(job_dir)
    assert done.code == 0, done.err
    assert {row["text"] for row in found.values()} == {"good"}
    assert done.seconds < 30


def test_one_row_has_a_time_limit_over_all_its_tries(fs, job_dir):
    fs.set_script({"r2": [status(500)], "*": [echo()]})
    limits = {"retries": 100, "row": "2s"}
    write_job(job_dir, fs.url, 3, limits=limits, results=NO_TABLES)
    done, found = run_rows(job_dir)
    assert done.code == 1
    assert found["r2"]["status"] == "failed"
    assert "limits.row" in found["r2"]["error"] or "time limit" in found["r2"]["error"]
    assert done.seconds < 20


def test_a_name_that_leads_nowhere_is_said_and_the_same_command_goes_on(job_dir):
    write_job(job_dir, "http://no-such-host.invalid/v1", 2, results=NO_TABLES)
    done = run_bagent([*RUN, "--wait-hosts", "1s"], job_dir)
    assert done.code == 75
    assert "no-such-host.invalid" in done.err
    assert "Traceback" not in done.err
    assert done.err.splitlines()[-1].startswith("next")


def test_a_port_that_takes_connections_and_says_nothing_is_no_endpoint(job_dir):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        write_job(job_dir, f"http://127.0.0.1:{silent.getsockname()[1]}/v1", 2, results=NO_TABLES)
        done = run_bagent([*RUN, "--wait-hosts", "1s"], job_dir)
    assert done.code == 75
    assert done.seconds < 30


@pytest.mark.process("concurrent")
def test_a_server_that_starts_again_is_found_again(fs, job_dir):
    fs.set_script({"*": [slow(0.1, echo())]})
    write_job(job_dir, fs.url, 30, limits={"concurrency": 2, "retries": 1}, results=NO_TABLES)
    with Running(RUN, job_dir) as running:
        fs.wait_for(6)
        fs.stop()
        running.wait_for_err("does not answer")
        fs.restart()
        done = running.finish()
    assert done.code == 0, done.err
    assert len(results_by_id(job_dir)) == 30


def test_a_dead_and_a_slow_endpoint_cost_no_row(fs, job_dir):
    fs.set_script({"*": [echo()]})
    with socket.socket() as free, FakeServer({"*": [slow(0.5, echo())]}) as late:
        free.bind(("127.0.0.1", 0))
        dead = f"127.0.0.1:{free.getsockname()[1]}"
        (job_dir / "hosts.txt").write_text(f"{dead}\n{late.address}\n{fs.address}\n")
        limits = {"per_endpoint": 4, "retries": 0}
        keys = {"backend": None, "hostfile": "hosts.txt", "limits": limits, "results": NO_TABLES}
        write_job(job_dir, fs.url, 60, **keys)
        done, found = run_rows(job_dir)
        assert done.code == 0, done.err
        assert len(found) == 60
        assert len(fs.requests) > len(late.requests) > 0
    assert f"{dead} does not answer" in done.err


# --- proxies and certificates --------------------------------------------------------------------


def test_a_proxy_of_the_environment_is_not_asked_for_what_is_near(fs, job_dir):
    fs.set_script({"*": [echo()]})
    write_job(job_dir, fs.url, 2, results=NO_TABLES)
    dead = "http://127.0.0.1:9"
    env = {"HTTP_PROXY": dead, "http_proxy": dead, "ALL_PROXY": dead, "NO_PROXY": "127.0.0.0/8"}
    done = run_bagent(RUN, job_dir, env=env)
    assert done.code == 0, done.err


def test_what_is_outside_goes_through_the_proxy_and_what_no_proxy_names_does_not(fs, job_dir):
    fs.set_script({"*": [echo()]})
    write_job(job_dir, "http://outside.test/v1", 2, results=NO_TABLES)
    with ForwardProxy({"outside.test:80": fs.address}) as proxy:
        done = run_bagent(RUN, job_dir, env={"HTTP_PROXY": proxy.url, "NO_PROXY": "10.0.0.0/8"})
        assert done.code == 0, done.err
        assert "POST http://outside.test/v1/chat/completions" in proxy.seen
        proxy.seen.clear()
        env = {"HTTP_PROXY": proxy.url, "NO_PROXY": "localhost, .test"}
        done = run_bagent([*RUN, "--fresh", "--wait-hosts", "1s"], job_dir, env=env)
        assert done.code == 75
        assert proxy.seen == []


def test_a_job_may_name_or_refuse_a_proxy_itself(fs, job_dir):
    fs.set_script({"*": [echo()]})
    with ForwardProxy({"outside.test:80": fs.address}) as proxy:
        backend = {"url": "http://outside.test/v1", "proxy": proxy.url}
        write_job(job_dir, fs.url, 2, backend=backend, results=NO_TABLES)
        assert run_bagent(RUN, job_dir).code == 0
        backend = {"url": "http://outside.test/v1", "proxy": "none"}
        write_job(job_dir, fs.url, 2, backend=backend, name="direct", results=NO_TABLES)
        before = len(proxy.seen)
        env = {"HTTP_PROXY": proxy.url}
        assert run_bagent([*RUN, "--wait-hosts", "1s"], job_dir, env=env).code == 75
        assert len(proxy.seen) == before


def test_an_error_behind_a_proxy_names_the_proxy(job_dir):
    write_job(job_dir, "http://outside.test/v1", 2, results=NO_TABLES)
    env = {"HTTP_PROXY": "http://user:secret@127.0.0.1:9"}
    done = run_bagent([*RUN, "--wait-hosts", "1s"], job_dir, env=env)
    assert done.code == 75
    assert "127.0.0.1:9" in done.err
    assert "secret" not in done.err


@pytest.mark.process("environment")
@pytest.mark.parametrize("way", ["SSL_CERT_FILE", "ca_file", "nothing"])
def test_a_certificate_of_the_sites_own_authority_is_taken_where_it_is_named(
    job_dir, tmp_path, way
):
    authority = site_authority(tmp_path)
    with FakeServer({"*": [echo()]}, ssl_context=authority.context) as fs:
        backend = {"url": fs.url}
        env = {}
        if way == "ca_file":
            backend["ca_file"] = str(authority.ca_file)
        elif way == "SSL_CERT_FILE":
            env = {"SSL_CERT_FILE": str(authority.ca_file)}
        write_job(job_dir, fs.url, 2, backend=backend, results=NO_TABLES)
        done = run_bagent([*RUN, "--wait-hosts", "1s"], job_dir, env=env)
    assert done.code == (75 if way == "nothing" else 0), done.err
    if way == "nothing":
        assert "certificate" in done.err
        assert "ca_file" in done.err
        assert done.seconds < 30
