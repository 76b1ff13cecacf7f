"""One process on every node of a batch job, by each launcher: ``deploy/lib.sh``'s words again."""

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

_KEPT = ("PATH", "LD_LIBRARY_PATH", "PYTHONPATH", "VIRTUAL_ENV", "CONDA_PREFIX", "TMPDIR")
"""Variables that programs on the nodes need; not every launcher brings the environment."""

_LAUNCH = {
    # Engines of the same job may have a step of their own: both want all of a node.
    "srun": (
        'srun --overlap --nodes="$NODES" --ntasks="$NODES" --ntasks-per-node=1'
        ' --nodelist="$HERE/nodes" --cpus-per-task="${SLURM_CPUS_ON_NODE:-1}" --cpu-bind=none'
        " --mem=0 --no-kill --kill-on-bad-exit=0 --wait=0 --input=none"
    ),
    "pals": (
        'mpiexec --np "$NODES" --ppn 1 --hostfile "$HERE/nodes" --cpu-bind none'
        " --no-abort-on-failure"
    ),
    "hydra": 'mpiexec -n "$NODES" -ppn 1 -f "$HERE/nodes" -bind-to none',
    "openmpi": ('mpiexec -n "$NODES" --map-by ppr:1:node --bind-to none --hostfile "$HERE/nodes"'),
    "ssh": '"$PYTHON" -m bagent.hpc ssh --nodes "$HERE/nodes" --',
}


def on_every_node(command: str, launcher: str, python: str, excluded: Sequence[str] = ()) -> str:
    """A script that runs ``command`` once on each node of the batch job around it.

    It needs ``$SCRIPTS``, a folder that all nodes share. How many nodes there are is asked in the
    job: bad ones may have to be left out.

    Args:
        command: shell words, run on each node.
        launcher: as ``cluster.launcher`` names it.
        python: the interpreter on the nodes.
        excluded: nodes that are left out.
    """
    kept = "\n".join(
        f"if [[ -n ${{{name}:-}} ]]; then printf 'export {name}=%q\\n' \"${name}\"; fi"
        for name in _KEPT
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
{kept}
cat <<'END_OF_COMMAND'
exec {command}
END_OF_COMMAND
}} >"$HERE/node.sh"
{_LAUNCH[launcher]} bash "$HERE/node.sh"
"""


def set_up_script(cwd: Path, modules: Sequence[str], lines: Sequence[str]) -> str:
    """What a batch job does first: go to its folder, load modules, run lines of one's own."""
    loads = [f"module load {shlex.quote(name)}" for name in modules]
    return "\n".join([f"cd {shlex.quote(str(cwd))}", *loads, *lines, ""])


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
