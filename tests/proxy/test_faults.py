"""A proxy whose run directory takes nothing more: it ends, and says why."""

from __future__ import annotations

import json
import resource
import signal
import subprocess
import sys
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from bagent.errors import EXIT_CANNOT_WRITE
from support.cli import Running
from support.fake_server import FakeServer
from support.jobs import results_by_id, write_job
from support.proxy_calls import post_chat, rows_of, running_proxy
from support.replies import ok

ROOM = 4000
"""Bytes that a file may have: enough for a few rows."""


@pytest.mark.process("signal")
def test_a_full_disk_ends_the_proxy_with_one_line_and_74(tmp_path):
    with ExitStack() as stack:
        fs = stack.enter_context(FakeServer({"*": [ok("yes")]}))
        proxy = running_proxy(stack, tmp_path, fs, "--per-endpoint", "1")
        resource.prlimit(proxy.process.pid, resource.RLIMIT_FSIZE, (ROOM, ROOM))
        codes = []
        while len(codes) < 100 and (code := post_chat(proxy.out.strip())) is not None:
            codes.append(code)
        while proxy.process.poll() is None:
            proxy.send(signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                proxy.process.wait(0.002)
        done = proxy.finish()
    assert done.code == EXIT_CANNOT_WRITE, done.err
    # Whoever comes while it ends is told to come again.
    assert codes == sorted(codes)
    assert set(codes) <= {200, 503}
    assert codes[0] == 200
    assert "Traceback" not in done.err
    assert done.err.count("cannot write") == 1
    assert "next: bagent query" not in done.err
    rows = rows_of(tmp_path / "run")
    assert 0 < len(rows) < 100
    info = json.loads(next((tmp_path / "run").glob("run*.json")).read_text())
    assert info["starts"][-1]["exit_code"] == EXIT_CANNOT_WRITE
    assert info["total_rows"] == len(codes)


PROGRAM = """
import json, os, urllib.request

body = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
request = urllib.request.Request(
    os.environ["OPENAI_BASE_URL"] + "/chat/completions",
    json.dumps(body).encode(),
    {
        "Content-Type": "application/json",
        "Authorization": "Bearer " + os.environ["OPENAI_API_KEY"],
    },
)
while True:
    urllib.request.urlopen(request).read()
"""


@pytest.mark.slow  # a program takes its real time
def test_a_run_whose_proxy_can_no_longer_meter_stops_with_74(job_dir: Path):
    (job_dir / "agent.py").write_text(PROGRAM)
    with FakeServer({"*": [ok("yes")]}) as fs:
        agent = {"command": [sys.executable, str(job_dir / "agent.py")]}
        write_job(job_dir, fs.url, 1, agent=agent)
        with Running(["run", "job.yaml"], job_dir) as run:
            fs.wait_for(1)
            resource.prlimit(run.process.pid, resource.RLIMIT_FSIZE, (1 << 15, 1 << 15))
            done = run.finish()
    assert done.code == EXIT_CANNOT_WRITE, done.err
    assert "cannot write" in done.err
    assert results_by_id(job_dir) == {}
