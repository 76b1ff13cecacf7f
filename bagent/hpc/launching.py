"""One process on every node of a batch job, by each launcher: ``deploy/lib.sh``'s words again."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

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
