"""A load test of a mixed fleet: two real vLLM, a simulated engine at a tenth of their speed, and an
endpoint where nobody is."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from bagent.fleet.hostfile import read_hostfile
from real.serve_vllm import VllmServer
from support.chromium import CHROMIUM, look
from support.cli import Completed
from support.simulated_fleets import DEAD, addresses, simulated

pytestmark = [pytest.mark.real, pytest.mark.timeout(420)]

Bagent = Callable[..., Completed]

MODEL = "simulated-tiny"
"""Only endpoints of one model are compared, and a simulated one always says what it is."""

SIZES = ["--input-tokens", "128", "--output-tokens", "32"]


@pytest.fixture(scope="module")
def two_vllm(logs: Path) -> Iterator[list[VllmServer]]:
    """Two servers of the tiny model, each on a core of its own; they end with this file."""
    options = [f"--served-model-name={MODEL}"]
    servers = [
        VllmServer("tiny", options, log=logs / f"vllm-bench-{number}.log", core=number)
        for number in range(2)
    ]
    with ExitStack() as stack, ThreadPoolExecutor(2) as pool:
        for server in servers:
            stack.callback(server.stop)
        yield list(pool.map(VllmServer.start, servers))


def test_a_mixed_fleet_names_the_slow_and_the_dead_and_its_page_is_right(
    two_vllm: list[VllmServer], bagent: Bagent, job_dir: Path
) -> None:
    real = [server.address for server in two_vllm]
    (job_dir / "real.hosts").write_text("".join(f"{one}\n" for one in real))
    args = ["--hostfile", "real.hosts", *SIZES, "--concurrency", "4", "--duration", "3s"]
    alone = bagent(["bench", *args, "--model", MODEL, "-o", "alone"])
    assert alone.code in (0, 3), alone.err
    (load,) = json.loads((job_dir / "alone" / "summary.json").read_text())["loads"]
    tenth = 1000 / load["tpot_p50_ms"] / 10
    with simulated(f"decode={tenth:.2f}&batch_slowdown=0&model={MODEL}") as sim:
        lines = [*real, *addresses(sim), DEAD]
        (job_dir / "fleet.hosts").write_text("".join(f"{one} rack=1\n" for one in lines))
        args = ["--hostfile", "fleet.hosts", "--preset", "quick", *SIZES, "--duration", "4s"]
        args += ["--model", MODEL, "--write-hostfile", "good"]
        done = bagent(["bench", *args, "-o", "out"])
    assert done.code in (0, 3), done.err  # 3: the machine was busy with the servers
    out = job_dir / "out"
    summary = json.loads((out / "summary.json").read_text())
    found = [one["verdict"] for one in summary["endpoints"]]
    assert found == ["ok", "ok", "slow", "dead"], summary["endpoints"]
    assert "2 ok, 1 slow, 1 dead" in done.err
    assert [one.name for one in read_hostfile(job_dir / "good")] == real
    assert all(one.tags == {"rack": "1"} for one in read_hostfile(job_dir / "good"))
    if CHROMIUM is not None:
        page = (out / "report.html").read_text()
        drawn = look(page, job_dir)
        assert (drawn["broken"], drawn["outside"], drawn["loaded"]) == (0, [], 0)
        assert drawn["wide"] <= 0 and drawn["charts"] >= 3
        assert all(name in drawn["shown"] for name in lines)
        assert "slow" in drawn["shown"] and "dead" in drawn["shown"]
