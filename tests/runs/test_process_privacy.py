"""Programs that bagent starts cannot read its keys from the process that started them."""

from __future__ import annotations

import sys

import pytest

from support.cli import Running
from support.fake_server import FakeServer
from support.jobs import results_by_id, write_job
from support.run_outcomes import NO_TABLES

SPY = """
import os, subprocess
parent = os.getppid()
print([e for e in open(f"/proc/{parent}/environ", "rb").read().split(b"\\0") if b"KEY" in e])
print("key" in " ".join(os.environ.values()))
"""

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")


@pytest.mark.process("another process looks into it")
def test_a_program_finds_no_key_in_the_environment_of_its_parent(job_dir):
    with FakeServer() as fs:
        backend = {"url": fs.url, "api_key_env": "MY_KEY"}
        agent = {"command": [sys.executable, "-c", SPY]}
        write_job(job_dir, "", 1, backend=backend, agent=agent, results=NO_TABLES)
        command, env = ["run", "job.yaml"], {"MY_KEY": "a-secret-key"}
        with Running(command, job_dir, env, fresh=True) as running:
            done = running.finish()
    assert done.code in (0, 1), done.err
    row = results_by_id(job_dir)["r1"]
    # Root sees stars, others may not even look.
    text = row["text"] or row["error"]
    assert "MY_KEY=************" in text or "Permission denied" in text
    assert "a-secret-key" not in text


HIDDEN = """
import ctypes, os, subprocess
from bagent.process_privacy import hide_from_children
hide_from_children()
libc = ctypes.CDLL(None)
libc.getenv.restype = ctypes.c_char_p
child = subprocess.run(["sh", "-c", "echo $MY_KEY $LANG"], capture_output=True, text=True)
print(libc.prctl(3, 0, 0, 0, 0), os.environ["MY_KEY"], libc.getenv(b"MY_KEY").decode())
print(child.stdout)
"""


@pytest.mark.process("a new process has a first environment")
def test_the_process_itself_and_what_it_starts_keep_their_environment(tmp_path):
    import subprocess

    env = {"MY_KEY": "k3y", "LANG": "C", "PATH": "/usr/bin:/bin"}
    done = subprocess.run(
        [sys.executable, "-c", HIDDEN], env=env, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["0", "k3y", "k3y", "k3y", "C"]
