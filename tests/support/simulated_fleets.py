"""Simulated fleets in a thread."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

from bagent.bench.plan import BenchPlan
from bagent.bench.runner import BenchRequest, make_folder, send_all, write_results
from bagent.bench.schedule import TraceInfo
from bagent.fleet.hostfile import hosts_in
from bagent.report.load_test import page
from bagent.servers.resolve import host_endpoints
from bagent.sim import RunningSim, parse_sim_url, start_sim
from support.http_servers import in_thread

DEAD = "127.0.0.1:1999"


def simulated(options: str) -> AbstractContextManager[RunningSim]:
    """A simulated fleet on a loop of its own, from the options of a ``sim://`` URL."""
    return in_thread(start_sim(parse_sim_url(f"sim://?{options}")))


def addresses(sim: RunningSim) -> list[str]:
    """The lines of a hostfile."""
    return [url.removeprefix("http://") for url in sim.urls]


Measure = Callable[..., dict[str, Any]]


def measure_in(place: Path, lines: list[str], **settings: Any) -> dict[str, Any]:
    """A whole load test of the hostfile ``lines``, in a folder of its own; returns its summary.

    A ``trace`` among the settings is a list of recorded requests, ``tell`` gets the words.
    """
    folder = place / f"bench{len(list(place.iterdir()))}"
    make_folder(folder)
    hosts = hosts_in("\n".join(lines).encode(), "hosts")
    endpoints = host_endpoints(hosts, Path("hosts"), None, {})
    trace, tell = settings.pop("trace", []), settings.pop("tell", lambda _: None)
    if trace:
        settings["trace"] = TraceInfo("trace", len(trace), trace[-1].at, 100, 4)
    plan = BenchPlan(**{"input_tokens": 60, "output_tokens": 8, "warmup": 1, **settings})
    wanted = BenchRequest(plan=plan, endpoints=endpoints, folder=folder, trace=trace)
    called, course = send_all(wanted, None, tell)
    return {**write_results(wanted, called, course, partial(page, old=None)), "folder": folder}
