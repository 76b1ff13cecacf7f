"""The engines of a node: their commands, how often dead ones come back, and the lost head node."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from bagent.hpc.allocation import Allocation
from bagent.hpc.engines import (
    EngineProcess,
    EngineState,
    EngineSupervisor,
    HeadNode,
    NodePlan,
    node_engines,
    read_states,
    requeue,
    supervise,
    until_gone,
    with_own_cache,
)
from bagent.hpc.startup import is_alive
from support.http_servers import refusing_port

NODES = ["n1.site", "n2.site", "n3.site", "n4.site", "n5.site"]
LISTEN = """
import socket, sys, time
with socket.create_server(("127.0.0.1", int(sys.argv[1]))) as server:
    server.accept()
    time.sleep(600)
"""


def test_ports_are_added_where_the_command_has_none():
    (engine,) = node_engines(NodePlan(("vllm", "serve", "m"), (8000,)), NODES, 0)
    assert engine.command == ("vllm", "serve", "m", "--host", "0.0.0.0", "--port", "8000")
    plan = NodePlan(("serve", "-p={port}", "{stage}/m", '{"a": 1}'), (8000,), stage="/tmp/s")
    (engine,) = node_engines(plan, NODES, 0)
    assert engine.command == ("serve", "-p=8000", "/tmp/s/m", '{"a": 1}')


def test_engines_of_a_node_share_its_gpus_and_no_port():
    plan = NodePlan(("e",), (8000, 8001, 8002), gpus=12, mask="ZE_AFFINITY_MASK")
    engines = node_engines(plan, NODES, 2)
    masks = [engine.env["ZE_AFFINITY_MASK"] for engine in engines]
    assert masks == ["0,1,2,3", "4,5,6,7", "8,9,10,11"]
    for name in ("VLLM_PORT", "MASTER_PORT", "VLLM_CACHE_ROOT"):
        assert len({engine.env[name] for engine in engines}) == 3
    ports = sorted(int(engine.env["VLLM_PORT"]) for engine in engines)
    assert min(b - a for a, b in pairwise(ports)) >= 50


def test_a_cache_folder_that_another_user_made_is_replaced(tmp_path, monkeypatch, capsys):
    def cache_of():
        (engine,) = node_engines(NodePlan(("e",), (8000,)), NODES, 0)
        return with_own_cache(engine).env["VLLM_CACHE_ROOT"]

    monkeypatch.setenv("TMPDIR", str(tmp_path))
    usual = cache_of()
    assert cache_of() == usual and Path(usual).stat().st_mode & 0o777 == 0o700
    monkeypatch.setattr("bagent.files.os.geteuid", lambda: os.getuid() + 1)
    fresh = cache_of()
    assert fresh != usual and fresh.startswith(str(tmp_path))
    assert Path(fresh).stat().st_mode & 0o777 == 0o700
    assert "belongs to another user" in capsys.readouterr().err


def test_a_large_engine_spans_nodes_and_its_head_serves():
    plan = NodePlan(("vllm", "serve", "m"), (8000,), span=2, suffix=".fast")
    (head,) = node_engines(plan, NODES, 2)
    (other,) = node_engines(plan, NODES, 3)
    assert (head.serves, other.serves) == (True, False)
    assert "--headless" in other.command
    assert "--headless" not in head.command
    assert head.command[head.command.index("--node-rank") + 1] == "0"
    assert other.command[other.command.index("--master-addr") + 1] == "n3.fast"
    assert node_engines(plan, NODES, 4) == []


def keep(folder, words, restarts, port=1):
    state = EngineState("n1", 0, port)
    engine = EngineProcess(tuple(words), {"MARK": "7"}, 0, port, serves=port > 1)
    return EngineSupervisor(engine, state, folder, restarts, pause=lambda _: 0.0), state


def test_a_dead_engine_is_started_again_the_stated_number_of_times(tmp_path):
    words = ["sh", "-c", "echo start $MARK; exit 3"]
    supervisor, state = keep(tmp_path, words, 2)
    assert asyncio.run(supervisor.run()) is False
    assert (state.state, state.starts, state.exit_code) == ("failed", 3, 3)
    assert (tmp_path / "n1.0.log").read_text() == "start 7\n" * 3
    assert list(read_states(tmp_path)) == [state]


def test_a_command_that_is_not_there_is_said_in_the_log(tmp_path):
    supervisor, state = keep(tmp_path, ["/no/such/engine"], 0)
    assert asyncio.run(supervisor.run()) is False
    assert state.exit_code == 127
    assert "No such file" in (tmp_path / "n1.0.log").read_text()


def test_an_engine_that_listens_is_noted_and_ends_when_asked(tmp_path):
    async def scenario(supervisor):
        running = asyncio.create_task(supervisor.run())
        async with asyncio.timeout(20):
            while state.state != "listening":
                await asyncio.sleep(0.05)
            await supervisor.stop()
            assert await running is True

    with refusing_port() as port:
        supervisor, state = keep(tmp_path, [sys.executable, "-c", LISTEN, str(port)], 3, port)
        asyncio.run(scenario(supervisor))
    assert (state.state, state.starts) == ("stopped", 1)
    assert state.start_seconds is not None
    assert state.start_seconds >= 0


def test_half_written_states_are_passed_over(tmp_path):
    (tmp_path / "n1.0.json").write_text('{"node": "n1"')
    (tmp_path / "n2.0.json").write_text('{"node": "n2", "slot": 0, "port": 1, "more": 1}')
    assert list(read_states(tmp_path)) == []


@pytest.mark.process("signal")
def test_the_step_keeps_engines_until_a_signal_and_takes_their_children_along(tmp_path):
    (tmp_path / "nodes").write_text("n1\nn2\n")
    engine = ["sh", "-c", "sleep 600 & echo $!; wait", "{port}"]
    command = [sys.executable, "-m", "bagent.hpc", "supervise", "--folder", tmp_path]
    command += ["--nodes", tmp_path / "nodes", "--ports", "1 2", "--", *engine]
    process = subprocess.Popen(command, env={**os.environ, "BAGENT_NODE": "n2.site"})
    logs = [tmp_path / "n2.0.log", tmp_path / "n2.1.log"]
    while not all(log.exists() and log.read_text().strip() for log in logs):
        assert process.poll() is None
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.1)
    process.send_signal(signal.SIGUSR2)
    assert process.wait(20) == 0
    assert not any(is_alive(int(log.read_text())) for log in logs)
    assert [state.state for state in read_states(tmp_path)] == ["stopped", "stopped"]


def test_under_slurm_the_job_is_requeued_and_elsewhere_nothing_is_asked():
    asked = []
    for job in (Allocation("slurm", "77"), Allocation("pbs", "78"), Allocation()):
        asyncio.run(requeue(job, 0, lambda words: asked.append(list(words)) or ""))
    assert asked == [["scontrol", "requeue", "77"]]


def test_engines_are_stopped_when_the_script_is_gone(tmp_path):
    engine = EngineProcess(("sleep", "600"), {}, 0, 8000, serves=False)
    head = HeadNode(tmp_path / "alive", 0.0, 1)
    assert asyncio.run(supervise([engine], tmp_path, "n2", 3, head)) == 0
    assert [state.state for state in read_states(tmp_path)] == ["stopped"]


def test_a_script_is_gone_once_its_file_has_not_changed_for_so_long(tmp_path):
    alive = tmp_path / "alive"
    alive.touch()
    now, looks = 0.0, []

    def pause():
        nonlocal now
        now += 10
        looks.append(now)
        if now <= 50:
            os.utime(alive, ns=(0, int(now)))
        if now == 80:
            alive.unlink()
        return 0

    asyncio.run(until_gone(alive, 60, lambda: now, pause))
    assert looks[-1] == 110
