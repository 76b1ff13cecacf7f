"""``bagent sim`` as a process."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from bagent.sim import OPTIONS

BAGENT = [sys.executable, "-c", "from bagent.cli.main import run_and_exit; run_and_exit()"]


def start(*args: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*BAGENT, "sim", *args], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def finish(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*BAGENT, "sim", *args], capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_addresses_on_stdout_answer_and_a_signal_ends_with_0(number: int, tmp_path: Path) -> None:
    hosts = tmp_path / "sim.hosts"
    process = start("--replicas", "2", "--port", "0", "--write-hostfile", str(hosts))
    assert process.stdout is not None
    urls = [process.stdout.readline().strip() for _ in range(2)]
    for url in urls:
        with urllib.request.urlopen(url + "/v1/models", timeout=10) as reply:
            assert b"bagent-sim" in reply.read()
    lines = [line for line in hosts.read_text().splitlines() if not line.startswith("#")]
    assert [f"http://{line}" for line in lines] == urls
    process.send_signal(number)
    out, err = process.communicate(timeout=20)
    assert (process.returncode, out) == (0, "")
    assert err.splitlines()[-1] == f"next: bagent run JOB.yaml --hostfile {hosts}"
    assert list(tmp_path.iterdir()) == [hosts]


def test_a_taken_port_is_one_line_and_2() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        ended = finish("--port", str(port))
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr.startswith(f"bagent: error: cannot listen on 127.0.0.1:{port}: ")
    assert ended.stderr.count("\n") == 1


@pytest.mark.parametrize(
    "args", [["--rate-429", "2"], ["--decode", "fast"], ["--stall", "soon"], ["--nothing"]]
)
def test_wrong_options_are_one_line_and_2(args: list[str]) -> None:
    ended = finish(*args)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr.startswith("bagent: error: ")
    assert ended.stderr.count("\n") == 1


def test_help_names_every_setting_and_an_example() -> None:
    ended = finish("-h")
    assert ended.returncode == 0
    assert "Example: bagent sim" in ended.stdout
    for name in OPTIONS:
        assert f"--{name.replace('_', '-')}" in ended.stdout
