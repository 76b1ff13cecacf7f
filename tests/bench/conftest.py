"""Whole load tests, from a hostfile's lines to the summary."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bagent.bench.plan import BenchPlan
from bagent.bench.trace import TraceInfo
from bagent.bench.whole import Wanted, make_folder, send_all, write_results
from bagent.fleet.hostfile import hosts_in
from bagent.runs.endpoints import host_endpoints
from bench.support_bench import Measure


@pytest.fixture
def measure(tmp_path: Path) -> Measure:
    """A whole load test of the hostfile ``lines``; returns its summary."""

    def run(lines: list[str], **settings: Any) -> dict[str, Any]:
        folder = tmp_path / f"bench{len(list(tmp_path.iterdir()))}"
        make_folder(folder)
        hosts = hosts_in("\n".join(lines).encode(), "hosts")
        endpoints = host_endpoints(hosts, Path("hosts"), None, {})
        trace = settings.pop("trace", [])
        if trace:
            settings["trace"] = TraceInfo("trace", len(trace), trace[-1].at, 100, 4)
        plan = BenchPlan(**{"input_tokens": 60, "output_tokens": 8, "warmup": 1, **settings})
        wanted = Wanted(plan=plan, endpoints=endpoints, folder=folder, trace=trace)
        called, course = send_all(wanted, None, lambda _: None)
        return {**write_results(wanted, called, course, None), "folder": folder}

    return run
