"""``python -m bagent.hpc STEP``: steps of the batch scripts that ``bagent submit`` writes.

Thousands of nodes may run a step at once, so each imports as little as possible.
"""

from __future__ import annotations

import sys
from importlib import import_module

from bagent.errors import EXIT_USAGE, BagentError

STEPS = {
    "deadline": "bagent.hpc.allocation",
    "nodes": "bagent.hpc.allocation",
    "signature": "bagent.hpc.staging",
    "stage": "bagent.hpc.staging",
    "broadcast": "bagent.hpc.staging",
    "ssh": "bagent.hpc.allocation",
    "supervise": "bagent.hpc.engines",
    "wait": "bagent.hpc.startup",
    "late": "bagent.hpc.startup",
    "engines": "bagent.hpc.startup",
    "vacant": "bagent.hpc.startup",
}
"""The module of each step; its function ``STEP_step`` takes arguments and returns an exit code."""


def main(argv: list[str]) -> int:
    """Run the step ``argv[0]`` with the other arguments; return its exit code."""
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
