"""A launcher for machines without one: one command on each of some tens of nodes, by ssh."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import shlex
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from bagent.hpc.nodes import read_names

SSH = (
    "ssh",
    "-tt",  # with a terminal of its own the command ends when this end goes away
    "-o",
    "BatchMode=yes",
    "-o",
    "StrictHostKeyChecking=accept-new",
)


async def on_nodes(nodes: Sequence[str], words: Sequence[str], ssh: Sequence[str] = SSH) -> int:
    """Run ``words`` on every node; returns the first exit code that is not 0.

    A signal that asks to stop (TERM, INT, HUP) is passed on, and ends the waiting once all have
    ended.
    """
    running: set[asyncio.subprocess.Process] = set()
    stopping = asyncio.Event()

    def stop() -> None:
        stopping.set()
        for process in running:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()

    async def one(node: str) -> int:
        command = f"BAGENT_NODE={shlex.quote(node)} {shlex.join(words)}"
        if stopping.is_set():
            return 128 + signal.SIGTERM
        process = await asyncio.create_subprocess_exec(
            *ssh, node, command, stdin=asyncio.subprocess.DEVNULL
        )
        running.add(process)
        code = await process.wait()
        running.discard(process)
        if code:
            sys.stderr.write(f"{node}: exit code {code}\n")
        return code

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        loop.add_signal_handler(number, stop)
    codes = await asyncio.gather(*map(one, nodes))
    return next((code for code in codes if code), 0)


def ssh_step(argv: list[str]) -> int:
    """Run the words after ``--`` on every node of a file."""
    parser = argparse.ArgumentParser(prog="bagent.hpc ssh")
    parser.add_argument("--nodes", type=Path, required=True)
    parser.add_argument("words", nargs="+")
    given = parser.parse_args(argv)
    return abs(asyncio.run(on_nodes(read_names(given.nodes), given.words)))
