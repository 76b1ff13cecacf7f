"""Engines' own counters are read while a load goes on, without holding it up."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
from pathlib import Path

from bagent.backends.http.client import Transport
from bagent.bench.monitors import ServerWatch
from bagent.bench.plan import BenchTarget
from bagent.bench.records import RowFile
from bagent.fleet.hostfile import hosts_in
from bagent.servers.resolve import host_endpoints
from support.simulated_fleets import addresses, simulated


def test_counters_are_read_during_a_load_and_at_its_ends(tmp_path: Path) -> None:
    ticks = itertools.count()

    async def main(lines: list[str]) -> None:
        hosts = hosts_in("\n".join(lines).encode(), "hosts")
        targets = [BenchTarget(one) for one in host_endpoints(hosts, Path("hosts"), None, {})]
        file, transport = RowFile(tmp_path / "servers.jsonl"), Transport()
        watch = ServerWatch(targets, transport, file, lambda: float(next(ticks)))
        reading = asyncio.ensure_future(watch.watch(7))
        while (tmp_path / "servers.jsonl").stat().st_size == 0:
            await asyncio.sleep(0.01)
        reading.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await reading
        await watch.read_all(8)
        file.close()
        await transport.close()

    with simulated("replicas=3") as sim:
        names = addresses(sim)
        asyncio.run(main(names))
    rows = [json.loads(line) for line in (tmp_path / "servers.jsonl").read_text().splitlines()]
    during = [row["endpoint"] for row in rows if row["stage"] == 7]
    assert during and set(during) <= set(names)
    assert sorted(row["endpoint"] for row in rows if row["stage"] == 8) == sorted(names)
    assert all(row["running"] == 0 for row in rows)
