"""Lag of the client and counters of the servers during a load."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
from pathlib import Path

import pytest

from bagent.backends.http.client import Transport
from bagent.bench.monitors import ClientState, ClientWatch, ServerWatch, client_limits
from bagent.bench.plan import BenchTarget
from bagent.bench.records import ClientRow, RowFile
from bagent.errors import WriteError
from bagent.fleet.hostfile import hosts_in
from bagent.servers.resolve import host_endpoints
from support.jumping_loop import in_event_loop
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


@pytest.mark.parametrize(
    ("state", "words"),
    [
        (ClientState("x", 2.0, 0.3), []),
        (ClientState("x", None, 0.79, 9.9), []),
        (ClientState("x", 30.0, 0.3), ["event loop 30 ms late"]),
        (ClientState("x", 2.0, 0.95), ["95 % of a core in use"]),
        (ClientState("x", 2.0, 0.3, 250.0), ["requests sent 250 ms late"]),
    ],
)
def test_the_limits_of_a_client(state: ClientState, words: list[str]) -> None:
    assert client_limits(state) == words


@in_event_loop
async def test_a_loop_that_is_held_up_is_seen_as_late() -> None:
    loop = asyncio.get_running_loop()
    spent = iter([1.0, 3.5])
    watch = ClientWatch(cpu=lambda: next(spent))
    await asyncio.sleep(0.05)
    until = loop.time() + 0.1
    while loop.time() < until:  # holds the loop up
        pass
    await asyncio.sleep(0.05)
    _, cpu = watch.stop()
    lags = watch.lags_us
    assert max(lags) > 70_000
    assert cpu == 2.5


def test_rows_that_cannot_be_written_are_said_with_the_file(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.symlink_to("/dev/full")
    file = RowFile(path)
    file.write(ClientRow(0, 0, 1.0, 0.5, [1, 2]))
    for step in (file.flush, file.close):
        with pytest.raises(WriteError, match=r"cannot write .*rows.jsonl: No space left on device"):
            step()
    with pytest.raises(WriteError, match="No such file or directory"):
        RowFile(tmp_path / "gone" / "rows.jsonl")
