"""Tools in the run's own process that print, and that leave work behind."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from support.agent_jobs import agent_job, calls
from support.fake_server import FakeServer
from support.replies import ok

pytestmark = pytest.mark.slow  # each test runs the command

ODD = '''
import multiprocessing, subprocess, time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

print("imported")

def speak() -> str:
    """Print."""
    print("spoken")
    subprocess.run(["echo", "by a program"], check=True)
    return "said"

def leave(how: str) -> str:
    """Leave something that does not end."""
    if how == "thread":
        ThreadPoolExecutor(1).submit(time.sleep, 300)
    else:
        child = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(300,))
        child.start()
        (Path(__file__).parent / "child").write_text(str(child.pid))
    return "left"
'''


def odd_job(folder: Path, url: str, function: str) -> None:
    """A job whose one tool is a function of the source above."""
    (folder / "odd.py").write_text(ODD)
    agent_job(folder, url, agent={"tools": [{"python": f"odd.py:{function}"}]})


def test_what_tools_print_does_not_stand_among_the_rows(job_dir, bagent):
    with FakeServer({"*": [calls(("speak", "{}")), ok("done")]}) as fs:
        odd_job(job_dir, fs.url, "speak")
        done = bagent(["run", "job.yaml", "-o", "-"])
    assert done.code == 0, done.err
    assert [json.loads(line)["text"] for line in done.out.splitlines()] == ["done"]
    assert "spoken" in done.err and "by a program" in done.err


@pytest.mark.parametrize("how", ["thread", "process"])
def test_what_tools_left_running_does_not_hold_the_end_of_the_run(job_dir, bagent, how):
    turn = calls(("leave", json.dumps({"how": how})))
    with FakeServer({"*": [turn, ok("done")]}) as fs:
        odd_job(job_dir, fs.url, "leave")
        done = bagent(["run", "job.yaml"], timeout=60)
    assert done.code == 0, done.err
    assert "was not waited for" in done.err
    if how == "process":
        with pytest.raises(ProcessLookupError):
            os.kill(int((job_dir / "child").read_text()), 0)
