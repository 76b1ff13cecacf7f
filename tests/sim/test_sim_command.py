"""``bagent sim`` as a process."""

from __future__ import annotations

import signal
import socket
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest

from bagent.sim import OPTIONS
from support.cli import Completed, Running
from support.jobs import wait_until


@pytest.mark.process("signal")
def test_addresses_on_stdout_answer_and_a_signal_ends_with_0(tmp_path: Path) -> None:
    hosts = tmp_path / "sim.hosts"
    args = ["sim", "--replicas", "2", "--port", "0", "--write-hostfile", hosts]
    with Running(args, tmp_path) as process:
        process.wait_for_err("next: ")
        wait_until(lambda: process.out.count("\n") == 2)
        urls = process.out.split()
        for url in urls:
            with urllib.request.urlopen(url + "/v1/models", timeout=10) as reply:
                assert b"bagent-sim" in reply.read()
        process.send(signal.SIGTERM)
        done = process.finish()
    lines = [line for line in hosts.read_text().splitlines() if not line.startswith("#")]
    assert [f"http://{line}" for line in lines] == urls == done.out.split()
    assert len(urls) == 2
    assert done.code == 0
    assert done.err.splitlines()[-1] == f"next: bagent run JOB.yaml --hostfile {hosts}"


@pytest.mark.parametrize(
    "args", [["--rate-429", "2"], ["--decode", "fast"], ["--stall", "soon"], ["--nothing"], []]
)
def test_wrong_options_and_a_taken_port_are_one_line_and_2(
    args: list[str], bagent: Callable[..., Completed]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        ended = bagent(["sim", *(args or ["--port", str(taken.getsockname()[1])])])
    assert (ended.code, ended.out) == (2, "")
    assert ended.err.startswith("bagent: error: ")
    assert ("cannot listen on 127.0.0.1:" in ended.err) == (not args)
    assert ended.err.count("\n") == 1


def test_help_names_every_setting_and_an_example(bagent: Callable[..., Completed]) -> None:
    ended = bagent(["sim", "-h"])
    assert ended.code == 0
    assert "Example: bagent sim" in ended.out
    for name in OPTIONS:
        assert f"--{name.replace('_', '-')}" in ended.out
