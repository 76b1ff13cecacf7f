"""Servers that are slow, full or silent, and the networks between."""

from __future__ import annotations

import socket

import pytest

from support.cli import run_bagent, run_here
from support.fake_server import FakeServer
from support.in_process import meanwhile
from support.jobs import wait_for_text, write_job
from support.replies import close, delta, echo, hang, ok, raw, slow, status, stream, wire
from support.run_outcomes import NO_TABLES, RUN, run_rows, run_script, statuses
from support.tls import site_authority

BRIEFLY = ["--wait-hosts", "0.2s"]


@pytest.fixture(autouse=True)
def echo_every_prompt(fs):
    """Let the server repeat each prompt."""
    fs.set_script({"*": [echo()]})


# --- too many requests ----------------------------------------------------------------------------


def test_waits_that_a_server_asks_for_are_kept_and_others_mean_the_usual_one(fs, job_dir):
    heads = {"blank": ({"Retry-After": " 1 "}, 1.0), "ms": ({"retry-after-ms": "900"}, 0.9)}
    odd = ["0", "soon", "Fri, 31 Dec 1999 23:59:59 GMT", "", "1e999"]
    heads |= {f"r{n}": ({"Retry-After": word}, 0.2) for n, word in enumerate(odd)}
    script = {name: [status(503, headers=head), echo()] for name, (head, _) in heads.items()}
    done, found = run_script(fs, job_dir, script)
    assert done.code == 0, done.err
    assert {row["attempts"] for row in found.values()} == {2}
    for name, (_, least) in heads.items():
        first, second = fs.of(name)
        assert least <= second.received - first.received < least + 12, name


def test_a_wait_of_a_day_is_cut_to_the_setting_and_told(fs, job_dir):
    fs.set_script({"r1": [status(429, headers={"Retry-After": "86400"}), echo()], "*": [echo()]})
    limits = {"retry_after_max": "0.5s", "concurrency": 1}
    write_job(job_dir, fs.url, 3, limits=limits, results=NO_TABLES)
    done = run_bagent(RUN, job_dir)
    assert done.code == 0, done.err
    assert "86400" in done.err
    assert "retry_after_max" in done.err
    first = fs.of("r1")[0].received
    later = [seen for seen in fs.requests if seen.received > first]
    assert len(later) == 3
    assert all(seen.received - first >= 0.5 for seen in later), "it holds back the others too"


def test_a_small_quota_takes_time_but_costs_no_row(job_dir):
    with FakeServer({"*": [echo()]}, rate=20) as fs:
        limits = {"concurrency": 50, "retries": 1}
        write_job(job_dir, fs.url, 40, limits=limits, results=NO_TABLES)
        done, found = run_rows(job_dir)
        assert done.code == 0, done.err
        assert set(statuses(found).values()) == {"ok"}
        assert len(found) == 40
        assert len(fs.requests) < 120
    assert "throttl" in done.err
    assert "too many requests" in done.err


@pytest.mark.slow
def test_rows_that_the_last_server_refuses_wait_for_the_next_start(fs, job_dir):
    fs.set_script({"r2": [status(503)], "r4": [status(429)], "*": [echo()]})
    write_job(job_dir, fs.url, 5, limits={"retries": 1}, results=NO_TABLES)
    done, found = run_rows(job_dir, timeout=110)
    assert done.code == 75
    assert "nothing else got through" in done.err
    assert statuses(found) == {"r1": "ok", "r3": "ok", "r5": "ok"}
    assert done.seconds < 90
    fs.set_script({"*": [echo()]})
    sent = len(fs.requests)
    done, found = run_rows(job_dir)
    assert done.code == 0, done.err
    assert set(statuses(found).values()) == {"ok"}
    assert {row for seen in fs.requests[sent:] for row in seen.rows} == {"r2", "r4"}


# --- silence --------------------------------------------------------------------------------------


def test_answers_that_break_off_or_never_end_are_sent_again(fs, job_dir):
    head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
    broken = {
        "reset": close(reset=True),
        "closed": close(),
        "silent": hang(),
        "after-status": wire(head + b"Content-Length: 90\r\n\r\n{"),
        "trickle": stream([delta("a"), *[": \n"] * 100], gap=0.2),
        "late": slow(30, ok("never")),
        "gateway": raw("<html>504</html>", "text/html", 504),
    }
    script = {name: [reply, ok("good")] for name, reply in broken.items()}
    limits = {"retries": 2, "concurrency": 50, "timeout": {"total": "1s"}}
    done, found = run_script(fs, job_dir, script, limits=limits)
    assert done.code == 0, done.err
    assert {row["text"] for row in found.values()} == {"good"}
    assert done.seconds < 30


def test_a_row_has_a_time_limit_over_all_its_attempts(fs, job_dir, run_clock):
    fs.set_script({"r1": [hang()], "r2": [status(500)], "*": [echo()]})
    limits = {"retries": 100, "row": "100s", "timeout": "40s"}
    write_job(job_dir, fs.url, 4, limits=limits, results=NO_TABLES)

    def skip_limits():
        wait_for_text(job_dir, "runs/job/journal/rows-*.jsonl", '"id":"r3"', '"id":"r4"')
        for attempt in (2, 3):
            run_clock.skip(41)
            fs.wait_until(lambda number=attempt: fs.count("r1") == number)
        run_clock.skip(41)

    with meanwhile(skip_limits):
        done, found = run_rows(job_dir)
    assert done.code == 1
    expected = {"r1": "failed", "r2": "failed", "r3": "ok", "r4": "ok"}
    assert statuses(found) == expected
    assert found["r1"]["error_kind"] == "timeout"
    assert found["r1"]["attempts"] == 3
    assert "limits.row" in found["r2"]["error"] or "time limit" in found["r2"]["error"]


def test_an_address_that_leads_nowhere_is_said_and_the_run_can_resume(job_dir):
    write_job(job_dir, "http://no-such-host.invalid/v1", 2, results=NO_TABLES)
    done = run_bagent([*RUN, *BRIEFLY], job_dir)
    assert done.code == 75
    assert "no-such-host.invalid" in done.err
    assert "Traceback" not in done.err
    assert done.err.splitlines()[-1].startswith("next")


@pytest.mark.slow
def test_a_port_that_takes_connections_and_says_nothing_is_no_endpoint(job_dir):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        write_job(job_dir, f"http://127.0.0.1:{silent.getsockname()[1]}/v1", 2, results=NO_TABLES)
        done = run_bagent([*RUN, *BRIEFLY], job_dir)
    assert done.code == 75
    assert done.seconds < 30


# --- proxies and certificates --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("host", "no_proxy", "through"),
    [
        ("outside.test", "10.0.0.0/8", True),
        ("10.9.8.7", "10.9.0.0/16", False),
    ],
)
def test_what_is_outside_goes_through_the_proxy_unless_it_is_named(
    fs, job_dir, host, no_proxy, through
):
    write_job(job_dir, f"http://{host}:8000/v1", 2, results=NO_TABLES)
    env = {"http_proxy": fs.base, "HTTP_PROXY": fs.base, "no_proxy": no_proxy}
    limits = ["--set", "limits.timeout.connect=0.5s", *BRIEFLY]
    done = run_bagent([*RUN, *limits], job_dir, env=env)
    assert (done.code == 0) == through, done.err
    target = f"http://{host}:8000/v1/chat/completions"
    assert [seen.target for seen in fs.requests] == ([target] * 2 if through else [])


def test_a_job_may_name_or_refuse_a_proxy_itself(fs, job_dir):
    backend = {"url": "http://outside.test/v1", "proxy": fs.base}
    write_job(job_dir, fs.url, 2, backend=backend, results=NO_TABLES)
    assert run_bagent(RUN, job_dir).code == 0
    backend = {"url": "http://outside.test/v1", "proxy": "none"}
    write_job(job_dir, fs.url, 2, backend=backend, name="direct", results=NO_TABLES)
    before = len(fs.requests)
    assert run_bagent([*RUN, *BRIEFLY], job_dir, env={"HTTP_PROXY": fs.base}).code == 75
    assert len(fs.requests) == before == 2


@pytest.mark.process("environment")
@pytest.mark.parametrize("way", ["SSL_CERT_FILE", "ca_file"])
def test_a_certificate_of_the_sites_own_authority_is_taken_where_it_is_named(
    job_dir, tmp_path, way
):
    authority = site_authority(tmp_path)
    with FakeServer({"*": [echo()]}, ssl_context=authority.context) as fs:
        file = str(authority.ca_file)
        if way == "ca_file":
            backend = {"url": fs.url, "ca_file": file}
            write_job(job_dir, fs.url, 2, backend=backend, results=NO_TABLES)
            done = run_here(RUN, job_dir)
        else:
            write_job(job_dir, fs.url, 2, results=NO_TABLES)
            done = run_bagent(RUN, job_dir, env={"SSL_CERT_FILE": file})
    assert done.code == 0, done.err
