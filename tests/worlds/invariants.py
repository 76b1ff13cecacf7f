"""What has to be true of every world.

Each invariant is a function that is named after what it promises, and yields what is wrong. The
promises are those of the guides, not what the code does.
"""

from __future__ import annotations

from worlds import (
    agent_invariants,
    batch_invariants,
    copy_invariants,
    count_invariants,
    deadly_invariants,
    end_invariants,
    journal_invariants,
    limit_invariants,
    output_invariants,
    request_invariants,
    retry_invariants,
    row_invariants,
    shard_invariants,
    stage_invariants,
    stop_invariants,
    watch_invariants,
    work_invariants,
)
from worlds.evidence import INVARIANTS
from worlds.history import History

MODULES = (
    end_invariants,
    row_invariants,
    shard_invariants,
    retry_invariants,
    agent_invariants,
    batch_invariants,
    stage_invariants,
    stop_invariants,
    count_invariants,
    journal_invariants,
    work_invariants,
    copy_invariants,
    output_invariants,
    limit_invariants,
    watch_invariants,
    deadly_invariants,
    request_invariants,
)
"""Where the invariants are; importing them lists them."""


def problems(history: History) -> list[tuple[str, str]]:
    """Return the broken invariants: name and details."""
    return [(check.__name__, details) for check in INVARIANTS for details in check(history)]


def first_problem(history: History) -> tuple[str, str] | None:
    """Return the first broken invariant."""
    for check in INVARIANTS:
        for details in check(history):
            return check.__name__, details
    return None
