"""What ``agents.py compare`` needs beside its arms: slots by turn, and what a server tells."""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import os
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path


class SlotsByTurn:
    """So many slots; of those who wait, the one of the furthest turn gets the next."""

    def __init__(self, count: int) -> None:
        self._free = count
        self._served = 0
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []

    @asynccontextmanager
    async def at(self, turn: int) -> AsyncIterator[None]:
        """A slot for one call of that turn."""
        if self._free:
            self._free -= 1
        else:
            slot = asyncio.get_running_loop().create_future()
            self._served += 1
            heapq.heappush(self._waiting, (-turn, self._served, slot))
            await slot
        try:
            yield
        finally:
            if self._waiting:
                heapq.heappop(self._waiting)[2].set_result(None)
            else:
                self._free += 1


def cpu_seconds(process: int) -> dict[str, float]:
    """CPU seconds of a process and of all below it on Linux, by the kernel's names of them."""
    ticks = os.sysconf("SC_CLK_TCK")
    values: dict[str, float] = {}
    pending = [process]
    while pending:
        folder = Path(f"/proc/{pending.pop()}")
        with contextlib.suppress(OSError):
            name = (folder / "comm").read_text().strip()
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            values[name] = values.get(name, 0.0) + (int(fields[11]) + int(fields[12])) / ticks
            for task in (folder / "task").iterdir():
                pending += map(int, (task / "children").read_text().split())
    return values


def engine(url: str) -> dict[str, float]:
    """What the engine has counted so far: the tokens that it made and found in its cache."""
    names = {
        "vllm:generation_tokens_total": "generated_tokens",
        "vllm:prefix_cache_hits_total": "cached_tokens",
    }
    values = dict.fromkeys(names.values(), 0.0)
    with urllib.request.urlopen(f"{url.removesuffix('/v1')}/metrics", timeout=10) as answer:
        for line in answer.read().decode().splitlines():
            name = line.partition("{")[0].partition(" ")[0]
            if name in names:
                values[names[name]] += float(line.rpartition(" ")[2])
    return values
