"""``--metrics-port`` and ``--dashboard`` of a run against a scripted server."""

from __future__ import annotations

import re
import urllib.request

import pytest

from support.cli import Running
from support.jobs import write_job
from support.replies import hang, ok
from support.run_outcomes import NO_TABLES


@pytest.mark.process("concurrent")
def test_metrics_are_served_while_the_run_goes_on(fs, job_dir):
    fs.set_script({"r3": [hang(20.0)], "*": [ok("fine")]})
    write_job(job_dir, fs.url, 3, batching={"mode": "single"}, results=NO_TABLES)
    args = ["run", "job.yaml", "--metrics-port", "0", "--progress", "plain"]
    with Running(args, job_dir) as running:
        running.wait_for_err("/metrics")
        url = re.search(r"http://127\.0\.0\.1:\d+/metrics", running.err)
        assert url is not None
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

        def scraped() -> str:
            with opener.open(url[0], timeout=10) as answer:
                return str(answer.read().decode())

        running.wait_for_err("2 ok")
        text = scraped()
        assert 'bagent_rows_total{status="ok"} 2.0' in text
        assert "bagent_num_requests_running 1.0" in text
        assert "bagent_num_requests_waiting 0.0" in text
        assert "bagent_endpoints_up 1.0" in text
        for counted in ("prompt_tokens", "generation_tokens"):
            assert re.search(rf"^bagent_{counted}_total [1-9]", text, re.M)
        assert "process_cpu_seconds_total" in text
        host = fs.url.split("//")[1].removesuffix("/v1")
        assert f'bagent_endpoint_tries_total{{endpoint="{host}"}} 2.0' in text
        assert "bagent_e2e_request_latency_seconds_count 2.0" in text


def test_a_wrong_metrics_port_is_told_before_anything_is_sent(bagent, fs, job_dir):
    write_job(job_dir, fs.url, 1)
    done = bagent(["run", "job.yaml", "--metrics-port", "here"])
    assert (done.code, done.out) == (2, "")
    assert "--metrics-port here" in done.err
    assert not (job_dir / "runs").exists()
