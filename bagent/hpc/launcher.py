"""Launching of one process on every node of a batch job, as in ``deploy/lib.sh``."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import shlex
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from bagent.hpc.allocation import read_names
from bagent.hpc.schedulers import SCHEDULERS

_EXPORTED = ("PATH", "LD_LIBRARY_PATH", "PYTHONPATH", "VIRTUAL_ENV", "CONDA_PREFIX", "TMPDIR")
"""Variables that are exported to the nodes: not every launcher does so."""

LAUNCHERS = {
    **{
        name: command
        for scheduler in SCHEDULERS.values()
        for name, command in scheduler.own_launchers.items()
    },
    "pals": (
        'mpiexec --np "$NODES" --ppn 1 --hostfile "$HERE/nodes" --cpu-bind none'
        " --no-abort-on-failure"
    ),
    "hydra": 'mpiexec -n "$NODES" -ppn 1 -f "$HERE/nodes" -bind-to none',
    "openmpi": ('mpiexec -n "$NODES" --map-by ppr:1:node --bind-to none --hostfile "$HERE/nodes"'),
    "ssh": '"$PYTHON" -m bagent.hpc ssh --nodes "$HERE/nodes" --',
}
"""For each ``cluster.launcher``: the shell words before a command."""


def on_every_node(command: str, launcher: str, python: str, excluded: Sequence[str] = ()) -> str:
    """Return a script that runs ``command`` once on each node of the batch job around it.

    ``$SCRIPTS`` must be a folder that all nodes share. The nodes are determined in the job.

    Args:
        command: a shell command.
        launcher: as ``cluster.launcher`` names it.
        python: the interpreter on the nodes.
        excluded: nodes to leave out.
    """
    exports = "\n".join(
        f"if [[ -n ${{{name}:-}} ]]; then printf 'export {name}=%q\\n' \"${name}\"; fi"
        for name in _EXPORTED
    )
    return f"""set -euo pipefail
PYTHON={shlex.quote(python)}
HERE=$(mktemp -d "$SCRIPTS/nodes.XXXXXXXX")
"$PYTHON" -m bagent.hpc nodes --exclude {shlex.quote(" ".join(excluded))} >"$HERE/nodes"
NODES=$(grep -c . "$HERE/nodes")
export NODES
{{
echo '#!/bin/bash'
printf 'cd %q\\n' "$PWD"
{exports}
cat <<'END_OF_COMMAND'
exec {command}
END_OF_COMMAND
}} >"$HERE/node.sh"
{LAUNCHERS[launcher]} bash "$HERE/node.sh"
"""


def set_up_script(cwd: Path, modules: Sequence[str], lines: Sequence[str]) -> str:
    """Return the start of a batch job: change the folder, load modules, run setup lines."""
    loads = [f"module load {shlex.quote(name)}" for name in modules]
    return "\n".join([f"cd {shlex.quote(str(cwd))}", *loads, *lines, ""])


SSH = (
    "ssh",
    "-tt",  # with a terminal the command ends when this process does
    "-o",
    "BatchMode=yes",
    "-o",
    "StrictHostKeyChecking=accept-new",
)


async def on_nodes(nodes: Sequence[str], arguments: Sequence[str], ssh: Sequence[str] = SSH) -> int:
    """Run a command on every node; return the first exit code that is not 0.

    TERM, INT and HUP are forwarded as TERM.
    """
    running: set[asyncio.subprocess.Process] = set()
    stopping = asyncio.Event()

    def stop() -> None:
        stopping.set()
        for process in running:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()

    async def run(node: str) -> int:
        command = f"BAGENT_NODE={shlex.quote(node)} {shlex.join(arguments)}"
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
    codes = await asyncio.gather(*map(run, nodes))
    return next((code for code in codes if code), 0)


def ssh_step(argv: list[str]) -> int:
    """Run the command after ``--`` on every node of a file."""
    parser = argparse.ArgumentParser(prog="bagent.hpc ssh")
    parser.add_argument("--nodes", type=Path, required=True)
    parser.add_argument("command", nargs="+")
    args = parser.parse_args(argv)
    return abs(asyncio.run(on_nodes(read_names(args.nodes), args.command)))
