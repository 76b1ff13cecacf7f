"""A run that is killed at any instant resumes, and no row is lost, doubled or changed.

Ten disturbed runs are part of the default suite. ``BAGENT_TEST_SEED`` draws their kinds, signals
and instants; it is the day unless it is set, and pytest prints it.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random

import pytest

from support.agent_jobs import agent_job
from support.cli import Running
from support.fake_server import FakeServer
from support.jobs import journal_lines, rows, write_job
from support.replies import echo, ok_tools, slow, tool_call
from support.run_outcomes import NO_TABLES

IN_USE = "is working on this run"
"""A worker whose parent process was killed ends what it has in flight, for some seconds."""

KINDS = ("plain", "lists", "fleet", "agent", "stages", "workers")
ROWS = 24
SLOTS = 4
LIST_SIZE = 3
RUN = ["run", "job.yaml", "--progress", "none"]
ANSWERS = {row["id"]: f"id={row['id']} {row['text']}" for row in rows(ROWS)}
"""The server repeats each prompt, so that an answer shows whose it is."""


@contextmanager
def servers_of(kind: str, folder: Path) -> Iterator[list[FakeServer]]:
    """Start the servers of a kind of run and write its job."""
    reply = slow(0.02, echo())
    script = {"*": [reply]}
    keys: dict[str, object] = {"limits": {"concurrency": SLOTS}, "results": NO_TABLES}
    if kind == "agent":
        calls = [tool_call("add", '{"a": 1, "b": 2}')]
        script = {"*": [slow(0.02, ok_tools(*calls)), reply]}
    with FakeServer(script) as first, FakeServer(script) as second:
        servers = [first]
        if kind == "lists":
            keys["prompt"] = {"raw": "id={{ id }} {{ text }}"}
            keys["batching"] = {"mode": "completions", "size": LIST_SIZE}
        elif kind == "fleet":
            servers.append(second)
            keys["batching"] = {"mode": "single"}
        elif kind == "stages":
            last = {"kind": "map", "name": "last", "prompt": "{{ first }}"}
            keys["prompt"] = None
            keys["stages"] = [
                {"kind": "map", "name": "first", "prompt": "id={{ id }} {{ text }}"},
                last,
            ]
        if kind in ("lists", "fleet"):  # lists of prompts go to engines of a hostfile alone
            keys |= {"backend": "vllm", "hostfile": "hosts.txt"}
            hosts = "".join(f"{server.address}\n" for server in servers)
            (folder / "hosts.txt").write_text(hosts)
        if kind == "agent":
            agent_job(folder, first.url, ROWS, tools=["add"], **keys)
        else:
            write_job(folder, first.url, ROWS, **keys)
        yield servers


def received(servers: list[FakeServer]) -> int:
    """How many rows the servers got so far, a row as often as it came."""
    return sum(len(seen.rows) for server in servers for seen in server.requests)


def disturb(running: Running, servers: list[FakeServer], number: int, draw: Random) -> int:
    """Send a signal at an instant that ``draw`` chooses; returns the exit code."""
    target = received(servers) + draw.randrange(ROWS)
    deadline = time.monotonic() + draw.choice([0.3, 5.0])  # before the first request, or among them
    while running.process.poll() is None and time.monotonic() < deadline:
        if received(servers) > target:
            break
        time.sleep(0.01)
    time.sleep(draw.uniform(0.0, 0.03))
    if running.process.poll() is None:
        running.send_to_group(signal.Signals(number))
    return running.finish().code


def outcomes(folder: Path) -> dict[tuple[str, str], str]:
    """Text by stage and row id, of a journal in which each must stand once and as ok."""
    texts: dict[tuple[str, str], str] = {}
    for line in journal_lines(folder / "runs/job"):
        if "status" in line and "id" in line:
            unit = (line["stage"], line["id"])
            assert line["status"] == "ok", line
            assert unit not in texts, f"{unit} is there twice"
            texts[unit] = line["text"]
    return texts


def check_disturbed_run(folder: Path, kind: str, seed: str) -> None:
    """Disturb a run once or twice, let it end, and compare what it left."""
    draw = Random(seed)
    number = draw.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGTERM])
    disturbances = draw.randint(1, 2)
    print(f"{kind}, {disturbances} x {number.name}, drawn from {seed!r}")
    command = [*RUN, "--workers", "2"] if kind == "workers" else RUN
    with servers_of(kind, folder) as servers:
        for _ in range(disturbances):
            with Running(command, folder) as running:
                code = disturb(running, servers, number, draw)
            assert code in (0, 75, -number) or IN_USE in running.err, running.err
        deadline = time.monotonic() + 30
        while True:
            with Running(command, folder) as running:
                done = running.finish()
            if IN_USE not in done.err or time.monotonic() > deadline:
                break
            time.sleep(0.2)
        assert done.code == 0, done.err
        requested = received(servers)
        assert all(server.requests for server in servers)
        largest = max(len(seen.rows) for seen in servers[0].requests)
        assert (largest > 1) == (kind == "lists")
    stages = ("first", "last") if kind == "stages" else ("main",)
    assert outcomes(folder) == {
        (stage, name): text for stage in stages for name, text in ANSWERS.items()
    }
    in_flight = SLOTS * (LIST_SIZE if kind == "lists" else 1)
    needed = ROWS * (2 if kind in ("agent", "stages") else 1)
    assert requested <= needed + in_flight * disturbances


@pytest.mark.process("kill")
@pytest.mark.parametrize("run", range(10))
def test_no_row_is_lost_doubled_or_changed_by_kills(tmp_path, run):
    seed = f"{os.environ['BAGENT_TEST_SEED']} {run}"
    kind = KINDS[run] if run < len(KINDS) else Random(seed).choice(KINDS)
    check_disturbed_run(tmp_path, kind, seed)


@pytest.mark.slow
@pytest.mark.parametrize("run", range(150))
def test_no_row_is_lost_doubled_or_changed_by_many_more_kills(tmp_path, run):
    check_disturbed_run(tmp_path, KINDS[run % len(KINDS)], f"slow {run}")
