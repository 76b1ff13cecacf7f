"""Rows answered by an agent program that asks the job's servers through a proxy."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest

from support.cli import Running, in_this_process
from support.fake_server import FakeServer
from support.in_process import meanwhile
from support.jobs import results_by_id, wait_until, write_job
from support.replies import ok

pytestmark = pytest.mark.slow  # programs take their real time

AGENT = """
import json, os, pathlib, sys, time, urllib.request

prompt = sys.stdin.read()
pathlib.Path("here.txt").write_text(os.getcwd())
for question in (prompt, "id=again " + prompt):
    message = {"role": "user", "content": question}
    body = {"model": os.environ["OPENAI_MODEL"], "messages": [message]}
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json",
         "Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]},
    )
    answer = json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]
print("thinking about it", file=sys.stderr)
print(answer)
"""


def program_job(job_dir, url, rows=1, code=AGENT, **keys):
    """A job whose rows this program answers."""
    (job_dir / "agent.py").write_text(code)
    agent = {"command": [sys.executable, str(job_dir / "agent.py")], **keys.pop("agent", {})}
    write_job(job_dir, url, rows, agent=agent, **keys)


def test_each_row_runs_a_process_in_its_own_folder_and_its_tokens_are_counted(job_dir, bagent):
    with FakeServer({"*": [ok("first")], "again": [ok("final")]}) as fs:
        program_job(job_dir, fs.url, 3)
        done = bagent(["run", "job.yaml"], env={"MY_SECRET": "hush"})
        assert done.code == 0, done.err
        assert len(fs.requests) == 6
    rows = results_by_id(job_dir)
    assert {(row["text"], row["turns"]) for row in rows.values()} == {("final", 2)}
    assert all(row["prompt_tokens"] > 0 and row["completion_tokens"] > 0 for row in rows.values())
    folders = sorted((job_dir / "runs/job/work").iterdir())
    assert len(folders) == 3
    assert [(folder / "here.txt").read_text() for folder in folders] == list(map(str, folders))


def test_places_in_the_arguments_and_the_environment_are_filled(job_dir, bagent):
    code = "import os, sys\nprint(os.environ['SETUP'], sys.argv[1], sep='|')\n"
    env = {"SETUP": '{job_folder}/a.json {"{model}":"{id}"} {prompt} {other}'}
    command = [sys.executable, str(job_dir / "agent.py"), "{base_url}"]
    with FakeServer() as fs:
        program_job(job_dir, fs.url, code=code, agent={"command": command, "env": env})
        done = bagent(["run", "job.yaml"])
        assert done.code == 0, done.err
    told, url = results_by_id(job_dir)["r1"]["text"].split("|")
    assert told == f'{job_dir}/a.json {{"fake-model":"r1"}} {{prompt}} {{other}}'
    assert url.startswith("http://127.0.0.1:") and url.endswith("/v1")


def test_a_program_that_fails_fails_its_row_with_its_last_words_and_leaves_its_home(
    job_dir, bagent
):
    code = (
        "import os, pathlib, sys\nhome = os.environ['HOME']\n"
        "pathlib.Path(home, 'made').write_text(home)\nif 'id=r2' in sys.stdin.read():\n"
        "    print('no model of that name', file=sys.stderr)\n"
        "    print('try another')\n    sys.exit(3)\nprint('done')\n"
    )
    with FakeServer() as fs:
        program_job(job_dir, fs.url, 2, code=code)
        assert bagent(["run", "job.yaml"]).code == 1
    good, bad = results_by_id(job_dir).values()
    assert (good["status"], bad["status"], bad["error_kind"]) == ("ok", "failed", "tool")
    assert bad["error"] == "it ended with code 3: no model of that name; try another"
    (made,) = (job_dir / "runs/job/home").glob("*/made")
    assert str(job_dir / "runs/job/work") not in made.read_text()
    assert list((job_dir / "runs/job/work").glob("*/*")) == []


def test_an_answer_that_does_not_fit_the_schema_is_asked_for_again(job_dir, bagent):
    code = (
        "import sys\nprompt = sys.stdin.read()\n"
        "print('{\"sum\": 3}' if 'not valid' in prompt else 'three')\n"
    )
    schema = {"type": "object", "properties": {"sum": {"type": "integer"}}, "required": ["sum"]}
    with FakeServer() as fs:
        program_job(job_dir, fs.url, code=code, output={"schema": schema})
        done = bagent(["run", "job.yaml"])
        assert done.code == 0, done.err
    row = results_by_id(job_dir)["r1"]
    assert (row["output"], row["attempts"]) == ({"sum": 3}, 2)


def test_the_row_s_limit_kills_the_program_and_what_it_started(job_dir, bagent, run_clock):
    code = (
        "import os, pathlib, subprocess, time\n"
        "child = subprocess.Popen(['sleep', '60'])\n"
        "pathlib.Path('child').write_text(str(child.pid))\ntime.sleep(60)\n"
    )

    def skip_limit():
        wait_until(lambda: list((job_dir / "runs/job/work").glob("*/child")))
        run_clock.skip(101)

    with FakeServer() as fs:
        program_job(job_dir, fs.url, code=code, limits={"row": "100s"})
        with in_this_process(), meanwhile(skip_limit):
            done = bagent(["run", "job.yaml"])
        assert done.code == 1, done.err
    row = results_by_id(job_dir)["r1"]
    assert (row["status"], row["error_kind"]) == ("failed", "timeout")
    (child,) = (job_dir / "runs/job/work").glob("*/child")
    assert not running_now(child.read_text())


def running_now(pid):
    """Whether a process runs (one that has ended and was not waited for does not)."""
    try:
        stat = (Path("/proc") / pid / "stat").read_text()
    except FileNotFoundError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


def test_a_second_signal_ends_the_programs_at_once(job_dir):
    code = (
        "import pathlib, time\npathlib.Path('../../../../began').write_text('')\ntime.sleep(60)\n"
    )
    with FakeServer() as fs:
        program_job(job_dir, fs.url, code=code)
        with Running(["run", "job.yaml"], job_dir) as running:
            wait_until((job_dir / "began").exists)
            running.send(signal.SIGINT)
            running.wait_for_err("waiting up to")
            running.send(signal.SIGINT)
            done = running.finish(30)
        assert done.code == 130, done.err


def test_what_programs_ask_goes_to_the_endpoints_that_the_hostfile_names_now(job_dir):
    with FakeServer({"*": [ok("old")]}) as old, FakeServer({"*": [ok("new")]}) as new:
        hosts = job_dir / "hosts.txt"
        hosts.write_text(f"{old.address}\n")
        limits = {"concurrency": 2}
        program_job(job_dir, "", 200, backend="vllm", hostfile="hosts.txt", limits=limits)
        with Running(["run", "job.yaml", "--progress", "plain"], job_dir) as running:
            old.wait_for(4)
            hosts.write_text(f"{new.address}\n")
            new.wait_for(4)
            running.wait_for_err(f"{new.address} joined, {old.address} removed, 1 endpoint now")
            asked = len(old.requests)
            new.wait_for(len(new.requests) + 8)
            assert len(old.requests) <= asked + 2, "what was in flight"
            (job_dir / "runs/job/stop").touch()
            assert running.finish().code == 75
    assert {row["status"] for row in results_by_id(job_dir).values()} == {"ok"}


def test_a_program_that_is_not_there_is_an_error_before_anything_is_sent(job_dir, bagent):
    with FakeServer() as fs:
        program_job(job_dir, fs.url, agent={"command": ["no-such-agent"]})
        done = bagent(["run", "job.yaml"])
        assert done.code == 2
        assert "bagent: error: job.yaml:12:3: cannot run no-such-agent" in done.err
        assert fs.requests == []


def test_a_lone_surrogate_reaches_a_program_as_the_replacement_character(job_dir, bagent):
    code = "import sys\nprint(ascii(sys.stdin.buffer.read().decode()))\n"
    command = [sys.executable, str(job_dir / "agent.py"), "{id}"]
    with FakeServer() as fs:
        program_job(
            job_dir, fs.url, code=code, agent={"command": command}, prompt={"user": "{{ text }}"}
        )
        (job_dir / "rows.jsonl").write_text('{"id": "a\\udc01", "text": "x\\ud800y"}\n')
        done = bagent(["run", "job.yaml"])
    assert done.code == 0, done.err
    (row,) = results_by_id(job_dir).values()
    assert row["text"] == "'x\\ufffdy'"
