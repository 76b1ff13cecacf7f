"""``python -m bagent.hpc STEP``: the steps of a batch script that are more than a line of shell.

Not for people: the scripts of ``bagent submit`` call it, on the first node and on all others.
Thousands of nodes may do so at once, so each step imports as little as it can.
"""

from __future__ import annotations

import sys
from importlib import import_module

from bagent.errors import EXIT_USAGE, BagentError

STEPS = {
    "deadline": "bagent.hpc.scheduler_queries",
    "nodes": "bagent.hpc.nodes",
    "signature": "bagent.hpc.staging",
    "stage": "bagent.hpc.staging",
    "broadcast": "bagent.hpc.staging",
    "ssh": "bagent.hpc.launcher",
    "supervise": "bagent.hpc.engines",
    "wait": "bagent.hpc.startup",
    "late": "bagent.hpc.startup",
    "engines": "bagent.hpc.startup",
    "vacant": "bagent.hpc.wait_for_owner",
}
"""Each step: the module with a function of its name and ``_step``, from words to an exit code."""


def main(argv: list[str]) -> int:
    """Do the step ``argv[0]`` with the words after it; returns the exit code."""
    name = argv[0] if argv else ""
    if name not in STEPS:
        sys.stderr.write(f"bagent.hpc: no step {name!r}; there are {', '.join(STEPS)}\n")
        return EXIT_USAGE
    step = getattr(import_module(STEPS[name]), f"{name}_step")
    try:
        return int(step(argv[1:]))
    except BagentError as error:
        sys.stderr.write(f"bagent.hpc {name}: error: {error}\n")
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
